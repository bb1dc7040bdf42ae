// Converts torch's element types and reduce operations to the engine's. [any thread]
#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "base/types.h"

namespace mycoll {

struct ElementType {
  DType dtype = DType::kOpaque;
  uint8_t opaqueType = 0;  // torch's number of a type that can only be moved
  size_t bytes = 1;
};

ElementType elementType(const at::Tensor& tensor);

// Returns ReduceOp::kCount for PREMUL_SUM and for torch's UNUSED.
ReduceOp toReduceOp(c10d::ReduceOp::RedOpType op);
const char* name(c10d::ReduceOp::RedOpType op);

}  // namespace mycoll
