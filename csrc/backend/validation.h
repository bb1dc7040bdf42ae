// Everything that can be wrong with a call is found here, before anything is sent. A refusal is an
// ArgumentError that names the group, the function as Python's users know it, the argument, what
// was expected, what came, and the rank. Where gloo refuses the same, its words come first, as
// programs look for them. Nothing is formatted unless something is wrong. [any thread]
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "backend/element_type.h"
#include "backend/layout.h"
#include "base/types.h"

namespace mycoll {

// Which call of whom.
struct CallSite {
  const char* function;  // "all_reduce"
  int rank;
  int ranks;
  const std::string* group = nullptr;  // its name; null while there is none
};

// "tensor", or "tensor_list[3]" when there is an index.
struct Argument {
  const char* name;
  int64_t index = -1;
  std::string text() const;
};

[[noreturn]] void refuse(const CallSite& site, const std::string& what);

// A defined, dense tensor with memory of its own, on the CPU or a device.
inline bool isUsable(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_meta() &&
         !tensor.is_nested() && !tensor.is_quantized();
}
[[noreturn]] void refuseTensor(const CallSite& site, const Argument& argument,
                               const at::Tensor& tensor);
inline void checkTensor(const CallSite& site, const Argument& argument, const at::Tensor& tensor) {
  if (!isUsable(tensor)) [[unlikely]] {
    refuseTensor(site, argument, tensor);
  }
}

// As checkTensor, for memory that will be written: no two elements may share memory.
void checkOutput(const CallSite& site, const Argument& argument, const at::Tensor& tensor);

// The one tensor of c10d's lists, which were made for several devices in a process. kind: what gloo
// calls it.
const at::Tensor& single(const CallSite& site, const char* name,
                         const std::vector<at::Tensor>& tensors, const char* kind = "tensor");
// The same for lists of lists.
const std::vector<at::Tensor>& singleList(const CallSite& site, const char* name,
                                          const std::vector<std::vector<at::Tensor>>& lists,
                                          const char* kind);

// One list for each tensor.
void checkListForEach(const CallSite& site, const std::vector<std::vector<at::Tensor>>& lists,
                      const std::vector<at::Tensor>& tensors);

void checkSameType(const CallSite& site, const Argument& argument, const at::Tensor& tensor,
                   const Argument& reference, const at::Tensor& expected);
void checkSameShape(const CallSite& site, const Argument& argument, const at::Tensor& tensor,
                    const Argument& reference, const at::Tensor& expected);

// checkOutput() or checkTensor(), for a tensor of a list.
void checkOneOf(const CallSite& site, const Argument& argument, const at::Tensor& tensor,
                bool isOutput);
// One usable tensor for each rank, all of the type of `reference`. wrongLength: gloo's words for
// too many or too few.
void checkPerRank(const CallSite& site, const char* name, const std::vector<at::Tensor>& tensors,
                  const Argument& reference, const at::Tensor& expected, bool areOutputs,
                  const char* wrongLength = "");

// argument: "src" or "dst".
void checkRank(const CallSite& site, const char* argument, int64_t rank, const char* words = "");
// The same, of a collective.
inline void checkRoot(const CallSite& site, const char* argument, int64_t rank) {
  checkRank(site, argument, rank, "invalid root rank: ");
}

// rootTensor of an operation's options: which of the root's tensors.
void checkRootTensor(const CallSite& site, int64_t index, const std::vector<at::Tensor>& tensors);

// A group's. Python's largest timedelta comes as a negative number.
void checkTimeout(const CallSite& site, std::chrono::milliseconds timeout);

// The engine's reduce operation for elements of this type, which are the tensor's; PREMUL_SUM is
// kSum here (see Request::premultiply).
ReduceOp checkReduceOp(const CallSite& site, const c10d::ReduceOp& op, const at::Tensor& tensor,
                       DType dtype);

// numel must be `expected`, and is described as `why` ("2 x the elements of input").
void checkElements(const CallSite& site, const Argument& argument, const at::Tensor& tensor,
                   int64_t expected, const char* why);

}  // namespace mycoll
