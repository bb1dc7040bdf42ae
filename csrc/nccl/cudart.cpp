#include "nccl/cudart.h"

#include <dlfcn.h>

#include <atomic>
#include <mutex>
#include <type_traits>

namespace mycoll::nccl {
namespace {

constexpr int kCaptureStatusActive = 1;          // cudaStreamCaptureStatusActive
constexpr unsigned kNoDestructorSync = 1;        // cudaUserObjectNoDestructorSync: the only way
constexpr unsigned kGraphTakesTheReference = 1;  // cudaGraphUserObjectMove

// The runtime that torch is linked with, which need not be visible to everybody.
void* handleOfRuntime() {
  if (dlsym(RTLD_DEFAULT, "cudaStreamIsCapturing") != nullptr) return RTLD_DEFAULT;
  for (const char* name : {"libcudart.so.13", "libcudart.so.12"}) {
    if (void* handle = dlopen(name, RTLD_NOLOAD | RTLD_NOW)) return handle;
  }
  return RTLD_DEFAULT;
}

}  // namespace

Cudart Cudart::find() {
  Cudart found;
  void* const handle = handleOfRuntime();
  auto look = [handle](auto& function, const char* symbol) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, symbol));
  };
  look(found.streamIsCapturing_, "cudaStreamIsCapturing");
  if (found.streamIsCapturing_ == nullptr) return found;
  int (*runtimeGetVersion)(int*) = nullptr;
  look(runtimeGetVersion, "cudaRuntimeGetVersion");
  if (runtimeGetVersion != nullptr) runtimeGetVersion(&found.version_);
  // One name, three signatures: CUDA 13's plain name takes what CUDA 12 calls _v3.
  if (found.version_ >= 13000) {
    look(found.captureInfo3_, "cudaStreamGetCaptureInfo");
  } else {
    look(found.captureInfo3_, "cudaStreamGetCaptureInfo_v3");
    look(found.captureInfo2_, "cudaStreamGetCaptureInfo_v2");
  }
  look(found.exchangeCaptureMode_, "cudaThreadExchangeStreamCaptureMode");
  look(found.userObjectCreate_, "cudaUserObjectCreate");
  look(found.userObjectRelease_, "cudaUserObjectRelease");
  look(found.graphRetainUserObject_, "cudaGraphRetainUserObject");
  look(found.getLastError_, "cudaGetLastError");
  return found;
}

const Cudart& Cudart::get() {
  static const Cudart kNone;
  static std::atomic<const Cudart*> known{nullptr};
  if (const Cudart* found = known.load(std::memory_order_acquire)) return *found;
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (const Cudart* found = known.load(std::memory_order_acquire)) return *found;
  const Cudart found = find();
  if (!found.isThere()) return kNone;
  const auto* const kept = new Cudart(found);  // never freed: used by threads until the very end
  known.store(kept, std::memory_order_release);
  return *kept;
}

// An error that we know how to live with must not be found by torch after its next kernel.
bool Cudart::succeeded(int error) const {
  if (error == 0) return true;
  if (getLastError_ != nullptr) getLastError_();
  return false;
}

bool Cudart::busId(int device, std::string* id) {
  auto* const getBusId =
      reinterpret_cast<int (*)(char*, int, int)>(dlsym(handleOfRuntime(), "cudaDeviceGetPCIBusId"));
  char text[32] = {};
  if (getBusId == nullptr || getBusId(text, sizeof(text), device) != 0) return false;
  *id = text;
  return true;
}

bool Cudart::capture(void* stream, CaptureInfo* info) const {
  *info = CaptureInfo();
  if (!isThere()) return false;
  int status = 0;
  unsigned long long id = 0;
  void* graph = nullptr;
  int error = 0;
  if (captureInfo3_ != nullptr) {
    error = captureInfo3_(stream, &status, &id, &graph, nullptr, nullptr, nullptr);
  } else if (captureInfo2_ != nullptr) {
    error = captureInfo2_(stream, &status, &id, &graph, nullptr, nullptr);
  } else {
    error = streamIsCapturing_(stream, &status);
  }
  if (!succeeded(error)) return false;
  info->isCapturing = status == kCaptureStatusActive;
  if (info->isCapturing) {
    info->id = id;
    info->graph = graph;
  }
  return true;
}

bool Cudart::retain(void* graph, void* object, void (*destroy)(void*)) const {
  void* held = nullptr;
  if (userObjectCreate_ == nullptr || userObjectRelease_ == nullptr ||
      graphRetainUserObject_ == nullptr ||
      !succeeded(userObjectCreate_(&held, object, destroy, 1, kNoDestructorSync))) {
    destroy(object);
    return false;
  }
  if (succeeded(graphRetainUserObject_(graph, held, 1, kGraphTakesTheReference))) return true;
  (void)succeeded(userObjectRelease_(held, 1));  // calls destroy
  return false;
}

RelaxedCapture::RelaxedCapture() {
  const Cudart& cudart = Cudart::get();
  isExchanged_ = cudart.exchangeCaptureMode_ != nullptr &&
                 cudart.succeeded(cudart.exchangeCaptureMode_(&mode_));
}

RelaxedCapture::~RelaxedCapture() {
  if (isExchanged_) (void)Cudart::get().exchangeCaptureMode_(&mode_);
}

}  // namespace mycoll::nccl
