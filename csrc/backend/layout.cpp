#include "backend/layout.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "backend/plain_dispatch.h"
#include "kernels/copy.h"

namespace mycoll {
namespace {

// One dimension of a copy; strides in bytes.
struct Dimension {
  int64_t size;
  int64_t tensorStride;
  int64_t plainStride;
};
using Dimensions = c10::SmallVector<Dimension, 8>;

// Returns the dimensions, outermost first. Leaves out dimensions of size 1, and merges neighbours
// that are contiguous on both sides, so that the list is as short as possible.
Dimensions dimensionsOf(const at::Tensor& tensor) {
  const int64_t bytes = static_cast<int64_t>(tensor.itemsize());
  Dimensions dimensions;
  int64_t plainStride = bytes;
  for (int64_t i = tensor.dim() - 1; i >= 0; --i) {
    const int64_t size = tensor.size(i);
    if (size != 1) {
      const Dimension outer{size, tensor.stride(i) * bytes, plainStride};
      if (!dimensions.empty()) {
        Dimension& inner = dimensions.back();
        if (outer.tensorStride == inner.tensorStride * inner.size) {
          inner.size *= size;
          plainStride *= size;
          continue;
        }
      }
      dimensions.push_back(outer);
    }
    plainStride *= size;
  }
  std::reverse(dimensions.begin(), dimensions.end());
  return dimensions;
}

template <size_t kBytes>
void copyRow(char* to, int64_t toStride, const char* from, int64_t fromStride, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * toStride, from + i * fromStride, kBytes);
  }
}

// Copies two dimensions. If one side is a transposition of the other, copies in tiles: 8 columns,
// so that lines a power of two apart still fit the ways of one cache set, and 64 rows, so that each
// of those lines is used whole.
template <size_t kBytes>
void copyPlane(char* to, const char* from, bool toTensor, const Dimension& outer,
               const Dimension& inner) {
  const int64_t toOuter = toTensor ? outer.tensorStride : outer.plainStride;
  const int64_t toInner = toTensor ? inner.tensorStride : inner.plainStride;
  const int64_t fromOuter = toTensor ? outer.plainStride : outer.tensorStride;
  const int64_t fromInner = toTensor ? inner.plainStride : inner.tensorStride;
  const bool isTransposed = std::abs(outer.tensorStride) < std::abs(inner.tensorStride);
  const int64_t rows = isTransposed ? 64 : outer.size;
  const int64_t columns = isTransposed ? 8 : inner.size;
  for (int64_t row = 0; row < outer.size; row += rows) {
    const int64_t rowEnd = std::min(row + rows, outer.size);
    for (int64_t column = 0; column < inner.size; column += columns) {
      const int64_t count = std::min(columns, inner.size - column);
      for (int64_t r = row; r < rowEnd; ++r) {
        copyRow<kBytes>(to + r * toOuter + column * toInner, toInner,
                        from + r * fromOuter + column * fromInner, fromInner, count);
      }
    }
  }
}

template <size_t kBytes>
void copyInner(char* to, const char* from, bool toTensor, const Dimensions& dimensions) {
  const Dimension& inner = dimensions.back();
  if (inner.tensorStride == static_cast<int64_t>(kBytes)) {  // whole rows
    const int64_t rowBytes = inner.size * static_cast<int64_t>(kBytes);
    if (dimensions.size() == 1) {
      copy(to, from, static_cast<size_t>(rowBytes));
      return;
    }
    const Dimension& outer = dimensions[dimensions.size() - 2];
    const int64_t toStride = toTensor ? outer.tensorStride : outer.plainStride;
    const int64_t fromStride = toTensor ? outer.plainStride : outer.tensorStride;
    for (int64_t i = 0; i < outer.size; ++i) {
      copy(to + i * toStride, from + i * fromStride, static_cast<size_t>(rowBytes));
    }
    return;
  }
  if (dimensions.size() == 1) {
    copyPlane<kBytes>(to, from, toTensor, Dimension{1, 0, 0}, inner);
  } else {
    copyPlane<kBytes>(to, from, toTensor, dimensions[dimensions.size() - 2], inner);
  }
}

using CopyInner = void (*)(char* to, const char* from, bool toTensor, const Dimensions&);

CopyInner copyInnerFor(size_t elementBytes) {
  switch (elementBytes) {
    case 1: return copyInner<1>;
    case 2: return copyInner<2>;
    case 4: return copyInner<4>;
    case 8: return copyInner<8>;
    case 16: return copyInner<16>;
    default: TORCH_CHECK(false, "mycoll: elements of ", elementBytes, " bytes are not supported");
  }
}

