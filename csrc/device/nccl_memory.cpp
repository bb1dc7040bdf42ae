#include "device/nccl_memory.h"

#include <sys/types.h>

#include <utility>

#include "backend/errors.h"
#include "base/log.h"
#include "nccl/library.h"

namespace mycoll {
namespace {

std::string& wheelFile() {
  static std::string* const kFile = new std::string;
  return *kFile;
}

}  // namespace

void setNcclWheelFile(std::string path) {
  if (wheelFile().empty()) wheelFile() = std::move(path);
}

Status findNccl(const nccl::Library** library) { return nccl::Library::get(wheelFile(), library); }

void useNccl(const std::string& path) {
  const nccl::Library* library = nullptr;
  throwIfFailed(nccl::Library::open(path, &library));
  nccl::Library::adopt(library);
}

void requireNcclMemory() {
  const nccl::Library* library = nullptr;
  throwIfFailed(findNccl(&library));
  if (library->functions().memAlloc == nullptr) {
    throwStatus(Status(Code::kUnsupported, library->describe() + " has no ncclMemAlloc"));
  }
}

Status NcclMemory::add(std::shared_ptr<nccl::Comm> comm, void* address, size_t bytes,
                       bool isSymmetric) {
  {
    MutexLock lock(mutex_);
    const auto known = registered_.find(address);
    if (known != registered_.end()) {
      const bool isSame = known->second.isSymmetric == isSymmetric && known->second.bytes == bytes;
      if (isSame) return Status();
      return Status(Code::kInvalidArgument,
                    "this memory is registered already, in another size or with another "
                    "symmetric=: call deregister_mem_pool() first");
    }
  }
  Registered registered{std::move(comm), isSymmetric, bytes};
  MYCOLL_RETURN_IF_ERROR(
      registered.comm->registerMemory(address, bytes, isSymmetric, &registered.registration));
  if (isSymmetric && registered.registration.window == nullptr) {
    MYCOLL_LOG_WARN(
        "NCCL makes no symmetric window of this memory (as GPUs without peer access, or several "
        "hosts without GPU-initiated networking, have none); it is used like any other memory");
  }
  MutexLock lock(mutex_);
  registered_[address] = std::move(registered);
  return Status();
}

Status NcclMemory::remove(void* address) {
  Registered registered;
  {
    MutexLock lock(mutex_);
    auto known = registered_.find(address);
    if (known == registered_.end()) {
      return Status(Code::kInvalidArgument, "this memory is not registered with the group");
    }
    registered = std::move(known->second);
    registered_.erase(known);
  }
  return registered.comm->deregister(registered.registration);
}

}  // namespace mycoll

// For torch.cuda.memory.CUDAPluggableAllocator, which finds them by name in this module.
extern "C" {

__attribute__((visibility("default"))) void* mycoll_nccl_alloc(ssize_t bytes, int, void*) {
  const mycoll::nccl::Library* library = mycoll::nccl::Library::loaded();
  void* memory = nullptr;
  if (library == nullptr || bytes <= 0 ||
      !mycoll::nccl::Comm::allocate(*library, static_cast<size_t>(bytes), &memory).ok()) {
    return nullptr;  // torch raises that it is out of memory
  }
  return memory;
}

__attribute__((visibility("default"))) void mycoll_nccl_free(void* memory, ssize_t, int, void*) {
  if (const mycoll::nccl::Library* library = mycoll::nccl::Library::loaded()) {
    (void)mycoll::nccl::Comm::free(*library, memory);
  }
}
}
