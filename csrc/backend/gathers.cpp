// all_gather in all its forms, and gather.
#include "backend/mycoll_backend.h"

namespace mycoll {
namespace {

// Ranks may pass different shapes: every rank knows all of them from its outputs.
void addAllGatherList(Request& request, const std::vector<at::Tensor>& outputs,
                      const at::Tensor& input) {
  checkPerRank(request.caller, "tensor_list", outputs, Argument{"tensor"}, input,
               /*areOutputs=*/true, "invalid output tensor list");
  Spans out = request.outputs(outputs);
  request.addCall(OpKind::kAllGather, input, {request.input(input)}, std::move(out));
}

void addAllGatherInto(Request& request, const at::Tensor& output, const at::Tensor& input,
                      int64_t index) {
  const int ranks = request.caller.ranks;
  const Argument outputArgument{"output_tensor", index};
  const Argument inputArgument{"input_tensor", index};
  checkTensor(request.caller, inputArgument, input);
  checkOutput(request.caller, outputArgument, output);
  checkSameType(request.caller, outputArgument, output, inputArgument, input);
  // Any shape with the right number of elements: concatenated, stacked, or SyncBatchNorm's (1, n).
  checkElements(request.caller, outputArgument, output, input.numel() * ranks,
                "the input's times the number of ranks");
  const Span whole = request.output(output);
  const Span in = request.input(input);
  request.addList(true);
  request.addCall(OpKind::kAllGather, input, {in}, cut(whole, ranks));
}

}  // namespace

MycollBackend::WorkPtr MycollBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                                const c10d::AllgatherOptions& opts) {
  const UserCall caller = enter("all_gather");
  const at::Tensor& input = single(caller, "tensor", inputs, "input tensor");
  const Tensors& list = singleList(caller, "tensor_list", outputs, "output");
  Request request(caller, c10d::OpType::ALLGATHER, opts);
  checkTensor(caller, Argument{"tensor"}, input);
  addAllGatherList(request, list, input);
  return run(request, inputs, list);
}

MycollBackend::WorkPtr MycollBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::AllgatherOptions& opts) {
  const UserCall caller = enter("all_gather_into_tensor");
  Request request(caller, c10d::OpType::_ALLGATHER_BASE, opts);
  addAllGatherInto(request, output, input, /*index=*/-1);
  return run(request, input, output);
}

MycollBackend::WorkPtr MycollBackend::gather(TensorLists& outputs, Tensors& inputs,
                                             const c10d::GatherOptions& opts) {
  const UserCall caller = enter("gather");
  const at::Tensor& input = single(caller, "tensor", inputs, "input tensor");
  checkRoot(caller, "dst", opts.rootRank);
  checkTensor(caller, Argument{"tensor"}, input);
  const Tensors* const list = checkRootList(caller, "gather_list", outputs, Argument{"tensor"},
                                            input, opts.rootRank, /*areOutputs=*/true);
  Request request(caller, c10d::OpType::GATHER, opts);
  Spans out = list ? request.oneByOne(*list, /*areOutputs=*/true) : Spans();
  Call& call = request.addCall(OpKind::kGather, input, {request.input(input)}, std::move(out));
  call.root = static_cast<int>(opts.rootRank);
  return run(request, inputs, list ? at::TensorList(*list) : at::TensorList());
}

MycollBackend::WorkPtr MycollBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                          const c10d::AllgatherOptions& opts) {
  const UserCall caller = enter("all_gather_coalesced");
  if (inputs.empty()) refuse(caller, "input_tensor_list must hold a tensor, but it is empty");
  // output_tensor_lists[rank][i] receives inputs[i] of that rank.
  if (outputs.size() != static_cast<size_t>(caller.ranks)) {
    refuse(caller,
           "output lists should be equal to world size: output_tensor_lists must "
           "hold one list for each of the ",
           caller.ranks, " ranks, but it holds ", outputs.size());
  }
  for (size_t rank = 0; rank < outputs.size(); ++rank) {
    if (outputs[rank].size() == inputs.size()) continue;
    refuse(caller, "output_tensor_lists[", rank, "] must hold one tensor for each of the ",
           inputs.size(), " inputs, but it holds ", outputs[rank].size());
  }
  Request request(caller, c10d::OpType::ALLGATHER_COALESCED, opts);
  request.perList = inputs.size();
  for (size_t i = 0; i < inputs.size(); ++i) {
    checkTensor(caller, Argument{"input_tensor_list", static_cast<int64_t>(i)}, inputs[i]);
    Tensors column;
    for (const Tensors& row : outputs) column.push_back(row[i]);
    addAllGatherList(request, column, inputs[i]);
  }
  Tensors results;
  for (const Tensors& row : outputs) results.insert(results.end(), row.begin(), row.end());
  return run(request, inputs, results);
}

MycollBackend::WorkPtr MycollBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  const UserCall caller = enter("all_gather_into_tensor_coalesced");
  checkPairs(caller, outputs, inputs);
  Request request(caller, c10d::OpType::COALESCED, opts);
  for (size_t i = 0; i < inputs.size(); ++i) {
    addAllGatherInto(request, outputs[i], inputs[i], static_cast<int64_t>(i));
  }
  return run(request, inputs, outputs);
}

}  // namespace mycoll
