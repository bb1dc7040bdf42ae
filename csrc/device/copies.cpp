#include "device/copies.h"

#include <ATen/ops/empty.h>

namespace mycoll {

at::Tensor emptyPinned(size_t bytes) {
  const auto count = static_cast<int64_t>(bytes);
  const nccl::RelaxedCapture relaxed;
  try {
    return at::empty({count}, at::TensorOptions(at::kByte).pinned_memory(true));
  } catch (const std::exception&) {
    return at::empty({count}, at::TensorOptions(at::kByte));
  }
}

void copyBackOnDevice(c10::ArrayRef<CopyBack> copies) {
  const PlainDispatch plain;
  for (const CopyBack& copy : copies) {
    const at::Tensor& target = copy.target;
    const int64_t first = copy.offsetBytes / static_cast<int64_t>(target.itemsize());
    const at::Tensor source =
        copy.packed.sizes() == target.sizes()
            ? copy.packed
            : copy.packed.view({-1}).narrow(0, first, target.numel()).view(target.sizes());
    // torch refuses to copy to an expanded tensor.
    withoutRepeats(target).copy_(withoutRepeatsOf(target, source), /*non_blocking=*/true);
  }
}

}  // namespace mycoll
