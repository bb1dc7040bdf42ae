// Window: memory of each rank of a group that the other ranks write to, and read where they can,
// without a call of its owner.
//
//   all ranks     open(memory)       exchange where the memory is; the ranks of a host map it
//   any rank      put, map, signal, waitSignal
//   all ranks     close()            optional: see below
//
// How a put travels. Shared memory (SharedHeap) of a rank on this host is mapped here: its put is
// one copy by the caller, and is done when it returns. Any other memory is written by the process
// that owns it: the put is a message (frame kPut) and is done when it has left. The thread that
// moves bytes in that process (the engine's, if no other does) reads it into place. This includes
// unshared memory on this host: no other process can map it, and process_vm_writev() needs the
// rights of a debugger and would write into whatever occupies the memory after it was freed. While
// a window with such memory is open, the engine's thread of its owner sleeps like a thread that
// waits for messages.
//
// Order. A rank's puts into a window of another rank and a signal after them arrive in that order:
// the rank that has received the signal sees the puts. Puts of different ranks, or into different
// windows, are not ordered; neither are puts relative to messages or collectives of the group.
// Signals are counted: each ends one waitSignal() of its receiver for the sender's rank, now or
// later. A put sends no signal.
//
// Bounds. A put is checked here against the size that the owner has opened. The owner checks a
// message again, against the window as it is then (Mailbox). Other ranks map the pages that contain
// the window, and no more of the heap.
//
// Ending. If all ranks call close(), and no rank still uses a mapping, the memory can be used for
// other things. A window that is only dropped here accepts no further puts by messages and discards
// those in progress; but other ranks may still have the memory mapped. So the memory is not reused
// after it is freed (SharedHeap), and late writes destroy no other data. The same holds after a
// failure, or if the group is closed first. A mapping (Pages) may be accessed while it is
// referenced, whatever happens to its rank: if the process has ended, the mapping has its last
// contents; if it has freed the memory, zeros. The window of a dead group releases its own mappings
// within a second or two.
//
// Failure. As for messages: an error names the rank that has died or left, and every call on the
// window of a failed group ends with the group's first cause. A copy needs no action of the other
// rank, so it may still succeed until the death is known.
//
// Thread contract: all [any thread], except open(), close() and the composites that they return,
// which belong to the collectives of the group. One lock, a leaf, never held while bytes move.
// Lifetime: holds its group. The memory must stay where it is until the window is closed or
// dropped: keepAlive is held as long.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "engine/communicator.h"
#include "engine/engine.h"
#include "engine/op.h"
#include "transport/shm/segment.h"

namespace mycoll {

class Window final : public std::enable_shared_from_this<Window> {
 public:
  using Milliseconds = Communicator::Milliseconds;
  // A rank's description of its memory for the others, opaque to the window.
  using Description = std::array<char, 160>;

  explicit Window(std::shared_ptr<Communicator> group);
  ~Window();

  // Both return a composite (kWindow) for the caller to submit; all ranks do so, in the same order
  // among their collectives. If it is not submitted, the window can only be dropped.
  Status open(Span memory, const Description& description, std::shared_ptr<void> keepAlive,
              Composite* opening) EXCLUDES(mutex_);
  Status close(Composite* closing) EXCLUDES(mutex_);

  // ---- while it is open; an error otherwise, or for a rank out of range
  Status describe(int rank, uint64_t* bytes, Description* description) const EXCLUDES(mutex_);
  // *op is done when the source may be used again.
  Status put(Span data, int rank, uint64_t offset, std::shared_ptr<void> keepAlive, bool willWait,
             Milliseconds timeout, OpPtr* op) EXCLUDES(mutex_);
  Status signal(int rank, bool willWait, Milliseconds timeout, OpPtr* op) {
    return post(OpKind::kSignal, rank, willWait, timeout, op);
  }
  Status waitSignal(int rank, bool willWait, Milliseconds timeout, OpPtr* op) {
    return post(OpKind::kWaitSignal, rank, willWait, timeout, op);
  }
  // Another rank's memory; null if it is not mapped here.
  Status map(int rank, std::shared_ptr<Pages>* pages) const EXCLUDES(mutex_);

  // Called by the group when it is dead.
  void releaseOthers() EXCLUDES(mutex_);

 private:
  Status post(OpKind kind, int rank, bool willWait, Milliseconds timeout, OpPtr* op)
      EXCLUDES(mutex_);
  enum class State { kClosed, kOpening, kOpen, kClosing };
  struct Part;  // a rank's entry: its memory

  void moveTo(State next) REQUIRES(mutex_);
  Status checkOpen(int rank) const REQUIRES(mutex_);
  Part ownPart() const;
  Task introduce(CollectiveRunner& runner);
  Task mapNeighbours(CollectiveRunner& runner, const std::vector<Part>& parts,
                     std::vector<std::shared_ptr<Pages>>& mapped);
  Task retire(CollectiveRunner& runner);
  // Closes the window on this rank.
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
  std::optional<Listening> listening_ GUARDED_BY(mutex_);          // for its messages
};

}  // namespace mycoll
