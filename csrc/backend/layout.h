// Copies between tensors of any layout and the plain memory that the engine works on.
//
// Results are copied back on any thread that completes an operation, and the modes of that thread
// (autograd, functorch, inference, Python dispatch) have nothing to do with the operation and its
// tensors: the copies do not use torch's dispatcher, or only under PlainDispatch.
// [any thread], with or without the GIL.
#pragma once

#include <ATen/core/Tensor.h>

#include "base/types.h"

namespace mycoll {

// True if the tensor's memory is its elements in order.
inline bool isPlain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

// The size that the tensor's storage must have for its elements.
size_t storageBytes(const at::Tensor& tensor);

// A plain CPU tensor, not initialised.
at::Tensor emptyOfShape(at::IntArrayRef shape, at::ScalarType type);

// Copies a strided CPU tensor of any layout into plain memory for all of its elements, and back.
void pack(const at::Tensor& tensor, void* plain);
void unpack(const void* plain, const at::Tensor& tensor);

// True if two elements of the tensor share memory (expanded tensors): writing to it then has no
// defined result.
bool overlapsItself(const at::Tensor& tensor);

// If the tensor is expanded (stride 0), returns a view with one element for all that share memory,
// so that an operation in place changes each of them once. Otherwise returns the tensor itself.
at::Tensor withoutRepeats(const at::Tensor& tensor);
// Returns the part of another tensor of the same shape that withoutRepeats() takes of `expanded`.
at::Tensor withoutRepeatsOf(const at::Tensor& expanded, const at::Tensor& tensor);

// The memory of a plain tensor: for reading, and for writing (which un-shares copy-on-write
// memory).
inline Span readable(const at::Tensor& plain) {
  const size_t bytes = plain.nbytes();
  return Span{bytes == 0 ? nullptr : const_cast<void*>(plain.const_data_ptr()), bytes};
}
inline Span writable(const at::Tensor& plain) {
  const size_t bytes = plain.nbytes();
  return Span{bytes == 0 ? nullptr : plain.mutable_data_ptr(), bytes};
}

// Returns the parts of a span that is cut into this many equal ones.
inline Spans cut(const Span& whole, int parts) {
  const size_t bytes = whole.bytes / static_cast<size_t>(parts);
  Spans spans;
  spans.reserve(static_cast<size_t>(parts));
  for (size_t i = 0; i < static_cast<size_t>(parts); ++i) {
    spans.push_back(Span{bytes == 0 ? nullptr : whole.begin() + i * bytes, bytes});
  }
  return spans;
}

}  // namespace mycoll
