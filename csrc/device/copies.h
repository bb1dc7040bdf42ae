// Copies on devices, through torch's operators, on the current stream.
// Thread contract: [any thread], with or without the GIL, whatever the thread's dispatch modes.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/ArrayRef.h>

#include "backend/errors.h"
#include "backend/layout.h"
#include "backend/plain_dispatch.h"
#include "backend/request.h"
#include "base/status.h"
#include "device/operation.h"
#include "device/streams.h"
#include "nccl/cudart.h"

namespace mycoll {

// Returns pinned memory, or ordinary memory if the device has none.
inline at::Tensor emptyPinned(size_t bytes) {
  const auto count = static_cast<int64_t>(bytes);
  const PlainDispatch plain;
  const nccl::RelaxedCapture relaxed;
  try {
    return at::empty({count}, at::TensorOptions(at::kByte).pinned_memory(true));
  } catch (const std::exception&) {
    return at::empty({count}, at::TensorOptions(at::kByte));
  }
}

// Copies results from plain memory to the user's tensors.
inline void copyBackOnDevice(c10::ArrayRef<CopyBack> copies) {
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

// Runs `copies` with the device as the current one, and returns what torch throws.
template <typename Copies>
Status copying(c10::Device device, const Copies& copies) {
  try {
    const PlainDispatch plain;
    const OnDevice guard(device);
    const nccl::RelaxedCapture relaxed;  // torch's allocators allocate, and query events
    copies();
    return Status();
  } catch (...) {
    return Status(Code::kInternal, "a copy between device and host failed: " + describeException());
  }
}

// As copying(), on `stream`, unless the operation has failed. `copies` returns the event that
// follows the copies: the operation keeps its tensors until the stream has passed it.
template <typename Copies>
Status copyingFor(DeviceOperation& operation, const c10::Stream& stream, const Copies& copies) {
  DeviceOperation::StreamUse use(operation);
  if (!use.isAllowed()) return operation.status();
  return copying(stream.device(), [&] {
    const c10::StreamGuard guard(stream);
    use.setEnd(copies());
  });
}

}  // namespace mycoll
