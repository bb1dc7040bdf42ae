// DeviceWork: the Work for an operation on a device. wait() makes the current stream wait, not the
// host.
//
// Thread contract: [any thread]. wait() and synchronize() must not be called with the GIL held.
// Lifetime: may be dropped at any time; the operation continues. In a forked child every call
// throws.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "backend/callback_order.h"
#include "backend/callback_pool.h"
#include "backend/owning_process.h"
#include "backend/torch_version.h"
#include "base/mutex.h"
#include "device/operation.h"

namespace mycoll {

class DeviceGroup;

class DeviceWork final : public c10d::Work {
 public:
  // waitsOnHost: wait() returns when the operation is over (MYCOLL_CUDA_BLOCKING_WAIT).
  // perList: see Request. order: see DeviceSupport::Extras.
  DeviceWork(std::shared_ptr<DeviceGroup> group, c10d::OpType type, uint64_t sequence,
             std::chrono::milliseconds timeout, DeviceOperationPtr operation,
             std::vector<at::Tensor> outputs, size_t perList, bool waitsOnHost,
             std::shared_ptr<CallbackOrder> order);
  ~DeviceWork() override;

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  int sourceRank() const override;
  // With a timeout, the host waits until the operation is over.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { synchronize(); }
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  float getDuration() const override;
  uint64_t getSequencenumber() const override { return sequence_; }
#if MYCOLL_TORCH_HAS_WORK_TIMEOUT
  std::chrono::milliseconds getTimeout() const override { return timeout_; }
#endif

 private:
  void enter(const char* function) const;
  void throwFailure(const Status& status) const;

  const std::shared_ptr<DeviceGroup> group_;
  const OwningProcess owner_;
  const uint64_t sequence_;
  [[maybe_unused]] const std::chrono::milliseconds timeout_;
  const DeviceOperationPtr operation_;
  const std::vector<at::Tensor> outputs_;
  const size_t perList_;
  const bool waitsOnHost_;
  const std::shared_ptr<CallbackOrder> order_;

  // For a future that was not complete immediately; set before isAsked_.
  std::shared_ptr<CallbacksDone> callbacksDone_;
  std::atomic<bool> isAsked_{false};

  Mutex mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_ GUARDED_BY(mutex_);
  c10::intrusive_ptr<c10::ivalue::Future> resultFuture_ GUARDED_BY(mutex_);
};

}  // namespace mycoll
