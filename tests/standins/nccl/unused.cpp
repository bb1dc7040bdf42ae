// Functions that torch's own NCCL backend is linked with and mycoll does not use, so that this
// library can be preloaded instead of torch's copy. They always fail.
#include "comm.h"

#define STANDIN_UNUSED(symbol)                                                      \
  extern "C" __attribute__((visibility("default"))) mycoll::nccl::Result symbol() { \
    return standin::nccl::complain(mycoll::nccl::Result::kInvalidUsage,             \
                                   #symbol " is not in the stand-in");              \
  }

STANDIN_UNUSED(ncclCommGetUniqueId)
STANDIN_UNUSED(ncclCommGrow)
STANDIN_UNUSED(ncclCommInitAll)
STANDIN_UNUSED(ncclCommInitRankScalable)
STANDIN_UNUSED(ncclCommMemStats)
STANDIN_UNUSED(ncclCommResume)
STANDIN_UNUSED(ncclCommShrink)
STANDIN_UNUSED(ncclCommSuspend)
STANDIN_UNUSED(ncclDevCommCreate)
STANDIN_UNUSED(ncclDevCommDestroy)
STANDIN_UNUSED(ncclGetLsaMultimemDevicePointer)
STANDIN_UNUSED(ncclGetPeerDevicePointer)
STANDIN_UNUSED(ncclGroupSimulateEnd)
STANDIN_UNUSED(ncclPutSignal)
STANDIN_UNUSED(ncclRedOpCreatePreMulSum)
STANDIN_UNUSED(ncclRedOpDestroy)
STANDIN_UNUSED(ncclSignal)
STANDIN_UNUSED(ncclWaitSignal)
STANDIN_UNUSED(ncclWinGetUserPtr)
