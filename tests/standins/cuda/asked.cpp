// The functions of the CUDA runtime that mycoll finds by name, for the stand-in device. On their
// own they are libmycoll_standin_cudart.so, which is loaded (globally) with a torch without CUDA.
// With runtime.cpp they are part of a runtime that also knows its capability and bus id
// (STANDIN_IS_WHOLE). Both apply CUDA's rule that a call which may invalidate another thread's
// capture is refused and invalidates it.
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "standin_device.h"

namespace {

constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;
constexpr int kActive = 1;

[[gnu::constructor]] void becomeStrict() { mycoll_standin_set_strict_capture(1); }

// The value that a test has set in the environment; `otherwise` if the runtime is whole.
const char* known(const char* variable, const char* otherwise) {
  const char* const value = std::getenv(variable);
#ifdef STANDIN_IS_WHOLE
  return value != nullptr ? value : otherwise;
#else
  (void)otherwise;
  return value;
#endif
}

}  // namespace

extern "C" {

STANDIN_API int cudaStreamIsCapturing(void* stream, int* status) {
  mycoll_standin_enter();
  *status = mycoll_standin_is_capturing(stream) ? kActive : 0;
  return kSuccess;
}

STANDIN_API int cudaThreadExchangeStreamCaptureMode(int* mode) {
  mycoll_standin_enter();
  *mode = mycoll_standin_exchange_capture_mode(*mode);
  return kSuccess;
}

STANDIN_API int cudaDeviceGetAttribute(int* value, int attribute, int /*device*/) {
  constexpr int kMajor = 75, kMinor = 76;
  const char* const capability = known("STANDIN_CAPABILITY", "90");
  if (capability == nullptr || (attribute != kMajor && attribute != kMinor)) return kInvalidValue;
  const int both = std::atoi(capability);
  *value = attribute == kMajor ? both / 10 : both % 10;
  return kSuccess;
}

// Ranks compare it to find out whether they share a GPU.
STANDIN_API int cudaDeviceGetPCIBusId(char* text, int length, int device) {
  char own[32];
  std::snprintf(own, sizeof own, "0000:%02x:00.0", static_cast<unsigned>(device));
  const char* const id = known("STANDIN_BUS_ID", own);
  if (id == nullptr) return kInvalidValue;
  std::snprintf(text, static_cast<size_t>(length), "%s", id);
  return kSuccess;
}

// runtime.cpp replaces it.
STANDIN_API [[gnu::weak]] int cudaGetLastError() { return kSuccess; }

}  // extern "C"
