// MycollWindow: one-sided communication as torch has it from 2.14 on (c10d::Window), and
// mycoll.Window for all torch versions. It checks arguments and knows tensors; the window itself is
// engine/window.h.
//
// Which tensors. Any CPU tensor whose memory is its elements in order. Where it is a shared one
// (shared_tensors.h) the ranks of its host map it: a put is a copy, map_remote_tensor() gives the
// tensor itself. An ordinary one is written by its own process, as between hosts, and cannot be
// mapped: torch's API allows any tensor, and the engine has a safe way for it.
//
// The memory belongs to the window until tensor_deregister(), or until the window is gone, also
// where it is not `owning`: another rank may write to it at any moment. Meanwhile its storage
// cannot be resized.
//
// A put makes no signal of its own (torch's window over NCCL does, as NCCL has no other). A tensor
// that map_remote_tensor() gave may be used as long as somebody holds it; once its owner has freed
// its own there are zeros in it.
//
// Thread contract: as MycollBackend's.
// Lifetime: keeps its backend, which stays open until its group is destroyed or both are dropped.
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

  void tensor_register(const at::Tensor& tensor, bool owning) override;
  void tensor_deregister() override;
  WorkPtr put(const at::Tensor& tensor, int64_t dstRank, int64_t targetOffsetNelems, bool asyncOp,
              const PutOptions& opts) override;
  at::Tensor map_remote_tensor(int64_t rank) override;
  WorkPtr signal(int64_t peerRank, bool asyncOp, const SignalOptions& opts) override;
  WorkPtr wait_signal(int64_t peerRank, bool asyncOp, const WaitSignalOptions& opts) override;
  WindowAttr get_attr(int64_t peerRank) override;

 private:
  struct Layout;  // of a rank's tensor

  Layout layoutOf(const CallSite& site, int64_t rank) const;
  bool isMapped(const CallSite& site, int64_t rank, std::shared_ptr<Pages>* pages) const;
  WorkPtr workOf(Request& request, const OpPtr& op);

  const c10::intrusive_ptr<MycollBackend> backend_;
  const std::shared_ptr<mycoll::Window> window_;  // qualified: torch's class has that name, too
  Mutex mutex_;
  at::Tensor tensor_ GUARDED_BY(mutex_);  // this rank's
};

}  // namespace mycoll
