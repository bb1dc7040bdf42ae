// tests/standins/cuda/properties.h against NVIDIA's headers of CUDA 13: compiled by
// tests/test_nccl_abi.py, never run.
#include <cuda_runtime.h>

#include <cstddef>

#include "properties.h"

using namespace standin::cuda;

#define CHECK(field, place, value) \
  static_assert(offsetof(cudaDeviceProp, field) == place, #field " is elsewhere");
STANDIN_PROPERTIES(CHECK)
CHECK(uuid, kUuidOffset, )
CHECK(totalGlobalMem, kTotalGlobalMemOffset, )
CHECK(pciBusID, kPciBusIdOffset, )
static_assert(sizeof(cudaDeviceProp) == kPropertiesBytes, "cudaDeviceProp has another size");
static_assert(sizeof(cudaPointerAttributes) == 3 * 8 + 8 * sizeof(long));
static_assert(offsetof(cudaLaunchConfig_t, stream) == 32);
