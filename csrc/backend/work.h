// MycollWork: the Work that torch gets for an operation in flight.
//
// Thread contract: everything [any thread], with or without the GIL, except wait(), which must not
// hold it. An operation is over for the user when finish() has run: it copies results back,
// notifies the profiler, and posts futures. The first thread that sees the engine done
// runs it: one that waits or polls, or (if there is something to copy or to notify) the one that
// completes the last operation.
// A collective that follows futures whose callbacks have not run is held: it has no operations
// until begin().
// If Python asked for the future before the operation was done, wait() also waits for its callbacks
// (see CallbacksDone), and isCompleted() returns false until the future is complete.
//
// Lifetime: may be dropped at any time. The engine holds the memory until it is done, and also the
// Work if that has anything left to do. The Work is then passed to CallbackPool::drop(), because it
// holds tensors that Python knows. In a forked child every call throws.
#pragma once

#include <c10/util/SmallVector.h>

#include <atomic>
#include <chrono>
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
  using Clock = std::chrono::steady_clock;

  // What does not change, besides what its request says.
  struct Traits {
    bool isTimed = false;  // record when it ended
    std::chrono::milliseconds timeout{0};
    CallbackOrder::Ptr order;    // of the call; null: callbacks of the future run when they can
    std::string heldCall;        // describes a held call, whose operations begin() adds; else empty
    std::string profilingTitle;  // empty: not profiled
  };

  // Takes what the operation needs until its end out of the request.
  MycollWork(std::shared_ptr<Communicator> communicator, Request& request, Ops ops,
             std::vector<at::Tensor> outputs, Traits traits);

  // Asks the engine for a notification when it is done, if finish() must not wait for a thread that
  // waits or polls.
  void start();
  // Called once on a held work, when its operations have been submitted.
  void begin(Ops ops);
  // Sets the held work's place, before the program gets the work. Null: it has begun immediately.
  void setEntry(CallbackOrder::EntryPtr entry) { heldAs_ = std::move(entry); }

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
  std::chrono::milliseconds getTimeout() const override { return traits_.timeout; }
#endif

 private:
  enum class State { kRunning, kDone };

  void enter(const char* function) const { owner_.check(communicator_->options().name, function); }
  bool areOpsDone() const;
  // Whether its operations are done. If so, finish() has run.
  bool isOver() const;
  // Completes future_, and so runs its callbacks: without the lock.
  void completeFuture(const c10::intrusive_ptr<c10::ivalue::Future>& future);
  // Idempotent; waits for another thread that is running it. Call it only when the engine is done.
  void finish();
  // The timeout of a message counts from here.
  void noteWaiting() const;
  void watch();
  void watchOps();
  bool hasBegun() const { return hasBegun_.load(std::memory_order_acquire); }
  // Begins a held work if this thread runs a callback of the group.
  void beginIfInCallback() {
    if (heldAs_) traits_.order->beginIfInside(heldAs_);
  }
  void awaitBegin(Deadline deadline);
  bool isDone() const { return state_.load(std::memory_order_acquire) == State::kDone; }

  const std::shared_ptr<Communicator> communicator_;
  const OwningProcess owner_;
  const Traits traits_;
  CallbackOrder::EntryPtr heldAs_;  // set before other threads know the work
  std::atomic<bool> hasBegun_;
  Ops ops_;  // read after hasBegun_
  const std::vector<at::Tensor> outputs_;
  const size_t perList_;  // see Request::perList
  const Clock::time_point started_ = Clock::now();

  std::atomic<State> state_{State::kRunning};
  std::atomic<bool> isAsked_{false};   // Python got future_ before the end
  std::atomic<size_t> unfinishedOps_;  // counts down once watched
  // Set before kDone, read after it.
  Status status_;
  Clock::time_point ended_;

  // Not the base's mutex_: the base does not use any of these.
  mutable Mutex lock_;
  bool isWatched_ GUARDED_BY(lock_) = false;
  CopyBacks copyBacks_ GUARDED_BY(lock_);
  std::shared_ptr<void> extension_ GUARDED_BY(lock_);  // of the timeout; may be null
  c10::intrusive_ptr<c10::ivalue::Future> future_ GUARDED_BY(lock_);
  // The turn of future_, if Python asked for it before it was done.
  CallbackOrder::TurnPtr turn_ GUARDED_BY(lock_);
  c10::intrusive_ptr<c10::ivalue::Future> resultFuture_ GUARDED_BY(lock_);
  CallbacksDone callbacksDone_;  // of future_
};

// For the futures of Works. perList: see Request::perList.
c10::intrusive_ptr<c10::ivalue::Future> makeTensorsFuture(size_t perList,
                                                          std::vector<c10::Device> devices = {});
c10::IValue futureValue(const std::vector<at::Tensor>& outputs, size_t perList);

// Throws if a call must end its wait for the callbacks before it. waited: how long it has waited.
void throwUnlessIdle(CallbackOrder::Outcome outcome, const std::string& call,
                     std::chrono::milliseconds waited);

// A Work for several operations, which endCoalescing() returns.
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
