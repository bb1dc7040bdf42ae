// The part of NCCL's binary interface that mycoll uses, declared here so that a build needs no
// nccl.h and no CUDA. tests/test_nccl_abi.py compares every line with the real nccl.h. Plain
// declarations: no threads, no ownership.
#pragma once

#include <climits>
#include <cstddef>

namespace mycoll::nccl {

struct RawComm;            // ncclComm_t points to it
struct Window;             // ncclWindow_t points to it
using CudaStream = void*;  // cudaStream_t

struct UniqueId {
  char bytes[128];
};

enum class Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
  kTimeout = 8,  // since 2.32
};

enum class DataType : int {
  kInt8 = 0,
  kUInt8 = 1,
  kInt32 = 2,
  kUInt32 = 3,
  kInt64 = 4,
  kUInt64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBFloat16 = 9,
  kFloat8E4M3 = 10,  // since 2.24
  kFloat8E5M2 = 11,
};

enum class RedOp : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4 };

inline constexpr int kUndefined = INT_MIN;  // in a Config: NCCL chooses
inline constexpr int kSplitNoColor = -1;
inline constexpr int kWindowSymmetric = 1;
inline constexpr size_t kWindowAlignment = 4096;
inline constexpr unsigned kConfigMagic = 0xcafebeef;

constexpr int versionCode(int major, int minor, int patch) {
  return major * 10000 + minor * 100 + patch;  // since 2.9
}

// As of 2.28. NCCL reads at most `size` bytes; an older version ignores the last fields, a newer
// one chooses values for the fields that it has added.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = kConfigMagic;
  unsigned version = versionCode(2, 28, 0);
  int blocking = kUndefined;
  int cgaClusterSize = kUndefined;
  int minCtas = kUndefined;
  int maxCtas = kUndefined;
  const char* netName = nullptr;
  int splitShare = kUndefined;
  int trafficClass = kUndefined;
  const char* commName = nullptr;
  int collnetEnable = kUndefined;
  int ctaPolicy = kUndefined;
  int shrinkShare = kUndefined;
  int nvlsCtas = kUndefined;
  int nChannelsPerNetPeer = kUndefined;
  int nvlinkCentricSched = kUndefined;
};

}  // namespace mycoll::nccl

// Every function that mycoll calls: X(member, symbol, return type, parameters).
// Required: present in every accepted version of NCCL.
#define MYCOLL_NCCL_REQUIRED(X)                                                                    \
  X(getVersion, ncclGetVersion, Result, (int* version))                                            \
  X(getUniqueId, ncclGetUniqueId, Result, (UniqueId * id))                                         \
  X(getErrorString, ncclGetErrorString, const char*, (Result result))                              \
  X(getLastError, ncclGetLastError, const char*, (RawComm * comm))                                 \
  X(commInitRankConfig, ncclCommInitRankConfig, Result,                                            \
    (RawComm * *comm, int ranks, UniqueId id, int rank, Config* config))                           \
  X(commFinalize, ncclCommFinalize, Result, (RawComm * comm))                                      \
  X(commDestroy, ncclCommDestroy, Result, (RawComm * comm))                                        \
  X(commAbort, ncclCommAbort, Result, (RawComm * comm))                                            \
  X(commGetAsyncError, ncclCommGetAsyncError, Result, (RawComm * comm, Result * error))            \
  X(groupStart, ncclGroupStart, Result, ())                                                        \
  X(groupEnd, ncclGroupEnd, Result, ())                                                            \
  X(allReduce, ncclAllReduce, Result,                                                              \
    (const void* send, void* receive, size_t count, DataType type, RedOp op, RawComm* comm,        \
     CudaStream stream))                                                                           \
  X(broadcast, ncclBroadcast, Result,                                                              \
    (const void* send, void* receive, size_t count, DataType type, int root, RawComm* comm,        \
     CudaStream stream))                                                                           \
  X(reduce, ncclReduce, Result,                                                                    \
    (const void* send, void* receive, size_t count, DataType type, RedOp op, int root,             \
     RawComm* comm, CudaStream stream))                                                            \
  X(allGather, ncclAllGather, Result,                                                              \
    (const void* send, void* receive, size_t sendCount, DataType type, RawComm* comm,              \
     CudaStream stream))                                                                           \
  X(reduceScatter, ncclReduceScatter, Result,                                                      \
    (const void* send, void* receive, size_t receiveCount, DataType type, RedOp op, RawComm* comm, \
     CudaStream stream))                                                                           \
  X(send, ncclSend, Result,                                                                        \
    (const void* buffer, size_t count, DataType type, int peer, RawComm* comm, CudaStream stream)) \
  X(recv, ncclRecv, Result,                                                                        \
    (void* buffer, size_t count, DataType type, int peer, RawComm* comm, CudaStream stream))

// Null where the library does not have them. The first version that does: 2.18.1 (commSplit), 2.19
// (memAlloc, commRegister), 2.27 (commWindowRegister), 2.28.7 (commRevoke).
#define MYCOLL_NCCL_OPTIONAL(X)                                                                \
  X(commSplit, ncclCommSplit, Result,                                                          \
    (RawComm * comm, int color, int key, RawComm** child, Config* config))                     \
  X(memAlloc, ncclMemAlloc, Result, (void** memory, size_t bytes))                             \
  X(memFree, ncclMemFree, Result, (void* memory))                                              \
  X(commRegister, ncclCommRegister, Result,                                                    \
    (RawComm * comm, void* buffer, size_t bytes, void** handle))                               \
  X(commDeregister, ncclCommDeregister, Result, (RawComm * comm, void* handle))                \
  X(commWindowRegister, ncclCommWindowRegister, Result,                                        \
    (RawComm * comm, void* buffer, size_t bytes, Window** window, int flags))                  \
  X(commWindowDeregister, ncclCommWindowDeregister, Result, (RawComm * comm, Window * window)) \
  X(commRevoke, ncclCommRevoke, Result, (RawComm * comm, int flags))

namespace mycoll::nccl {

// The functions of one copy of NCCL.
struct Functions {
#define MYCOLL_NCCL_MEMBER(member, symbol, result, parameters) result(*member) parameters = nullptr;
  MYCOLL_NCCL_REQUIRED(MYCOLL_NCCL_MEMBER)
  MYCOLL_NCCL_OPTIONAL(MYCOLL_NCCL_MEMBER)
#undef MYCOLL_NCCL_MEMBER
};

}  // namespace mycoll::nccl
