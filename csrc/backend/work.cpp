#include "backend/work.h"

#include <ATen/Context.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "backend/errors.h"
#include "base/wait.h"

namespace mycoll {
namespace {

using Future = c10::ivalue::Future;
using FuturePtr = c10::intrusive_ptr<Future>;

// Appends the tensors of a work's future, or of its lists.
void append(const c10::IValue& value, std::vector<at::Tensor>* all) {
  if (value.isTensorList()) {
    for (at::Tensor& tensor : value.toTensorVector()) all->push_back(std::move(tensor));
    return;
  }
  for (const c10::IValue& list : value.toListRef()) append(list, all);
}

FuturePtr makeResultFuture() { return c10::make_intrusive<Future>(c10::IntType::get()); }

void completeResult(const FuturePtr& future, const Status& status, c10d::OpType type) {
  runCallbacks(type, [&] {
    future->markCompleted(c10::IValue(static_cast<int64_t>(toWorkResult(status))));
  });
}

Deadline toDeadline(std::chrono::milliseconds timeout) {
  return timeout <= std::chrono::milliseconds(0) ? Deadline::never() : Deadline::after(timeout);
}

}  // namespace

FuturePtr makeTensorsFuture(size_t perList, std::vector<c10::Device> devices) {
  const c10::TypePtr tensors = c10::ListType::create(c10::TensorType::get());
  return c10::make_intrusive<Future>(perList > 0 ? c10::ListType::create(tensors) : tensors,
                                     std::move(devices));
}

c10::IValue futureValue(const std::vector<at::Tensor>& outputs, size_t perList) {
  if (perList == 0) return outputs;
  c10::List<c10::List<at::Tensor>> lists;
  for (auto first = outputs.begin(); first != outputs.end();
       first += static_cast<ptrdiff_t>(perList)) {
    lists.push_back(c10::List<at::Tensor>(
        std::vector<at::Tensor>(first, first + static_cast<ptrdiff_t>(perList))));
  }
  return lists;
}

void throwUnlessIdle(CallbackOrder::Outcome outcome, const std::string& call,
                     std::chrono::milliseconds waited) {
  switch (outcome) {
    case CallbackOrder::Outcome::kIdle: return;
    case CallbackOrder::Outcome::kInterrupted: throwStatus(interrupted());
    case CallbackOrder::Outcome::kTimeout:
      throwStatus(
          Status(Code::kTimeout,
                 c10::str(call,
                          " has not started: an earlier operation's future has not completed, or a "
                          "callback of it has not returned, within ",
                          waited.count(), " ms")));
  }
}

MycollWork::MycollWork(std::shared_ptr<Communicator> communicator, Request& request, Ops ops,
                       std::vector<at::Tensor> outputs, Traits traits)
    : c10d::Work(communicator->rank(), request.type,
                 traits.profilingTitle.empty() ? nullptr : traits.profilingTitle.c_str(),
                 std::exchange(request.given, {})),
      communicator_(std::move(communicator)),
      traits_(std::move(traits)),
      hasBegun_(traits_.heldCall.empty()),
      ops_(std::move(ops)),
      outputs_(std::move(outputs)),
      perList_(request.perList),
      unfinishedOps_(ops_.size()),
      copyBacks_(std::move(request.copyBacks)),
      extension_(std::move(request.extension)) {}

// Takes no lock: no other thread knows the work yet.
void MycollWork::start() NO_THREAD_SAFETY_ANALYSIS {
  const bool hasMoreToDo =
      !copyBacks_.empty() || extension_ || traits_.isTimed || recordFunctionEndCallback_ != nullptr;
  if (hasMoreToDo) watch();
}

void MycollWork::watch() {
  {
    MutexLock lock(lock_);
    if (std::exchange(isWatched_, true) || !hasBegun()) return;
  }
  watchOps();
}

void MycollWork::begin(Ops ops) {
  bool isWatched = false;
  {
    MutexLock lock(lock_);
    ops_ = std::move(ops);
    unfinishedOps_.store(ops_.size(), std::memory_order_relaxed);
    hasBegun_.store(true, std::memory_order_release);
    isWatched = isWatched_;
  }
  if (isWatched) watchOps();
}

void MycollWork::awaitBegin(Deadline deadline) {
  const auto waited = [this] {
    return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - started_);
  };
  const bool isTimeLimited = traits_.timeout > std::chrono::milliseconds(0);
  if (isTimeLimited) deadline = earlier(deadline, Deadline::after(traits_.timeout - waited()));
  const CallbackOrder::Outcome outcome =
      traits_.order->await(heldAs_, deadline, isInterruptPending);
  const QuietScope quiet;  // the wait is over, not the operation
  throwUnlessIdle(outcome, traits_.heldCall, waited());
}

