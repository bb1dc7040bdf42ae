// Torch's operators for CUDA tensors on the stand-in device, in a torch that is built with CUDA and
// has the library of runtime.cpp preloaded. Operators that would launch a kernel run on the CPU.
// Those that make, view and free tensors, and streams and events, remain torch's own.
#include <ATen/NativeFunctions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <set>
#include <string>
#include <vector>

#include "../accelerator/operators.h"
#include "standin_device.h"

namespace standin {
namespace {

// Operators that launch no kernel.
const std::set<std::string> kTorchsOwn = {
    "aten::_reshape_alias",
    "aten::alias",
    "aten::as_strided",
    "aten::empty.memory_format",
    "aten::empty_strided",
    "aten::is_pinned",
    "aten::_pin_memory",
    "aten::is_set_to",
    "aten::record_stream",
    "aten::resize_",
    "aten::set_",
    "aten::set_.source_Storage",
    "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Tensor",
    "aten::unfold",
    "aten::view",
    "aten::view_as_complex",
    "aten::view_as_real",
};

bool isPlain(const at::Tensor& a, const at::Tensor& b) {
  return a.dtype() == b.dtype() && a.is_contiguous() && b.is_contiguous() &&
         a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}

at::Tensor& copyInto(at::Tensor& self, const at::Tensor& source, bool isAsync) {
  const at::Tensor from = source.sizes() == self.sizes() ? source : source.expand(self.sizes());
  if (isPlain(from, self)) return at::native::copy_(self, from, isAsync);
  if (self.numel() != 0) copyElements(from, self, isAsync);
  return self;
}

at::Tensor copyFrom(const at::Tensor& source, const at::Tensor& target, bool isAsync) {
  at::Tensor to = target;
  copyInto(to, source, isAsync);
  return target;
}

at::Tensor copyFromAndResize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copyFrom(source, target, false);
}

at::Scalar localScalar(const at::Tensor& self) { return self.to(at::kCPU).item(); }

// Replaces every operator that has a CUDA kernel with the fallback. The operators in load()
// replace some of them again.
void replaceAll() {
  static auto& kept = *new std::vector<c10::RegistrationHandleRAII>;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const std::string full =
        name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    if (name.name.rfind("aten::", 0) != 0 || kTorchsOwn.count(full) != 0) continue;
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    kept.push_back(dispatcher.registerImpl(name, c10::DispatchKey::CUDA,
                                           c10::KernelFunction::makeFromBoxedFunction<&fallback>(),
                                           std::nullopt, nullptr, "the stand-in for CUDA"));
  }
}

// Torch warns when an operator is replaced.
struct NoWarnings final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

void load() {
  NoWarnings quiet;
  const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  replaceAll();
  static torch::Library& library =
      *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  library.impl("copy_", copyInto);
  library.impl("_copy_from", copyFrom);
  library.impl("_copy_from_and_resize", copyFromAndResize);
  library.impl("_local_scalar_dense", localScalar);
  registerOperators(library);
}

}  // namespace
}  // namespace standin

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("load", &standin::load);
  m.def("verify", &mycoll_standin_verify, pybind11::call_guard<pybind11::gil_scoped_release>());
}
