// Streams and events of whatever device a tensor is on, through c10's device-generic interface: no
// CUDA is needed to build, and a pretended device can stand in for one. What each operation does
// goes straight to CUDA's runtime, where that is found.
//
// Thread contract: [any thread], with or without the GIL.
// Lifetimes: an event returns to its pool with its last EventPtr; the pool is never destroyed.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "base/task.h"

namespace mycoll {

// An event, shared by those who hold it: as a shared_ptr, without a second block of memory.
class EventPtr {
 public:
  struct Entry {
    c10::Event event;
    std::vector<Entry*>* home;  // where free ones of its kind are; null: it is not used again
    std::atomic<int> holders{0};
  };

  EventPtr() = default;
  explicit EventPtr(Entry* entry) : entry_(entry) {
    if (entry_) entry_->holders.fetch_add(1, std::memory_order_relaxed);
  }
  EventPtr(const EventPtr& other) : EventPtr(other.entry_) {}
  EventPtr(EventPtr&& other) noexcept : entry_(std::exchange(other.entry_, nullptr)) {}
  EventPtr& operator=(EventPtr other) noexcept {
    std::swap(entry_, other.entry_);
    return *this;
  }
  ~EventPtr() {
    if (entry_ && entry_->holders.fetch_sub(1, std::memory_order_acq_rel) == 1) drop();
  }

  c10::Event& operator*() const { return entry_->event; }
  c10::Event* operator->() const { return &entry_->event; }
  explicit operator bool() const { return entry_ != nullptr; }

 private:
  void drop();

  Entry* entry_ = nullptr;
};

// While it lives, the device is this thread's current one. Before any call of CUDA's runtime: most
// make a context on the current device, which on a thread of ours is the first one of all until
// somebody says otherwise, and half a GiB of its memory for every rank of the node. Where it is
// current already this costs nothing, while c10's own guard asks the driver when it ends.
class OnDevice {
 public:
  explicit OnDevice(c10::Device device);

 private:
  c10::OptionalDeviceGuard guard_;
};

c10::Stream currentStream(c10::Device device);
// One of the device's pool, of high priority: what travels on it starts before what computes.
c10::Stream sideStream(c10::Device device);

bool isCapturing(const c10::Stream& stream);

// An event for this device that was not recorded yet, or is not needed by anybody any more.
// isTimed: it can be asked for elapsed times. isCaptured: it will belong to a graph, and is not
// used again for anything else.
EventPtr takeEvent(c10::Device device, bool isTimed = false, bool isCaptured = false);

// Records on the stream, with a fresh event. As for block(), the stream's device must be current.
EventPtr recordEvent(const c10::Stream& stream, bool isTimed = false, bool isCaptured = false);

// Makes the stream wait for the event.
void block(const c10::Event& event, const c10::Stream& stream);

// What a device or torch says has gone wrong, without the frames of C++ that torch adds.
std::string textOf(const std::exception& error);

// Whether the device has passed it. An error of the device counts as passed, and is returned. Not
// for captured events: to ask for them spoils their graph.
Status ask(const c10::Event& event, bool* hasPassed);

// The same, for those who go on after an error: the device tells its users itself.
bool hasPassed(const c10::Event& event);

// For a task, which looks at the status afterwards. null: nothing was recorded.
class EventPassed final : public Condition {
 public:
  explicit EventPassed(EventPtr event) : event_(std::move(event)) {}
  bool ready() override {
    bool hasPassed = true;
    if (event_) status_ = ask(*event_, &hasPassed);
    return hasPassed;
  }
  const Status& status() const { return status_; }

 private:
  const EventPtr event_;
  Status status_;
};

// The streams on which graphs with operations of a group were captured, and their devices' usual
// ones, on which graphs are replayed as a rule.
class CapturedStreams {
 public:
  void add(const c10::Stream& stream);
  bool isEmpty() const { return !isAny_.load(std::memory_order_acquire); }
  // A captured operation may be under way.
  bool isAnyBusy() const;

 private:
  std::atomic<bool> isAny_{false};
  mutable Mutex mutex_;
  std::vector<c10::Stream> streams_ GUARDED_BY(mutex_);
};

}  // namespace mycoll
