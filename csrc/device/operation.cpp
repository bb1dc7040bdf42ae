#include "device/operation.h"

#include <algorithm>
#include <utility>

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

DeviceOperation::Putting::Putting(DeviceOperation& operation)
    : operation_(operation), isAllowed_([&] {
        MutexLock lock(operation.mutex_);
        if (operation.state_ == State::kFailed) return false;
        ++operation.putting_;
        return true;
      }()) {}

DeviceOperation::Putting::~Putting() {
  if (!isAllowed_) return;
  EventPtr earlier;
  MutexLock lock(operation_.mutex_);
  --operation_.putting_;
  if (!end_ || operation_.kept_.empty()) return;
  for (auto& [stream, end] : operation_.put_) {
    if (stream != end_->first) continue;
    earlier = std::exchange(end, std::move(end_->second));
    return;
  }
  operation_.put_.push_back(std::move(*end_));
}

void DeviceOperation::Putting::setEnd(const c10::Stream& stream, EventPtr end) {
  end_.emplace(stream, std::move(end));
}

void DeviceOperation::keep(Kept tensors) {
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
  if (isPassed_.load(std::memory_order_relaxed)) return;
  EventPtr ended;
  {
    MutexLock lock(mutex_);
    if (state_ == State::kEnqueued) ended = ended_;
  }
  bool isPassed = false;
  if (ended && askDevice(*ended, &isPassed).ok() && isPassed) return;
  end(cause, /*isDeviceError=*/false);
}

void DeviceOperation::failByDevice(const Status& error) {
  end(error.withMessage(std::string(what_) + ": " + error.message()), /*isDeviceError=*/true);
}

void DeviceOperation::end(const Status& failure, bool isDeviceError) {
  std::vector<std::function<void()>> callbacks;
  OpPtr finished;
  {
    MutexLock lock(mutex_);
    if (state_ == State::kFailed || isPassed_.load(std::memory_order_relaxed)) return;
    state_ = State::kFailed;
    status_ = failure;
    isDeviceError_.store(isDeviceError, std::memory_order_release);
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
  return status();
}

bool DeviceOperation::isEnqueued() const {
  MutexLock lock(mutex_);
  return state_ != State::kQueued;
}

Status DeviceOperation::askDevice(const c10::Event& ended, bool* isPassed) const {
  *isPassed = true;
  return isCaptured_ ? Status() : ask(ended, isPassed);
}

bool DeviceOperation::isOver() {
  if (isPassed_.load(std::memory_order_relaxed)) return true;
  EventPtr ended;
  {
    MutexLock lock(mutex_);
    if (state_ != State::kEnqueued) return state_ == State::kFailed;
    ended = ended_;
  }
  bool isPassed = true;
  const Status asked = askDevice(*ended, &isPassed);
  if (!asked.ok()) {
    failByDevice(asked);
    return true;
  }
  if (isPassed) isPassed_.store(true, std::memory_order_relaxed);
  return isPassed;
}

bool DeviceOperation::mayRelease() const {
  decltype(put_) put;
  {
    MutexLock lock(mutex_);
    if (kept_.empty()) return true;
    if (state_ == State::kQueued || putting_ > 0) return false;
    put = put_;
  }
  return isCaptured_ || std::all_of(put.begin(), put.end(),
                                    [](const auto& stream) { return hasPassed(*stream.second); });
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
  mycoll::block(*ended_, stream);
}

float DeviceOperation::milliseconds() const {
  // The device need not have come to the end of what has failed.
  if (!started_ || !ended_ || isCaptured_ || !status().ok()) return 0.0f;
  const OnDevice guard(device());
  return static_cast<float>(started_->elapsedTime(*ended_));
}

Kept DeviceOperation::release() {
  MutexLock lock(mutex_);
  return std::exchange(kept_, {});
}

}  // namespace mycoll
