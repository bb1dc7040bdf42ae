#include "operators.h"

#include <ATen/ExpandUtils.h>
#include <ATen/InferSize.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "standin_device.h"

namespace standin {
namespace {

// A tensor's location in memory. It does not keep the memory alive.
struct View {
  explicit View(const at::Tensor& tensor)
      : data(tensor.numel() != 0 ? tensor.data_ptr() : nullptr),
        sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        dtype(tensor.scalar_type()),
        isConjugated(tensor.is_conj()),
        isNegative(tensor.is_neg()) {}

  // The same elements as a CPU tensor. [the stream's thread]
  at::Tensor onHost(const char* what) const {
    const auto options = at::TensorOptions().dtype(dtype).device(at::kCPU);
    if (data == nullptr) return at::empty(sizes, options);
    const size_t bytes = at::detail::computeStorageNbytes(sizes, strides, c10::elementSize(dtype));
    at::Tensor host =
        at::from_blob(mycoll_standin_touch(data, bytes, what), sizes, strides, options);
    if (isConjugated) host = host.conj();
    if (isNegative) host = host._neg_view();
    return host;
  }

  void* data;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  bool isConjugated, isNegative;
};

void* streamOf(const at::Tensor& tensor) {
  const c10::Device device = tensor.device();
  void* const handle = c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
  return handle != nullptr ? handle : mycoll_standin_default_stream(device.index());
}

// Runs `work` on the current stream of the tensor's device. `work` may call operators of the CPU.
void launch(const at::Tensor& tensor, std::function<void()> work) {
  using Work = std::function<void()>;
  mycoll_standin_enqueue_owned(
      streamOf(tensor),
      [](void* w) {
        const at::AutoDispatchBelowAutograd below;
        (*static_cast<Work*>(w))();
      },
      new Work(std::move(work)), [](void* w) { delete static_cast<Work*>(w); });
}

void waitForStreamOf(const at::Tensor& tensor) {
  const char* const refusal = mycoll_standin_stream_synchronize(streamOf(tensor));
  TORCH_CHECK(refusal == nullptr, refusal);
}

// --- copies

void copyOnDevice(const at::Tensor& source, const at::Tensor& target) {
  if (source.device() != target.device()) {
    waitForStreamOf(source);  // a real device would use events
  }
  launch(target, [from = View(source), to = View(target)] {
    to.onHost("a copy").copy_(from.onHost("a copy"));
  });
  if (source.device() != target.device()) waitForStreamOf(target);
}

// Asynchronous only from pinned memory, which is kept alive until the copy is done.
void copyToDevice(const at::Tensor& source, const at::Tensor& target, bool isAsync) {
  isAsync = isAsync && source.is_pinned();
  const at::Tensor taken = isAsync ? source.detach() : source.clone();
  launch(target, [from = View(taken), kept = taken.storage(), to = View(target)] {
    to.onHost("a copy to the device").copy_(from.onHost("a copy to the device"));
  });
  if (!isAsync && !mycoll_standin_is_capturing(streamOf(target))) {
    waitForStreamOf(target);
  }
}

void copyToHost(const at::Tensor& source, const at::Tensor& target, bool isAsync) {
  isAsync = isAsync && target.is_pinned();
  launch(source, [from = View(source), to = View(target), kept = target.storage()] {
    to.onHost("a copy to the host").copy_(from.onHost("a copy to the host"));
  });
  if (!isAsync) waitForStreamOf(source);
}

// --- arithmetic

at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  if (self.numel() != 0) {
    launch(self, [to = View(self), value] { to.onHost("fill_").fill_(value); });
  }
  return self;
}

at::Tensor& zero(at::Tensor& self) { return fill(self, 0); }

// A number, or a tensor on the device.
struct Operand {
  explicit Operand(const at::Tensor& tensor) {
    if (tensor.is_cpu()) {
      TORCH_CHECK(tensor.dim() == 0, "expected all tensors on one device");
      number = tensor.clone();
    } else {
      view.emplace(tensor);
    }
  }
  at::Tensor onHost(const char* what) const { return view ? view->onHost(what) : number; }

  at::Tensor number;
  std::optional<View> view;
};

using Binary = at::Tensor (*)(const at::Tensor&, const at::Tensor&, const at::Scalar&);

at::Tensor plus(const at::Tensor& a, const at::Tensor& b, const at::Scalar& alpha) {
  return at::add(a, b, alpha);
}
at::Tensor minus(const at::Tensor& a, const at::Tensor& b, const at::Scalar& alpha) {
  return at::sub(a, b, alpha);
}
at::Tensor times(const at::Tensor& a, const at::Tensor& b, const at::Scalar&) {
  return at::mul(a, b);
}
at::Tensor over(const at::Tensor& a, const at::Tensor& b, const at::Scalar&) {
  return at::div(a, b);
}

void into(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, const at::Scalar& alpha,
          Binary op) {
  if (out.numel() == 0) return;
  launch(out, [to = View(out), left = Operand(a), right = Operand(b), alpha, op] {
    to.onHost("arithmetic").copy_(op(left.onHost("arithmetic"), right.onHost("arithmetic"), alpha));
  });
}

at::Tensor compute(const at::Tensor& a, const at::Tensor& b, const at::Scalar& alpha, Binary op) {
  at::ScalarType dtype = at::result_type(a, b);
  if (op == over && at::isIntegralType(dtype, true)) {
    dtype = c10::typeMetaToScalarType(c10::get_default_dtype());
  }
  const at::Tensor& ours = a.is_cpu() ? b : a;
  at::Tensor out = at::empty(at::infer_size(a.sizes(), b.sizes()), ours.options().dtype(dtype));
  into(out, a, b, alpha, op);
  return out;
}

// The forms of an operator that torch dispatches: with a factor `alpha` and without it.
template <Binary op>
at::Tensor scaled(const at::Tensor& a, const at::Tensor& b, const at::Scalar& alpha) {
  return compute(a, b, alpha, op);
}
template <Binary op>
at::Tensor& scaledInPlace(at::Tensor& a, const at::Tensor& b, const at::Scalar& alpha) {
  into(a, a, b, alpha, op);
  return a;
}
template <Binary op>
at::Tensor plain(const at::Tensor& a, const at::Tensor& b) {
  return compute(a, b, 1, op);
}
template <Binary op>
at::Tensor& plainInPlace(at::Tensor& a, const at::Tensor& b) {
  return scaledInPlace<op>(a, b, 1);
}

}  // namespace

void registerOperators(torch::Library& m) {
  m.impl("fill_.Scalar", fill);
  m.impl("zero_", zero);
  m.impl("add.Tensor", scaled<plus>);
  m.impl("add_.Tensor", scaledInPlace<plus>);
  m.impl("sub.Tensor", scaled<minus>);
  m.impl("sub_.Tensor", scaledInPlace<minus>);
  m.impl("mul.Tensor", plain<times>);
  m.impl("mul_.Tensor", plainInPlace<times>);
  m.impl("div.Tensor", plain<over>);
  m.impl("div_.Tensor", plainInPlace<over>);
}

void copyElements(const at::Tensor& source, const at::Tensor& target, bool isAsync) {
  if (source.is_cpu()) {
    copyToDevice(source, target, isAsync);
  } else if (target.is_cpu()) {
    copyToHost(source, target, isAsync);
  } else {
    TORCH_CHECK(source.device().type() == target.device().type(),
                "copies go to and from the CPU only");
    copyOnDevice(source, target);
  }
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

}  // namespace standin
