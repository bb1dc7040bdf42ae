// The functions of ../device that this stand-in needs. They are found in the process at first use,
// because the two libraries are loaded separately and in any order. Aborts the process if the
// device is not loaded.
//
// Thread contract: [any thread].
#pragma once

#include <cstddef>

namespace standin::nccl {

struct Device {
  void* (*stream)(void* stream);  // resolves null to the default stream
  void (*enqueueOwned)(void* stream, void (*fn)(void*), void* argument, void (*destroy)(void*));
  void* (*touch)(const void* address, size_t bytes, const char* what);
  int (*pointerDevice)(const void* address);
  int (*isCapturing)(void* stream);
  void* (*streamCreate)(int device, int priority);
  int (*isIdle)();
  void (*spend)(int isNccl);
  void* (*allocate)(size_t bytes, void* stream);
  void (*release)(void* address);
  int (*currentDevice)();
  int (*streamDevice)(void* stream);
  void (*enter)();  // as each call of CUDA's runtime does
  const char* (*synchronize)(int device);
  int (*exchangeCaptureMode)(int mode);  // of this thread

  static const Device& get();
};

inline bool isDevicePointer(const void* address) {
  return Device::get().pointerDevice(address) >= 0;
}

}  // namespace standin::nccl
