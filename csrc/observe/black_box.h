// BlackBox: a record of the operations of this process, in memory that other processes of the same
// user can read while it runs, hangs or is stopped: `mycoll status` opens it through /proc/PID/fd,
// which the kernel allows to processes that may trace this one. This process does not take part.
//
//   0      magic, version, a description of everything below (JSON), by which a reader of another
//          version finds the fields
//   box    the process: pid, rank, clocks
//   sites  texts: where the program called operations
//   groups one area for each group: its state, then the ring of its last operations
//
// The same bytes are the trace that is written when a group fails (trace_file.h). Only Python reads
// them: python/mycoll/black_box.py.
//
// Without shared memory, the areas are ordinary memory: recording continues, but other processes
// cannot read it.
//
// Thread contract: all [any thread]. Every field that changes is an atomic; related fields are
// guarded by a number that readers check before and after (Entry::id, waitVersion).
// Lifetime: one for each process, made with the first group and never unmapped, so that a pointer
// into it always remains valid. A forked child does not inherit it (a reader would take it for the
// child's), and makes its own.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/call.h"
#include "base/fd.h"
#include "base/mutex.h"

namespace mycoll {

constexpr int kOpKinds = static_cast<int>(OpKind::kCount);

template <typename T>
void put(std::atomic<T>& field, T value) {
  // Release: each store must come after the number that says "being written"; free on x86.
  field.store(value, std::memory_order_release);
}
template <typename T>
T get(const std::atomic<T>& field) {
  return field.load(std::memory_order_acquire);
}

enum class OpState : uint8_t { kQueued, kStarted, kDone, kFailed };
inline bool isOver(OpState state) { return state == OpState::kDone || state == OpState::kFailed; }

// One operation. Two cache lines.
struct alignas(64) Entry {
  std::atomic<uint64_t> id;  // unique in the process, from 1; 0: empty, or being written
  std::atomic<uint64_t> sequence;
  std::atomic<int64_t> enqueued;  // steady clock, ns
  std::atomic<int64_t> started;   // 0: not yet
  std::atomic<int64_t> ended;
  std::atomic<uint64_t> inBytes;  // of this rank
  std::atomic<uint64_t> outBytes;
  std::atomic<uint64_t> tag;
  std::atomic<uint64_t> signature[3];  // a Signature, as the ranks compare it
  std::atomic<int32_t> peer;           // of a message: the other rank; -1: any
  std::atomic<uint32_t> site;          // 0: not known
  std::atomic<OpState> state;
  std::atomic<uint8_t> flags;  // kIs...
};
static_assert(sizeof(Entry::signature) == sizeof(Signature));
static_assert(sizeof(Entry) == 128);

constexpr uint8_t kIsComposite = 1;  // sizes are not known in advance
constexpr uint8_t kIsOnDevice = 2;

// The completed operations of one kind.
struct Tally {
  std::atomic<uint64_t> done;
  std::atomic<uint64_t> failed;
  std::atomic<uint64_t> bytes;
  std::atomic<uint64_t> nanos;  // from call to end
};

enum class GroupPhase : uint32_t { kUnused, kOpen, kFailed, kClosed };

struct GroupState {
  static constexpr int kShownRanks = 2048;
  static constexpr int kShownWaits = 32;
  static constexpr size_t kNameBytes = 128;
  static constexpr size_t kFailureBytes = 1024;

  std::atomic<GroupPhase> phase;
  std::atomic<uint32_t> capacity;
  std::atomic<int32_t> rank;
  std::atomic<int32_t> ranks;
  // The same on all ranks of the group, and no other group's; 0 while the area is reassigned.
  std::atomic<uint64_t> context;
  std::atomic<uint64_t> written;    // the number of entries written: the index of the next one
  std::atomic<uint64_t> submitted;  // collectives
  std::atomic<uint64_t> finished;
  // The ranks that the current collective waits for, as of the last check.
  std::atomic<uint32_t> waitVersion;  // odd: being written
  std::atomic<int32_t> waitCount;
  std::atomic<uint64_t> waitSequence;
  std::atomic<int32_t> waitRanks[kShownWaits];
  std::atomic<int32_t> globalRanks[kShownRanks];  // -1: none; a prefix where there are more
  Tally tallies[kOpKinds];                        // since the group was made
  // The group is a part of another one, such as that for tensors on devices: readers show it once
  // it has run an operation.
  std::atomic<uint32_t> isPart;
  // Each written once.
  char name[kNameBytes];
  char transport[16];
  char encryption[48];  // of bytes between hosts; empty: none
  char description[kNameBytes];
  char failure[kFailureBytes];
};

class BlackBox {
 public:
  static BlackBox& process();

  // Returns an area with zeroed state and entries; may reuse that of a closed group.
  GroupState* take();
  // Called when the group is closed. Its area stays readable until another group needs one; its
  // tallies are added to those of all closed groups.
  void giveBack(GroupState* area);
  Tally& ended(OpKind kind);
  Entry* entriesOf(GroupState* area) const;
  uint32_t capacity() const { return capacity_; }
  // Zero: nothing is recorded.
  bool isOn() const { return capacity_ > 0; }

  uint64_t nextId() { return nextId_.fetch_add(1, std::memory_order_relaxed) + 1; }

  // Returns a number for a place in a program; 0 when there is no room for more.
  uint32_t intern(std::string_view function, std::string_view file, int line);
  // The place of a number: "train.py:57 in step"; empty where it is not known.
  std::string placeOf(uint32_t site) const;

  // Called for each new group. If it is the only one, as the first of a job is, also after a
  // restart within the process, its context becomes the job's name, and rank this process's rank in
  // the job.
  void join(uint64_t context, int rank);
  // -1: not known yet.
  int rank() const;
  // The same for all ranks of a job; 16 hexadecimal digits.
  std::string job() const;
  // A copy of the whole box, as a reader would see it now: each operation is complete or left out.
  std::string snapshot() const;

 private:
  BlackBox();
  char* map(size_t offset, size_t bytes);
  void open();
  void describe();

  struct Box;
  uint32_t capacity_ = 0;
  size_t stateBytes_ = 0;
  size_t areaBytes_ = 0;
  Fd fd_;                 // closed: ordinary memory
  char* head_ = nullptr;  // everything before the groups
  Box* box_ = nullptr;
  std::atomic<uint64_t> nextId_{0};

  mutable Mutex mutex_;
  std::vector<GroupState*> areas_ GUARDED_BY(mutex_);
  std::deque<GroupState*> returned_ GUARDED_BY(mutex_);
  std::map<std::string, uint32_t, std::less<>> sites_ GUARDED_BY(mutex_);
};

std::string toContext(uint64_t context);

inline int64_t steadyNanos() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace mycoll
