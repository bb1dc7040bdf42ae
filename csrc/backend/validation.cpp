#include "backend/validation.h"

#include <c10/util/Exception.h>

#include "backend/errors.h"
#include "backend/torch_version.h"

namespace mycoll {
namespace {

bool isPremultipliable(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16;
}

}  // namespace

std::string Argument::text() const {
  return index < 0 ? std::string(name) : c10::str(name, "[", index, "]");
}

void refuseCall(const CallerInfo& caller, const std::string& what) {
  throwArgumentError(c10::str("mycoll group '", *caller.group, "': ", caller.function, ": ", what,
                              " (rank ", caller.rank, " of ", caller.ranks, ")"));
}

void refuseTensor(const CallerInfo& caller, const Argument& argument, const at::Tensor& tensor) {
  const std::string name = argument.text();
  if (!tensor.defined()) refuse(caller, name + " must be a tensor, but it is undefined");
  if (tensor.is_meta()) {
    refuse(caller, name + " must have memory, but it is on the meta device");
  }
  if (tensor.is_nested()) {
    refuse(caller, name + " must be a dense tensor, but it is a nested one");
  }
  if (tensor.is_quantized()) {
    refuse(caller, name, " must not be quantized, but it is ", c10::toString(tensor.scalar_type()),
           "; pass its int_repr(), and its scale and zero point beside it");
  }
  if (tensor.layout() == at::kStrided) {
    refuse(caller, name + " must have memory, but its storage has ", tensor.storage().nbytes(),
           " of the ", storageBytes(tensor),
           " bytes that its shape needs: the storage was freed or resized, as FSDP does with "
           "parameters that are not in use");
  }
  const std::string where = argument.index < 0 ? "" : c10::str(" at index ", argument.index);
  refuse(caller, "invalid tensor layout", where, ": ", name,
         " must be a dense tensor, but has the unsupported layout ", tensor.layout());
}

void checkOutput(const CallerInfo& caller, const Argument& argument, const at::Tensor& tensor) {
  checkTensor(caller, argument, tensor);
  if (tensor.is_contiguous()) return;
  if (overlapsItself(tensor)) {
    refuse(caller, argument.text(),
           " is written to, so its elements must not share memory, but it has "
           "shape ",
           tensor.sizes(), " and strides ", tensor.strides(), "; pass a clone() of it");
  }
}

const at::Tensor& single(const CallerInfo& caller, const char* name,
                         const std::vector<at::Tensor>& tensors, const char* kind) {
  if (tensors.size() != 1)
    refuse(caller, "requires a single-element ", kind, " list: ", name, " must be one tensor, but ",
           tensors.size(), " came");
  return tensors.front();
}

const std::vector<at::Tensor>& singleList(const CallerInfo& caller, const char* name,
                                          const std::vector<std::vector<at::Tensor>>& lists,
                                          const char* kind) {
  if (lists.size() != 1)
    refuse(caller, "requires a single-element ", kind, " list: ", name,
           " must be one list of tensors, but ", lists.size(), " came");
  return lists.front();
}

void checkPairs(const CallerInfo& caller, const std::vector<at::Tensor>& outputs,
                const std::vector<at::Tensor>& inputs) {
  if (!inputs.empty() && outputs.size() == inputs.size()) return;
  refuse(caller, "there must be one output for each input, but there are ", outputs.size(),
         " outputs and ", inputs.size(), " inputs");
}

void checkSameType(const CallerInfo& caller, const Argument& argument, const at::Tensor& tensor,
                   const Argument& reference, const at::Tensor& expected) {
  if (tensor.scalar_type() == expected.scalar_type()) return;
  refuse(caller, "invalid tensor type: ", argument.text(), " must be of the same dtype as ",
         reference.text(), ", ", c10::toString(expected.scalar_type()), ", but it is ",
         c10::toString(tensor.scalar_type()));
}

void checkSameShape(const CallerInfo& caller, const Argument& argument, const at::Tensor& tensor,
                    const Argument& reference, const at::Tensor& expected) {
  if (tensor.sizes() == expected.sizes()) return;
  refuse(caller, "invalid tensor size: ", argument.text(), " must have the shape of ",
         reference.text(), ", ", expected.sizes(), ", but its shape is ", tensor.sizes());
}

void checkOneOf(const CallerInfo& caller, const Argument& argument, const at::Tensor& tensor,
                bool isOutput) {
  isOutput ? checkOutput(caller, argument, tensor) : checkTensor(caller, argument, tensor);
}

void checkList(const CallerInfo& caller, const char* name, const std::vector<at::Tensor>& tensors,
               const Argument& reference, const at::Tensor& expected, bool areOutputs,
               const char* wrongLength) {
  if (tensors.size() != static_cast<size_t>(caller.ranks)) {
    refuse(caller, wrongLength, *wrongLength == 0 ? "" : ": ", name,
           " must hold one tensor for each of the ", caller.ranks, " ranks, but it holds ",
           tensors.size());
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Argument argument{name, static_cast<int64_t>(i)};
    checkOneOf(caller, argument, tensors[i], areOutputs);
    checkSameType(caller, argument, tensors[i], reference, expected);
  }
}

void checkPerRank(const CallerInfo& caller, const char* name,
                  const std::vector<at::Tensor>& tensors, const Argument& reference,
                  const at::Tensor& expected, bool areOutputs, const char* wrongLength) {
  checkList(caller, name, tensors, reference, expected, areOutputs, wrongLength);
  checkSameShape(caller, Argument{name, caller.rank}, tensors[static_cast<size_t>(caller.rank)],
                 reference, expected);
}

const std::vector<at::Tensor>* checkRootList(const CallerInfo& caller, const char* name,
                                             const std::vector<std::vector<at::Tensor>>& lists,
                                             const Argument& reference, const at::Tensor& expected,
                                             int64_t root, bool areOutputs) {
  const char* const kind = areOutputs ? "output" : "input";
  if (root == caller.rank) {
    const std::vector<at::Tensor>& list = singleList(caller, name, lists, kind);
    checkPerRank(caller, name, list, reference, expected, areOutputs,
                 areOutputs ? "Incorrect output list size" : "Incorrect input list size");
    return &list;
  }
  if (lists.empty() || lists.front().empty()) return nullptr;
  refuse(caller, "requires empty ", kind, " on non-root: ", name, " must be empty except on rank ",
         root, areOutputs ? ", the destination" : ", the source", ", but it holds ",
         lists.front().size(), " tensors");
}

void checkRank(const CallerInfo& caller, const char* argument, int64_t rank, const char* words) {
  if (rank >= 0 && rank < caller.ranks) return;
  refuse(caller, words, argument, " must be a rank of the group, 0 to ", caller.ranks - 1,
         ", but it is ", rank);
}

void checkTimeout(const CallerInfo& caller, std::chrono::milliseconds timeout) {
  if (timeout.count() > 0) return;
  refuse(caller, "timeout must be positive, but it is ", timeout.count(), " ms");
}

ReduceOp checkReduceOp(const CallerInfo& caller, const c10d::ReduceOp& op, const at::Tensor& tensor,
                       DType dtype) {
  const c10d::ReduceOp::RedOpType type = op;
  if (type == c10d::ReduceOp::PREMUL_SUM) {
    if (!isPremultipliable(tensor.scalar_type())) {
      refuse(caller,
             "op PREMUL_SUM is for Float, Double, Half and BFloat16, but the tensor "
             "is ",
             c10::toString(tensor.scalar_type()));
    }
    if (dynamic_cast<const PreMulSum*>(op.supplement_.get()) == nullptr) {
      refuse(caller, "op PREMUL_SUM came without its factor");
    }
    return ReduceOp::kSum;
  }
  const ReduceOp reduceOp = toReduceOp(type);
  if (reduceOp != ReduceOp::kCount && isSupported(dtype, reduceOp)) [[likely]] {
    return reduceOp;
  }
  refuse(caller, "op ", name(type), " is not defined for tensors of ",
         c10::toString(tensor.scalar_type()));
}

void checkElements(const CallerInfo& caller, const Argument& argument, const at::Tensor& tensor,
                   int64_t expected, const char* why) {
  if (tensor.numel() == expected) return;
  refuse(caller, argument.text(), " must have ", expected, " elements (", why, "), but it has ",
         tensor.numel(), ", in shape ", tensor.sizes());
}

}  // namespace mycoll
