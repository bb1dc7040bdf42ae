// The one place that knows how torch's minors differ; everything else in backend/, device/ and
// bindings/ is written against all of them. One build is for one minor (virtual functions move
// between minors).
#pragma once

#include <torch/version.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

static_assert(TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 11,
              "mycoll needs torch 2.11 or newer");

namespace mycoll {

// What ReduceOp PREMUL_SUM carries: a factor, as a number or as a tensor of one element.
#if TORCH_VERSION_MINOR >= 13
using PreMulSum = c10d::PreMulSumSupplement;
#else
using PreMulSum = c10d::NCCLPreMulSumSupplement;
#endif

// c10::Stream::is_capturing() came with 2.12.
#if TORCH_VERSION_MINOR >= 12
#define MYCOLL_TORCH_HAS_STREAM_CAPTURE 1
#else
#define MYCOLL_TORCH_HAS_STREAM_CAPTURE 0
#endif

// dist.record_comm(), and c10d::get_comm_profiling_name() for it.
#if TORCH_VERSION_MINOR >= 13
#define MYCOLL_TORCH_HAS_COMM_NAME 1
#else
#define MYCOLL_TORCH_HAS_COMM_NAME 0
#endif

// c10d::Backend::Options::clone() and c10d::Work::getTimeout() came with 2.14.
#if TORCH_VERSION_MINOR >= 14
#define MYCOLL_TORCH_HAS_OPTIONS_CLONE 1
#define MYCOLL_TORCH_HAS_WORK_TIMEOUT 1
#else
#define MYCOLL_TORCH_HAS_OPTIONS_CLONE 0
#define MYCOLL_TORCH_HAS_WORK_TIMEOUT 0
#endif

// c10d::Backend::isInitialized() came with 2.15.
#if TORCH_VERSION_MINOR >= 15
#define MYCOLL_TORCH_HAS_IS_INITIALIZED 1
#else
#define MYCOLL_TORCH_HAS_IS_INITIALIZED 0
#endif

}  // namespace mycoll
