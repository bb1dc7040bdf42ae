#include "backend/device/streams.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/version.h>

#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "base/log.h"
#include "nccl/cudart.h"

namespace mycoll {
namespace {

// Making an event costs several microseconds, taking one from here a fraction of one.
class EventPool {
 public:
  using Key = std::tuple<c10::DeviceType, c10::DeviceIndex, bool>;

  std::unique_ptr<c10::Event> take(const Key& key) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& free = free_[key];
    if (free.empty()) return nullptr;
    std::unique_ptr<c10::Event> event = std::move(free.back());
    free.pop_back();
    return event;
  }

  void giveBack(const Key& key, std::unique_ptr<c10::Event> event) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_[key].push_back(std::move(event));
  }

 private:
  std::mutex mutex_;
  std::map<Key, std::vector<std::unique_ptr<c10::Event>>> free_;  // guarded by mutex_
};

// Never destroyed: events come back during static destruction, when the device may be gone.
EventPool& pool() {
  static EventPool* const kPool = new EventPool;
  return *kPool;
}

}  // namespace

c10::Stream currentStream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

c10::Stream sideStream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type())
      .getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

bool isCapturing(const c10::Stream& stream) {
#if TORCH_VERSION_MINOR >= 12
  return stream.is_capturing();
#else
  nccl::CaptureInfo info;
  return stream.device_type() == c10::DeviceType::CUDA &&
         nccl::Cudart::get().capture(stream.native_handle(), &info) && info.isCapturing;
#endif
}

EventPtr takeEvent(c10::Device device, bool isTimed, bool isCaptured) {
  const EventPool::Key key{device.type(), device.index(), isTimed};
  std::unique_ptr<c10::Event> event = isCaptured ? nullptr : pool().take(key);
  if (!event) {
    event = std::make_unique<c10::Event>(
        device.type(), isTimed ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT);
  }
  if (isCaptured) return EventPtr(std::move(event));
  return EventPtr(event.release(), [key](c10::Event* done) {
    pool().giveBack(key, std::unique_ptr<c10::Event>(done));
  });
}

EventPtr recordEvent(const c10::Stream& stream, bool isTimed, bool isCaptured) {
  EventPtr event = takeEvent(stream.device(), isTimed, isCaptured);
  event->record(stream);
  return event;
}

bool hasPassed(const c10::Event& event) {
  try {
    const nccl::RelaxedCapture relaxed;
    return event.query();
  } catch (const std::exception& error) {
    MYCOLL_LOG_WARN("the device cannot be asked for an event: %s", error.what());
    return true;
  }
}

}  // namespace mycoll
