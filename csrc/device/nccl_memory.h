// The NCCL of the process, which Python chooses, and the memory of a group that NCCL uses without
// copies. [any thread]
#pragma once

#include <map>
#include <memory>
#include <string>

#include "base/mutex.h"
#include "base/status.h"
#include "nccl/comm.h"

namespace mycoll {

// path: the library of the nvidia-nccl wheel beside torch; empty: there is none. To be called once,
// before the first group.
void setNcclWheelFile(std::string path);
Status findNccl(const nccl::Library** library);
// Throws if NCCL is not found, or cannot allocate memory.
void requireNcclMemory();
// For tests: uses this file as NCCL, even if torch has loaded another one.
void useNccl(const std::string& path);

// The memory of one group that is registered with its communicator. Lifetime: a part of its
// DeviceGroup.
class NcclMemory {
 public:
  // isSymmetric: all ranks call it, in the same order and with the same sizes.
  Status add(std::shared_ptr<nccl::Comm> comm, void* address, size_t bytes, bool isSymmetric);
  Status remove(void* address);

 private:
  struct Registered {
    std::shared_ptr<nccl::Comm> comm;
    bool isSymmetric = false;
    size_t bytes = 0;
    nccl::Comm::Registration registration{};
  };

  Mutex mutex_;
  std::map<void*, Registered> registered_ GUARDED_BY(mutex_);
};

}  // namespace mycoll
