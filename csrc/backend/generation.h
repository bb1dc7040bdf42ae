// Generation: the engine's group and the DeviceSupport that belong together; generations.h says
// when a group gets others. UserCall: a call of the user, with the generation in which all of it
// runs, so that its rank, its size and its group belong together while another thread calls
// reconfigure().
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "backend/validation.h"
#include "base/deadline.h"
#include "base/status.h"
#include "engine/communicator.h"

namespace mycoll {

class DeviceSupport;
class MycollBackend;

struct Generation {
  std::shared_ptr<Communicator> communicator;  // null: the group has no ranks, see `why`
  std::shared_ptr<DeviceSupport> device;       // null if there is no accelerator
  Status why;
  int rank = 0;  // without a communicator: as before, or as the group was made
  int ranks = 1;

  // The first cause if the generation has failed.
  Status error() const;
  // Number of collectives so far.
  uint64_t sequence() const;
  // Waits for pending operations, at most until the deadline, and leaves the groups. The reason is
  // sent to the other ranks; it may be empty. A generation that has failed no longer uses its
  // connections: those that are broken can be made again.
  void end(Deadline deadline, const std::string& reason) const;
};

struct UserCall : CallerInfo {
  Generation generation;
  const MycollBackend* backend;

  // Throws if the group has no ranks.
  const std::shared_ptr<Communicator>& communicator() const;
};

}  // namespace mycoll
