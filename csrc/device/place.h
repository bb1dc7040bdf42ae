// What the parts of a DeviceGroup share: which group it is, and the engine's groups that it uses.
// Plain values; the engine's groups are safe for any thread.
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
  std::shared_ptr<Communicator> cpu;      // the group itself
  std::shared_ptr<Communicator> control;  // external operations, and what ranks have to agree on
  std::shared_ptr<Communicator> host;     // the host path's
  c10::intrusive_ptr<MycollOptions> options;  // never changed; the timeout is control's
  bool waitsOnHost = false;                   // MYCOLL_CUDA_BLOCKING_WAIT

  // Not ok once the group is dead.
  Status error() const {
    for (const auto& group : {control, host, cpu}) MYCOLL_RETURN_IF_ERROR(group->error());
    return Status();
  }
  std::chrono::milliseconds timeoutOf(const Request& request) const {
    return request.timeout > std::chrono::milliseconds(0) ? request.timeout : control->timeout();
  }
};

// For messages of ours between two ranks that connect: the user's message that waits for them has a
// deadline of its own, and its text names what the user called.
constexpr std::chrono::milliseconds kNoDeadline = std::chrono::milliseconds::max();

// How often a thread that waits for another one looks at signals.
constexpr auto kSignalTick = std::chrono::milliseconds(50);

}  // namespace mycoll
