// Copies on devices, through torch's operators, on the current stream.
// Thread contract: [any thread], with or without the GIL, under whatever modes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/ArrayRef.h>

#include <exception>
#include <string>

#include "backend/plain_dispatch.h"
#include "backend/request.h"
#include "base/status.h"
#include "device/operation.h"
#include "device/streams.h"
#include "nccl/cudart.h"

namespace mycoll {

// Pinned, as far as the device has such memory.
at::Tensor emptyPinned(size_t bytes);

// From plain memory of ours to the user's tensors.
void copyBackOnDevice(c10::ArrayRef<CopyBack> copies);

// Runs `copies` with the device as the current one, where torch's exceptions must not get out.
template <typename Copies>
Status copying(c10::Device device, const Copies& copies) {
  try {
    const PlainDispatch plain;
    const OnDevice guard(device);
    const nccl::RelaxedCapture relaxed;  // torch's allocators allocate, and ask for events
    copies();
    return Status();
  } catch (const std::exception& error) {
    return Status(Code::kInternal, "a copy between device and host failed: " + textOf(error));
  }
}

// The same on `stream`, for an operation that has not failed, which keeps its tensors until the
// stream has passed the copies: they return the event behind them.
template <typename Copies>
Status copyingFor(DeviceOperation& operation, const c10::Stream& stream, const Copies& copies) {
  DeviceOperation::Putting putting(operation);
  if (!putting.isAllowed()) return operation.status();
  return copying(stream.device(), [&] {
    const c10::StreamGuard guard(stream);
    putting.setEnd(stream, copies());
  });
}

}  // namespace mycoll
