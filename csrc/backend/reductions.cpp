// broadcast, all_reduce in all its forms but the sparse one, reduce, and the barriers.
#include <algorithm>
#include <utility>
#include <vector>

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

// isShared: another tensor of the request has some of its memory.
void addAllReduce(Request& request, const at::Tensor& tensor, const c10d::ReduceOp& op,
                  bool isShared = false) {
  Call& call = request.addReduction(OpKind::kAllReduce, tensor, op);
  if (call.isScaled) {
    call.in.push_back(request.input(request.premultiply(tensor, op)));
    call.out.push_back(request.output(tensor));
  } else {
    call.in.push_back(isShared ? request.separateInOut(tensor) : request.inOut(tensor));
    call.out.push_back(call.in.front());
  }
}

// Returns which of the tensors share memory with an earlier one by address, so that no two of the
// others share any.
std::vector<bool> findShared(const std::vector<at::Tensor>& tensors) {
  std::vector<std::pair<const char*, size_t>> byAddress;  // and index
  for (size_t i = 0; i < tensors.size(); ++i) {
    const bool isPlace = tensors[i].nbytes() > 0 && isPlain(tensors[i]);
    if (isPlace) byAddress.emplace_back(static_cast<const char*>(tensors[i].const_data_ptr()), i);
  }
  std::sort(byAddress.begin(), byAddress.end());
  std::vector<bool> areShared(tensors.size());
  const char* end = nullptr;
  for (const auto& [begin, index] : byAddress) {
    areShared[index] = begin < end;
    end = std::max(end, begin + tensors[index].nbytes());
  }
  return areShared;
}

// Returns the tensor, or for an expanded one its part that holds each element once, which it keeps
// in *part.
const at::Tensor& narrowed(const at::Tensor& tensor, at::Tensor* part) {
  if (!tensor.defined() || tensor.is_contiguous()) return tensor;
  return *part = withoutRepeats(tensor);
}

void addBucket(Request& request, at::ArrayRef<at::Tensor> tensors, size_t bytes,
               const c10d::ReduceOp& op) {
  const at::ScalarType type = tensors.front().scalar_type();
  const at::Tensor bucket =
      emptyOfShape({static_cast<int64_t>(bytes / tensors.front().itemsize())}, type);
  Call& call = request.addReduction(OpKind::kAllReduce, bucket, op);  // refuses ops first
  const Span span = writable(bucket);
  request.awaitCallbacks();
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
  // All ranks, or some, may pass an expanded tensor. Elements that share memory then get one of the
  // source's: they are equal if the source is expanded as well.
  at::Tensor part;
  checkOneOf(caller, Argument{"tensor"}, narrowed(tensor, &part), /*isOutput=*/!isRoot);
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
  at::Tensor part;
  const at::Tensor& tensor = narrowed(given, &part);
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
  at::Tensor part;  // other ranks may pass an expanded tensor, or one like it
  checkOneOf(caller, Argument{"tensor"}, narrowed(tensor, &part), /*isOutput=*/isRoot);
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
  const std::vector<bool> areShared = findShared(tensors);
  for (size_t i = 0; i < tensors.size();) {
    size_t end = i;
    size_t bytes = 0;
    // On devices, all tensors are one launch anyway.
    while (request.device.is_cpu() && end < tensors.size() && tensors[end].device().is_cpu() &&
           tensors[end].nbytes() <= kSmallBytes && bytes + tensors[end].nbytes() <= kBucketBytes) {
      bytes += tensors[end++].nbytes();
    }
    if (end - i < 2) {
      addAllReduce(request, tensors[i], opts.reduceOp, areShared[i]);
      ++i;
    } else {
      addBucket(request, at::ArrayRef<at::Tensor>(tensors).slice(i, end - i), bytes, opts.reduceOp);
      i = end;
    }
  }
  return run(request, given, given);
}

}  // namespace mycoll
