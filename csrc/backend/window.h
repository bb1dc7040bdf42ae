// MycollWindow: one-sided communication as torch has it from 2.14 on (c10d::Window), and
// mycoll.Window for all torch versions. It checks arguments and knows tensors; the window itself is
// engine/window.h.
//
// A window takes any CPU tensor whose memory is its elements in order. If it is a shared tensor
// (shared_tensors.h), the ranks of its host map it: a put is a copy, and map_remote_tensor()
// returns the tensor itself. An ordinary tensor is written by its own process, as between hosts,
// and cannot be mapped: torch's API allows any tensor, and this is safe for all of them.
//
// The window holds the memory until tensor_deregister(), or until it is destroyed, even if it is
// not `owning`: another rank may write to the memory at any moment. Meanwhile the storage cannot be
// resized.
//
// A put makes no signal of its own (torch's window over NCCL does, as NCCL has no other put). A
// tensor that map_remote_tensor() returned remains valid while it is referenced; once its owner has
// freed the original, it reads as zeros.
//
// Thread contract: as MycollBackend's.
// Lifetime: holds its backend, which stays open until its group is destroyed or both are dropped.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "backend/mycoll_backend.h"
#include "backend/torch_version.h"
#include "base/mutex.h"
#include "engine/window.h"

namespace mycoll {

class MycollWindow final : public TorchWindow {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  explicit MycollWindow(c10::intrusive_ptr<MycollBackend> backend);
  ~MycollWindow() override;

  void tensor_register(const at::Tensor& tensor, bool owning) MYCOLL_TORCH_WINDOW_OVERRIDE;
  void tensor_deregister() MYCOLL_TORCH_WINDOW_OVERRIDE;
  WorkPtr put(const at::Tensor& tensor, int64_t dstRank, int64_t targetOffsetNelems, bool asyncOp,
              const PutOptions& opts) MYCOLL_TORCH_WINDOW_OVERRIDE;
  at::Tensor map_remote_tensor(int64_t rank) MYCOLL_TORCH_WINDOW_OVERRIDE;
  WorkPtr signal(int64_t peerRank, bool asyncOp,
                 const SignalOptions& opts) MYCOLL_TORCH_WINDOW_OVERRIDE;
  WorkPtr wait_signal(int64_t peerRank, bool asyncOp,
                      const WaitSignalOptions& opts) MYCOLL_TORCH_WINDOW_OVERRIDE;
  WindowAttr get_attr(int64_t peerRank) MYCOLL_TORCH_WINDOW_OVERRIDE;

 private:
  struct Layout;  // of a rank's tensor

  // In the generation of the window, which need not be the current one.
  UserCall enter(const char* function) const;
  Layout layoutOf(const CallerInfo& caller, int64_t rank) const;
  bool isMapped(const CallerInfo& caller, int64_t rank, std::shared_ptr<Pages>* pages) const;
  WorkPtr workOf(Request& request, const OpPtr& op);

  const c10::intrusive_ptr<MycollBackend> backend_;
  const Generation generation_;
  const std::shared_ptr<mycoll::Window> window_;  // qualified: torch's class has that name, too
  Mutex mutex_;
  at::Tensor tensor_ GUARDED_BY(mutex_);  // this rank's
};

}  // namespace mycoll
