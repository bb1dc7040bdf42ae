// HostPath: executes requests with device tensors on the CPU engine, through pinned host memory, if
// NCCL cannot be used. Slower, but complete: every operation, dtype and reduce op of the engine.
// Collectives are transferred in chunks (host_collective.h), and messages in pieces: while one
// piece is sent, the next is copied.
//
//   first piece     [number | data]   with the user's tag; matched like any message
//   further pieces  [data]            with a tag made of the number
//
// Two ranks that agree on the size make the same pieces. The number is the sender's count of long
// messages. A receiver from any source learns from the first piece which rank sends the others. For
// each piece, both ranks compare the size of the whole message.
//
// Thread contract: launch() as DeviceGroup. The watchdog, and threads that wait for an operation,
// continue operations that wait for a device.
// Lifetime: a part of its DeviceGroup; queued operations hold what they need of it.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "device/host_collective.h"
#include "device/operation.h"
#include "device/place.h"

namespace mycoll {

class DeviceGroup;

class HostPath {
 public:
  explicit HostPath(const DevicePlace& place) : place_(place) {}

  // requests: one, or those of a batch, in order, for which the operation stands.
  DeviceOperationPtr launch(DeviceGroup& group, Requests requests, bool isTimed);

  // [watchdog] Continues operations that have waited for a device. Returns true while there are
  // any.
  bool advance();

 private:
  struct Outgoing;

  DeviceOperationPtr launchOne(DeviceGroup& group, Request& request, bool isTimed, EventPtr ready);
  void launchCollective(Request& request, const DeviceOperationPtr& operation, EventPtr ready);
  void send(Request& request, const DeviceOperationPtr& operation, const EventPtr& ready);
  void receive(Request& request, const DeviceOperationPtr& operation, EventPtr ready);

  const DevicePlace& place_;
  const std::shared_ptr<HostStaging> staging_ = std::make_shared<HostStaging>();
  std::atomic<uint64_t> longMessages_{0};  // sent so far
  Mutex mutex_;
  // Of the collectives, one for each device: their copies have the order of the calls, as have
  // NCCL's collectives.
  std::map<c10::DeviceIndex, c10::Stream> streams_ GUARDED_BY(mutex_);
  // Pieces that are being copied from the device, in the order of the calls. Only advance() removes
  // them.
  std::deque<std::shared_ptr<Outgoing>> outgoing_ GUARDED_BY(mutex_);
};

}  // namespace mycoll
