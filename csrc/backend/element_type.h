// Converts torch's element types and reduce operations to the engine's. [any thread]
#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "base/call.h"
#include "base/types.h"

namespace mycoll {

DType toDType(at::ScalarType type);
// Returns a call for elements of the tensor's type, without spans.
Call makeCall(OpKind kind, const at::Tensor& tensor);

// Returns ReduceOp::kCount for PREMUL_SUM and for torch's UNUSED.
ReduceOp toReduceOp(c10d::ReduceOp::RedOpType op);
const char* name(c10d::ReduceOp::RedOpType op);

}  // namespace mycoll
