// The process's NCCL, as Python chooses it, and the group's memory that it reads and writes without
// a copy. [any thread]
#pragma once

#include <map>
#include <memory>
#include <string>

#include "base/mutex.h"
#include "base/status.h"
#include "nccl/comm.h"

namespace mycoll {

// Where the nvidia-nccl wheel beside torch has its library; empty: there is none. Once, before the
// first group.
void setNcclWheelFile(std::string path);
Status findNccl(const nccl::Library** library);
// Finds NCCL, or throws why there is none, or that it has no memory to give.
void requireNcclMemory();
// For tests: NCCL is this file, also beside a copy that torch has loaded.
void useNccl(const std::string& path);

// Memory of one group that is registered with its communicator. Lifetimes: a part of its
// DeviceGroup.
class NcclMemory {
 public:
  // isSymmetric: on all ranks, in the same order and sizes.
  Status add(std::shared_ptr<nccl::Comm> comm, void* address, size_t bytes, bool isSymmetric);
  Status remove(void* address);

 private:
  struct Registered {
    std::shared_ptr<nccl::Comm> comm;
    void* handle = nullptr;          // of memory
    nccl::Window* window = nullptr;  // of symmetric memory; null: NCCL cannot have it here
    bool isSymmetric = false;
    size_t bytes = 0;
  };

  Mutex mutex_;
  std::map<void*, Registered> registered_ GUARDED_BY(mutex_);
};

}  // namespace mycoll
