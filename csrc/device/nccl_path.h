// NcclPath: a group's requests as calls of NCCL's, on the caller's stream (synchronous ones) or on
// a channel's own.
//
// Threads: as DeviceGroup.
// Lifetimes: a part of its DeviceGroup.
#pragma once

#include <vector>

#include "device/channels.h"
#include "device/operation.h"
#include "device/path_choice.h"
#include "device/place.h"
#include "nccl/collectives.h"

namespace mycoll {

class DeviceGroup;

class NcclPath {
 public:
  NcclPath(const DevicePlace& place, Channels& channels, const PathChoice& choice)
      : place_(place), channels_(channels), choice_(choice) {}

  // All of the same device. requests: one, or those of a batch, which become one launch. A batch
  // goes by the group's communicator, even one of a single message.
  DeviceOperationPtr carry(DeviceGroup& group, Requests requests, bool isTimed, bool isBatch);

 private:
  void check(Requests requests) const;
  nccl::Form formOf(const Request& request) const;
  // Puts the collective among the group's, as the next one in NCCL's order.
  void watchCollective(DeviceGroup& group, Requests requests, const DeviceOperationPtr& operation);
  // peer: of a message, as the communicator counts.
  void enqueue(nccl::Issue& issue, const Request& request, int peer, void* stream) const;

  const DevicePlace& place_;
  Channels& channels_;
  const PathChoice& choice_;
};

}  // namespace mycoll
