// scatter, reduce_scatter in all its forms, and all_to_all.
#include <c10/util/StringUtil.h>

#include <limits>

#include "backend/mycoll_backend.h"

namespace mycoll {
namespace {

// Returns the byte sizes of the parts into which all_to_all_single cuts a tensor, along its first
// dimension.
std::vector<size_t> partBytes(const CallSite& site, const char* tensorName, const char* splitsName,
                              const at::Tensor& tensor, const std::vector<int64_t>& splits) {
  const size_t ranks = static_cast<size_t>(site.ranks);
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  std::vector<size_t> bytes(ranks);
  if (splits.empty()) {
    if (tensor.numel() != 0 && (tensor.dim() == 0 || rows % site.ranks != 0)) {
      refuse(site, c10::str("without ", splitsName, ", the first dimension of ", tensorName,
                            " must be a multiple of the ", site.ranks, " ranks, but its shape is ",
                            tensor.sizes()));
    }
    bytes.assign(ranks, tensor.nbytes() / ranks);
    return bytes;
  }
  if (splits.size() != ranks) {
    refuse(site, c10::str(splitsName, " must hold one number for each of the ", site.ranks,
                          " ranks, but it holds ", splits.size()));
  }
  int64_t sum = 0;
  for (size_t i = 0; i < ranks; ++i) {
    if (splits[i] < 0) {
      refuse(site, c10::str(splitsName, "[", i, "] must not be negative, but it is ", splits[i]));
    }
    if (splits[i] > std::numeric_limits<int64_t>::max() - sum) {
      refuse(site, c10::str(splitsName, " must add up to the first dimension of ", tensorName,
                            ", whose shape is ", tensor.sizes(), ", but the sum is too large"));
    }
    sum += splits[i];
  }
  if (sum != rows || tensor.dim() == 0) {
    refuse(site, c10::str(splitsName, " must add up to the first dimension of ", tensorName,
                          ", whose shape is ", tensor.sizes(), ", but it adds up to ", sum));
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

}  // namespace

MycollBackend::WorkPtr MycollBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                              const c10d::ScatterOptions& opts) {
  const CallSite site = enter("scatter");
  const at::Tensor& output = single(site, "tensor", outputs, "output tensor");
  checkRoot(site, "src", opts.rootRank);
  checkOutput(site, Argument{"tensor"}, output);
  Request request(site, c10d::OpType::SCATTER, "mycoll:scatter", opts.timeout, opts.asyncOp);
  const Span out = request.output(output);
  Spans in;
  if (opts.rootRank == rank_) {
    const Tensors& list = singleList(site, "scatter_list", inputs, "input");
    checkPerRank(site, "scatter_list", list, Argument{"tensor"}, output, /*areOutputs=*/false,
                 "Incorrect input list size");
    checkSameShape(site, Argument{"scatter_list", rank_}, list[static_cast<size_t>(rank_)],
                   Argument{"tensor"}, output);
    in.reserve(list.size());
    for (const at::Tensor& input : list) in.push_back(request.input(input));
  } else if (!inputs.empty() && !inputs.front().empty()) {
    refuse(
        site,
        c10::str("requires empty input on non-root: scatter_list must be empty except on rank ",
                 opts.rootRank, ", the source, but it holds ", inputs.front().size(), " tensors"));
  }
  Call& call = request.addCall(OpKind::kScatter, output);
  call.root = static_cast<int>(opts.rootRank);
  call.in = std::move(in);
  call.out.push_back(out);
  request.separateInputs(call);
  return run(request, inputs.empty() ? at::TensorList() : at::TensorList(inputs.front()), outputs);
}

MycollBackend::WorkPtr MycollBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                     const c10d::ReduceScatterOptions& opts) {
  const CallSite site = enter("reduce_scatter");
  const at::Tensor& output = single(site, "output", outputs, "output tensor");
  const Tensors& list = singleList(site, "input_list", inputs, "input");
  checkOutput(site, Argument{"output"}, output);
  checkPerRank(site, "input_list", list, Argument{"output"}, output, /*areOutputs=*/false);
  checkSameShape(site, Argument{"input_list", rank_}, list[static_cast<size_t>(rank_)],
                 Argument{"output"}, output);
  Request request(site, c10d::OpType::REDUCE_SCATTER, "mycoll:reduce_scatter", opts.timeout,
                  opts.asyncOp);
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
  const CallSite site = enter("reduce_scatter_tensor");
  Request request(site, c10d::OpType::_REDUCE_SCATTER_BASE, "mycoll:reduce_scatter_tensor",
                  opts.timeout, opts.asyncOp);
  addReduceScatterFrom(request, output, input, opts.reduceOp, /*index=*/-1);
  return run(request, input, output);
}

void MycollBackend::addReduceScatterFrom(Request& request, const at::Tensor& output,
                                         const at::Tensor& input, const c10d::ReduceOp& op,
                                         int64_t index) {
  const Argument outputArgument{"output", index};
  const Argument inputArgument{"input", index};
  checkTensor(request.site, inputArgument, input);
  checkOutput(request.site, outputArgument, output);
  checkSameType(request.site, inputArgument, input, outputArgument, output);
  checkElements(request.site, inputArgument, input, output.numel() * size_,
                "the output's times the number of ranks");
  Call& call = request.addReduction(OpKind::kReduceScatter, output, op);
  const Span out = request.output(output);
  const Span whole = request.input(request.premultiply(input, op));
  request.addList(true);
  call.in = cut(whole, std::vector<size_t>(static_cast<size_t>(size_), out.bytes));
  call.out.push_back(out);
  request.separateInputs(call);
}

MycollBackend::WorkPtr MycollBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                    std::vector<int64_t>& outputSplits,
                                                    std::vector<int64_t>& inputSplits,
                                                    const c10d::AllToAllOptions& opts) {
  const CallSite site = enter("all_to_all_single");
  checkTensor(site, Argument{"input"}, input);
  checkOutput(site, Argument{"output"}, output);
  checkSameType(site, Argument{"output"}, output, Argument{"input"}, input);
  const std::vector<size_t> inBytes =
      partBytes(site, "input", "input_split_sizes", input, inputSplits);
  const std::vector<size_t> outBytes =
      partBytes(site, "output", "output_split_sizes", output, outputSplits);
  const size_t self = static_cast<size_t>(rank_);
  if (inBytes[self] != outBytes[self]) {
    refuse(site, c10::str("this rank's part for itself must be as large in output as in input, but "
                          "it has ",
                          outBytes[self] / output.itemsize(), " elements in output and ",
                          inBytes[self] / input.itemsize(), " in input"));
  }
  Request request(site, c10d::OpType::ALLTOALL_BASE, "mycoll:all_to_all_single", opts.timeout,
                  opts.asyncOp);
  const Span out = request.output(output);
  const Span in = request.input(input);
  request.addList(outputSplits.empty() && inputSplits.empty());
  Call& call = request.addCall(OpKind::kAllToAll, input);
  call.in = cut(in, inBytes);
  call.out = cut(out, outBytes);
  request.separateInputs(call);
  return run(request, input, output);
}

