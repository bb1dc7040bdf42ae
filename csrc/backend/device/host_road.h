// HostRoad: requests of device tensors carried by the CPU engine, through pinned host memory, where
// NCCL cannot serve. Slower, and right: every operation, dtype and reduce op that the engine knows.
// Collectives go chunk by chunk (host_collective.h); a message goes whole, since nobody could tell
// its receiver how it was cut.
//
// Thread contract: carry() as DeviceGroup; what waits for a device is moved on by the watchdog, and
// by whoever waits for the operation.
// Lifetimes: a part of its DeviceGroup; what is queued holds what it needs of it.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "backend/device/device_group.h"
#include "backend/device/host_collective.h"

namespace mycoll {

class HostRoad {
 public:
  explicit HostRoad(const DevicePlace& place);

  // requests: one, or those of a batch, in order; the operation stands for all of them.
  DeviceOperationPtr carry(DeviceGroup& group, const std::vector<Request*>& requests, bool isTimed);

  // Goes on with what waited for a device. True while there is something of the kind. [watchdog]
  bool advance();

 private:
  struct Outgoing;

  DeviceOperationPtr carryOne(DeviceGroup& group, Request& request, bool isTimed);
  void carryCollective(Request& request, const DeviceOperationPtr& operation, EventPtr ready);
  void send(Request& request, const DeviceOperationPtr& operation, const EventPtr& ready);
  void receive(Request& request, const DeviceOperationPtr& operation, EventPtr ready);
  void dispatch(const Outgoing& message);

  const DevicePlace& place_;
  const std::shared_ptr<HostStaging> staging_;
  // Operations that are not yet on their streams; shared with them, as they may outlive the road.
  const std::shared_ptr<std::atomic<int>> queued_;

  std::mutex mutex_;
  std::deque<std::shared_ptr<Outgoing>>
      outgoing_;  // guarded by mutex_: being copied from the device, in order
};

}  // namespace mycoll
