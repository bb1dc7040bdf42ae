#include "device.h"

#include <dlfcn.h>

#include <string>

#include "script.h"

namespace standin::nccl {
namespace {

template <typename Function>
void find(void* handle, const char* symbol, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, symbol));
  if (function == nullptr) {
    die(std::string("there is no ") + symbol + "; load libmycoll_standin_device.so first");
  }
}

Device load() {
  void* handle = RTLD_DEFAULT;
  if (dlsym(handle, "mycoll_standin_enqueue_owned") == nullptr) {
    handle = dlopen("libmycoll_standin_device.so", RTLD_NOLOAD | RTLD_NOW);
    if (handle == nullptr) die("load libmycoll_standin_device.so first");
  }
  Device device{};
  find(handle, "mycoll_standin_stream", device.stream);
  find(handle, "mycoll_standin_enqueue_owned", device.enqueueOwned);
  find(handle, "mycoll_standin_touch", device.touch);
  find(handle, "mycoll_standin_pointer_device", device.pointerDevice);
  find(handle, "mycoll_standin_is_capturing", device.isCapturing);
  find(handle, "mycoll_standin_stream_create", device.streamCreate);
  find(handle, "mycoll_standin_is_idle", device.isIdle);
  find(handle, "mycoll_standin_spend", device.spend);
  find(handle, "mycoll_standin_malloc", device.allocate);
  find(handle, "mycoll_standin_free", device.release);
  find(handle, "mycoll_standin_current_device", device.currentDevice);
  find(handle, "mycoll_standin_stream_device", device.streamDevice);
  find(handle, "mycoll_standin_enter", device.enter);
  find(handle, "mycoll_standin_device_synchronize", device.synchronize);
  find(handle, "mycoll_standin_exchange_capture_mode", device.exchangeCaptureMode);
  return device;
}

}  // namespace

const Device& Device::get() {
  static const Device device = load();
  return device;
}

}  // namespace standin::nccl
