// Streams and events of a tensor's device, through c10's device-generic interface: no CUDA is
// needed to build, and a stand-in device can replace CUDA. If CUDA's runtime is found, recording
// and waiting call it directly.
//
// Thread contract: [any thread], with or without the GIL.
// Lifetimes: the pool of events is never destroyed.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "base/task.h"

namespace mycoll {

// Its event returns to the pool of its kind with the last pointer; one that belongs to a graph is
// destroyed.
using EventPtr = std::shared_ptr<c10::Event>;

// While it lives, the device is this thread's current one. Required before any call of CUDA's
// runtime: most create a context on the current device, which is the first device on a new thread,
// and a context takes half a GiB of its memory for each rank of the node. Costs nothing if the
// device is current already, while c10's own guard queries the driver when it ends.
class OnDevice {
 public:
  explicit OnDevice(c10::Device device);

 private:
  c10::OptionalDeviceGuard guard_;
};

c10::Stream currentStream(c10::Device device);
// Returns a stream of the device's pool, of high priority: transfers start before computations.
c10::Stream sideStream(c10::Device device);

bool isCapturing(const c10::Stream& stream);

// Records an event that no one else uses. As for block(), the stream's device must be current.
// isTimed: it measures elapsed times. isCaptured: it will belong to a graph, and is not reused.
EventPtr recordEvent(const c10::Stream& stream, bool isTimed = false, bool isCaptured = false);

// Makes the stream wait for the event.
void block(const c10::Event& event, const c10::Stream& stream);

// Finds out whether the device has passed the event. An error of the device counts as passed, and
// is returned. Not for captured events: a query invalidates their graph.
Status query(const c10::Event& event, bool* hasPassed);

// As query(), for callers that continue after an error: the device reports it to its users.
bool hasPassed(const c10::Event& event);

// For a task, which checks the status afterwards. Null: nothing was recorded.
class EventPassed final : public Condition {
 public:
  explicit EventPassed(EventPtr event) : event_(std::move(event)) {}
  bool ready() override {
    bool hasPassed = true;
    if (event_) status_ = query(*event_, &hasPassed);
    return hasPassed;
  }
  const Status& status() const { return status_; }

 private:
  const EventPtr event_;
  Status status_;
};

// The streams on which graphs with operations of a group were captured, and the default streams of
// their devices, on which graphs are usually replayed.
class CapturedStreams {
 public:
  void add(const c10::Stream& stream);
  bool isEmpty() const;
  // A captured operation may be in progress.
  bool isAnyBusy() const;

 private:
  mutable Mutex mutex_;
  std::vector<c10::Stream> streams_ GUARDED_BY(mutex_);
};

}  // namespace mycoll
