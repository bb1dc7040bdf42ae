#include "device/device_work.h"

#include <c10/core/StreamGuard.h>

#include <optional>

#include "backend/errors.h"
#include "backend/work.h"
#include "device/device_group.h"

namespace mycoll {
namespace {

using Future = c10::ivalue::Future;

// The future records its events on the current stream. On the operation's stream, a wait for the
// future is a wait for the operation.
void complete(Future& future, DeviceOperation& operation, const std::vector<at::Tensor>& outputs,
              size_t perList, c10d::OpType type) {
  operation.setReliedOn();
  runCallbacks(type, [&] {
    const Status status = operation.status();
    if (!status.ok()) return future.setError(toException(status));
    const c10::StreamGuard guard(operation.stream());
    future.markCompleted(futureValue(outputs, perList));
  });
}

}  // namespace

DeviceWork::DeviceWork(std::shared_ptr<DeviceGroup> group, c10d::OpType type, uint64_t sequence,
                       std::chrono::milliseconds timeout, DeviceOperationPtr operation,
                       std::vector<at::Tensor> outputs, size_t perList, bool waitsOnHost,
                       std::shared_ptr<CallbackOrder> order)
    : c10d::Work(group->rank(), type),
      group_(std::move(group)),
      sequence_(sequence),
      timeout_(timeout),
      operation_(std::move(operation)),
      outputs_(std::move(outputs)),
      perList_(perList),
      waitsOnHost_(waitsOnHost),
      order_(std::move(order)) {}

DeviceWork::~DeviceWork() {
  if (!owner_.isHere()) return;
  // If it is not over, the watchdog releases the memory.
  Kept dropped;
  (void)operation_->releaseUnused(&dropped);
  dropped.dropHere();
}

void DeviceWork::enter(const char* function) const { owner_.check(group_->name(), function); }

bool DeviceWork::isCompleted() {
  enter("Work.is_completed");
  return operation_->isOver();
}

bool DeviceWork::isSuccess() const {
  enter("Work.is_success");
  return operation_->status().ok();
}

std::exception_ptr DeviceWork::exception() const {
  enter("Work.exception");
  return toException(operation_->status());
}

std::vector<at::Tensor> DeviceWork::result() {
  enter("Work.result");
  return outputs_;
}

int DeviceWork::sourceRank() const {
  enter("Work.source_rank");
  return operation_->source();
}

bool DeviceWork::wait(std::chrono::milliseconds timeout) {
  enter("Work.wait");
  const bool isTimed = timeout > std::chrono::milliseconds(0);
  const Deadline deadline = isTimed ? Deadline::after(timeout) : Deadline::never();
  const Status enqueued = operation_->waitEnqueued(deadline);
  if (!enqueued.ok()) stayIfExiting();
  throwFailure(enqueued);
  const c10::Stream current = currentStream(operation_->device());
  operation_->block(current);
  if (isTimed || waitsOnHost_) throwFailure(operation_->waitOver(deadline));
  operation_->setReliedOn();
  throwIfFailed(operation_->status());
  stayIfExiting();
  // Later work on the stream to which the memory belongs follows the operation, so the allocator
  // may reuse the memory. On another stream this would be too early for memory that the program has
  // dropped since the call, although torch's nccl does so.
  if (current == operation_->caller()) operation_->release().dropHere();
  if (isAsked_.load(std::memory_order_acquire)) callbacksDone_->await();
  return true;
}

// Throws the failure of a wait, whose deadline may have passed while the operation continues.
void DeviceWork::throwFailure(const Status& status) const {
  if (status.ok()) return;
  std::optional<QuietScope> quiet;
  if (operation_->status().ok()) quiet.emplace();
  throwStatus(status);
}

void DeviceWork::abort() {
  enter("Work.abort");
  group_->abort("Work.abort() was called");
}

c10::intrusive_ptr<Future> DeviceWork::getFuture() {
  enter("Work.get_future");
  MutexLock lock(mutex_);
  if (future_) return future_;
  auto future = makeTensorsFuture(perList_, {operation_->device()});
  future_ = future;
  lock.unlock();
  // On NCCL's path it is enqueued by now, and the future is complete immediately: work that is
  // chained to it is then enqueued after it, in the same order on all ranks.
  if (operation_->isEnqueued()) {
    complete(*future, *operation_, outputs_, perList_, opType_);
  } else {
    callbacksDone_ = std::make_shared<CallbacksDone>();  // only the first call sets it
    isAsked_.store(true, std::memory_order_release);
    CallbackOrder::TurnPtr turn = CallbackOrder::add(order_, future);
    // The references are moved on, so that the thread that ends the operation drops none of them.
    operation_->onEnqueued([turn = std::move(turn), future, operation = operation_,
                            outputs = outputs_, perList = perList_, done = callbacksDone_,
                            type = opType_]() mutable {
      auto completion = [future = std::move(future), operation = std::move(operation),
                         outputs = std::move(outputs), perList, done = std::move(done), type] {
        complete(*future, *operation, outputs, perList, type);
        done->set();
      };
      CallbackOrder::ready(std::move(turn), std::move(completion));
    });
  }
  return future;
}

c10::intrusive_ptr<Future> DeviceWork::getFutureResult() {
  enter("Work.get_future_result");
  MutexLock lock(mutex_);
  if (resultFuture_) return resultFuture_;
  auto future = c10::make_intrusive<Future>(c10::IntType::get());
  resultFuture_ = future;
  lock.unlock();
  const auto onOver =
      std::make_shared<OnOver>([future, type = opType_](const Status& status) mutable {
        const auto result = static_cast<int64_t>(toWorkResult(status));
        CallbackPool::get().post([future = std::move(future), result, type] {
          runCallbacks(type, [&] { future->markCompleted(c10::IValue(result)); });
        });
      });
  group_->watch({.operation = operation_, .isMessage = true, .onOver = onOver});
  return future;
}

float DeviceWork::getDuration() const {
  enter("Work._get_duration");
  TORCH_CHECK(operation_->isOver(), "the duration is known when the operation has completed");
  return operation_->milliseconds();
}

}  // namespace mycoll
