// PlainDispatch: for calls to torch's operators from threads whose modes have nothing to do with
// the tensors. While it lives, this thread uses no autograd, no version counters, no functorch, no
// autocast and no Python dispatch.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace mycoll {

class PlainDispatch {
 public:
  PlainDispatch() : others_(otherKeys()) {}

 private:
  static c10::DispatchKeySet otherKeys() {
    return c10::python_ks | c10::functorch_transforms_ks | c10::autocast_dispatch_keyset |
           c10::functorch_batched_ks |
           c10::DispatchKeySet({c10::DispatchKey::Functionalize, c10::DispatchKey::PreDispatch});
  }

  at::AutoDispatchBelowADInplaceOrView autograd_;
  c10::impl::ExcludeDispatchKeyGuard others_;
};

}  // namespace mycoll
