// scatter, reduce_scatter in all its forms, and all_to_all.
#include <limits>

#include "backend/mycoll_backend.h"

namespace mycoll {
namespace {

// Returns the byte sizes of the parts into which all_to_all_single cuts a tensor, along its first
// dimension. areRows: false if there are no splits at all. The tensor may then be cut anywhere.
std::vector<size_t> partBytes(const CallerInfo& caller, const char* tensorName,
                              const char* splitsName, const at::Tensor& tensor,
                              const std::vector<int64_t>& splits, bool areRows) {
  const size_t ranks = static_cast<size_t>(caller.ranks);
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  std::vector<size_t> bytes(ranks);
  if (splits.empty()) {
    const bool isEven =
        areRows ? tensor.dim() > 0 && rows % caller.ranks == 0 : tensor.numel() % caller.ranks == 0;
    if (tensor.numel() != 0 && !isEven) {
      refuse(caller, "without ", splitsName, ", the ",
             areRows ? "first dimension" : "number of elements", " of ", tensorName,
             " must be a multiple of the ", caller.ranks, " ranks, but its shape is ",
             tensor.sizes());
    }
    bytes.assign(ranks, tensor.nbytes() / ranks);
    return bytes;
  }
  if (splits.size() != ranks) {
    refuse(caller, splitsName, " must hold one number for each of the ", caller.ranks,
           " ranks, but it holds ", splits.size());
  }
  int64_t sum = 0;
  for (size_t i = 0; i < ranks; ++i) {
    if (splits[i] < 0) {
      refuse(caller, splitsName, "[", i, "] must not be negative, but it is ", splits[i]);
    }
    if (splits[i] > std::numeric_limits<int64_t>::max() - sum) {
      refuse(caller, splitsName, " must add up to the first dimension of ", tensorName,
             ", whose shape is ", tensor.sizes(), ", but the sum is too large");
    }
    sum += splits[i];
  }
  if (sum != rows || tensor.dim() == 0) {
    refuse(caller, splitsName, " must add up to the first dimension of ", tensorName,
           ", whose shape is ", tensor.sizes(), ", but it adds up to ", sum);
  }
  const size_t rowBytes = rows == 0 ? 0 : tensor.nbytes() / static_cast<size_t>(rows);
  for (size_t i = 0; i < ranks; ++i) bytes[i] = static_cast<size_t>(splits[i]) * rowBytes;
  return bytes;
}

Spans cut(const Span& whole, const std::vector<size_t>& partBytes) {
  Spans parts;
  parts.reserve(partBytes.size());
  size_t offset = 0;
  for (const size_t bytes : partBytes) {
    parts.push_back(Span{bytes == 0 ? nullptr : whole.begin() + offset, bytes});
    offset += bytes;
  }
  return parts;
}

void addReduceScatterFrom(Request& request, const at::Tensor& output, const at::Tensor& input,
                          const c10d::ReduceOp& op, int64_t index) {
  const int ranks = request.caller.ranks;
  const Argument outputArgument{"output", index};
  const Argument inputArgument{"input", index};
  checkTensor(request.caller, inputArgument, input);
  checkOutput(request.caller, outputArgument, output);
  checkSameType(request.caller, inputArgument, input, outputArgument, output);
  checkElements(request.caller, inputArgument, input, output.numel() * ranks,
                "the output's times the number of ranks");
  Call& call = request.addReduction(OpKind::kReduceScatter, output, op);
  const Span out = request.output(output);
  const Span whole = request.input(request.premultiply(input, op));
  request.addList(true);
  call.in = cut(whole, ranks);
  call.out.push_back(out);
  request.separateInputs(call);
}

}  // namespace

MycollBackend::WorkPtr MycollBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                              const c10d::ScatterOptions& opts) {
  const UserCall caller = enter("scatter");
  const at::Tensor& output = single(caller, "tensor", outputs, "output tensor");
  checkRoot(caller, "src", opts.rootRank);
  checkOutput(caller, Argument{"tensor"}, output);
  const Tensors* const list = checkRootList(caller, "scatter_list", inputs, Argument{"tensor"},
                                            output, opts.rootRank, /*areOutputs=*/false);
  Request request(caller, c10d::OpType::SCATTER, opts);
  const Span out = request.output(output);
  Spans in = list ? request.oneByOne(*list, /*areOutputs=*/false) : Spans();
  Call& call = request.addCall(OpKind::kScatter, output, std::move(in), {out});
  call.root = static_cast<int>(opts.rootRank);
  return run(request, inputs.empty() ? at::TensorList() : at::TensorList(inputs.front()), outputs);
}

