#include "device/streams.h"

#include <c10/core/impl/GPUTrace.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <tuple>

#include "backend/errors.h"
#include "backend/torch_version.h"
#include "base/log.h"
#include "base/os.h"
#include "base/recycler.h"
#include "nccl/cudart.h"

namespace mycoll {
namespace {

// Making an event costs several microseconds, reusing one a fraction of one. Never destroyed:
// events are returned during static destruction, when the device may be gone.
struct EventPool {
  using Kind = std::tuple<c10::DeviceType, c10::DeviceIndex, bool>;
  Mutex mutex;
  std::map<Kind, std::vector<c10::Event*>> free GUARDED_BY(mutex);
};

// Around each of CUDA's calls, c10's query and set the current device, which takes longer than the
// call itself. They are needed for an event that was never recorded, which they create; if torch
// traces such calls; and for the text of an error.
bool isDirect(const c10::Event& event) {
  return event.device_type() == c10::DeviceType::CUDA && event.eventId() != nullptr &&
         c10::impl::GPUTrace::get_trace() == nullptr;
}

// Returns an event that was not recorded yet, or is no longer in use.
EventPtr takeEvent(c10::Device device, bool isTimed, bool isCaptured) {
  const auto flag = isTimed ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT;
  if (isCaptured) return std::make_shared<c10::Event>(device.type(), flag);
  EventPool& events = perProcess<EventPool>();
  c10::Event* event = nullptr;
  MutexLock lock(events.mutex);
  std::vector<c10::Event*>* const home = &events.free[{device.type(), device.index(), isTimed}];
  if (!home->empty()) {
    event = home->back();
    home->pop_back();
  }
  lock.unlock();
  if (event == nullptr) event = new c10::Event(device.type(), flag);
  const auto giveBack = [home](c10::Event* unused) {
    const MutexLock returning(perProcess<EventPool>().mutex);
    home->push_back(unused);
  };
  return EventPtr(event, giveBack, Recycler<c10::Event>());
}

}  // namespace

OnDevice::OnDevice(c10::Device device) {
  const bool isCurrent = c10::impl::VirtualGuardImpl(device.type()).getDevice() == device;
  if (!isCurrent) guard_.reset_device(device);
}

c10::Stream currentStream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

c10::Stream sideStream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type())
      .getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

bool isCapturing(const c10::Stream& stream) {
  const nccl::Cudart& cudart = nccl::Cudart::get();
  if (stream.device_type() == c10::DeviceType::CUDA && cudart.isThere()) {
    return cudart.isCapturing(stream.native_handle());
  }
#if MYCOLL_TORCH_HAS_STREAM_CAPTURE
  return stream.is_capturing();
#else
  return false;
#endif
}

EventPtr recordEvent(const c10::Stream& stream, bool isTimed, bool isCaptured) {
  EventPtr event = takeEvent(stream.device(), isTimed, isCaptured);
  const bool isRecorded =
      isDirect(*event) && nccl::Cudart::get().record(event->eventId(), stream.native_handle());
  if (!isRecorded) event->record(stream);
  return event;
}

void block(const c10::Event& event, const c10::Stream& stream) {
  const bool isDone =
      isDirect(event) && nccl::Cudart::get().block(event.eventId(), stream.native_handle());
  if (!isDone) event.block(stream);
}

Status query(const c10::Event& event, bool* hasPassed) {
  *hasPassed = true;
  try {
    const OnDevice guard(event.device());
    const nccl::RelaxedCapture relaxed;
    *hasPassed = event.query();
  } catch (...) {
    return Status(Code::kInternal, "the device reports an error: " + describeException());
  }
  return Status();
}

bool hasPassed(const c10::Event& event) {
  bool isPassed = true;
  const Status status = query(event, &isPassed);
  if (!status.ok()) {
    static std::atomic<bool> isLogged{false};  // every query returns it
    if (!isLogged.exchange(true)) MYCOLL_LOG_WARN("%s", status.message().c_str());
  }
  return isPassed;
}

void CapturedStreams::add(const c10::Stream& stream) {
  const c10::Stream byDefault =
      c10::impl::VirtualGuardImpl(stream.device_type()).getDefaultStream(stream.device());
  MutexLock lock(mutex_);
  for (const c10::Stream& one : {stream, byDefault}) {
    const bool isKnown = std::find(streams_.begin(), streams_.end(), one) != streams_.end();
    if (!isKnown) streams_.push_back(one);
  }
}

bool CapturedStreams::isEmpty() const {
  MutexLock lock(mutex_);
  return streams_.empty();
}

bool CapturedStreams::isAnyBusy() const {
  std::vector<c10::Stream> streams;
  {
    MutexLock lock(mutex_);
    streams = streams_;
  }
  return std::any_of(streams.begin(), streams.end(), [](const c10::Stream& stream) {
    try {
      const OnDevice guard(stream.device());
      const nccl::RelaxedCapture relaxed;
      return !isCapturing(stream) && !stream.query();
    } catch (const std::exception&) {
      return false;  // the device reports it to its users
    }
  });
}

}  // namespace mycoll
