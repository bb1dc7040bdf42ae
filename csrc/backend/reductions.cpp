// broadcast, all_reduce, reduce, and the barriers.
#include "backend/errors.h"
#include "backend/mycoll_backend.h"

namespace mycoll {
namespace {

Task fencedBarrier(std::shared_ptr<Condition> fence, CollectiveRunner& runner) {
  co_await *fence;
  Call barrier;
  barrier.kind = OpKind::kBarrier;
  Status status = co_await runner.run(std::move(barrier));
  co_return status;
}

}  // namespace

MycollBackend::WorkPtr MycollBackend::broadcast(Tensors& tensors,
                                                const c10d::BroadcastOptions& opts) {
  const CallSite site = enter("broadcast");
  const at::Tensor& tensor = single(site, "tensor", tensors);
  checkRank(site, "src", opts.rootRank);
  const bool isRoot = opts.rootRank == rank_;
  if (isRoot) {
    checkTensor(site, Argument{"tensor"}, tensor);
  } else {
    checkOutput(site, Argument{"tensor"}, tensor);
  }
  Request request(site, c10d::OpType::BROADCAST, "mycoll:broadcast", opts.timeout, opts.asyncOp);
  const Span span = isRoot ? request.input(tensor) : request.output(tensor);
  Call& call = request.addCall(OpKind::kBroadcast, tensor);
  call.root = static_cast<int>(opts.rootRank);
  call.out.push_back(span);
  return run(request, tensors);
}

MycollBackend::WorkPtr MycollBackend::allreduce(Tensors& tensors,
                                                const c10d::AllreduceOptions& opts) {
  const CallSite site = enter("all_reduce");
  const at::Tensor& given = single(site, "tensor", tensors);
  // Torch sends sparse CPU tensors this way, not to allreduce_sparse().
  if (given.defined() && given.layout() == at::kSparse) [[unlikely]] {
    return allreduce_sparse(tensors, opts);
  }
  at::Tensor narrowed;
  const bool isAsGiven = !given.defined() || given.is_contiguous();
  const at::Tensor& tensor = isAsGiven ? given : (narrowed = withoutRepeats(given));
  checkOutput(site, Argument{"tensor"}, tensor);
  Request request(site, c10d::OpType::ALLREDUCE, "mycoll:all_reduce", opts.timeout, opts.asyncOp);
  addAllReduce(request, tensor, opts.reduceOp);
  return run(request, tensors);
}

void MycollBackend::addAllReduce(Request& request, const at::Tensor& tensor,
                                 const c10d::ReduceOp& op) {
  const ReduceOp reduceOp = checkReduceOp(request.site, op, tensor);
  Span in;
  Span out;
  if (op.op_ == c10d::ReduceOp::PREMUL_SUM) {
    in = request.input(request.premultiply(tensor, op));
    out = request.output(tensor);
  } else {
    in = out = request.inOut(tensor);
  }
  Call& call = request.addCall(OpKind::kAllReduce, tensor);
  call.reduceOp = reduceOp;
  call.in.push_back(in);
  call.out.push_back(out);
}

MycollBackend::WorkPtr MycollBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const CallSite site = enter("reduce");
  const at::Tensor& tensor = single(site, "tensor", tensors);
  checkRank(site, "dst", opts.rootRank);
  const bool isRoot = opts.rootRank == rank_;
  if (isRoot) {
    checkOutput(site, Argument{"tensor"}, tensor);
  } else {
    checkTensor(site, Argument{"tensor"}, tensor);
  }
  const ReduceOp reduceOp = checkReduceOp(site, opts.reduceOp, tensor);
  Request request(site, c10d::OpType::REDUCE, "mycoll:reduce", opts.timeout, opts.asyncOp);
  const bool isInPlace = isRoot && opts.reduceOp.op_ != c10d::ReduceOp::PREMUL_SUM;
  const Span in =
      isInPlace ? request.inOut(tensor) : request.input(request.premultiply(tensor, opts.reduceOp));
  Call& call = request.addCall(OpKind::kReduce, tensor);
  call.reduceOp = reduceOp;
  call.root = static_cast<int>(opts.rootRank);
  call.in.push_back(in);
  if (isRoot) call.out.push_back(isInPlace ? in : request.output(tensor));
  return run(request, tensors);
}

MycollBackend::WorkPtr MycollBackend::barrier(const c10d::BarrierOptions& opts) {
  // device_ids tell NCCL which devices to use; ranks that meet on the CPU need none.
  const CallSite site = enter("barrier");
  Request request(site, c10d::OpType::BARRIER, "mycoll:barrier", opts.timeout, opts.asyncOp);
  // What was enqueued before it on devices is over behind it, as with NCCL's.
  const std::shared_ptr<Condition> fence = device_ ? device_->fence() : nullptr;
  if (fence && opts.asyncOp) {
    request.compositeKind = OpKind::kBarrier;
    request.composite = [fence](CollectiveRunner& runner) { return fencedBarrier(fence, runner); };
    return run(request, at::TensorList());
  }
  if (fence) throwIfFailed(device_->waitFor(*fence));
  request.calls.emplace_back().kind = OpKind::kBarrier;
  return run(request, at::TensorList());
}

void MycollBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool waitAllRanks) {
  const CallSite site = enter("monitored_barrier");
  Request request(site, c10d::OpType::BARRIER, "mycoll:monitored_barrier", opts.timeout,
                  /*isAsync=*/false);
  Call& call = request.calls.emplace_back();
  call.kind = OpKind::kMonitoredBarrier;
  call.waitAllRanks = waitAllRanks;
  run(request, at::TensorList());
}

}  // namespace mycoll
