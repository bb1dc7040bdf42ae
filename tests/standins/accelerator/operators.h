// Operators of a device whose streams are threads, computed by the operators of the CPU. A call
// records its arguments; their bytes are read when the stream runs the work.
//
// Thread contract: [any thread], as for any operator. The device is that of the arguments.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <torch/library.h>

namespace standin {

// Fills and arithmetic.
void registerOperators(torch::Library& library);

// Any other operator: runs on the CPU, with copies that wait for the current stream.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Copies between tensors of equal sizes, at least one of which is on the device. Asynchronous on
// the device, and also from and to pinned memory if isAsync.
void copyElements(const at::Tensor& source, const at::Tensor& target, bool isAsync);

}  // namespace standin
