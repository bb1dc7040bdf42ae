// What torch gets back for an operation in flight.
//
// Thread contract: everything [any thread], with or without the GIL, except wait(), which must not
// hold it. An operation is over for the user when finish() has run: results copied back, profiler
// told, futures and hooks on their way. Whoever first sees that the engine is done runs it: a
// waiter, somebody who polls, or (when there is something to copy, or somebody to tell) the thread
// that completes the last operation.
// A collective that follows futures whose callbacks have not run is held: it has no operations
// until begin().
// With a future that Python has asked for before, wait() waits for its callbacks, too (see Told),
// and isCompleted() says no until it is complete.
//
// Lifetime: may be dropped at any time. The memory belongs to the engine until it is done, and the
// Work itself is held by the engine where it has anything left to do. The engine hands it to
// CallbackPool::drop() then: the Work holds tensors that Python knows. In a forked child every call
// throws.
#pragma once

#include <c10/util/SmallVector.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "backend/callback_order.h"
#include "backend/callback_pool.h"
#include "backend/owning_process.h"
#include "backend/request.h"
#include "backend/torch_version.h"
#include "base/mutex.h"
#include "engine/communicator.h"

namespace mycoll {

class MycollWork final : public c10d::Work {
 public:
  using Ops = c10::SmallVector<OpPtr, 1>;
  using Hook = std::function<void(std::shared_ptr<c10d::WorkInfo>)>;
  using Clock = std::chrono::steady_clock;

  struct Extras {
    CopyBacks copyBacks;
    Hook hook;                   // called once, when done; may be empty
    bool isTimed = false;        // remember when it ended
    size_t perList = 0;          // see Request::perList
    std::string profilingTitle;  // empty: nobody profiles
    std::optional<std::vector<at::Tensor>> profiledInputs;
    Clock::time_point started;
    std::chrono::milliseconds timeout{0};
    CallbackOrder::Ptr order;  // that of the call; null: callbacks of the future run when they can
    std::string heldCall;  // not empty: begin() brings the operations, and this describes the call
  };

  MycollWork(std::shared_ptr<Communicator> communicator, c10d::OpType type, Ops ops,
             std::vector<at::Tensor> outputs, Extras extras);

  // Asks the engine to say when it is done, if finish() must not wait until somebody looks.
  void start();
  // Call it once, on a held work: its operations have been submitted.
  void begin(Ops ops);
  // The held work's place. Null: it has begun at once.
  void setEntry(CallbackOrder::EntryPtr entry);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override { enter("Work.synchronize"); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void blockCurrentStream() override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  float getDuration() const override;
  uint64_t getSequencenumber() const override;
#if MYCOLL_TORCH_HAS_WORK_TIMEOUT
  std::chrono::milliseconds getTimeout() const override { return timeout_; }
#endif

 private:
  enum class State { kRunning, kDone };

  void enter(const char* function) const { owner_.check(communicator_->options().name, function); }
  bool areOpsDone() const;
  // Its operations are done, and finish() has run.
  bool isOver();
  // Completes future_; not under the lock, as its callbacks run here.
  void tell(const c10::intrusive_ptr<c10::ivalue::Future>& future);
  c10::IValue value() const;
  // Idempotent; waits for another thread that is at it. Only when the engine is done.
  void finish();
  void watch();
  void watchOps();
  bool hasBegun() const { return hasBegun_.load(std::memory_order_acquire); }
  // A callback of the group asks for it.
  void beginIfInCallback();
  void awaitBegin(Deadline deadline);
  bool isDone() const { return state_.load(std::memory_order_acquire) == State::kDone; }

  const std::shared_ptr<Communicator> communicator_;
  const OwningProcess owner_;
  // What waits for begin() of a held work.
  struct Held {
    std::string call;
    CallbackOrder::EntryPtr entry;  // guarded by lock_
    std::condition_variable begun;
  };
  const std::unique_ptr<Held> held_;
  std::atomic<bool> hasBegun_;
  Ops ops_;  // read after hasBegun_
  const std::vector<at::Tensor> outputs_;
  const Clock::time_point started_;
  const std::chrono::milliseconds timeout_;
  const bool isTimed_;
  const size_t perList_;
  const CallbackOrder::Ptr order_;

  std::atomic<State> state_{State::kRunning};
  std::atomic<bool> isAsked_{false};   // Python has future_, and had it before the end
  std::atomic<size_t> unfinishedOps_;  // counts down once watched
  // Set before kDone, read after it.
  Status status_;
  Clock::time_point ended_;

  // Not the base's mutex_: nothing here is the base's business.
  mutable Mutex lock_;
  bool isWatched_ GUARDED_BY(lock_) = false;
  CopyBacks copyBacks_ GUARDED_BY(lock_);
  Hook hook_ GUARDED_BY(lock_);
  c10::intrusive_ptr<c10::ivalue::Future> future_ GUARDED_BY(lock_);
  // Of future_, when Python asked for it before it was done.
  CallbackOrder::TurnPtr turn_ GUARDED_BY(lock_);
  c10::intrusive_ptr<c10::ivalue::Future> resultFuture_ GUARDED_BY(lock_);
  Told told_;  // of future_
};

// The error of a call that has waited this long for the callbacks before it.
Status heldTooLong(const std::string& call, std::chrono::milliseconds timeout);

// A work that stands for several: what endCoalescing() returns.
class CoalescedWork final : public c10d::Work {
 public:
  explicit CoalescedWork(std::vector<c10::intrusive_ptr<c10d::Work>> works)
      : c10d::Work(-1, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override {}
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void blockCurrentStream() override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  uint64_t getSequencenumber() const override;

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace mycoll
