// One NCCL communicator: made, monitored and freed within deadlines even if NCCL hangs, whether its
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
// close() moves kNew directly to kClosed. kFailed: NCCL reported an error; nothing more is issued,
// abort() frees the communicator. The first cause is kept, and every later call returns it.
//
// Threads: every function [any thread] unless marked. connect(), split() and close() are for one
// thread at a time; Issue serialises the rest by a mutex that is held around enqueues only.
// check(), state() and cause() never wait for that mutex, and abort() at most until its deadline.
// While NCCL works on something the calling thread waits in short steps, and abort() ends that
// wait.
// NCCL's enqueues run in their caller. A communicator is freed when no thread is inside NCCL with
// it: ncclCommRevoke, where the library has it, makes a thread that hangs there return. Calls that
// make, register or end something run on a short-lived thread of ours: if one hangs in NCCL, its
// thread is left there and logged, and the caller waits no longer than until its deadline.
//
// Lifetimes: held by shared_ptr only; threads left behind hold one. close() or abort() must be
// called before the last reference is dropped; otherwise NCCL's resources are leaked, and the log
// reports it.
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

  // Called every few milliseconds while a call waits for other ranks: a failure ends the wait and
  // is returned by the waiting call. May be empty.
  using Check = std::function<Status()>;

  // name: of the group, for logs, error texts and NCCL's commName.
  Comm(const Library& library, int rank, int ranks, std::string name, CommOptions options = {});
  ~Comm();
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  // For rank 0, which sends the id to the other ranks.
  static Status createId(const Library& library, UniqueId* id);

  // --- making: on all ranks. If it fails, is late or `check` fails, the new communicator is
  // aborted.

  Status connect(const UniqueId& id, Deadline deadline, const Check& check);

  // Called on all ranks of this communicator. Ranks with one color get a child, ordered by key;
  // `child` was constructed for it, with its own rank and size, and this connects it. color
  // kSplitNoColor: child is null. Needs ncclCommSplit. Enqueues of other threads wait
  // meanwhile. After a failure this communicator has failed, too: its ranks no longer agree.
  Status split(int color, int key, Comm* child, Deadline deadline, const Check& check);

  // --- watching

  State state() const { return state_.load(std::memory_order_acquire); }
  // Ok while the communicator can be used, else the cause.
  Status cause() const;
  // Asks NCCL for asynchronous errors. Ok while all is well or in progress; a new error makes the
  // communicator kFailed. Does not block, not even behind an enqueue that hangs.
  Status check();

  // --- ending

  // Waits for what was enqueued and for the other ranks of the host, and frees everything. On all
  // ranks, as far as they live. Idempotent. The Status is that of an orderly end. Past the
  // deadline, or refused by `check`, NCCL is left with it on a thread of its own, which frees it
  // when it can. To stop what runs, call abort() instead. While such a thread has not
  // returned, the device's other communicators are aborted here.
  Status close(Deadline deadline, const Check& check = {});

  // Stops what runs on the device and frees everything. `why` is what later calls return, if the
  // communicator had not failed before. Idempotent; a second caller waits for the first. Returns by
  // the deadline: kTimeout when NCCL has not come back by then, and then it never counts on it.
  Status abort(Deadline deadline, Status why);
  // The same without waiting, to stop several communicators simultaneously.
  void beginAbort(Status why);

  // --- memory of this communicator, for zero-copy transfers. Deregister memory before freeing it.

  struct Registration {  // both null: there is none
    void* buffer = nullptr;
    Window* window = nullptr;
  };
  // isSymmetric: makes a window, or none where NCCL cannot. On all ranks, in the same order, with
  // the same size: memory from allocate(), aligned to kWindowAlignment.
  Status registerMemory(void* memory, size_t bytes, bool isSymmetric, Registration* made);
  Status deregister(const Registration& made);

  // NCCL's allocator: memory that can be registered. Needs ncclMemAlloc.
  static Status allocate(const Library& library, size_t bytes, void** memory);
  static Status free(const Library& library, void* memory);

  // --- identity

  const Library& library() const { return library_; }
  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  const std::string& name() const { return name_; }
  // NCCL's handle; null before connect() and after the end.
  RawComm* handle() const { return comm_.load(std::memory_order_acquire); }

  // A result of NCCL as a Status with the function, NCCL's error text, the version and this rank.
  // Ok for kSuccess. context: the purpose, appended in brackets; may be empty.
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
                  const Slot& slot = {}, std::atomic<int>* left = nullptr);
  Config config() const;
  Status becomeReady(const Slot& slot, const char* function, Deadline deadline, const Check& check);
  Deadline issueDeadline() const;
  Status managed(const char* function, bool isThere, const std::function<Result(RawComm*)>& call);
  void runAbort();
  void endAbort();
  std::unique_lock<std::mutex> evict();
  Status leave(Deadline deadline, const Check& check);

  const Library& library_;
  const int rank_;
  const int ranks_;
  const std::string name_;
  const CommOptions options_;

  // Lock order: issue_ before inspect_.
  std::mutex issue_;    // around enqueues, and around calls that must not run beside one
  std::mutex inspect_;  // around ncclCommGetAsyncError: the handle is not freed meanwhile

  std::atomic<int> apart_{0};  // threads of ours that are inside NCCL

  std::atomic<State> state_{State::kNew};
  std::atomic<RawComm*> comm_{nullptr};  // set and cleared under stateMutex_

  mutable std::mutex stateMutex_;  // guards transitions and the fields below; never held in NCCL
  std::condition_variable abortDone_;
  Status cause_;
  bool isAbortDone_ = false;
  // Slots of splits that have failed: NCCL may still make a child there, which abort() frees.
  std::vector<Slot> unfinished_;
};

const char* name(Comm::State state);

}  // namespace mycoll::nccl
