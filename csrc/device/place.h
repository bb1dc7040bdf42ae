// DevicePlace: what the parts of a DeviceGroup share: the group's identity, and the engine's groups
// that it uses. Plain values; the engine's groups are safe for any thread.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "backend/options.h"
#include "backend/request.h"
#include "engine/communicator.h"

namespace mycoll {

struct DevicePlace {
  std::string name;
  int rank = 0;
  int ranks = 1;
  std::shared_ptr<Communicator> cpu;          // the group itself
  std::shared_ptr<Communicator> control;      // external operations, and agreement between ranks
  std::shared_ptr<Communicator> host;         // the host path's
  c10::intrusive_ptr<MycollOptions> options;  // never changed; the timeout is control's
  bool waitsOnHost = false;                   // MYCOLL_CUDA_BLOCKING_WAIT

  // Not ok once the group has failed: the first cause.
  Status error() const {
    for (const auto& group : {control, host, cpu}) MYCOLL_RETURN_IF_ERROR(group->error());
    return Status();
  }
  std::chrono::milliseconds timeoutOf(const Request& request) const {
    return request.timeout > std::chrono::milliseconds(0) ? request.timeout : control->timeout();
  }
};

// The timeout of internal messages between two ranks that connect: the user's message that waits
// for them has its own deadline, and its error names the function that the user called.
constexpr std::chrono::milliseconds kNoDeadline = std::chrono::milliseconds::max();

}  // namespace mycoll
