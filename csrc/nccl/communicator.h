// One NCCL communicator: made without blocking, watched, and left by a deadline whatever NCCL does.
//
//   auto comm = std::make_shared<Communicator>(library, rank, ranks, "dp", options);
//   comm->connect(id, deadline, check);       // all ranks, the same id
//   { Issue issue(*comm); enqueue(issue, call, stream); ...; issue.end(); }      // collectives.h
//   comm->close(deadline);                    // or abort(deadline, why)
//
// States (moveTo() in communicator.cpp makes every transition):
//
//   kNew -> kConnecting -> kReady -> kClosing -> kClosed
//    |           |            |          |
//    +-----------+------------+----------+---> (kFailed) -> kAborted
//
// kFailed: NCCL reported an error; nothing more is issued, abort() frees what is left. The first
// cause is kept, and is what every later call returns.
//
// Thread contract: all [any thread] unless marked. connect(), split(), shrink() and close() are for
// one thread at a time; Issue serialises the rest by a mutex that is held around enqueues only.
// abort(), check(), state() and cause() never wait for that mutex beyond a moment. While NCCL works
// on something the calling thread waits in short steps, and abort() ends that wait.
// NCCL's setup and teardown calls run on short-lived threads of ours, so that a call that hangs in
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
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/env.h"
#include "base/status.h"
#include "nccl/library.h"

namespace mycoll::nccl {

// ncclConfig_t in plain words. What is not set is left to NCCL.
struct CommunicatorOptions {
  // False: NCCL returns before its work is enqueued and its thread does the rest; mycoll waits for
  // that where it can be interrupted. True: NCCL's enqueues return when done, and cost less.
  // Connecting keeps its deadline either way.
  std::optional<bool> isBlocking;  // default: false
  std::optional<int> minCtas, maxCtas, cgaClusterSize, nvlsCtas, ctaPolicy;
  std::optional<int> trafficClass;
  std::optional<bool> splitShare, shrinkShare, collnet;
  std::string netName;  // empty: NCCL's choice

  // How long one enqueue may take (the first one connects to peers); the communicator fails after
  // it.
  std::chrono::milliseconds issueTimeout{600000};

  // Called first on every thread of ours that calls NCCL: makes the communicator's device current.
  std::function<void()> bindDevice;

  // What the program set stays; the environment fills in the rest.
  void fillFrom(const NcclEnv& env);
};

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  enum class State { kNew, kConnecting, kReady, kClosing, kClosed, kFailed, kAborted };

  // Asked every few milliseconds during a wait for others: a failure ends the wait, and is what the
  // waiting call returns. May be empty.
  using Check = std::function<Status()>;

  // name: of the group, for logs, error texts and NCCL's own (commName).
  Communicator(const Library& library, int rank, int ranks, std::string name,
               CommunicatorOptions options = {});
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // For rank 0, which tells the others.
  static Status createId(const Library& library, UniqueId* id);

  // --- making: on all ranks. Failed, late or refused by `check`: the communicator is aborted.

  Status connect(const UniqueId& id, Deadline deadline, const Check& check);

  // Called on all ranks of this communicator. Ranks with one color get a child, ordered by key;
  // `child` was constructed for it, with its own rank and size, and is connected by this. color
  // kSplitNoColor: child is null. Needs Capability::kSplit. Other threads' enqueues wait meanwhile.
  // After a failure this communicator has failed, too: its ranks no longer agree.
  Status split(int color, int key, Communicator* child, Deadline deadline, const Check& check);

  // As split(), called on the ranks that stay; NCCL keeps their order. abortParent: what still runs
  // on this communicator is stopped first, which is how one recovers from lost ranks.
  // Needs Capability::kShrink.
  Status shrink(const std::vector<int>& excluded, bool abortParent, Communicator* child,
                Deadline deadline, const Check& check);

  // --- watching

  State state() const { return state_.load(std::memory_order_acquire); }
  // Ok while it can be used, else why not.
  Status cause() const;
  // Asks NCCL for asynchronous errors. Ok while all is well or in progress; a new error makes the
  // communicator kFailed. Does not block, not even behind an enqueue that hangs.
  Status check();

  // --- ending

  // Waits for what was enqueued and for the other ranks of the host, and frees everything. On all
  // ranks, as far as they live. Idempotent. The Status is that of an orderly end. Past the deadline
  // NCCL is left with it on a thread of its own, which frees it when it can: who wants to stop what
  // runs calls abort() instead.
  Status close(Deadline deadline);

