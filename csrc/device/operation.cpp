#include "device/operation.h"

#include <utility>

#include "base/wait.h"

namespace mycoll {
namespace {

Status waitEnded(const char* what) {
  return Status(Code::kTimeout,
                std::string("wait() for ") + what + " timed out; the operation is still running");
}

}  // namespace

DeviceOperation::StreamUse::StreamUse(DeviceOperation& operation)
    : operation_(operation), isAllowed_([&] {
        MutexLock lock(operation.mutex_);
        if (operation.state_ == State::kFailed) return false;
        ++operation.uses_;
        return true;
      }()) {}

DeviceOperation::StreamUse::~StreamUse() {
  if (!isAllowed_) return;
  MutexLock lock(operation_.mutex_);
  --operation_.uses_;
  if (end_ && !operation_.kept_.empty()) std::swap(operation_.lastUse_, end_);
}

void DeviceOperation::keep(Kept memory) {
  MutexLock lock(mutex_);
  kept_ = std::move(memory);
}

void DeviceOperation::setEnqueued(const c10::Stream& stream, EventPtr ended) {
  MutexLock lock(mutex_);
  if (state_ != State::kQueued) return;
  stream_ = stream;
  ended_ = std::move(ended);
  state_ = State::kEnqueued;
  announce(lock);
}

void DeviceOperation::fail(const Status& cause) {
  if (!isOver()) end(cause, /*isDeviceError=*/false);
}

void DeviceOperation::failByDevice(const Status& error) {
  end(error.withMessage(std::string(what_) + ": " + error.message()), /*isDeviceError=*/true);
}

void DeviceOperation::end(const Status& failure, bool isDeviceError) {
  MutexLock lock(mutex_);
  if (state_ == State::kFailed || isPassed_.load(std::memory_order_relaxed)) return;
  status_ = failure;
  state_ = State::kFailed;
  isDeviceError_.store(isDeviceError, std::memory_order_release);
  announce(lock);
}

void DeviceOperation::announce(MutexLock& lock) NO_THREAD_SAFETY_ANALYSIS {
  // The engine's operation holds what executes this one, which holds this one.
  const OpPtr finished = std::exchange(engineOp_, nullptr);
  const std::vector<std::function<void()>> callbacks = std::exchange(callbacks_, {});
  lock.unlock();
  changed_.notify_all();
  for (const auto& fn : callbacks) fn();
}

void DeviceOperation::setEngineOp(std::shared_ptr<Communicator> communicator, OpPtr op) {
  MutexLock lock(mutex_);
  if (state_ != State::kQueued) return;
  communicator_ = std::move(communicator);
  engineOp_ = std::move(op);
  changed_.notify_all();  // a thread that waits runs it
}

Status DeviceOperation::waitEnqueued(Deadline deadline) {
  if (state_ != State::kQueued) return status();
  MutexLock lock(mutex_);
  while (state_ == State::kQueued) {
    if (engineOp_ && !engineOp_->done()) {
      const OpPtr op = engineOp_;
      const std::shared_ptr<Communicator> communicator = communicator_;
      lock.unlock();
      const Status status = communicator->wait(op, deadline);
      // A signal must be handled even if the operation is done.
      if (!op->done() || status.code() == Code::kInterrupted) return status;
      lock.lock();
      continue;
    }
    const auto until = earlier(deadline, Deadline::after(kWaitTick)).when();
    if (changed_.wait_until(lock.native(), until) == std::cv_status::no_timeout) continue;
    if (deadline.expired()) return waitEnded(what_);
    lock.unlock();
    if (isInterruptPending()) return interrupted();
    lock.lock();
  }
  return status();
}

Status DeviceOperation::waitOver(Deadline deadline) {
  MYCOLL_RETURN_IF_ERROR(waitEnqueued(deadline));
  DevicePause pause;
  while (!isOver()) {
    if (deadline.expired()) return waitEnded(what_);
    if (pause.rest() && isInterruptPending()) return interrupted();
  }
  return status();
}

bool DeviceOperation::isOver() {
  if (isPassed_.load(std::memory_order_relaxed)) return true;
  const State now = state_;
  if (now != State::kEnqueued) return now == State::kFailed;
  bool isPassed = true;
  const Status error = isCaptured_ ? Status() : query(*ended_, &isPassed);
  if (!error.ok()) {
    failByDevice(error);
    return true;
  }
  if (isPassed) isPassed_.store(true, std::memory_order_relaxed);
  return isPassed;
}

Status DeviceOperation::status() const { return state_ == State::kFailed ? status_ : Status(); }

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
  mycoll::block(*ended_, stream);
}

float DeviceOperation::milliseconds() const {
  // The device may not have reached the end of an operation that has failed.
  if (!started_ || !ended_ || isCaptured_ || !status().ok()) return 0.0f;
  try {
    const OnDevice guard(device());
    return static_cast<float>(started_->elapsedTime(*ended_));
  } catch (const std::exception&) {
    return 0.0f;  // the device has failed since, and reports that to its users
  }
}

Kept DeviceOperation::release() {
  MutexLock lock(mutex_);
  return std::move(kept_);
}

bool DeviceOperation::releaseUnused(Kept* released) {
  EventPtr last;
  {
    MutexLock lock(mutex_);
    if (kept_.empty()) return true;
    if (state_ == State::kQueued || uses_ > 0) return false;
    last = lastUse_;
  }
  if (last && !isCaptured_ && !hasPassed(*last)) return false;
  *released = release();
  return true;
}

}  // namespace mycoll
