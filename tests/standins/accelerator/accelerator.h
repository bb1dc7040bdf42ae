// The stand-in device as an accelerator of torch's: PrivateUse1, named "standin".
//
//   guard.cpp    current devices and streams, events: what c10's device-generic classes call
//   memory.cpp   allocators, pinned memory, the hooks by which torch asks for them
//   operators.cpp  asynchronous ones, and a fallback to the CPU that waits: for any device
//   kernels.cpp  torch's own for making and viewing tensors
//   module.cpp   what Python sees beyond that
//
// Thread contract: [any thread], as for any device. The current device and streams are the
// thread's.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <functional>
#include <utility>

#include "standin_device.h"

namespace standin {

constexpr c10::DeviceType kDevice = c10::DeviceType::PrivateUse1;

// Throws what the device refused.
inline void check(const char* refusal) { TORCH_CHECK(refusal == nullptr, refusal); }

c10::DeviceIndex currentDevice();
// The current stream of a device (-1: of the current device).
c10::Stream currentStream(c10::DeviceIndex device = -1);
void* handleOf(c10::Stream stream);

c10::Allocator* deviceAllocator();
void resizeStorage(const c10::Storage& storage, size_t bytes);

}  // namespace standin
