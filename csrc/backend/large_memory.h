// Memory for large objects that are received (python/mycoll/parcel.py). New memory takes several
// times as long as the copy into it, nearly all of that for its pages; so freed memory is kept for
// the next object. The kernel may take the pages meanwhile if memory is short.
// Thread contract: [any thread]. Tensors may outlive everything else.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace mycoll {

// Returns a tensor of `bytes` bytes on the CPU, not initialised. Its storage can be resized, like
// that of any tensor.
at::Tensor newLargeMemory(size_t bytes);

}  // namespace mycoll
