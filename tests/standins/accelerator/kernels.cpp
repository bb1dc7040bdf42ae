// Operators. Those that tests of streams use are asynchronous (operators.cpp). All others use
// torch's fallback to the CPU, whose copies wait for the current stream.
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <optional>

#include "accelerator.h"
#include "operators.h"

namespace standin {
namespace {

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

at::Tensor copyFrom(const at::Tensor& source, const at::Tensor& target, bool isAsync) {
  if (target.numel() == 0) return target;
  copyElements(source.sizes() == target.sizes() ? source : source.expand(target.sizes()), target,
               isAsync);
  return target;
}

at::Tensor copyFromAndResize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copyFrom(source, target, false);
}

at::Scalar localScalar(const at::Tensor& self) { return self.to(at::kCPU).item(); }

void recordStream(at::Tensor& self, at::Stream stream) {
  const c10::DataPtr& data = self.storage().data_ptr();
  if (data.get() != nullptr) mycoll_standin_record_use(data.get(), handleOf(stream));
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

  registerOperators(m);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace
}  // namespace standin