void MycollWork::noteWaiting() const {
  if (!hasBegun()) return;
  for (const OpPtr& op : ops_) op->noteWaiting();
}

void MycollWork::watchOps() {
  if (areOpsDone()) return finish();
  // One reference for all operations; the last one takes it.
  const auto watching = std::make_shared<c10::intrusive_ptr<MycollWork>>(
      c10::intrusive_ptr<MycollWork>::unsafe_reclaim_from_nonowning(this));
  for (const OpPtr& op : ops_) {
    op->onDone([watching] {
      MycollWork& work = **watching;
      if (work.unfinishedOps_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
      work.finish();
      auto last = std::make_shared<c10::intrusive_ptr<MycollWork>>(std::move(*watching));
      CallbackPool::get().drop(std::move(last));
    });
  }
}

bool MycollWork::areOpsDone() const {
  return hasBegun() && std::all_of(ops_.begin(), ops_.end(), [](auto& op) { return op->done(); });
}

void MycollWork::finish() {
  // This thread, which may be the engine's, does not drop the program's objects: they move to the
  // pool, or stay with the Work.
  CopyBacks copyBacks;
  FuturePtr future;
  CallbackOrder::TurnPtr turn;
  FuturePtr resultFuture;
  {
    MutexLock lock(lock_);
    if (isDone()) return;
    for (const OpPtr& op : ops_) {
      if (!op->status().ok()) {
        status_ = op->status();
        break;
      }
    }
    copyBacks = std::move(copyBacks_);
    copyBacks_.clear();
    if (status_.ok()) {
      for (const CopyBack& copy : copyBacks) copy.run();
    }
    future = future_;
    turn.swap(turn_);
    resultFuture = resultFuture_;
    extension_.reset();
    if (traits_.isTimed) ended_ = Clock::now();
    state_.store(State::kDone, std::memory_order_release);
  }
  if (recordFunctionEndCallback_) recordFunctionEndCallback_();
  const auto self = [this] {
    return c10::intrusive_ptr<MycollWork>::unsafe_reclaim_from_nonowning(this);
  };
  if (future) {
    CallbackOrder::ready(std::move(turn), [self = self(), future = std::move(future)] {
      self->completeFuture(future);
    });
  }
  if (resultFuture) {
    CallbackPool::get().post([self = self(), resultFuture = std::move(resultFuture)] {
      completeResult(resultFuture, self->status_, self->opType_);
    });
  }
}

// Const, as those functions of torch's Work are that may be the first to see the end.
bool MycollWork::isOver() const {
  if (isDone()) return true;
  if (!areOpsDone()) {
    noteWaiting();
    return false;
  }
  const_cast<MycollWork*>(this)->finish();
  return true;
}

bool MycollWork::isCompleted() {
  enter("Work.is_completed");
  if (!hasBegun()) beginIfInCallback();
  if (!isOver()) return false;
  if (!isAsked_.load(std::memory_order_acquire)) return true;
  MutexLock lock(lock_);
  return future_->completed();
}

void MycollWork::completeFuture(const FuturePtr& future) {
  runCallbacks(opType_, [&] {
    if (status_.ok()) {
      future->markCompleted(futureValue(outputs_, perList_));
    } else {
      future->setError(toException(status_));
    }
  });
  callbacksDone_.set();
}

bool MycollWork::isSuccess() const {
  enter("Work.is_success");
  return !isOver() || status_.ok();
}

std::exception_ptr MycollWork::exception() const {
  enter("Work.exception");
  return isOver() ? toException(status_) : nullptr;
}

int MycollWork::sourceRank() const {
  enter("Work.source_rank");
  TORCH_CHECK(hasBegun() && ops_.size() == 1 && ops_.front()->kind() == OpKind::kRecv,
              "source_rank() is for a receive");
  TORCH_CHECK(ops_.front()->done(), "source_rank() is known when the receive has completed");
  return ops_.front()->sourceRank();
}

std::vector<at::Tensor> MycollWork::result() {
  enter("Work.result");
  TORCH_CHECK(isOver(), "Work needs to be completed before calling result(); call wait() first");
  return outputs_;
}

bool MycollWork::wait(std::chrono::milliseconds timeout) {
  enter("Work.wait");
  if (!isDone()) {
    const Deadline deadline = toDeadline(timeout);
    if (!hasBegun()) [[unlikely]] {
      beginIfInCallback();
      awaitBegin(deadline);
    }
    const DropScope afterwards;
    noteWaiting();
    for (const OpPtr& op : ops_) {
      if (op->done()) continue;
      const Status status = communicator_->wait(op, deadline);
      // The wait has timed out, or there is a signal to handle: the operation itself continues, or
      // has ended meanwhile.
      if (!op->done() || status.code() == Code::kInterrupted) {
        const QuietScope quiet;  // the wait is over, not the operation
        throwStatus(status);
      }
    }
    stayIfExiting();
    finish();
  }
  if (isAsked_.load(std::memory_order_acquire)) callbacksDone_.await();
  throwIfFailed(status_);
  return true;
}

void MycollWork::blockCurrentStream() {
  enter("Work.block_current_stream");
  // Without streams, the only thing to block is this thread.
  if (at::hasCUDA()) {
    c10d::Work::blockCurrentStream();
  } else {
    wait();
  }
}

void MycollWork::abort() {
  enter("Work.abort");
  communicator_->abort("Work.abort() was called");
}

FuturePtr MycollWork::getFuture() {
  enter("Work.get_future");
  if (!hasBegun()) beginIfInCallback();
  FuturePtr future;
  bool isComplete = false;
  {
    MutexLock lock(lock_);
    if (future_) return future_;
    future = future_ = makeTensorsFuture(perList_);
    isComplete = isDone();
    if (!isComplete && isCalledByPython()) {
      isAsked_.store(true, std::memory_order_release);
      turn_ = CallbackOrder::add(traits_.order, future);
    }
  }
  if (isComplete) {
    completeFuture(future);
  } else {
    noteWaiting();
    watch();
  }
  return future;
}

FuturePtr MycollWork::getFutureResult() {
  enter("Work.get_future_result");
  FuturePtr future;
  bool isComplete = false;
  {
    MutexLock lock(lock_);
    if (resultFuture_) return resultFuture_;
    future = resultFuture_ = makeResultFuture();
    isComplete = isDone();
  }
  if (isComplete) {
    completeResult(future, status_, opType_);
  } else {
    noteWaiting();
    watch();
  }
  return future;
}

float MycollWork::getDuration() const {
  enter("Work._get_duration");
  TORCH_CHECK(traits_.isTimed,
              "durations are measured only when enableCollectivesTiming() was called");
  TORCH_CHECK(isDone(), "the duration is known when the operation has completed");
  return std::chrono::duration<float, std::milli>(ended_ - started_).count();
}

uint64_t MycollWork::getSequencenumber() const {
  return hasBegun() && !ops_.empty() ? ops_.front()->sequence() : 0;
}

bool CoalescedWork::isCompleted() {
  return std::all_of(works_.begin(), works_.end(), [](auto& work) { return work->isCompleted(); });
}

bool CoalescedWork::isSuccess() const {
  return std::all_of(works_.begin(), works_.end(), [](auto& work) { return work->isSuccess(); });
}

std::exception_ptr CoalescedWork::exception() const {
  for (const auto& work : works_) {
    if (std::exception_ptr cause = work->exception()) return cause;
  }
  return nullptr;
}

int CoalescedWork::sourceRank() const {
  TORCH_CHECK(works_.size() == 1, "source_rank() is for one receive, and this stands for ",
              works_.size(), " operations");
  return works_.front()->sourceRank();
}

std::vector<at::Tensor> CoalescedWork::result() {
  std::vector<at::Tensor> all;
  for (const auto& work : works_) {
    for (at::Tensor& tensor : work->result()) all.push_back(std::move(tensor));
  }
  return all;
}

bool CoalescedWork::wait(std::chrono::milliseconds timeout) {
  const Deadline deadline = toDeadline(timeout);
  for (const auto& work : works_) {
    // At least a millisecond: zero would mean no timeout.
    work->wait(deadline.isNever() ? kNoTimeout
                                  : std::max(deadline.remaining(), std::chrono::milliseconds(1)));
  }
  return true;
}

void CoalescedWork::blockCurrentStream() {
  for (const auto& work : works_) work->blockCurrentStream();
}

void CoalescedWork::abort() {
  for (const auto& work : works_) work->abort();
}

FuturePtr CoalescedWork::getFuture() {
  struct Pending {
    std::atomic<size_t> left;
    std::vector<FuturePtr> parts;
    FuturePtr whole;

    void complete() {
      // On streams of the pool: these wait for the parts and complete `whole`; this thread's own do
      // not wait.
      std::vector<c10::Stream> streams;
      for (const c10::Device device : whole->devices()) {
        streams.push_back(
            c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
      }
      const c10::MultiStreamGuard guard(streams);
      std::vector<at::Tensor> all;
      for (const FuturePtr& part : parts) {
        if (part->hasError()) {
          whole->setError(part->exception_ptr());
          return;
        }
        part->wait();  // it is complete: the streams wait for its devices
        append(part->value(), &all);
      }
      whole->markCompleted(c10::IValue(std::move(all)));
    }
  };
  auto pending = std::make_shared<Pending>();
  pending->left = works_.size() + 1;  // one for the loop below
  std::vector<c10::Device> devices;
  for (const auto& work : works_) {
    pending->parts.push_back(work->getFuture());
    for (const c10::Device device : pending->parts.back()->devices()) {
      const bool isKnown = std::find(devices.begin(), devices.end(), device) != devices.end();
      if (!isKnown) devices.push_back(device);
    }
  }
  const FuturePtr whole = makeTensorsFuture(/*perList=*/0, std::move(devices));
  pending->whole = whole;
  const auto countDown = [pending] {
    if (pending->left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    pending->complete();
    pending->parts.clear();  // their callbacks hold this
  };
  const std::vector<FuturePtr> parts = pending->parts;
  for (const FuturePtr& part : parts) part->addCallback([countDown](Future&) { countDown(); });
  countDown();
  return whole;
}

FuturePtr CoalescedWork::getFutureResult() {
  const FuturePtr result = makeResultFuture();
  getFuture()->addCallback([result](Future& tensors) {
    result->markCompleted(c10::IValue(static_cast<int64_t>(
        tensors.hasError() ? c10d::WorkResult::COMM_ERROR : c10d::WorkResult::SUCCESS)));
  });
  return result;
}

uint64_t CoalescedWork::getSequencenumber() const {
  return works_.empty() ? 0 : works_.front()->getSequencenumber();
}

}  // namespace mycoll