  // Stops what runs on the device and frees everything. `why` is what later calls return, if the
  // communicator had not failed before. Idempotent; a second caller waits for the first. Returns by
  // the deadline: kTimeout when NCCL has not come back by then, and then it never counts on it.
  Status abort(Deadline deadline, Status why);
  // The same without waiting: several communicators are stopped at once by it.
  void beginAbort(Status why);

  // Stops what runs, here and on ranks that do the same, and keeps the communicator for split() and
  // shrink(). Needs Capability::kRevoke.
  Status revoke(Deadline deadline);

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
  // NCCL's own handle, for torch's hooks; null before connect() and after the end.
  Comm* handle() const { return comm_.load(std::memory_order_acquire); }

  // A result of NCCL as a Status that says the function, the error in NCCL's words, the version and
  // who this is. Ok for kSuccess. context: what for, appended in brackets; may be empty.
  Status describe(Result result, const char* function, const std::string& context = {}) const;

 private:
  friend class Issue;
  struct Aside;
  using Call = std::function<Result()>;
  using Slot = std::shared_ptr<Comm*>;  // where NCCL writes a new handle, perhaps late

  // communicator.cpp: states and watching
  bool moveTo(State next, Status cause = {});
  bool moveToLocked(State next, Status cause);
  Status fail(Status cause);
  Status unusable() const;
  Status settle(const char* function, Comm* comm, Deadline deadline, const Check& check);
  Status aside(const char* function, Call call, Deadline deadline, const Check& check,
               std::function<void()> whenLate = {});
  Status late(const char* function, Deadline::Clock::time_point since) const;

  // setup.cpp: making and memory
  Config config() const;
  Status becomeReady(const Slot& slot, const char* function, Deadline deadline, const Check& check);
  Status makeChild(const char* function, const std::function<Result(Comm*, Comm**, Config*)>& call,
                   Communicator* child, bool mayHaveFailed, Deadline deadline, const Check& check);
  Status managed(const char* function, bool isThere, const std::function<Result(Comm*)>& call);

  // ending.cpp
  void runAbort();
  Status leave(Deadline deadline);

  const Library& library_;
  const int rank_;
  const int ranks_;
  const std::string name_;
  const CommunicatorOptions options_;

  // In this order, where both are held. abort() goes on without them after a moment.
  std::mutex issue_;    // around enqueues, and around what must not meet one
  std::mutex inspect_;  // around ncclCommGetAsyncError, so that nobody frees the handle under it

  std::atomic<State> state_{State::kNew};
  std::atomic<Comm*> comm_{nullptr};  // set and cleared under stateMutex_
  std::atomic<bool> isRevoked_{false};

  mutable std::mutex stateMutex_;  // guards transitions and what follows; never held in NCCL
  std::condition_variable abortDone_;
  Status cause_;
  bool isAbortDone_ = false;
  std::vector<Slot> unfinished_;  // NCCL may still write to these
};

const char* name(Communicator::State state);

// True for a failed connect() by which NCCL says that two ranks share a GPU.
bool isSharedGpuRefused(const Status& status);

// The right to enqueue: holds the issue mutex, and balances ncclGroupStart with ncclGroupEnd.
// Several operations of one Issue become one launch. Not thread safe: for the thread that made it,
// which must not make another one of the same communicator meanwhile. Short-lived.
class Issue {
 public:
  explicit Issue(Communicator& communicator);
  ~Issue();  // ends the group if end() was not called; its error is then only in cause()
  Issue(const Issue&) = delete;
  Issue& operator=(const Issue&) = delete;

  // Why nothing can be enqueued; after a failed call, its error.
  const Status& status() const { return status_; }

  // From here on until end(), operations form one group. Once is enough; more does no harm.
  Status group();

  // After each call into NCCL. kInProgress is waited for here, or at end() in a group. A failure
  // makes the communicator kFailed: other ranks may have started what this one did not.
  Status take(Result result, const char* function);

  // Everything enqueued is on its stream when this returns ok.
  Status end();

  Communicator& communicator() { return communicator_; }
  Comm* comm() const { return comm_; }
  const Functions& functions() const { return communicator_.library_.functions(); }

 private:
  Communicator& communicator_;
  std::unique_lock<std::mutex> lock_;
  Comm* comm_ = nullptr;
  Status status_;
  bool isGrouped_ = false;
  bool isEnded_ = false;
};

}  // namespace mycoll::nccl
