#include "backend/validation.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

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

void refuse(const CallSite& site, const std::string& what) {
  const std::string prefix = site.group == nullptr ? "" : "mycoll group '" + *site.group + "': ";
  throwArgumentError(
      c10::str(prefix, site.function, ": ", what, " (rank ", site.rank, " of ", site.ranks, ")"));
}

void refuseTensor(const CallSite& site, const Argument& argument, const at::Tensor& tensor) {
  const std::string name = argument.text();
  if (!tensor.defined()) refuse(site, name + " must be a tensor, but it is undefined");
  if (tensor.is_meta()) {
    refuse(site, name + " must have memory, but it is on the meta device");
  }
  if (tensor.is_nested()) {
    refuse(site, name + " must be a dense tensor, but it is a nested one");
  }
  if (tensor.is_quantized()) {
    refuse(site,
           c10::str(name, " must not be quantized, but it is ", c10::toString(tensor.scalar_type()),
                    "; pass its int_repr(), and its scale and zero point beside it"));
  }
  const std::string where = argument.index < 0 ? "" : c10::str(" at index ", argument.index);
  refuse(site,
         c10::str("invalid tensor layout", where, ": ", name,
                  " must be a dense tensor, but has the unsupported layout ", tensor.layout()));
}

void checkOutput(const CallSite& site, const Argument& argument, const at::Tensor& tensor) {
  checkTensor(site, argument, tensor);
  if (tensor.is_neg() && !tensor.is_floating_point() && !tensor.is_complex()) {
    refuse(site, c10::str(argument.text(), " must not be a lazily negated tensor of ",
                          c10::toString(tensor.scalar_type()), "; call resolve_neg() on it"));
  }
  if (tensor.is_contiguous()) return;
  if (mayOverlapItself(tensor)) {
    refuse(site,
           c10::str(argument.text(),
                    " is written to, so its elements must not share memory, but it has "
                    "shape ",
                    tensor.sizes(), " and strides ", tensor.strides(), "; pass a clone() of it"));
  }
}

const at::Tensor& single(const CallSite& site, const char* name,
                         const std::vector<at::Tensor>& tensors, const char* kind) {
  if (tensors.size() != 1) [[unlikely]] {
    refuse(site, c10::str("requires a single-element ", kind, " list: ", name,
                          " must be one tensor, but ", tensors.size(), " came"));
  }
  return tensors.front();
}

const std::vector<at::Tensor>& singleList(const CallSite& site, const char* name,
                                          const std::vector<std::vector<at::Tensor>>& lists,
                                          const char* kind) {
  if (lists.size() != 1) [[unlikely]] {
    refuse(site, c10::str("requires a single-element ", kind, " list: ", name,
                          " must be one list of tensors, but ", lists.size(), " came"));
  }
  return lists.front();
}

void checkListForEach(const CallSite& site, const std::vector<std::vector<at::Tensor>>& lists,
                      const std::vector<at::Tensor>& tensors) {
  if (lists.size() == tensors.size()) [[likely]] {
    return;
  }
  refuse(site, c10::str("requires input/output tensor lists to have the same length: there are ",
                        lists.size(), " output lists and ", tensors.size(), " inputs"));
}

void checkSameType(const CallSite& site, const Argument& argument, const at::Tensor& tensor,
                   const Argument& reference, const at::Tensor& expected) {
  if (tensor.scalar_type() == expected.scalar_type()) [[likely]] {
    return;
  }
  refuse(site, c10::str("invalid tensor type: ", argument.text(), " must be of the same dtype as ",
                        reference.text(), ", ", c10::toString(expected.scalar_type()),
                        ", but it is ", c10::toString(tensor.scalar_type())));
}

void checkSameShape(const CallSite& site, const Argument& argument, const at::Tensor& tensor,
                    const Argument& reference, const at::Tensor& expected) {
  if (tensor.sizes() == expected.sizes()) [[likely]] {
    return;
  }
  refuse(site,
         c10::str("invalid tensor size: ", argument.text(), " must have the shape of ",
                  reference.text(), ", ", expected.sizes(), ", but its shape is ", tensor.sizes()));
}

void checkOneOf(const CallSite& site, const Argument& argument, const at::Tensor& tensor,
                bool isOutput) {
  isOutput ? checkOutput(site, argument, tensor) : checkTensor(site, argument, tensor);
}

void checkPerRank(const CallSite& site, const char* name, const std::vector<at::Tensor>& tensors,
                  const Argument& reference, const at::Tensor& expected, bool areOutputs,
                  const char* wrongLength) {
  if (tensors.size() != static_cast<size_t>(site.ranks)) {
    refuse(site, c10::str(wrongLength, *wrongLength == 0 ? "" : ": ", name,
                          " must hold one tensor for each of the ", site.ranks,
                          " ranks, but it holds ", tensors.size()));
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Argument argument{name, static_cast<int64_t>(i)};
    checkOneOf(site, argument, tensors[i], areOutputs);
    checkSameType(site, argument, tensors[i], reference, expected);
  }
}

void checkRank(const CallSite& site, const char* argument, int64_t rank, const char* words) {
  if (rank >= 0 && rank < site.ranks) [[likely]] {
    return;
  }
  refuse(site, c10::str(words, argument, " must be a rank of the group, 0 to ", site.ranks - 1,
                        ", but it is ", rank));
}

void checkRootTensor(const CallSite& site, int64_t index, const std::vector<at::Tensor>& tensors) {
  if (index >= 0 && index < static_cast<int64_t>(tensors.size())) [[likely]] {
    return;
  }
  refuse(site, c10::str("invalid root tensor: rootTensor must be the number of one of the ",
                        tensors.size(), " tensors, but it is ", index));
}

void checkTimeout(const CallSite& site, std::chrono::milliseconds timeout) {
  if (timeout.count() > 0) return;
  refuse(site, c10::str("timeout must be positive, but it is ", timeout.count(), " ms"));
}

ReduceOp checkReduceOp(const CallSite& site, const c10d::ReduceOp& op, const at::Tensor& tensor,
                       DType dtype) {
  const c10d::ReduceOp::RedOpType type = op;
  if (type == c10d::ReduceOp::PREMUL_SUM) {
    if (!isPremultipliable(tensor.scalar_type())) {
      refuse(site, c10::str("op PREMUL_SUM is for Float, Double, Half and BFloat16, but the tensor "
                            "is ",
                            c10::toString(tensor.scalar_type())));
    }
    if (dynamic_cast<const PreMulSum*>(op.supplement_.get()) == nullptr) {
      refuse(site, "op PREMUL_SUM came without its factor");
    }
    return ReduceOp::kSum;
  }
  const ReduceOp reduceOp = toReduceOp(type);
  if (reduceOp != ReduceOp::kCount && isSupported(dtype, reduceOp)) [[likely]] {
    return reduceOp;
  }
  refuse(site, c10::str("op ", name(type), " is not defined for tensors of ",
                        c10::toString(tensor.scalar_type())));
}

void checkElements(const CallSite& site, const Argument& argument, const at::Tensor& tensor,
                   int64_t expected, const char* why) {
  if (tensor.numel() == expected) [[likely]] {
    return;
  }
  refuse(site, c10::str(argument.text(), " must have ", expected, " elements (", why,
                        "), but it has ", tensor.numel(), ", in shape ", tensor.sizes()));
}

}  // namespace mycoll
