// NCCL's functions for communicators and memory, as mycoll declares them (nccl/abi.h).
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <utility>

#include "comm.h"
#include "device.h"
#include "standin_nccl.h"

namespace standin::nccl {
namespace {

using mycoll::nccl::Window;

std::mutex lastConfigMutex;
Config lastConfig;

std::mutex allocationsMutex;
std::map<void*, void*> allocations;  // of ncclMemAlloc: the address it returned, and its block

bool isUndefinedOr(int value, int least, int most) {
  return value == mycoll::nccl::kUndefined || (value >= least && value <= most);
}

// Reads as many bytes as both versions have, as NCCL does.
Result readConfig(const Config* given, Config* config) {
  *config = Config();
  if (given == nullptr) return Result::kSuccess;
  if (given->size < offsetof(Config, cgaClusterSize) ||
      given->magic != mycoll::nccl::kConfigMagic) {
    return invalid("ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
  }
  std::memcpy(static_cast<void*>(config), given, std::min(given->size, sizeof(Config)));
  if (!isUndefinedOr(config->blocking, 0, 1)) return invalid("Invalid config blocking attribute");
  if (!isUndefinedOr(config->cgaClusterSize, 0, 8)) return invalid("Invalid cgaClusterSize");
  if (!isUndefinedOr(config->minCtas, 1, 64) || !isUndefinedOr(config->maxCtas, 1, 64) ||
      (config->minCtas != mycoll::nccl::kUndefined && config->maxCtas != mycoll::nccl::kUndefined &&
       config->minCtas > config->maxCtas)) {
    return invalid("Invalid config min/max channels attribute value");
  }
  if (!isUndefinedOr(config->splitShare, 0, 1)) return invalid("Invalid config splitShare");
  std::lock_guard<std::mutex> lock(lastConfigMutex);
  lastConfig = *config;
  lastConfig.netName = lastConfig.commName = nullptr;  // these belong to the caller
  return Result::kSuccess;
}

// For calls that are not operations. They, too, must not run at the same time as others.
template <typename Function>
Result with(Handle handle, const char* name, Function function) {
  count(name);
  const std::shared_ptr<Comm> comm = find(handle, name);
  const Entry entry(*comm, name, false);
  const Result ready = comm->readiness();
  return ready != Result::kSuccess ? ready : function(*comm);
}

// Counts the threads that are connecting, including those that hang.
struct Connecting {
  Connecting() { count("connecting"); }
  ~Connecting() { count("connecting", -1); }
};

Result connect(Handle* made, int ranks, const UniqueId& id, int rank, const Config* given) {
  count("ncclCommInitRankConfig");
  const Connecting connecting;
  *made = nullptr;
  Config config;
  const Result valid = readConfig(given, &config);
  if (valid != Result::kSuccess) return valid;
  if (ranks < 1 || rank < 0 || rank >= ranks) return invalid("invalid rank or number of ranks");
  if (isGrouping()) {
    return complain(Result::kInvalidUsage, "communicators in groups are not supported");
  }
  hangWhile("connect", rank, [] { return false; });
  Device::get().enter();
  auto comm = std::make_shared<Comm>(rank, ranks, Device::get().currentDevice(), config);
  *made = publish(comm);
  const DeviceEntry entry(comm->device, "ncclCommInitRankConfig");
  return comm->connect(id);
}

// A child inherits what its configuration leaves undefined.
Result childConfig(const Comm& parent, const Config* given, Config* config) {
  const Result valid = readConfig(given, config);
  if (given == nullptr) *config = parent.config;
  if (config->blocking == mycoll::nccl::kUndefined) config->blocking = parent.config.blocking;
  return valid;
}

}  // namespace
}  // namespace standin::nccl

using namespace standin::nccl;
using mycoll::nccl::CudaStream;
using mycoll::nccl::Window;

NCCL_API Result ncclGetVersion(int* version) {
  count("ncclGetVersion");
  *version = script().version;
  return Result::kSuccess;
}

NCCL_API const char* ncclGetErrorString(Result result) {
  switch (result) {
    case Result::kSuccess: return "no error";
    case Result::kUnhandledCudaError: return "unhandled cuda error";
    case Result::kSystemError: return "unhandled system error";
    case Result::kInternalError: return "internal error";
    case Result::kInvalidArgument: return "invalid argument";
    case Result::kInvalidUsage: return "invalid usage";
    case Result::kRemoteError: return "remote process exited or there was a network error";
    case Result::kInProgress: return "NCCL operation in progress";
    case Result::kTimeout: return "timeout";
  }
  return "unknown result code";
}

NCCL_API const char* ncclGetLastError(Handle) { return lastComplaint(); }

NCCL_API Result ncclGetUniqueId(UniqueId* id) {
  count("ncclGetUniqueId");
  if (id == nullptr) return invalid("the id is null");
  if (script().fails("id", 0)) return complain(Result::kSystemError, "the script makes it fail");
  return Segment::create(id) ? Result::kSuccess : Result::kSystemError;
}

NCCL_API Result ncclCommInitRankConfig(Handle* comm, int ranks, UniqueId id, int rank,
                                       Config* config) {
  return connect(comm, ranks, id, rank, config);
}

NCCL_API Result ncclCommInitRank(Handle* comm, int ranks, UniqueId id, int rank) {
  return connect(comm, ranks, id, rank, nullptr);
}

NCCL_API Result ncclCommSplit(Handle handle, int color, int key, Handle* child, Config* given) {
  return with(handle, "ncclCommSplit", [&](Comm& comm) {
    Config config;
    const Result valid = childConfig(comm, given, &config);
    if (valid != Result::kSuccess) return valid;
    if (color < -1) return invalid("color must be >= -1");
    *child = nullptr;
    return comm.split(color, key, child, config);
  });
}

NCCL_API Result ncclCommFinalize(Handle handle) {
  return with(handle, "ncclCommFinalize", [](Comm& comm) { return comm.finalize(); });
}

NCCL_API Result ncclCommDestroy(Handle handle) {
  count("ncclCommDestroy");
  const std::shared_ptr<Comm> comm = find(handle, "ncclCommDestroy");
  const DeviceEntry entry(comm->device, "ncclCommDestroy");
  return comm->destroy();
}

NCCL_API Result ncclCommAbort(Handle handle) {
  count("ncclCommAbort");
  return find(handle, "ncclCommAbort")->abort();
}

NCCL_API Result ncclCommRevoke(Handle handle, int flags) {
  count("ncclCommRevoke");
  if (flags != 0) return invalid("revokeFlags must be 0");
  return find(handle, "ncclCommRevoke")->revoke();
}

NCCL_API Result ncclCommGetAsyncError(Handle handle, Result* error) {
  *error = find(handle, "ncclCommGetAsyncError")->asyncError();
  return Result::kSuccess;
}

NCCL_API Result ncclCommCount(const Handle handle, int* count) {
  *count = find(handle, "ncclCommCount")->ranks;
  return Result::kSuccess;
}

NCCL_API Result ncclCommUserRank(const Handle handle, int* rank) {
  *rank = find(handle, "ncclCommUserRank")->rank;
  return Result::kSuccess;
}

NCCL_API Result ncclMemAlloc(void** memory, size_t bytes) {
  count("ncclMemAlloc");
  Device::get().enter();
  // Whole pages, aligned to one, because windows need that.
  constexpr size_t kPage = mycoll::nccl::kWindowAlignment;
  // Null is the default stream of the current device.
  auto* const block =
      static_cast<char*>(Device::get().allocate((bytes + 2 * kPage - 1) / kPage * kPage, nullptr));
  if (block == nullptr) return complain(Result::kUnhandledCudaError, "out of memory");
  const size_t past = reinterpret_cast<uintptr_t>(block) % kPage;
  *memory = past == 0 ? block : block + kPage - past;
  std::lock_guard<std::mutex> lock(allocationsMutex);
  allocations.emplace(*memory, block);
  return Result::kSuccess;
}

NCCL_API Result ncclMemFree(void* memory) {
  count("ncclMemFree");
  void* block = nullptr;
  {
    std::lock_guard<std::mutex> lock(allocationsMutex);
    const auto found = allocations.find(memory);
    if (found == allocations.end()) return invalid("not allocated by ncclMemAlloc");
    block = found->second;
    allocations.erase(found);
  }
  Device::get().release(block);
  return Result::kSuccess;
}

NCCL_API Result ncclCommRegister(const Handle handle, void* buffer, size_t bytes, void** made) {
  return with(handle, "ncclCommRegister", [&](Comm& comm) {
    if (bytes == 0 || !isDevicePointer(buffer)) return invalid("not device memory");
    comm.mayWaitForDevice();
    return comm.registerBuffer(made);
  });
}

NCCL_API Result ncclCommDeregister(const Handle handle, void* made) {
  return with(handle, "ncclCommDeregister",
              [&](Comm& comm) { return comm.deregisterBuffer(made); });
}

NCCL_API Result ncclCommWindowRegister(Handle handle, void* buffer, size_t bytes, Window** window,
                                       int flags) {
  return with(handle, "ncclCommWindowRegister", [&](Comm& comm) {
    if (bytes == 0 || !isDevicePointer(buffer)) return invalid("not device memory");
    if (reinterpret_cast<uintptr_t>(buffer) % mycoll::nccl::kWindowAlignment != 0) {
      return invalid("window address must be aligned to NCCL_WIN_REQUIRED_ALIGNMENT");
    }
    if (flags < 0 || flags > 1) return invalid("window flags");
    *window = nullptr;
    comm.mayWaitForDevice();
    if (!script().hasWindows) return Result::kSuccess;
    return comm.registerBuffer(reinterpret_cast<void**>(window));
  });
}

NCCL_API Result ncclCommWindowDeregister(Handle handle, Window* window) {
  return with(handle, "ncclCommWindowDeregister",
              [&](Comm& comm) { return comm.deregisterBuffer(window); });
}

extern "C" void mycoll_standin_nccl_last_config(void* config, uint64_t bytes) {
  std::lock_guard<std::mutex> lock(lastConfigMutex);
  std::memcpy(config, &lastConfig, std::min<uint64_t>(bytes, sizeof(lastConfig)));
}
