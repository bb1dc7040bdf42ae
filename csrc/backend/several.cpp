// broadcast, all_reduce and all_gather with several tensors of each rank in one call, which c10d's
// lists allow and gloo accepts. On the CPU only: on devices, one call has one tensor.
#include <c10/util/StringUtil.h>

#include "backend/mycoll_backend.h"
#include "kernels/reduce.h"

namespace mycoll {
namespace {

// Checks that all tensors are on the CPU and of one type and shape, and that outputs can be
// written.
void checkAlike(const CallSite& site, const char* name, const std::vector<at::Tensor>& tensors,
                bool areOutputs) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Argument argument{name, static_cast<int64_t>(i)};
    checkOneOf(site, argument, tensors[i], areOutputs);
    checkSameType(site, argument, tensors[i], Argument{name, 0}, tensors[0]);
    checkSameShape(site, argument, tensors[i], Argument{name, 0}, tensors[0]);
    if (tensors[i].device().is_cpu()) continue;
    refuse(site, c10::str(name, " must be one tensor on ", tensors[i].device(), ", but ",
                          tensors.size(), " came"));
  }
}

}  // namespace

// Copies the root's tensor number rootTensor to all tensors of all ranks.
MycollBackend::WorkPtr MycollBackend::broadcastSeveral(const CallSite& site, Tensors& tensors,
                                                       const c10d::BroadcastOptions& opts) {
  checkAlike(site, "tensors", tensors, /*areOutputs=*/true);
  Request request(site, c10d::OpType::BROADCAST, "mycoll:broadcast", opts.timeout, opts.asyncOp);
  const at::Tensor& root = tensors[static_cast<size_t>(opts.rootTensor)];
  const at::Tensor whole = emptyElements(root.numel(), root.scalar_type());
  if (opts.rootRank == rank_) pack(root, whole.mutable_data_ptr());
  for (const at::Tensor& tensor : tensors) request.copyBacks.emplace_back(whole, tensor);
  Call& call = request.addCall(OpKind::kBroadcast, whole);
  call.root = static_cast<int>(opts.rootRank);
  call.out.push_back(request.output(whole));
  return run(request, tensors, tensors);
}

// Reduces all tensors of all ranks.
MycollBackend::WorkPtr MycollBackend::allReduceSeveral(const CallSite& site, Tensors& tensors,
                                                       const c10d::AllreduceOptions& opts) {
  checkAlike(site, "tensors", tensors, /*areOutputs=*/true);
  const c10d::ReduceOp::RedOpType type = opts.reduceOp;
  if (type == c10d::ReduceOp::AVG || type == c10d::ReduceOp::PREMUL_SUM) {
    refuse(site, c10::str("op must not be AVG or PREMUL_SUM for several tensors, and ",
                          tensors.size(), " came"));
  }
  Request request(site, c10d::OpType::ALLREDUCE, "mycoll:all_reduce", opts.timeout, opts.asyncOp);
  const at::Tensor whole = emptyElements(tensors[0].numel(), tensors[0].scalar_type());
  Call& call = request.addReduction(OpKind::kAllReduce, whole, opts.reduceOp);
  Tensors plain;
  std::vector<const void*> inputs;
  for (const at::Tensor& tensor : tensors) {
    plain.push_back(isPlain(tensor) ? tensor : emptyLike(tensor));
    if (!isPlain(tensor)) pack(tensor, plain.back().mutable_data_ptr());
    inputs.push_back(plain.back().const_data_ptr());
    request.copyBacks.emplace_back(whole, tensor);
  }
  if (whole.numel() > 0) {
    mycoll::reduce(call.dtype, call.reduceOp, whole.mutable_data_ptr(), inputs.data(),
                   static_cast<int>(inputs.size()), whole.nbytes() / call.elementBytes,
                   /*divisor=*/1,
                   /*streaming=*/false);
  }
  call.in.push_back(request.inOut(whole));
  call.out.push_back(call.in.front());
  return run(request, tensors, tensors);
}

// Every list receives all tensors of all ranks, those of rank 0 first.
MycollBackend::WorkPtr MycollBackend::allGatherSeveral(const CallSite& site, TensorLists& outputs,
                                                       Tensors& inputs,
                                                       const c10d::AllgatherOptions& opts) {
  checkAlike(site, "tensors", inputs, /*areOutputs=*/false);
  const size_t count = inputs.size() * static_cast<size_t>(size_);
  Tensors all{inputs[0]};
  for (const Tensors& list : outputs) {
    if (list.size() != count) {
      refuse(site, c10::str("invalid output tensor list: every one must hold ", count, " tensors, ",
                            inputs.size(), " for each rank, but one holds ", list.size()));
    }
    all.insert(all.end(), list.begin(), list.end());
  }
  checkAlike(site, "tensor_lists", all, /*areOutputs=*/false);
  Request request(site, c10d::OpType::ALLGATHER, "mycoll:all_gather", opts.timeout, opts.asyncOp);
  request.perList = count;
  const auto bytes = static_cast<int64_t>(inputs[0].nbytes());
  const auto each = inputs[0].numel() * static_cast<int64_t>(inputs.size());
  const at::Tensor mine = emptyElements(each, inputs[0].scalar_type());
  const at::Tensor whole = emptyElements(each * size_, inputs[0].scalar_type());
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (bytes == 0) break;
    pack(inputs[i], static_cast<char*>(mine.mutable_data_ptr()) + static_cast<int64_t>(i) * bytes);
  }
  for (const Tensors& list : outputs) {
    for (size_t i = 0; i < count; ++i) {
      checkOutput(site, Argument{"tensor_lists", static_cast<int64_t>(i)}, list[i]);
      request.copyBacks.emplace_back(whole, list[i], static_cast<int64_t>(i) * bytes);
    }
  }
  addAllGatherInto(request, whole, mine, /*index=*/-1);
  return run(request, inputs, at::TensorList(all).slice(1));
}

}  // namespace mycoll
