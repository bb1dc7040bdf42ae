#include "nccl/cudart.h"

#include <dlfcn.h>

#include <atomic>
#include <memory>
#include <type_traits>

namespace mycoll::nccl {
namespace {

constexpr int kCaptureStatusActive = 1;  // cudaStreamCaptureStatusActive
constexpr int kCapabilityMajor = 75;     // cudaDevAttrComputeCapabilityMajor
constexpr int kCapabilityMinor = 76;

// torch's runtime, whose symbols are not always global.
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
  look(found.eventRecord_, "cudaEventRecord");
  look(found.streamWaitEvent_, "cudaStreamWaitEvent");
  look(found.exchangeCaptureMode_, "cudaThreadExchangeStreamCaptureMode");
  look(found.deviceGetAttribute_, "cudaDeviceGetAttribute");
  look(found.getLastError_, "cudaGetLastError");
  return found;
}

// Takes no lock: threads that search at the same time find the same. What is found is never freed,
// as threads use it until the process ends.
const Cudart& Cudart::get() {
  static const Cudart kNone;
  static std::atomic<const Cudart*> known{nullptr};
  const Cudart* first = known.load(std::memory_order_acquire);
  if (first) return *first;
  auto found = std::make_unique<const Cudart>(find());
  if (!found->isThere()) return kNone;
  return known.compare_exchange_strong(first, found.get()) ? *found.release() : *first;
}

// Clears an error that we handle, which torch would otherwise find after its next kernel.
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

bool Cudart::isCapturing(void* stream) const {
  int status = 0;
  return isThere() && succeeded(streamIsCapturing_(stream, &status)) &&
         status == kCaptureStatusActive;
}

bool Cudart::record(void* event, void* stream) const {
  return eventRecord_ != nullptr && succeeded(eventRecord_(event, stream));
}

bool Cudart::block(void* event, void* stream) const {
  return streamWaitEvent_ != nullptr && succeeded(streamWaitEvent_(stream, event, 0));
}

int Cudart::capability(int device) const {
  int major = 0;
  int minor = 0;
  if (deviceGetAttribute_ == nullptr ||
      !succeeded(deviceGetAttribute_(&major, kCapabilityMajor, device)) ||
      !succeeded(deviceGetAttribute_(&minor, kCapabilityMinor, device))) {
    return 0;
  }
  return 10 * major + minor;
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
