// Window: memory of each rank of a group that the others write to, and read where they can, without
// a call of its owner.
//
//   all ranks     open(memory)       where each one's memory lies; the ranks of a host map it
//   any rank      put, map, signal, waitSignal
//   all ranks     close()            or none: see below
//
// How a put travels. A rank of this host whose memory is shared (SharedHeap) has been mapped: a put
// is one copy by its caller, and is over when it returns. Any other memory is written by its own
// process: the put is a message (frame kPut), done when it has left, and whoever moves bytes over
// there, the engine's thread if nobody else does, reads it to its place. Ordinary memory of this
// host is written like that, too: no other process can map it, and the kernel's ways to write into
// it from outside (process_vm_writev) ask for the rights of a debugger, and would write into what
// has become of it after it was freed. While such a window is open, the engine's thread of its
// owner sleeps as one that waits for messages.
//
// Order. What a rank puts into a window of another one, and then its signal, arrive in that order:
// who has received the signal sees the puts. Between puts of different ranks, or to different
// windows, there is none; nor between puts and messages or collectives of the group. Signals are
// counted: each ends one waitSignal() of its receiver for that rank, now or later. A put makes
// none.
//
// Bounds. What is put is checked here against what its owner has opened, and by the owner again,
// against the window as it is then (Mailbox). Other ranks map the pages that the window lies in,
// and no more of the heap.
//
// Ending. A window whose ranks all call close() leaves nothing behind. One that is simply dropped
// here takes no further puts by messages, and those under way go nowhere; but other ranks may still
// have the memory mapped. It is then not used for anything else when it is freed (SharedHeap), so
// they write to nobody's memory; the same after a failure, or when the group is closed first. A
// mapping (Pages) may be touched for as long as somebody holds it, whatever becomes of its rank:
// when that has ended it has its last contents, when that has freed the memory it has zeros. Of a
// dead group the window itself lets go within a second or two.
//
// Failure. As for messages: a rank that has died or left is named, and every call on the window of
// a group that has failed ends with its first cause. A copy needs nobody at the other side, so it
// may still end well until the death is known.
//
// Thread contract: all [any thread], but open() and close(), and the composites that these return,
// which belong to the collectives of the group. One lock, a leaf, never held while bytes move.
// Lifetime: holds its group. The memory stays where it is until the window is closed or dropped:
// keepAlive is held as long.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "engine/communicator.h"
#include "engine/op.h"
#include "transport/shm/segment.h"

namespace mycoll {

class Window final : public std::enable_shared_from_this<Window> {
 public:
  using Milliseconds = Communicator::Milliseconds;
  // What a rank tells the others of its memory beside its size: the caller's business.
  using Description = std::array<char, 160>;

  static std::shared_ptr<Window> make(std::shared_ptr<Communicator> group);
  ~Window();

  // Both give a composite (kWindow) for the caller to submit; all ranks do so, in the same order
  // among their collectives. Where one is not submitted the window can only be dropped.
  Status open(Span memory, const Description& description, std::shared_ptr<void> keepAlive,
              Composite* opening) EXCLUDES(mutex_);
  Status close(Composite* closing) EXCLUDES(mutex_);

  // ---- while it is open; not ok otherwise, or where there is no such rank
  Status describe(int rank, uint64_t* bytes, Description* description) const EXCLUDES(mutex_);
  // *op is done when the source may be used again.
  Status put(Span data, int rank, uint64_t offset, std::shared_ptr<void> keepAlive, bool willWait,
             Milliseconds timeout, OpPtr* op) EXCLUDES(mutex_);
  Status signal(int rank, bool willWait, Milliseconds timeout, OpPtr* op) EXCLUDES(mutex_);
  Status waitSignal(int rank, bool willWait, Milliseconds timeout, OpPtr* op) EXCLUDES(mutex_);
  // Another rank's memory; null where it is not mapped here.
  Status map(int rank, std::shared_ptr<Pages>* pages) const EXCLUDES(mutex_);

  // For the group, when it is dead.
  void releaseOthers() EXCLUDES(mutex_);

 private:
  enum class State { kClosed, kOpening, kOpen, kClosing };
  struct Part;     // what a rank tells of its memory
  struct Passing;  // descriptors on their way

  explicit Window(std::shared_ptr<Communicator> group);
  void moveTo(State next) REQUIRES(mutex_);
  Status checkOpen(int rank) const REQUIRES(mutex_);
  Part ownPart() const;
  std::vector<int> neighbours() const;
  Task introduce(CollectiveRunner& runner);
  Task mapNeighbours(std::vector<Part>& parts, std::vector<std::shared_ptr<Pages>>& mapped);
  Task retire(CollectiveRunner& runner);
  void ignoreMessages() REQUIRES(mutex_);
  // What is here of it.
  void end() EXCLUDES(mutex_);

  const std::shared_ptr<Communicator> group_;
  // Written by open() and its composite; others read them while the window is open.
  uint64_t id_ = 0;
  Span memory_;
  Description description_{};
  bool isExposed_ = false;

  mutable Mutex mutex_;
  State state_ GUARDED_BY(mutex_) = State::kClosed;
  std::shared_ptr<void> keepAlive_ GUARDED_BY(mutex_);
  std::vector<Part> parts_ GUARDED_BY(mutex_);                     // by rank
  std::vector<std::shared_ptr<Pages>> mapped_ GUARDED_BY(mutex_);  // by rank; null: by messages
  bool isAttended_ GUARDED_BY(mutex_) = false;  // the engine's thread looks after messages for it
};

}  // namespace mycoll
