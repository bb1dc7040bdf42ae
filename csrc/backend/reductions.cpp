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
  checkRoot(site, "src", opts.rootRank);
  checkRootTensor(site, opts.rootTensor, tensors);
  if (tensors.size() > 1) return broadcastSeveral(site, tensors, opts);
  const at::Tensor& tensor = single(site, "tensor", tensors);
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
  return run(request, tensors, tensors);
}

MycollBackend::WorkPtr MycollBackend::allreduce(Tensors& tensors,
                                                const c10d::AllreduceOptions& opts) {
  const CallSite site = enter("all_reduce");
  if (tensors.empty()) refuse(site, "requires non-empty tensor list: no tensor came");
  const at::Tensor& given = tensors.front();
  // torch passes sparse CPU tensors here, not to allreduce_sparse().
  if (given.defined() && given.layout() == at::kSparse) [[unlikely]] {
    return allreduce_sparse(tensors, opts);
  }
  if (tensors.size() > 1) return allReduceSeveral(site, tensors, opts);
  at::Tensor narrowed;
  const bool isAsGiven = !given.defined() || given.is_contiguous();
  const at::Tensor& tensor = isAsGiven ? given : (narrowed = withoutRepeats(given));
  checkOutput(site, Argument{"tensor"}, tensor);
  Request request(site, c10d::OpType::ALLREDUCE, "mycoll:all_reduce", opts.timeout, opts.asyncOp);
  addAllReduce(request, tensor, opts.reduceOp);
  return run(request, tensors, tensors);
}

void MycollBackend::addAllReduce(Request& request, const at::Tensor& tensor,
                                 const c10d::ReduceOp& op) {
  Call& call = request.addReduction(OpKind::kAllReduce, tensor, op);
  if (call.isScaled) {
    call.in.push_back(request.input(request.premultiply(tensor, op)));
    call.out.push_back(request.output(tensor));
  } else {
    call.in.push_back(request.inOut(tensor));
    call.out.push_back(call.in.front());
  }
}

void MycollBackend::allReduceInto(const at::Tensor& sum, const at::Tensor& x) {
  const CallSite site = enter("all_reduce");
  checkTensor(site, Argument{"x"}, x);
  Request request(site, c10d::OpType::ALLREDUCE, "mycoll:all_reduce", c10d::kUnsetTimeout,
                  /*isAsync=*/false);
  Call& call = request.addReduction(OpKind::kAllReduce, x, c10d::ReduceOp::SUM);
  call.in.push_back(request.input(x));
  call.out.push_back(request.output(sum));
  run(request, x, sum);
}

MycollBackend::WorkPtr MycollBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const CallSite site = enter("reduce");
  const at::Tensor& tensor = single(site, "tensor", tensors);
  checkRoot(site, "dst", opts.rootRank);
  checkRootTensor(site, opts.rootTensor, tensors);
  const bool isRoot = opts.rootRank == rank_;
  if (isRoot) {
    checkOutput(site, Argument{"tensor"}, tensor);
  } else {
    checkTensor(site, Argument{"tensor"}, tensor);
  }
  Request request(site, c10d::OpType::REDUCE, "mycoll:reduce", opts.timeout, opts.asyncOp);
  Call& call = request.addReduction(OpKind::kReduce, tensor, opts.reduceOp);
  call.root = static_cast<int>(opts.rootRank);
  if (isRoot && !call.isScaled) {
    call.in.push_back(request.inOut(tensor));
    call.out.push_back(call.in.front());
  } else {
    call.in.push_back(request.input(request.premultiply(tensor, opts.reduceOp)));
    if (isRoot) call.out.push_back(request.output(tensor));
  }
  return run(request, tensors, tensors);
}

MycollBackend::WorkPtr MycollBackend::barrier(const c10d::BarrierOptions& opts) {
  // device_ids are for NCCL; ranks that meet on the CPU need none.
  const CallSite site = enter("barrier");
  Request request(site, c10d::OpType::BARRIER, "mycoll:barrier", opts.timeout, opts.asyncOp);
  // Everything enqueued on devices before the barrier is over after it, as with NCCL's.
  const auto device = this->device();
  const std::shared_ptr<Condition> fence = device ? device->fence() : nullptr;
  if (fence && opts.asyncOp) {
    request.compositeKind = OpKind::kBarrier;
    request.composite = [fence](CollectiveRunner& runner) { return fencedBarrier(fence, runner); };
    return run(request, {}, {});
  }
  if (fence) throwIfFailed(device->waitFor(*fence));
  request.calls.emplace_back().kind = OpKind::kBarrier;
  return run(request, {}, {});
}

void MycollBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool waitAllRanks) {
  const CallSite site = enter("monitored_barrier");
  if (opts.timeout.count() == 0) {  // for gloo, and so for programs made for it, no time at all
    C10_THROW_ERROR(DistBackendError, c10::str("mycoll group '", groupName_, "': Rank ", rank_,
                                               " timed out in monitoredBarrier after 0 ms"));
  }
  Request request(site, c10d::OpType::BARRIER, "mycoll:monitored_barrier", opts.timeout,
                  /*isAsync=*/false);
  Call& call = request.calls.emplace_back();
  call.kind = OpKind::kMonitoredBarrier;
  call.waitAllRanks = waitAllRanks;
  run(request, {}, {});
}

}  // namespace mycoll
