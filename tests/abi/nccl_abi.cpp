// csrc/nccl/abi.h against NVIDIA's nccl.h: compiled by tests/test_nccl_abi.py, never run.
#include <nccl.h>

#include <cstddef>
#include <type_traits>

#include "nccl/abi.h"

using namespace mycoll::nccl;

// --- NVIDIA's types in our words

template <typename T>
struct Ours {
  using type = T;
};
template <typename T>
using ours = typename Ours<T>::type;

template <>
struct Ours<ncclComm> {
  using type = RawComm;
};
template <>
struct Ours<std::remove_pointer_t<ncclWindow_t>> {
  using type = Window;
};
template <>
struct Ours<ncclUniqueId> {
  using type = UniqueId;
};
template <>
struct Ours<ncclResult_t> {
  using type = Result;
};
template <>
struct Ours<ncclDataType_t> {
  using type = DataType;
};
template <>
struct Ours<ncclRedOp_t> {
  using type = RedOp;
};
template <>
struct Ours<ncclConfig_t> {
  using type = Config;
};
template <>
struct Ours<cudaStream_t> {
  using type = CudaStream;
};
template <typename T>
struct Ours<const T> {
  using type = const ours<T>;
};
template <typename T>
struct Ours<T*> {
  using type = ours<T>*;
};
template <typename R, typename... P>
struct Ours<R(P...)> {
  using type = ours<R>(ours<P>...);
};

// --- functions

#define SAME_FUNCTION(member, symbol, result, parameters)                             \
  static_assert(std::is_same_v<ours<decltype(symbol)>*, decltype(Functions::member)>, \
                #symbol " has another signature");
MYCOLL_NCCL_REQUIRED(SAME_FUNCTION)
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 7)
MYCOLL_NCCL_OPTIONAL(SAME_FUNCTION)
#endif

// --- values

#define SAME_VALUE(mine, theirs) \
  static_assert(static_cast<long long>(mine) == static_cast<long long>(theirs), #theirs)
SAME_VALUE(Result::kSuccess, ncclSuccess);
SAME_VALUE(Result::kUnhandledCudaError, ncclUnhandledCudaError);
SAME_VALUE(Result::kSystemError, ncclSystemError);
SAME_VALUE(Result::kInternalError, ncclInternalError);
SAME_VALUE(Result::kInvalidArgument, ncclInvalidArgument);
SAME_VALUE(Result::kInvalidUsage, ncclInvalidUsage);
SAME_VALUE(Result::kRemoteError, ncclRemoteError);
SAME_VALUE(Result::kInProgress, ncclInProgress);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 32, 0)
SAME_VALUE(Result::kTimeout, ncclTimeout);
#endif
SAME_VALUE(DataType::kInt8, ncclInt8);
SAME_VALUE(DataType::kUInt8, ncclUint8);
SAME_VALUE(DataType::kInt32, ncclInt32);
SAME_VALUE(DataType::kUInt32, ncclUint32);
SAME_VALUE(DataType::kInt64, ncclInt64);
SAME_VALUE(DataType::kUInt64, ncclUint64);
SAME_VALUE(DataType::kFloat16, ncclFloat16);
SAME_VALUE(DataType::kFloat32, ncclFloat32);
SAME_VALUE(DataType::kFloat64, ncclFloat64);
SAME_VALUE(DataType::kBFloat16, ncclBfloat16);
SAME_VALUE(DataType::kFloat8E4M3, ncclFloat8e4m3);
SAME_VALUE(DataType::kFloat8E5M2, ncclFloat8e5m2);
SAME_VALUE(RedOp::kSum, ncclSum);
SAME_VALUE(RedOp::kProd, ncclProd);
SAME_VALUE(RedOp::kMax, ncclMax);
SAME_VALUE(RedOp::kMin, ncclMin);
SAME_VALUE(RedOp::kAvg, ncclAvg);
SAME_VALUE(kUndefined, NCCL_CONFIG_UNDEF_INT);
SAME_VALUE(kSplitNoColor, NCCL_SPLIT_NOCOLOR);
SAME_VALUE(kWindowSymmetric, NCCL_WIN_COLL_SYMMETRIC);
SAME_VALUE(kWindowAlignment, NCCL_WIN_REQUIRED_ALIGNMENT);
SAME_VALUE(versionCode(NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH), NCCL_VERSION_CODE);

// --- layouts

#define SAME_SIZE(mine, theirs)                                                     \
  static_assert(sizeof(mine) == sizeof(theirs) && alignof(mine) == alignof(theirs), \
                #theirs " is laid out differently")
SAME_SIZE(Result, ncclResult_t);
SAME_SIZE(DataType, ncclDataType_t);
SAME_SIZE(RedOp, ncclRedOp_t);
SAME_SIZE(UniqueId, ncclUniqueId);  // passed by value
static_assert(std::is_trivially_copyable_v<UniqueId> && std::is_standard_layout_v<UniqueId>);

#define SAME_FIELD(mine, theirs)                                                            \
  static_assert(offsetof(Config, mine) == offsetof(ncclConfig_t, theirs) &&                 \
                    std::is_same_v<decltype(Config::mine), decltype(ncclConfig_t::theirs)>, \
                "ncclConfig_t." #theirs)
SAME_FIELD(size, size);
SAME_FIELD(magic, magic);
SAME_FIELD(version, version);
SAME_FIELD(blocking, blocking);
SAME_FIELD(cgaClusterSize, cgaClusterSize);
SAME_FIELD(minCtas, minCTAs);
SAME_FIELD(maxCtas, maxCTAs);
SAME_FIELD(netName, netName);
SAME_FIELD(splitShare, splitShare);
SAME_FIELD(trafficClass, trafficClass);
SAME_FIELD(commName, commName);
SAME_FIELD(collnetEnable, collnetEnable);
SAME_FIELD(ctaPolicy, CTAPolicy);
SAME_FIELD(shrinkShare, shrinkShare);
SAME_FIELD(nvlsCtas, nvlsCTAs);
SAME_FIELD(nChannelsPerNetPeer, nChannelsPerNetPeer);
SAME_FIELD(nvlinkCentricSched, nvlinkCentricSched);
static_assert(sizeof(Config) <= sizeof(ncclConfig_t), "NCCL only ever appends fields");
static_assert(std::is_standard_layout_v<Config>);
constexpr ncclConfig_t kTheirs = NCCL_CONFIG_INITIALIZER;
static_assert(kTheirs.magic == kConfigMagic);
