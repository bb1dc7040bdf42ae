// The stand-in device as an accelerator of torch: PrivateUse1, named "standin".
//
//   guard.cpp      current devices and streams, events, for c10's device-generic classes
//   memory.cpp     allocators, pinned memory, and the hooks through which torch uses them
//   operators.cpp  asynchronous operators, and a fallback to the CPU that waits; for any device
//   kernels.cpp    operators that make and view tensors
//   module.cpp     further functions for Python
//
// Thread contract: [any thread], as for any device. The current device and streams are
// thread-local.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <functional>
#include <utility>

#include "standin_device.h"

namespace standin {

constexpr c10::DeviceType kDevice = c10::DeviceType::PrivateUse1;

// Throws if the device refused the call.
inline void check(const char* refusal) { TORCH_CHECK(refusal == nullptr, refusal); }

c10::DeviceIndex currentDevice();
// The current stream of a device (-1: of the current device).
c10::Stream currentStream(c10::DeviceIndex device = -1);
void* handleOf(c10::Stream stream);

c10::Allocator* deviceAllocator();
void resizeStorage(const c10::Storage& storage, size_t bytes);

}  // namespace standin
