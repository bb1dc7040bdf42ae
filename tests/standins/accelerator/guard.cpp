#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/version.h>

#include <array>
#include <atomic>
#include <mutex>
#include <vector>

#include "accelerator.h"

namespace standin {
namespace {

constexpr int kPoolSize = 4;  // of each priority
constexpr int kHighPriority = -1;

// Stream ids: 0 is the default stream; then come the two pools, then streams made on request.
class Device {
 public:
  explicit Device(c10::DeviceIndex index) : index_(index) {
    streams_.push_back(mycoll_standin_default_stream(index));
  }

  void* handle(c10::StreamId id) {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(id >= 0 && static_cast<size_t>(id) < streams_.size(), "no such stream");
    return streams_[id];
  }

  c10::StreamId make(int priority) {
    std::lock_guard<std::mutex> lock(mutex_);
    streams_.push_back(mycoll_standin_stream_create(index_, priority));
    return static_cast<c10::StreamId>(streams_.size() - 1);
  }

  c10::StreamId pooled(bool isHigh) {
    std::call_once(poolMade_, [this] {
      for (int i = 0; i < 2 * kPoolSize; ++i) make(i < kPoolSize ? 0 : kHighPriority);
    });
    const int turn = next_[isHigh]++ % kPoolSize;
    return poolStart_ + (isHigh ? kPoolSize : 0) + turn;
  }

 private:
  const c10::DeviceIndex index_;
  std::mutex mutex_;
  std::vector<void*> streams_;
  std::once_flag poolMade_;
  c10::StreamId poolStart_ = 1;
  std::array<std::atomic<int>, 2> next_{};
};

Device& device(c10::DeviceIndex index) {
  static std::vector<Device*>& all = *[] {
    auto* devices = new std::vector<Device*>;
    for (int i = 0; i < mycoll_standin_device_count(); ++i) devices->push_back(new Device(i));
    return devices;
  }();
  TORCH_CHECK(index >= 0 && static_cast<size_t>(index) < all.size(),
              "there is no standin:", static_cast<int>(index));
  return *all[index];
}

thread_local std::vector<c10::StreamId> currentStreams;

c10::StreamId& currentId(c10::DeviceIndex index) {
  if (currentStreams.empty()) currentStreams.resize(mycoll_standin_device_count(), 0);
  return currentStreams.at(index);
}

c10::Stream streamOf(c10::DeviceIndex index, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, index), id);
}

struct Event {
  void* handle;
  bool hasTiming;
};

// The device that was set without making a context there. As in c10's CUDA guards, only c10 knows
// it, and the runtime keeps the device before it. -1: both have the same device.
thread_local c10::DeviceIndex wanted = -1;

// Makes the device current, and a context there.
void choose(c10::DeviceIndex index) {
  wanted = -1;
  if (mycoll_standin_current_device() == index) return;
  mycoll_standin_set_current_device(index);
  mycoll_standin_enter();
}

// Makes a device current for a scope, as c10 does. Returning to the device before makes a context
// there, too.
class On {
 public:
  explicit On(c10::DeviceIndex index) : before_(currentDevice()) {
    choose(index);
    mycoll_standin_enter();
  }
  ~On() { choose(before_); }

 private:
  const c10::DeviceIndex before_;
};

}  // namespace

c10::DeviceIndex currentDevice() {
  return wanted >= 0 ? wanted : static_cast<c10::DeviceIndex>(mycoll_standin_current_device());
}

c10::Stream currentStream(c10::DeviceIndex index) {
  if (index < 0) index = currentDevice();
  return streamOf(index, currentId(index));
}

