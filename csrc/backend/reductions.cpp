// broadcast, all_reduce in all its forms but the sparse one, reduce, and the barriers.
#include "backend/errors.h"
#include "backend/mycoll_backend.h"
#include "kernels/reduce.h"

namespace mycoll {
namespace {

Task fencedBarrier(std::shared_ptr<Condition> fence, CollectiveRunner& runner) {
  co_await *fence;
  Call barrier;
  barrier.kind = OpKind::kBarrier;
  Status status = co_await runner.run(std::move(barrier));
  co_return status;
}

// Small tensors are reduced together: one operation on a bucket costs little more than one on a
// tensor. The rule uses only values that are the same on all ranks, so that all ranks make the same
// buckets.
constexpr size_t kSmallBytes = 64 << 10;
constexpr size_t kBucketBytes = 1 << 20;

void addAllReduce(Request& request, const at::Tensor& tensor, const c10d::ReduceOp& op) {
  Call& call = request.addReduction(OpKind::kAllReduce, tensor, op);
  if (call.isScaled) {
    call.in.push_back(request.input(request.premultiply(tensor, op)));
    call.out.push_back(request.output(tensor));
  } else {
    call.in.push_back(request.inOut(tensor));
    call.out.push_back(call.in.front());
  }
}

void addBucket(Request& request, at::ArrayRef<at::Tensor> tensors, size_t bytes,
               const c10d::ReduceOp& op) {
  const at::ScalarType type = tensors.front().scalar_type();
  const at::Tensor bucket =
      emptyElements(static_cast<int64_t>(bytes / tensors.front().itemsize()), type);
  Call& call = request.addReduction(OpKind::kAllReduce, bucket, op);  // refuses ops first
  const Span span = writable(bucket);
  int64_t offset = 0;
  for (const at::Tensor& tensor : tensors) {
    pack(request.premultiply(tensor, op), span.begin() + offset);
    request.copyBacks.emplace_back(bucket, tensor, offset);
    offset += static_cast<int64_t>(tensor.nbytes());
  }
  call.in.push_back(span);
  call.out.push_back(span);
  request.keep.add(bucket);
}

}  // namespace

MycollBackend::WorkPtr MycollBackend::broadcast(Tensors& tensors,
                                                const c10d::BroadcastOptions& opts) {
  const UserCall caller = enter("broadcast");
  checkRoot(caller, "src", opts.rootRank);
  const bool isRoot = opts.rootRank == caller.rank;
  const at::Tensor& tensor = single(caller, "tensor", tensors);
  checkOneOf(caller, Argument{"tensor"}, tensor, /*isOutput=*/!isRoot);
  Request request(caller, c10d::OpType::BROADCAST, opts);
  const Span span = isRoot ? request.input(tensor) : request.output(tensor);
  Call& call = request.addCall(OpKind::kBroadcast, tensor);
  call.out.push_back(span);
  call.root = static_cast<int>(opts.rootRank);
  return run(request, tensors, tensors);
}

MycollBackend::WorkPtr MycollBackend::allreduce(Tensors& tensors,
                                                const c10d::AllreduceOptions& opts) {
  const UserCall caller = enter("all_reduce");
  const at::Tensor& given = single(caller, "tensor", tensors);
  // torch passes sparse CPU tensors here, not to allreduce_sparse().
  if (given.defined() && given.layout() == at::kSparse) [[unlikely]] {
    return allreduce_sparse(tensors, opts);
  }
  Request request(caller, c10d::OpType::ALLREDUCE, opts);
  at::Tensor narrowed;
  const bool isAsGiven = !given.defined() || given.is_contiguous();
  const at::Tensor& tensor = isAsGiven ? given : (narrowed = withoutRepeats(given));
  checkOutput(caller, Argument{"tensor"}, tensor);
  addAllReduce(request, tensor, opts.reduceOp);
  return run(request, tensors, tensors);
}

void MycollBackend::allReduceInto(const at::Tensor& sum, const at::Tensor& x) {
  const UserCall caller = enter("all_reduce");
  checkTensor(caller, Argument{"x"}, x);
  Request request(caller, c10d::OpType::ALLREDUCE, c10d::kUnsetTimeout, /*isAsync=*/false);
  Call& call = request.addReduction(OpKind::kAllReduce, x, c10d::ReduceOp::SUM);
  call.in.push_back(request.input(x));
  call.out.push_back(request.output(sum));
  run(request, x, sum);
}

MycollBackend::WorkPtr MycollBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const UserCall caller = enter("reduce");
  const at::Tensor& tensor = single(caller, "tensor", tensors);
  checkRoot(caller, "dst", opts.rootRank);
  const bool isRoot = opts.rootRank == caller.rank;
  checkOneOf(caller, Argument{"tensor"}, tensor, /*isOutput=*/isRoot);
  Request request(caller, c10d::OpType::REDUCE, opts);
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
  const UserCall caller = enter("barrier");
  Request request(caller, c10d::OpType::BARRIER, opts);
  // Everything enqueued on devices before the barrier is over after it, as with NCCL's.
  const auto& device = caller.generation.device;
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
  const UserCall caller = enter("monitored_barrier");
  if (opts.timeout.count() == 0) {  // for gloo, and so for programs made for it, no time at all
    C10_THROW_ERROR(DistBackendError,
                    c10::str("mycoll group '", groupName_, "': Rank ", caller.rank,
                             " timed out in monitoredBarrier after 0 ms"));
  }
  Request request(caller, c10d::OpType::BARRIER, opts.timeout,
                  /*isAsync=*/false);
  Call& call = request.calls.emplace_back();
  call.kind = OpKind::kMonitoredBarrier;
  call.waitAllRanks = waitAllRanks;
  run(request, {}, {});
}

MycollBackend::WorkPtr MycollBackend::allreduce_coalesced(
    Tensors& given, const c10d::AllreduceCoalescedOptions& opts) {
  const UserCall caller = enter("all_reduce_coalesced");
  if (given.empty()) refuse(caller, "requires non-empty tensor list: no tensor came");
  Tensors tensors;
  for (const at::Tensor& tensor : given) tensors.push_back(withoutRepeats(tensor));
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Argument argument{"tensors", static_cast<int64_t>(i)};
    checkOutput(caller, argument, tensors[i]);
    if (tensors[i].scalar_type() == tensors[0].scalar_type()) continue;
    refuse(caller, "tensors must all have the same type, but ", argument.text(), " is ",
           c10::toString(tensors[i].scalar_type()), " and tensors[0] is ",
           c10::toString(tensors[0].scalar_type()));
  }
  Request request(caller, c10d::OpType::ALLREDUCE_COALESCED, opts);
  for (size_t i = 0; i < tensors.size();) {
    size_t end = i;
    size_t bytes = 0;
    // On devices, all tensors are one launch anyway.
    while (request.device.is_cpu() && end < tensors.size() && tensors[end].device().is_cpu() &&
           tensors[end].nbytes() <= kSmallBytes && bytes + tensors[end].nbytes() <= kBucketBytes) {
      bytes += tensors[end++].nbytes();
    }
    if (end - i < 2) {
      addAllReduce(request, tensors[i++], opts.reduceOp);
    } else {
      addBucket(request, at::ArrayRef<at::Tensor>(tensors).slice(i, end - i), bytes, opts.reduceOp);
      i = end;
    }
  }
  return run(request, given, given);
}

}  // namespace mycoll
