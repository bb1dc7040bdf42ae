// all_gather in all its forms, and gather.
#include <c10/util/StringUtil.h>

#include "backend/mycoll_backend.h"

namespace mycoll {

MycollBackend::WorkPtr MycollBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                                const c10d::AllgatherOptions& opts) {
  const CallSite site = enter("all_gather");
  if (inputs.empty()) refuse(site, "requires non-empty input tensor list: no tensor came");
  checkListForEach(site, outputs, inputs);
  if (inputs.size() > 1) return allGatherSeveral(site, outputs, inputs, opts);
  const at::Tensor& input = inputs.front();
  const Tensors& list = outputs.front();
  checkTensor(site, Argument{"tensor"}, input);
  Request request(site, c10d::OpType::ALLGATHER, "mycoll:all_gather", opts.timeout, opts.asyncOp);
  addAllGatherList(request, list, input);
  return run(request, inputs, list);
}

void MycollBackend::addAllGatherList(Request& request, const Tensors& outputs,
                                     const at::Tensor& input) {
  // Ranks may pass different shapes: every rank knows all of them from its outputs. In place of
  // gloo (shown_), all shapes must be equal.
  const Argument inputArgument{"tensor"};
  checkPerRank(request.site, "tensor_list", outputs, inputArgument, input, /*areOutputs=*/true,
               "invalid output tensor list");
  for (int rank = 0; rank < size_; ++rank) {
    if (shown_ == nullptr && rank != rank_) continue;
    checkSameShape(request.site, Argument{"tensor_list", rank}, outputs[static_cast<size_t>(rank)],
                   inputArgument, input);
  }
  Spans out = request.outputs(outputs);
  const Span in = request.input(input);
  Call& call = request.addCall(OpKind::kAllGather, input);
  call.in.push_back(in);
  call.out = std::move(out);
  request.separateInputs(call);
}

MycollBackend::WorkPtr MycollBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::AllgatherOptions& opts) {
  const CallSite site = enter("all_gather_into_tensor");
  Request request(site, c10d::OpType::_ALLGATHER_BASE, "mycoll:all_gather_into_tensor",
                  opts.timeout, opts.asyncOp);
  addAllGatherInto(request, output, input, /*index=*/-1);
  return run(request, input, output);
}

void MycollBackend::addAllGatherInto(Request& request, const at::Tensor& output,
                                     const at::Tensor& input, int64_t index) {
  const Argument outputArgument{"output_tensor", index};
  const Argument inputArgument{"input_tensor", index};
  checkTensor(request.site, inputArgument, input);
  checkOutput(request.site, outputArgument, output);
  checkSameType(request.site, outputArgument, output, inputArgument, input);
  // Any shape with the right number of elements: concatenated, stacked, or SyncBatchNorm's (1, n).
  checkElements(request.site, outputArgument, output, input.numel() * size_,
                "the input's times the number of ranks");
  const Span whole = request.output(output);
  const Span in = request.input(input);
  request.addList(true);
  Call& call = request.addCall(OpKind::kAllGather, input);
  call.in.push_back(in);
  call.out.reserve(static_cast<size_t>(size_));
  for (int i = 0; i < size_; ++i) {
    call.out.push_back(Span{
        in.bytes == 0 ? nullptr : whole.begin() + static_cast<size_t>(i) * in.bytes, in.bytes});
  }
  request.separateInputs(call);
}

MycollBackend::WorkPtr MycollBackend::gather(TensorLists& outputs, Tensors& inputs,
                                             const c10d::GatherOptions& opts) {
  const CallSite site = enter("gather");
  const at::Tensor& input = single(site, "tensor", inputs, "input tensor");
  checkRoot(site, "dst", opts.rootRank);
  checkTensor(site, Argument{"tensor"}, input);
  Request request(site, c10d::OpType::GATHER, "mycoll:gather", opts.timeout, opts.asyncOp);
  const bool isRoot = opts.rootRank == rank_;
  Spans out;
  if (isRoot) {
    const Tensors& list = singleList(site, "gather_list", outputs, "output");
    checkPerRank(site, "gather_list", list, Argument{"tensor"}, input, /*areOutputs=*/true,
                 "Incorrect output list size");
    checkSameShape(site, Argument{"gather_list", rank_}, list[static_cast<size_t>(rank_)],
                   Argument{"tensor"}, input);
    out.reserve(list.size());
    for (const at::Tensor& output : list) out.push_back(request.output(output));
  } else if (!outputs.empty() && !outputs.front().empty()) {
    refuse(site,
           c10::str("requires empty output on non-root: gather_list must be empty except on rank ",
                    opts.rootRank, ", the destination, but it holds ", outputs.front().size(),
                    " tensors"));
  }
  const Span in = request.input(input);
  Call& call = request.addCall(OpKind::kGather, input);
  call.root = static_cast<int>(opts.rootRank);
  call.in.push_back(in);
  call.out = std::move(out);
  request.separateInputs(call);
  return run(request, inputs, isRoot ? at::TensorList(outputs.front()) : at::TensorList());
}

}  // namespace mycoll
