// The only file that depends on how torch's minors differ; everything else in backend/, device/ and
// bindings/ is written against all of them. One build is for one minor (virtual functions move
// between minors).
#pragma once

#include <torch/version.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#if TORCH_VERSION_MINOR >= 14
#include <torch/csrc/distributed/c10d/Window.hpp>
#else
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <string>
#include <unordered_map>
#endif

static_assert(TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 11,
              "mycoll needs torch 2.11 or newer");

namespace mycoll {

// The factor of ReduceOp PREMUL_SUM: a number or a tensor of one element.
#if TORCH_VERSION_MINOR >= 13
using PreMulSum = c10d::PreMulSumSupplement;
#else
using PreMulSum = c10d::NCCLPreMulSumSupplement;
#endif

// c10::Stream::is_capturing()
#define MYCOLL_TORCH_HAS_STREAM_CAPTURE (TORCH_VERSION_MINOR >= 12)
// dist.record_comm(), and c10d::get_comm_profiling_name() for it
#define MYCOLL_TORCH_HAS_COMM_NAME (TORCH_VERSION_MINOR >= 13)
// c10d::Backend::Options::clone()
#define MYCOLL_TORCH_HAS_OPTIONS_CLONE (TORCH_VERSION_MINOR >= 14)
// c10d::Work::getTimeout()
#define MYCOLL_TORCH_HAS_WORK_TIMEOUT (TORCH_VERSION_MINOR >= 14)
// c10d::Backend::reconfigure()
#define MYCOLL_TORCH_HAS_RECONFIGURE (TORCH_VERSION_MINOR >= 14)
// c10d::Backend::addEphemeralTimeout()
#define MYCOLL_TORCH_HAS_EPHEMERAL_TIMEOUT (TORCH_VERSION_MINOR >= 14)
// c10d::Backend::registerAbortHook()
#define MYCOLL_TORCH_HAS_ABORT_HOOKS (TORCH_VERSION_MINOR >= 14)
// c10d::Backend::supportsAbortHooks()
#define MYCOLL_TORCH_HAS_ABORT_HOOK_QUERY (TORCH_VERSION_MINOR >= 15)
// c10d::Backend::registerCompletionHook()
#define MYCOLL_TORCH_HAS_COMPLETION_HOOKS (TORCH_VERSION_MINOR >= 15)
// c10d::Backend::isInitialized()
#define MYCOLL_TORCH_HAS_IS_INITIALIZED (TORCH_VERSION_MINOR >= 15)
// c10d::Window
#define MYCOLL_TORCH_HAS_WINDOW (TORCH_VERSION_MINOR >= 14)

// Where torch has no windows, these types replace torch's, with the same members.
#if MYCOLL_TORCH_HAS_WINDOW
#define MYCOLL_TORCH_WINDOW_OVERRIDE override
using c10d::PutOptions;
using c10d::SignalOptions;
using c10d::WaitSignalOptions;
using c10d::WindowAccessType;
using c10d::WindowAttr;
using TorchWindow = c10d::Window;
#else
#define MYCOLL_TORCH_WINDOW_OVERRIDE
struct PutOptions {
  std::chrono::milliseconds timeout = c10d::kUnsetTimeout;
  std::unordered_map<std::string, std::string> hints;
};
using SignalOptions = PutOptions;
using WaitSignalOptions = PutOptions;
enum class WindowAccessType : uint8_t { UNIFIED = 0, SEPARATE = 1 };
struct WindowAttr {
  WindowAccessType access_type = WindowAccessType::UNIFIED;
};
class TorchWindow : public c10::intrusive_ptr_target {};
#endif

}  // namespace mycoll