MycollBackend::WorkPtr MycollBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                     const c10d::ReduceScatterOptions& opts) {
  const UserCall caller = enter("reduce_scatter");
  const at::Tensor& output = single(caller, "output", outputs, "output tensor");
  const Tensors& list = singleList(caller, "input_list", inputs, "input");
  checkOutput(caller, Argument{"output"}, output);
  checkPerRank(caller, "input_list", list, Argument{"output"}, output, /*areOutputs=*/false);
  Request request(caller, c10d::OpType::REDUCE_SCATTER, opts);
  Call& call = request.addReduction(OpKind::kReduceScatter, output, opts.reduceOp);
  call.out.push_back(request.output(output));
  Tensors factored;
  factored.reserve(list.size());
  for (const at::Tensor& input : list) {
    factored.push_back(request.premultiply(input, opts.reduceOp));
  }
  call.in = request.inputs(factored);
  request.separateInputs(call);
  return run(request, list, outputs);
}

MycollBackend::WorkPtr MycollBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                           const c10d::ReduceScatterOptions& opts) {
  const UserCall caller = enter("reduce_scatter_tensor");
  Request request(caller, c10d::OpType::_REDUCE_SCATTER_BASE, opts);
  addReduceScatterFrom(request, output, input, opts.reduceOp, /*index=*/-1);
  return run(request, input, output);
}

MycollBackend::WorkPtr MycollBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                    std::vector<int64_t>& outputSplits,
                                                    std::vector<int64_t>& inputSplits,
                                                    const c10d::AllToAllOptions& opts) {
  const UserCall caller = enter("all_to_all_single");
  checkTensor(caller, Argument{"input"}, input);
  checkOutput(caller, Argument{"output"}, output);
  checkSameType(caller, Argument{"output"}, output, Argument{"input"}, input);
  const bool areRows = !inputSplits.empty() || !outputSplits.empty();
  const std::vector<size_t> inBytes =
      partBytes(caller, "input", "input_split_sizes", input, inputSplits, areRows);
  const std::vector<size_t> outBytes =
      partBytes(caller, "output", "output_split_sizes", output, outputSplits, areRows);
  const size_t self = static_cast<size_t>(caller.rank);
  if (inBytes[self] != outBytes[self]) {
    refuse(caller,
           "this rank's part for itself must be as large in output as in input, but "
           "it has ",
           outBytes[self] / output.itemsize(), " elements in output and ",
           inBytes[self] / input.itemsize(), " in input");
  }
  Request request(caller, c10d::OpType::ALLTOALL_BASE, opts);
  const Span out = request.output(output);
  const Span in = request.input(input);
  request.addCall(OpKind::kAllToAll, input, cut(in, inBytes), cut(out, outBytes));
  return run(request, input, output);
}

MycollBackend::WorkPtr MycollBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                               const c10d::AllToAllOptions& opts) {
  const UserCall caller = enter("all_to_all");
  if (inputs.empty() || !inputs.front().defined()) {
    refuse(caller, "input_tensor_list must hold one tensor for each rank, but it is empty");
  }
  checkList(caller, "input_tensor_list", inputs, Argument{"input_tensor_list", 0}, inputs.front(),
            /*areOutputs=*/false);
  checkList(caller, "output_tensor_list", outputs, Argument{"input_tensor_list", 0}, inputs.front(),
            /*areOutputs=*/true);
  const size_t self = static_cast<size_t>(caller.rank);
  checkSameShape(caller, Argument{"output_tensor_list", caller.rank}, outputs[self],
                 Argument{"input_tensor_list", caller.rank}, inputs[self]);
  Request request(caller, c10d::OpType::ALLTOALL, opts);
  Spans out = request.oneByOne(outputs, /*areOutputs=*/true);
  request.addCall(OpKind::kAllToAll, inputs.front(), request.oneByOne(inputs, /*areOutputs=*/false),
                  std::move(out));
  return run(request, inputs, outputs);
}

MycollBackend::WorkPtr MycollBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  const UserCall caller = enter("reduce_scatter_tensor_coalesced");
  checkPairs(caller, outputs, inputs);
  Request request(caller, c10d::OpType::COALESCED, opts);
  for (size_t i = 0; i < inputs.size(); ++i) {
    addReduceScatterFrom(request, outputs[i], inputs[i], opts.reduceOp, static_cast<int64_t>(i));
  }
  return run(request, inputs, outputs);
}

}  // namespace mycoll
