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

struct UserObject {
  void* pointer;
  void (*destroy)(void*);
  unsigned count;
};

void drop(void* object) {
  auto* held = static_cast<UserObject*>(object);
  if (--held->count != 0) return;
  held->destroy(held->pointer);
  delete held;
}

[[gnu::constructor]] void becomeStrict() { mycoll_standin_set_strict_capture(1); }

}  // namespace

extern "C" {

STANDIN_API int cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return kSuccess;
}

STANDIN_API int cudaStreamIsCapturing(void* stream, int* status) {
  *status = mycoll_standin_is_capturing(stream) ? kActive : 0;
  return kSuccess;
}

STANDIN_API int cudaStreamGetCaptureInfo(void* stream, int* status, unsigned long long* id,
                                         void** graph, const void** dependencies,
                                         const void** edges, size_t* dependencyCount) {
  uint64_t number = 0;
  void* current = nullptr;
  *status = mycoll_standin_capture_info(stream, &number, &current) ? kActive : 0;
  if (id != nullptr) *id = number;
  if (graph != nullptr) *graph = current;
  if (dependencies != nullptr) *dependencies = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (dependencyCount != nullptr) *dependencyCount = 0;
  return kSuccess;
}

STANDIN_API int cudaThreadExchangeStreamCaptureMode(int* mode) {
  *mode = mycoll_standin_exchange_capture_mode(*mode);
  return kSuccess;
}

STANDIN_API int cudaUserObjectCreate(void** object, void* pointer, void (*destroy)(void*),
                                     unsigned count, unsigned /*flags*/) {
  *object = new UserObject{pointer, destroy, count};
  return kSuccess;
}

STANDIN_API int cudaUserObjectRelease(void* object, unsigned count) {
  for (unsigned i = 0; i < count; ++i) drop(object);
  return kSuccess;
}

STANDIN_API int cudaGraphRetainUserObject(void* graph, void* object, unsigned count,
                                          unsigned flags) {
  constexpr unsigned kMove = 1;
  if (count != 1 || flags != kMove) return kInvalidValue;  // all that mycoll needs
  mycoll_standin_capture_retain(graph, object, drop);
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
