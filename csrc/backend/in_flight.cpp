#include "backend/in_flight.h"

#include <torch/csrc/distributed/c10d/debug.h>

namespace mycoll {

bool InFlight::isWanted() { return c10d::debug_level() != c10d::DebugLevel::Off; }

void InFlight::add(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_inference()) tensors_.emplace_back(tensor, tensor._version());
  }
}

void InFlight::check(const std::string& what) {
  for (const auto& [tensor, version] : tensors_) {
    if (tensor._version() == version) continue;
    TORCH_WARN(
        "mycoll: a tensor (", tensor.scalar_type(), ", shape ", tensor.sizes(), ") of ", what,
        " was written to before the operation was over: wait for the operation first, or its "
        "result is undefined (a write to another part of the same memory looks alike)");
    break;
  }
  tensors_.clear();
}

}  // namespace mycoll
