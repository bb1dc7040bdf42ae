// Checks the arguments of a call before anything is sent. The error is an ArgumentError that names
// the group, the function as Python's users know it, the argument, the expected and the actual
// value, and the rank. If gloo refuses the same, its words come first, as programs look for them.
// Nothing is formatted unless something is wrong. [any thread]
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/StringUtil.h>

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "backend/element_type.h"
#include "backend/layout.h"
#include "base/types.h"

namespace mycoll {

// The function that the program called, and the rank and group on which it did.
struct CallerInfo {
  const char* function;  // "all_reduce"
  int rank;
  int ranks;
  const std::string* group;  // its name
};

// "tensor", or "tensor_list[3]" if there is an index.
struct Argument {
  const char* name;
  int64_t index = -1;
  std::string text() const;
};

[[noreturn]] void refuseCall(const CallerInfo& caller, const std::string& what);
// what: parts of the text, as for c10::str().
template <typename... Parts>
[[noreturn]] void refuse(const CallerInfo& caller, const Parts&... what) {
  refuseCall(caller, c10::str(what...));
}

// Whether this is a defined, dense tensor with memory of its own, on the CPU or a device. The
// storage may be smaller than the shape needs: FSDP frees parameters by resizing it to 0.
inline bool isUsable(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_meta() &&
         !tensor.is_nested() && !tensor.is_quantized() &&
         tensor.storage().nbytes() >= storageBytes(tensor);
}
[[noreturn]] void refuseTensor(const CallerInfo& caller, const Argument& argument,
                               const at::Tensor& tensor);
inline void checkTensor(const CallerInfo& caller, const Argument& argument,
                        const at::Tensor& tensor) {
  if (!isUsable(tensor)) refuseTensor(caller, argument, tensor);
}

// As checkTensor, for memory that will be written: no two elements may share memory.
void checkOutput(const CallerInfo& caller, const Argument& argument, const at::Tensor& tensor);

// Returns the one tensor of a list of c10d's; these are lists because a process may have several
// devices. kind: gloo's word for it.
const at::Tensor& single(const CallerInfo& caller, const char* name,
                         const std::vector<at::Tensor>& tensors, const char* kind = "tensor");
// The same for lists of lists.
const std::vector<at::Tensor>& singleList(const CallerInfo& caller, const char* name,
                                          const std::vector<std::vector<at::Tensor>>& lists,
                                          const char* kind);

// Checks that there is an output for each input, and at least one.
void checkPairs(const CallerInfo& caller, const std::vector<at::Tensor>& outputs,
                const std::vector<at::Tensor>& inputs);

void checkSameType(const CallerInfo& caller, const Argument& argument, const at::Tensor& tensor,
                   const Argument& reference, const at::Tensor& expected);
void checkSameShape(const CallerInfo& caller, const Argument& argument, const at::Tensor& tensor,
                    const Argument& reference, const at::Tensor& expected);

// Calls checkOutput() or checkTensor(), for a tensor of a list.
void checkOneOf(const CallerInfo& caller, const Argument& argument, const at::Tensor& tensor,
                bool isOutput);
// Checks that there is one usable tensor for each rank, all of the type of `reference`.
// wrongLength: gloo's words for too many or too few.
void checkList(const CallerInfo& caller, const char* name, const std::vector<at::Tensor>& tensors,
               const Argument& reference, const at::Tensor& expected, bool areOutputs,
               const char* wrongLength = "");
// As checkList(), and that this rank's tensor of the list has the shape of `reference`.
void checkPerRank(const CallerInfo& caller, const char* name,
                  const std::vector<at::Tensor>& tensors, const Argument& reference,
                  const at::Tensor& expected, bool areOutputs, const char* wrongLength = "");

// argument: "src" or "dst".
void checkRank(const CallerInfo& caller, const char* argument, int64_t rank,
               const char* words = "");
// The same for the root of a collective.
inline void checkRoot(const CallerInfo& caller, const char* argument, int64_t rank) {
  checkRank(caller, argument, rank, "invalid root rank: ");
}

// Checks the list of a gather or a scatter, as checkPerRank(). Returns null on ranks other than the
// root, where it must be empty.
const std::vector<at::Tensor>* checkRootList(const CallerInfo& caller, const char* name,
                                             const std::vector<std::vector<at::Tensor>>& lists,
                                             const Argument& reference, const at::Tensor& expected,
                                             int64_t root, bool areOutputs);

// Checks a group's timeout. Python's largest timedelta arrives as a negative number.
void checkTimeout(const CallerInfo& caller, std::chrono::milliseconds timeout);

// Returns the engine's reduce operation for the tensor's elements, whose type is dtype; kSum for
// PREMUL_SUM (see Request::premultiply).
ReduceOp checkReduceOp(const CallerInfo& caller, const c10d::ReduceOp& op, const at::Tensor& tensor,
                       DType dtype);

// Checks that numel is `expected`; `why` explains that number ("2 x the elements of input").
void checkElements(const CallerInfo& caller, const Argument& argument, const at::Tensor& tensor,
                   int64_t expected, const char* why);

}  // namespace mycoll