// torch's copy_ takes 2.7 to 3.2 times as long for transposed and permuted tensors of 16 MiB, and
// 0.6 of the time for every other column (2026-11-24, two cores).
void copyStrided(const at::Tensor& tensor, char* tensorData, char* plain, bool toTensor) {
  Dimensions dimensions = dimensionsOf(tensor);
  if (dimensions.empty()) dimensions.push_back({1, 0, 0});
  // The second innermost loop runs over the dimension in which the tensor's memory is densest, the
  // innermost over the one in which the plain memory is. The two form the plane that is copied in
  // tiles.
  if (dimensions.size() > 2) {
    auto densest = std::min_element(dimensions.begin(), dimensions.end() - 1,
                                    [](const Dimension& a, const Dimension& b) {
                                      return std::abs(a.tensorStride) < std::abs(b.tensorStride);
                                    });
    std::rotate(densest, densest + 1, dimensions.end() - 1);
  }
  const CopyInner copyPlanes = copyInnerFor(tensor.itemsize());
  const size_t outerCount = dimensions.size() > 2 ? dimensions.size() - 2 : 0;
  c10::SmallVector<int64_t, 8> index(outerCount, 0);
  while (true) {
    copyPlanes(toTensor ? tensorData : plain, toTensor ? plain : tensorData, toTensor, dimensions);
    size_t i = outerCount;  // counts up the index, last of the outer dimensions first
    while (i > 0) {
      const Dimension& dimension = dimensions[--i];
      tensorData += dimension.tensorStride;
      plain += dimension.plainStride;
      if (++index[i] < dimension.size) break;
      tensorData -= dimension.tensorStride * dimension.size;
      plain -= dimension.plainStride * dimension.size;
      index[i] = 0;
      if (i == 0) return;
    }
    if (outerCount == 0) return;
  }
}

// Whether the tensor's memory holds other numbers than the tensor: conj() and neg() are lazy.
bool isLazy(const at::Tensor& tensor) { return tensor.is_conj() || tensor.is_neg(); }

}  // namespace

size_t storageBytes(const at::Tensor& tensor) {
  if (!tensor.is_contiguous()) [[unlikely]] {
    return at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(),
                                            static_cast<size_t>(tensor.storage_offset()));
  }
  if (tensor.numel() == 0) return 0;
  return static_cast<size_t>(tensor.storage_offset() + tensor.numel()) * tensor.itemsize();
}

at::Tensor emptyOfShape(at::IntArrayRef shape, at::ScalarType type) {
  return at::Tensor(at::detail::empty_cpu(shape, type, /*pin_memory=*/false));
}

void pack(const at::Tensor& tensor, void* plain) {
  if (tensor.numel() == 0) return;
  if (isLazy(tensor)) {
    const PlainDispatch guard;
    return pack(tensor.resolve_conj().resolve_neg(), plain);
  }
  copyStrided(tensor, static_cast<char*>(const_cast<void*>(tensor.const_data_ptr())),
              static_cast<char*>(plain), /*toTensor=*/false);
}

void unpack(const void* plain, const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  if (isLazy(tensor)) {
    const PlainDispatch guard;
    tensor.copy_(at::from_blob(const_cast<void*>(plain), tensor.sizes(),
                               at::TensorOptions(tensor.scalar_type())));
    return;
  }
  copyStrided(tensor, static_cast<char*>(tensor.mutable_data_ptr()),
              static_cast<char*>(const_cast<void*>(plain)), /*toTensor=*/true);
}

at::Tensor withoutRepeatsOf(const at::Tensor& expanded, const at::Tensor& tensor) {
  const PlainDispatch guard;
  at::Tensor narrowed = tensor;
  for (int64_t i = 0; i < expanded.dim(); ++i) {
    if (expanded.stride(i) == 0 && expanded.size(i) > 1) narrowed = narrowed.narrow(i, 0, 1);
  }
  return narrowed;
}

at::Tensor withoutRepeats(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided) return tensor;
  return withoutRepeatsOf(tensor, tensor);
}

bool overlapsItself(const at::Tensor& tensor) {
  if (tensor.numel() <= 1) return false;
  std::vector<std::pair<int64_t, int64_t>> byStride;  // stride, size
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) > 1) byStride.emplace_back(tensor.stride(i), tensor.size(i));
  }
  std::sort(byStride.begin(), byStride.end());
  int64_t reach = 0;  // of all smaller strides together
  bool isNested = true;
  for (const auto& [stride, size] : byStride) {
    isNested &= stride > reach;
    reach += stride * (size - 1);
  }
  if (isNested) return false;
  if (byStride.front().first == 0 || reach + 1 < tensor.numel()) return true;
  // The elements of several dimensions interleave: marks the place of each.
  const PlainDispatch guard;
  const at::Tensor marks = at::zeros({reach + 1}, at::TensorOptions(at::kByte).device(at::kCPU));
  marks.as_strided(tensor.sizes(), tensor.strides(), 0).fill_(1);
  return marks.sum().item<int64_t>() != tensor.numel();
}

}  // namespace mycoll
