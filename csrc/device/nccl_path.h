// NcclPath: executes a group's requests by calls of NCCL, on the caller's stream (synchronous ones)
// or on the stream of a channel.
//
// Thread contract: as DeviceGroup.
// Lifetime: a part of its DeviceGroup.
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

  // requests: one, or those of a batch, which become one launch; all on one device. A batch uses
  // the group's communicator, even a batch of one message.
  DeviceOperationPtr launch(DeviceGroup& group, Requests requests, bool isTimed, bool isBatch);

 private:
  void check(Requests requests) const;
  nccl::Form formOf(const Request& request) const;
  // Adds the collective to the control group's, as the next one in NCCL's order.
  void watchCollective(DeviceGroup& group, Requests requests, const DeviceOperationPtr& operation);
  // peer: of a message: its rank in the communicator.
  void enqueue(nccl::Issue& issue, const Request& request, int peer, void* stream) const;

  const DevicePlace& place_;
  Channels& channels_;
  const PathChoice& choice_;
};

}  // namespace mycoll