MycollBackend::WorkPtr MycollBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                               const c10d::AllToAllOptions& opts) {
  const CallSite site = enter("all_to_all");
  if (inputs.empty() || !inputs.front().defined()) {
    refuse(site, "input_tensor_list must hold one tensor for each rank, but it is empty");
  }
  checkPerRank(site, "input_tensor_list", inputs, Argument{"input_tensor_list", 0}, inputs.front(),
               /*areOutputs=*/false);
  checkPerRank(site, "output_tensor_list", outputs, Argument{"input_tensor_list", 0},
               inputs.front(), /*areOutputs=*/true);
  const size_t self = static_cast<size_t>(rank_);
  checkSameShape(site, Argument{"output_tensor_list", rank_}, outputs[self],
                 Argument{"input_tensor_list", rank_}, inputs[self]);
  Request request(site, c10d::OpType::ALLTOALL, "mycoll:all_to_all", opts.timeout, opts.asyncOp);
  Spans in;
  Spans out;
  in.reserve(inputs.size());
  out.reserve(outputs.size());
  for (const at::Tensor& output : outputs) out.push_back(request.output(output));
  for (const at::Tensor& input : inputs) in.push_back(request.input(input));
  Call& call = request.addCall(OpKind::kAllToAll, inputs.front());
  call.in = std::move(in);
  call.out = std::move(out);
  request.separateInputs(call);
  return run(request, inputs, outputs);
}

}  // namespace mycoll
