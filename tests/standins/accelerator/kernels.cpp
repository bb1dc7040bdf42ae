// Operators. What tests of streams use (copies, fills, arithmetic) is asynchronous: the arguments
// are noted at the call, and their bytes looked at when the stream comes to them. Everything else
// goes through torch's fallback to the CPU, whose copies wait for the current stream.
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/InferSize.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <vector>

#include "accelerator.h"

namespace standin {
namespace {

// A tensor's place in memory. It keeps nothing alive: that is the business of whoever frees.
struct View {
  explicit View(const at::Tensor& tensor)
      : data(tensor.numel() != 0 ? tensor.data_ptr() : nullptr),
        sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        dtype(tensor.scalar_type()),
        isConjugated(tensor.is_conj()),
        isNegative(tensor.is_neg()) {}

  // The same elements as a tensor of the host's. On the stream's thread only.
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

// Runs `work` on the stream of the tensor's device, where operators of the CPU may be called.
void launch(const at::Tensor& tensor, std::function<void()> work) {
  enqueue(currentStream(tensor.device().index()), [work = std::move(work)] {
    const at::AutoDispatchBelowAutograd below;
    work();
  });
}

void waitForStreamOf(const at::Tensor& tensor) {
  check(mycoll_standin_stream_synchronize(handleOf(currentStream(tensor.device().index()))));
}

// --- making tensors

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> layout, std::optional<at::Device> device,
                 std::optional<bool> isPinned, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "strided tensors only");
  TORCH_CHECK(!isPinned.value_or(false), "only tensors of the CPU can be pinned");
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, deviceAllocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor emptyStrided(at::IntArrayRef size, at::IntArrayRef stride,
                        std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                        std::optional<at::Device> device, std::optional<bool> isPinned) {
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "strided tensors only");
  TORCH_CHECK(!isPinned.value_or(false), "only tensors of the CPU can be pinned");
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, deviceAllocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size,
                         std::optional<at::MemoryFormat> format) {
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  const size_t bytes =
      at::detail::computeStorageNbytesContiguous(size, self.element_size(), self.storage_offset());
  if (bytes > self.storage().nbytes()) resizeStorage(self.storage(), bytes);
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}

at::Tensor& setStorage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                       at::IntArrayRef stride) {
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.data() == nullptr || (stride.empty() && !size.empty())) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  const size_t bytes =
      at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.element_size(), offset);
  if (self.numel() != 0 && bytes > self.storage().nbytes()) resizeStorage(self.storage(), bytes);
  return self;
}

at::Tensor& setEmpty(at::Tensor& self) {
  const c10::OptionalDeviceGuard guard(self.device());
  at::Storage nothing(c10::Storage::use_byte_size_t(), 0, deviceAllocator()->allocate(0),
                      deviceAllocator(), /*resizable=*/true);
  return setStorage(self, nothing, 0, {0}, {});
}

// --- copies

void copyOnDevice(const at::Tensor& source, const at::Tensor& target) {
  if (source.device() != target.device()) {
    waitForStreamOf(source);  // what both a real device and this one do by events, plainly
  }
  launch(target, [from = View(source), to = View(target)] {
    to.onHost("a copy").copy_(from.onHost("a copy"));
  });
  if (source.device() != target.device()) waitForStreamOf(target);
}

// Asynchronous only from pinned memory, which is then kept until the copy is done.
void copyToDevice(const at::Tensor& source, const at::Tensor& target, bool isAsync) {
  isAsync = isAsync && source.is_pinned();
  const at::Tensor taken = isAsync ? source.detach() : source.clone();
  launch(target, [from = View(taken), kept = taken.storage(), to = View(target)] {
    to.onHost("a copy to the device").copy_(from.onHost("a copy to the device"));
  });
  if (!isAsync && !mycoll_standin_is_capturing(handleOf(currentStream(target.device().index())))) {
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

at::Tensor copyFrom(const at::Tensor& source, const at::Tensor& target, bool isAsync) {
  if (target.numel() == 0) return target;
  const at::Tensor from = source.sizes() == target.sizes() ? source : source.expand(target.sizes());
  if (from.device().type() == kDevice && target.device().type() == kDevice) {
    copyOnDevice(from, target);
  } else if (target.device().type() == kDevice) {
    TORCH_CHECK(from.is_cpu(), "copies go to and from the CPU only");
    copyToDevice(from, target, isAsync);
  } else {
    TORCH_CHECK(target.is_cpu(), "copies go to and from the CPU only");
    copyToHost(from, target, isAsync);
  }
  return target;
}

at::Tensor copyFromAndResize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copyFrom(source, target, false);
}

at::Scalar localScalar(const at::Tensor& self) { return self.to(at::kCPU).item(); }

// --- arithmetic

at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  if (self.numel() != 0) {
    launch(self, [to = View(self), value] { to.onHost("fill_").fill_(value); });
  }
  return self;
}

at::Tensor& zero(at::Tensor& self) { return fill(self, 0); }

// A number, or a tensor of the device.
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

at::Tensor& computeInPlace(at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha,
                           Binary op) {
  into(self, self, other, alpha, op);
  return self;
}

at::Tensor add(const at::Tensor& a, const at::Tensor& b, const at::Scalar& alpha) {
  return compute(a, b, alpha, plus);
}
at::Tensor& addInPlace(at::Tensor& a, const at::Tensor& b, const at::Scalar& alpha) {
  return computeInPlace(a, b, alpha, plus);
}
at::Tensor sub(const at::Tensor& a, const at::Tensor& b, const at::Scalar& alpha) {
  return compute(a, b, alpha, minus);
}
at::Tensor& subInPlace(at::Tensor& a, const at::Tensor& b, const at::Scalar& alpha) {
  return computeInPlace(a, b, alpha, minus);
}
at::Tensor mul(const at::Tensor& a, const at::Tensor& b) { return compute(a, b, 1, times); }
at::Tensor& mulInPlace(at::Tensor& a, const at::Tensor& b) {
  return computeInPlace(a, b, 1, times);
}
at::Tensor div(const at::Tensor& a, const at::Tensor& b) { return compute(a, b, 1, over); }
at::Tensor& divInPlace(at::Tensor& a, const at::Tensor& b) { return computeInPlace(a, b, 1, over); }

void recordStream(at::Tensor& self, at::Stream stream) {
  const c10::DataPtr& data = self.storage().data_ptr();
  if (data.get() != nullptr) mycoll_standin_record_use(data.get(), handleOf(stream));
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", emptyStrided);
  m.impl("resize_", resize);
  m.impl("set_", setEmpty);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", setStorage);

  m.impl("alias", at::native::alias);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);

  m.impl("_copy_from", copyFrom);
  m.impl("_copy_from_and_resize", copyFromAndResize);
  m.impl("_local_scalar_dense", localScalar);
  m.impl("record_stream", recordStream);

  m.impl("fill_.Scalar", fill);
  m.impl("zero_", zero);
  m.impl("add.Tensor", add);
  m.impl("add_.Tensor", addInPlace);
  m.impl("sub.Tensor", sub);
  m.impl("sub_.Tensor", subInPlace);
  m.impl("mul.Tensor", mul);
  m.impl("mul_.Tensor", mulInPlace);
  m.impl("div.Tensor", div);
  m.impl("div_.Tensor", divInPlace);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace
}  // namespace standin
