// Operators of a device whose work runs on threads, by the operators of the CPU: the arguments are
// noted at the call, and their bytes looked at when the stream comes to them.
//
// Thread contract: [any thread], as for any operator. The device is that of the arguments.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <torch/library.h>

namespace standin {

// Fills and arithmetic.
void registerOperators(torch::Library& library);

// Any other: by the CPU, with copies that wait for the current stream.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Of equal sizes; one of them, or both, on the device. Asynchronous on the device, and from and to
// pinned memory where isAsync.
void copyElements(const at::Tensor& source, const at::Tensor& target, bool isAsync);

}  // namespace standin
