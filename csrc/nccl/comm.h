// One NCCL communicator: made, watched, and left by a deadline whatever NCCL does, whether its
// calls block or not.
//
//   auto comm = std::make_shared<Comm>(library, rank, ranks, "dp", options);
//   comm->connect(id, deadline, check);       // all ranks, the same id
//   { Issue issue(*comm); enqueue(issue, call, stream); ...; issue.end(); }      // collectives.h
//   comm->close(deadline);                    // or abort(deadline, why)
//
// States (moveTo() makes every transition):
//
//   kNew -> kConnecting -> kReady -> kClosing -> kClosed
//    |           |            |          |
//    +-----------+------------+----------+---> (kFailed) -> kAborted
//
// kFailed: NCCL reported an error; nothing more is issued, abort() frees what is left. The first
// cause is kept, and is what every later call returns.
//
// Threads: every function [any thread] unless marked. connect(), split() and close() are for one
// thread at a time; Issue serialises the rest by a mutex that is held around enqueues only.
// check(), state() and cause() never wait for that mutex, and abort() by its deadline. While NCCL
// works on something the calling thread waits in short steps, and abort() ends that wait.
// NCCL's enqueues run in their caller. A communicator is freed when no thread is inside NCCL with
// it: one that hangs there is let go by ncclCommRevoke, where the library has it. What makes,
// registers or ends something runs on a short-lived thread of ours, so that a call that hangs in
// NCCL is left there, logged, and nobody waits for it longer than until his deadline.
//
// Lifetimes: held by shared_ptr only; threads left behind hold one. close() or abort() come before
// the last reference goes; without either, NCCL's resources are abandoned and the log says so.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/nccl_options.h"
#include "base/status.h"
#include "nccl/library.h"

namespace mycoll::nccl {

struct CommOptions {
  NcclOptions nccl;
  // How long one enqueue may take (the first one connects to peers), or one registration of memory;
  // the communicator fails after it. Asked each time. Empty: as long as it takes.
  std::function<std::chrono::milliseconds()> issueTimeout;
  // The communicator's device: NCCL ends those of one device one after another.
  int device = 0;
  // Called first on every thread of ours that calls NCCL: makes the device current.
  std::function<void()> bindDevice;
};

class Comm : public std::enable_shared_from_this<Comm> {
 public:
  enum class State { kNew, kConnecting, kReady, kClosing, kClosed, kFailed, kAborted };

  // Asked every few milliseconds during a wait for others: a failure ends the wait, and is what the
  // waiting call returns. May be empty.
  using Check = std::function<Status()>;

  // name: of the group, for logs, error texts and NCCL's own (commName).
  Comm(const Library& library, int rank, int ranks, std::string name, CommOptions options = {});
  ~Comm();
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  // For rank 0, which tells the others.
  static Status createId(const Library& library, UniqueId* id);

  // --- making: on all ranks. Failed, late or refused by `check`: the communicator is aborted.

  Status connect(const UniqueId& id, Deadline deadline, const Check& check);

  // Called on all ranks of this communicator. Ranks with one color get a child, ordered by key;
  // `child` was constructed for it, with its own rank and size, and is connected by this. color
  // kSplitNoColor: child is null. Needs Capability::kSplit. Other threads' enqueues wait meanwhile.
  // After a failure this communicator has failed, too: its ranks no longer agree.
  Status split(int color, int key, Comm* child, Deadline deadline, const Check& check);

  // --- watching

  State state() const { return state_.load(std::memory_order_acquire); }
  // Ok while it can be used, else why not.
  Status cause() const;
  // Asks NCCL for asynchronous errors. Ok while all is well or in progress; a new error makes the
  // communicator kFailed. Does not block, not even behind an enqueue that hangs.
  Status check();

  // --- ending

  // Waits for what was enqueued and for the other ranks of the host, and frees everything. On all
  // ranks, as far as they live. Idempotent. The Status is that of an orderly end. Past the
  // deadline, or refused by `check`, NCCL is left with it on a thread of its own, which frees it
  // when it can: who wants to stop what runs calls abort() instead. While such a thread has not
  // come back, the device's other communicators are aborted here.
  Status close(Deadline deadline, const Check& check = {});

  // Stops what runs on the device and frees everything. `why` is what later calls return, if the
  // communicator had not failed before. Idempotent; a second caller waits for the first. Returns by
  // the deadline: kTimeout when NCCL has not come back by then, and then it never counts on it.
  Status abort(Deadline deadline, Status why);
  // The same without waiting: several communicators are stopped at once by it.
  void beginAbort(Status why);

  // --- memory of this communicator, for zero-copy transfers. Freed memory is deregistered first.

  Status registerBuffer(void* memory, size_t bytes, void** handle);
  Status deregisterBuffer(void* handle);
  // On all ranks, in the same order, same size: memory from allocate(), aligned to
  // kWindowAlignment.
  Status registerWindow(void* memory, size_t bytes, int flags, Window** window);
  Status deregisterWindow(Window* window);

  // NCCL's allocator: memory that can be registered. Needs Capability::kMemAlloc.
  static Status allocate(const Library& library, size_t bytes, void** memory);
  static Status free(const Library& library, void* memory);

  // --- who it is

  const Library& library() const { return library_; }
  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  const std::string& name() const { return name_; }
  // NCCL's own handle; null before connect() and after the end.
  RawComm* handle() const { return comm_.load(std::memory_order_acquire); }

  // A result of NCCL as a Status that says the function, the error in NCCL's words, the version and
  // who this is. Ok for kSuccess. context: what for, appended in brackets; may be empty.
  Status describe(Result result, const char* function, const std::string& context = {}) const;

 private:
  friend class Issue;
  struct Apart;
  using Call = std::function<Result()>;
  using Slot = std::shared_ptr<RawComm*>;  // where NCCL writes a new handle, perhaps late

  bool moveTo(State next, Status cause = {});
  Status fail(Status cause);
  Status unusable() const;
  Status late(const char* function, Deadline::Clock::time_point since) const;
  Status settle(const char* function, RawComm* comm, Deadline deadline, const Check& check);
  Status runApart(const char* function, Call call, Deadline deadline, const Check& check,
                  std::function<void()> undo = {});
  Config config() const;
  Status becomeReady(const Slot& slot, const char* function, Deadline deadline, const Check& check);
  Deadline issueDeadline() const;
  Status managed(const char* function, bool isThere, const std::function<Result(RawComm*)>& call);
  void runAbort();
  std::unique_lock<std::mutex> evict();
  Status leave(Deadline deadline, const Check& check);

  const Library& library_;
  const int rank_;
  const int ranks_;
  const std::string name_;
  const CommOptions options_;

  // In this order, where both are held.
  std::mutex issue_;    // around enqueues, and around what must not meet one
  std::mutex inspect_;  // around ncclCommGetAsyncError, so that nobody frees the handle under it

  std::atomic<int> apart_{0};  // threads of ours that are inside NCCL

  std::atomic<State> state_{State::kNew};
  std::atomic<RawComm*> comm_{nullptr};  // set and cleared under stateMutex_

  mutable std::mutex stateMutex_;  // guards transitions and what follows; never held in NCCL
  std::condition_variable abortDone_;
  Status cause_;
  bool isAbortDone_ = false;
  // Of splits that have not ended well: NCCL may still make a child there, which goes with us.
  std::vector<Slot> unfinished_;
};

const char* name(Comm::State state);

}  // namespace mycoll::nccl
