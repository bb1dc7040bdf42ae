#include "device/operation.h"

#include <utility>

#include "backend/errors.h"
#include "device/pause.h"

namespace mycoll {
namespace {

// How often a thread that waits looks at signals.
constexpr auto kTick = std::chrono::milliseconds(50);

Status waitEnded(const char* what) {
  return Status(Code::kTimeout,
                std::string("wait() for ") + what + " timed out; the operation is still running");
}

}  // namespace

void DeviceOperation::keep(std::vector<at::Tensor> tensors) {
  MutexLock lock(mutex_);
  kept_ = std::move(tensors);
}

void DeviceOperation::setEnqueued(const c10::Stream& stream, EventPtr ended) {
  std::vector<std::function<void()>> callbacks;
  OpPtr finished;  // it holds what carries the operation out, and that holds the operation
  {
    MutexLock lock(mutex_);
    if (state_ != State::kQueued) return;
    state_ = State::kEnqueued;
    finished.swap(engineOp_);
    stream_ = stream;
    ended_ = std::move(ended);
    callbacks.swap(callbacks_);
  }
  changed_.notify_all();
  for (auto& fn : callbacks) fn();
}

void DeviceOperation::fail(const Status& cause) {
  std::vector<std::function<void()>> callbacks;
  OpPtr finished;
  {
    MutexLock lock(mutex_);
    if (isPassed_.load(std::memory_order_relaxed)) return;
    if (state_ == State::kEnqueued) {
      const EventPtr ended = ended_;
      lock.unlock();  // the device may take its time
      if (hasPassedOrIsCaptured(*ended)) return;
      lock.lock();
    }
    if (state_ == State::kFailed) return;
    state_ = State::kFailed;
    status_ = cause;
    finished.swap(engineOp_);
    callbacks.swap(callbacks_);
  }
  changed_.notify_all();
  for (auto& fn : callbacks) fn();
}

void DeviceOperation::setEngineOp(std::shared_ptr<Communicator> communicator, OpPtr op) {
  MutexLock lock(mutex_);
  if (state_ != State::kQueued) return;  // over before we came here
  communicator_ = std::move(communicator);
  engineOp_ = std::move(op);
}

Status DeviceOperation::waitEnqueued(Deadline deadline) {
  MutexLock lock(mutex_);
  while (state_ == State::kQueued) {
    if (engineOp_ && !engineOp_->done()) {
      const OpPtr op = engineOp_;
      const std::shared_ptr<Communicator> communicator = communicator_;
      lock.unlock();
      const Status status = communicator->wait(op, deadline);
      if (!op->done()) return status;
      lock.lock();
      continue;
    }
    const auto until = earlier(deadline, Deadline::after(kTick)).when();
    if (changed_.wait_until(lock.native(), until) == std::cv_status::no_timeout) continue;
    if (deadline.expired()) return waitEnded(what_);
    lock.unlock();
    if (isInterruptPending()) return interrupted();
    lock.lock();
  }
  return status_;
}

Status DeviceOperation::waitOver(Deadline deadline) {
  MYCOLL_RETURN_IF_ERROR(waitEnqueued(deadline));
  Pause pause;
  while (!isOver()) {
    if (deadline.expired()) return waitEnded(what_);
    if (pause.rest() && isInterruptPending()) return interrupted();
  }
  const Status failure = status();
  if (!failure.ok() || isCaptured_) return failure;
  // An error of the device is an end, too, but not a good one.
  bool isPassed = true;
  return ask(*ended_, &isPassed);
}

bool DeviceOperation::isEnqueued() const {
  MutexLock lock(mutex_);
  return state_ != State::kQueued;
}

bool DeviceOperation::isOver() const {
  if (isPassed_.load(std::memory_order_relaxed)) return true;
  EventPtr ended;
  {
    MutexLock lock(mutex_);
    if (state_ != State::kEnqueued) return state_ == State::kFailed;
    ended = ended_;
  }
  if (!hasPassedOrIsCaptured(*ended)) return false;
  isPassed_.store(true, std::memory_order_relaxed);
  return true;
}

bool DeviceOperation::mayRelease() const {
  EventPtr ended;
  {
    MutexLock lock(mutex_);
    if (kept_.empty()) return true;
    if (state_ == State::kQueued) return false;
    ended = ended_;
  }
  return !ended || hasPassedOrIsCaptured(*ended);
}

Status DeviceOperation::status() const {
  MutexLock lock(mutex_);
  return status_;
}

void DeviceOperation::onEnqueued(std::function<void()> fn) {
  {
    MutexLock lock(mutex_);
    if (state_ == State::kQueued) {
      callbacks_.push_back(std::move(fn));
      return;
    }
  }
  fn();
}

void DeviceOperation::block(const c10::Stream& stream) const {
  const OnDevice guard(stream.device());
  ended_->block(stream);
}

float DeviceOperation::milliseconds() const {
  if (!started_ || !ended_ || isCaptured_) return 0.0f;
  const OnDevice guard(device());
  return static_cast<float>(started_->elapsedTime(*ended_));
}

std::vector<at::Tensor> DeviceOperation::release() {
  MutexLock lock(mutex_);
  return std::exchange(kept_, {});
}

}  // namespace mycoll
