// libmycoll_standin_cudart.so: the functions of the CUDA runtime that mycoll looks for by name, for
// the stand-in device. To be loaded (globally) only where no real one is. With it comes CUDA's rule
// that a call which may spoil another thread's capture is refused and does spoil it.
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "standin_device.h"

namespace {

constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;
constexpr int kActive = 1;

[[gnu::constructor]] void becomeStrict() { mycoll_standin_set_strict_capture(1); }

}  // namespace

extern "C" {

STANDIN_API int cudaStreamIsCapturing(void* stream, int* status) {
  *status = mycoll_standin_is_capturing(stream) ? kActive : 0;
  return kSuccess;
}

STANDIN_API int cudaThreadExchangeStreamCaptureMode(int* mode) {
  *mode = mycoll_standin_exchange_capture_mode(*mode);
  return kSuccess;
}

// Known only where a test says so.
STANDIN_API int cudaDeviceGetAttribute(int* value, int attribute, int /*device*/) {
  constexpr int kMajor = 75, kMinor = 76;
  const char* capability = std::getenv("STANDIN_CAPABILITY");
  if (capability == nullptr || (attribute != kMajor && attribute != kMinor)) return kInvalidValue;
  const int both = std::atoi(capability);
  *value = attribute == kMajor ? both / 10 : both % 10;
  return kSuccess;
}

// Known only where a test says so: by it ranks find out whether they share a GPU.
STANDIN_API int cudaDeviceGetPCIBusId(char* text, int length, int /*device*/) {
  const char* id = std::getenv("STANDIN_BUS_ID");
  if (id == nullptr) return kInvalidValue;
  std::snprintf(text, static_cast<size_t>(length), "%s", id);
  return kSuccess;
}

STANDIN_API int cudaGetLastError() { return kSuccess; }

}  // extern "C"
