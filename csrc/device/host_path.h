// HostPath: requests of device tensors carried by the CPU engine, through pinned host memory, where
// NCCL cannot serve. Slower, and right: every operation, dtype and reduce op that the engine knows.
// Collectives go chunk by chunk (host_collective.h), and so do messages: while one piece travels,
// the next is copied.
//
//   first piece     [number | data]   with the user's tag; matched like any message
//   further pieces  [data]            with a tag made of the number
//
// Two ranks that agree on the size cut alike. The number, by which the sender counts its long
// messages, is there for receivers from any source: they learn by the first piece whom to ask for
// the others. Every piece is compared by the whole's size.
//
// Thread contract: carry() as DeviceGroup; what waits for a device is moved on by the watchdog, and
// by whoever waits for the operation.
// Lifetimes: a part of its DeviceGroup; what is queued holds what it needs of it.
#pragma once

#include <atomic>
#include <deque>
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
  explicit HostPath(const DevicePlace& place);

  // requests: one, or those of a batch, in order; the operation stands for all of them.
  DeviceOperationPtr carry(DeviceGroup& group, Requests requests, bool isTimed);

  // Goes on with what waited for a device. True while there is something of the kind. [watchdog]
  bool advance();

 private:
  struct Cut;
  struct Outgoing;
  struct Incoming;

  DeviceOperationPtr carryOne(DeviceGroup& group, Request& request, bool isTimed, EventPtr ready);
  void carryCollective(Request& request, const DeviceOperationPtr& operation, EventPtr ready);
  void send(Request& request, const DeviceOperationPtr& operation, const EventPtr& ready);
  void receive(Request& request, const DeviceOperationPtr& operation, EventPtr ready);
  void dispatch(const Outgoing& piece);
  static void receivePiece(const std::shared_ptr<Incoming>& message, size_t piece, int source,
                           uint64_t tag);

  const DevicePlace& place_;
  const std::shared_ptr<HostStaging> staging_;
  // Operations that are not yet on their streams; shared with them, as they may outlive the path.
  const std::shared_ptr<std::atomic<int>> queued_;

  std::atomic<uint64_t> longMessages_{0};  // sent so far
  Mutex mutex_;
  // Being copied from the device, in the order of the calls. Only advance() removes them.
  std::deque<std::shared_ptr<Outgoing>> outgoing_ GUARDED_BY(mutex_);
};

}  // namespace mycoll
