#include "backend/quantized.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace mycoll {
namespace {

void redispatchToCpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

}  // namespace

void registerQuantizedMoves() {
  static torch::Library library(torch::Library::IMPL, "c10d", c10::DispatchKey::QuantizedCPU,
                                __FILE__, __LINE__);
  for (const char* name : {"broadcast_", "allgather_", "_allgather_base_", "gather_", "scatter_",
                           "alltoall_", "alltoall_base_", "send", "recv_", "recv_any_source_"}) {
    const auto op = c10::Dispatcher::singleton().findOp({std::string("c10d::") + name, ""});
    if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::QuantizedCPU)) continue;
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&redispatchToCpu>());
  }
}

}  // namespace mycoll
