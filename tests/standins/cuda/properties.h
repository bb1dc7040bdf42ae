// The fields of CUDA 13's cudaDeviceProp that torch reads, and their values in the stand-in.
// tests/abi/cuda_abi.cpp compares the offsets with NVIDIA's header.
#pragma once

#include <cstddef>

//    field, offset in bytes, value
#define STANDIN_PROPERTIES(X)               \
  X(warpSize, 308, 32)                      \
  X(maxThreadsPerBlock, 320, 1024)          \
  X(major, 360, 9)                          \
  X(minor, 364, 0)                          \
  X(multiProcessorCount, 384, 132)          \
  X(canMapHostMemory, 392, 1)               \
  X(unifiedAddressing, 588, 1)              \
  X(l2CacheSize, 596, 1 << 20)              \
  X(maxThreadsPerMultiProcessor, 604, 2048) \
  X(regsPerMultiprocessor, 632, 65536)

namespace standin::cuda {

constexpr std::size_t kUuidOffset = 256;
constexpr std::size_t kTotalGlobalMemOffset = 288;
constexpr std::size_t kPciBusIdOffset = 568;
constexpr std::size_t kPropertiesBytes = 1008;

}  // namespace standin::cuda
