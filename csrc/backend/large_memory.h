// Memory of large objects that arrive (python/mycoll/parcel.py). New memory costs several times as
// much as what is copied into it, nearly all of that for its pages; so memory that is freed is kept
// for the next object. The kernel may take its pages meanwhile, where memory is short.
// Thread contract: [any thread]. Tensors may outlive everything else.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace mycoll {

// So many bytes on the CPU, not initialised. Their storage can be resized, as that of any tensor.
at::Tensor newLargeMemory(size_t bytes);

}  // namespace mycoll