void* handleOf(c10::Stream stream) { return device(stream.device_index()).handle(stream.id()); }

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }

  c10::Device exchangeDevice(c10::Device to) const override {
    const c10::Device before = getDevice();
    setDevice(to);
    return before;
  }
  c10::Device getDevice() const override { return {kDevice, currentDevice()}; }
  void setDevice(c10::Device to) const override {
    device(to.index());  // throws if it does not exist
    choose(to.index());
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    if ((mycoll_standin_device_contexts() >> to.index() & 1) != 0) {
      choose(to.index());
    } else {
      wanted = to.index();
    }
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(mycoll_standin_device_count());
  }

  c10::Stream getStream(c10::Device of) const override { return currentStream(of.index()); }
  c10::Stream getDefaultStream(c10::Device of) const override {
    return streamOf(of.index() < 0 ? currentDevice() : of.index(), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool isHighPriority) const override {
    const c10::DeviceIndex index = of.index() < 0 ? currentDevice() : of.index();
    return streamOf(index, device(index).pooled(isHighPriority));
  }
  c10::Stream getNewStream(c10::Device of, int priority) const override {
    const c10::DeviceIndex index = of.index() < 0 ? currentDevice() : of.index();
    device(index).pooled(false);  // the pools have the first ids
    return streamOf(index, device(index).make(priority));
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    handleOf(to);  // throws if it does not exist
    c10::StreamId& id = currentId(to.device_index());
    return streamOf(to.device_index(), std::exchange(id, to.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return handleOf(stream); }

  bool queryStream(const c10::Stream& stream) const override {
    const c10::DeviceGuard guard(stream.device());
    mycoll_standin_enter();
    int isDone = 0;
    check(mycoll_standin_stream_query(handleOf(stream), &isDone));
    return isDone != 0;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    const c10::DeviceGuard guard(stream.device());
    mycoll_standin_enter();
    check(mycoll_standin_stream_synchronize(handleOf(stream)));
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    check(mycoll_standin_device_synchronize(index));
  }
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 12
  bool isStreamCapturing(const c10::Stream& stream) const override {
    const c10::DeviceGuard guard(stream.device());
    mycoll_standin_enter();
    return mycoll_standin_is_capturing(handleOf(stream)) != 0;
  }
#endif

  void destroyEvent(void* event, const c10::DeviceIndex device) const noexcept override {
    auto* held = static_cast<Event*>(event);
    if (held == nullptr) return;
    const On on(device);
    mycoll_standin_event_destroy(held->handle);
    delete held;
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex index,
              const c10::EventFlag flag) const override {
    TORCH_CHECK(index == -1 || index == stream.device_index(),
                "the event belongs to standin:", static_cast<int>(index), ", the stream to ",
                stream.device());
    const On on(stream.device_index());
    if (*event == nullptr) {
      *event = new Event{mycoll_standin_event_create(), flag == c10::EventFlag::BACKEND_DEFAULT};
    }
    check(mycoll_standin_event_record(static_cast<Event*>(*event)->handle, handleOf(stream)));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    const On on(stream.device_index());
    check(mycoll_standin_event_block(static_cast<Event*>(event)->handle, handleOf(stream)));
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    mycoll_standin_enter();
    int isDone = 0;
    check(mycoll_standin_event_query(static_cast<Event*>(event)->handle, &isDone));
    return isDone != 0;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    mycoll_standin_enter();
    check(mycoll_standin_event_synchronize(static_cast<Event*>(event)->handle));
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex /*device*/) const override {
    TORCH_CHECK(start != nullptr && end != nullptr, "both events must have been recorded");
    const auto *from = static_cast<Event*>(start), *to = static_cast<Event*>(end);
    TORCH_CHECK(from->hasTiming && to->hasTiming, "an event was made without timing");
    double milliseconds = 0;
    check(mycoll_standin_event_elapsed(from->handle, to->handle, &milliseconds));
    return milliseconds;
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (data.get() != nullptr) mycoll_standin_record_use(data.get_context(), handleOf(stream));
  }
};

static const c10::impl::DeviceGuardImplRegistrar registrar(kDevice, new GuardImpl);

}  // namespace standin
