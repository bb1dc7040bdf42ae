// Many tensors in one call, and many calls in one Work.
#include <c10/util/StringUtil.h>

#include <utility>

#include "backend/mycoll_backend.h"

namespace mycoll {
namespace {

// An address that no other living thread has.
const void* thisThread() {
  static thread_local char token;
  return &token;
}

// Small tensors are reduced together: one operation on a bucket costs little more than one on a
// tensor. The rule uses only values that are the same on all ranks, so that all ranks make the same
// buckets.
constexpr size_t kSmallBytes = 64 << 10;
constexpr size_t kBucketBytes = 1 << 20;

// Refuses what gloo refuses and mycoll would accept, in gloo's words.
void checkAsGloo(const CallSite& site, const std::vector<std::vector<at::Tensor>>& outputs,
                 const std::vector<at::Tensor>& inputs) {
  for (const std::vector<at::Tensor>& row : outputs) {
    for (size_t i = 0; i < row.size(); ++i) {
      if (row[i].sizes() != inputs[i].sizes()) {
        refuse(site, c10::str("invalid size of output tensor at index ", i,
                              ": it must be that of the input, ", inputs[i].sizes(), ", but is ",
                              row[i].sizes()));
      }
      if (row[i].scalar_type() != inputs[i].scalar_type()) {
        refuse(site,
               c10::str("invalid tensor type at index ", i, ": it must be that of the input, ",
                        inputs[i].scalar_type(), ", but is ", row[i].scalar_type()));
      }
    }
  }
}

}  // namespace

bool MycollBackend::isCoalescing() const {
  const void* owner = coalescingThread_.load(std::memory_order_relaxed);
  return owner != nullptr && owner == thisThread();
}

void MycollBackend::startCoalescing() {
  const CallSite site = enter("_coalescing_manager");
  const void* owner = coalescingThread_.load(std::memory_order_acquire);
  if (owner != nullptr && owner != thisThread()) {
    refuse(site, "another thread is coalescing operations of this group");
  }
  dropCoalescing();  // left over if an exception ended a block that torch's manager did not open
  coalescingThread_.store(thisThread(), std::memory_order_release);
}

MycollBackend::WorkPtr MycollBackend::endCoalescing() {
  const CallSite site = enter("_coalescing_manager");
  if (!isCoalescing()) refuse(site, "nothing was started that could end here");
  std::vector<WorkPtr> works = std::exchange(coalesced_, {});
  std::vector<CoalescedMessage> messages = std::exchange(coalescedMessages_, {});
  coalescingThread_.store(nullptr, std::memory_order_release);
  for (CoalescedMessage& each : messages) {
    each.request.given = each.inputs;
    works.push_back(launchNow(each.request, each.outputs, each.isProfiled, each.site));
  }
  const auto device = this->device();
  if (device && device->hasBatch()) {
    WorkPtr onDevice = device->endBatch(
        {isTimed_, hookFor(c10d::OpType::COALESCED), CallbackOrder::here(callbacks_)});
    if (works.empty()) return onDevice;
    works.push_back(std::move(onDevice));
  }
  return c10::make_intrusive<CoalescedWork>(std::move(works));
}

// Collectives on the CPU have been submitted already, and continue: every rank must take part.
void MycollBackend::dropCoalescing() {
  if (!isCoalescing()) return;
  coalesced_.clear();
  coalescedMessages_.clear();
  if (const auto device = this->device()) device->dropBatch();
  coalescingThread_.store(nullptr, std::memory_order_release);
}

MycollBackend::WorkPtr MycollBackend::allreduce_coalesced(
    Tensors& given, const c10d::AllreduceCoalescedOptions& opts) {
  const CallSite site = enter("all_reduce_coalesced");
  if (given.empty()) refuse(site, "requires non-empty tensor list: no tensor came");
  Tensors tensors;
  for (const at::Tensor& tensor : given) tensors.push_back(withoutRepeats(tensor));
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Argument argument{"tensors", static_cast<int64_t>(i)};
    checkOutput(site, argument, tensors[i]);
    if (tensors[i].scalar_type() == tensors[0].scalar_type()) continue;
    refuse(site, c10::str("tensors must all have the same type, but ", argument.text(), " is ",
                          c10::toString(tensors[i].scalar_type()), " and tensors[0] is ",
                          c10::toString(tensors[0].scalar_type())));
  }
  Request request(site, c10d::OpType::ALLREDUCE_COALESCED, "mycoll:all_reduce_coalesced",
                  opts.timeout, opts.asyncOp);
  for (size_t i = 0; i < tensors.size();) {
    size_t end = i;
    size_t bytes = 0;
    // On devices, all tensors are one launch anyway.
    while (request.device.is_cpu() && end < tensors.size() && tensors[end].device().is_cpu() &&
           tensors[end].nbytes() <= kSmallBytes && bytes + tensors[end].nbytes() <= kBucketBytes) {
      bytes += tensors[end].nbytes();
      ++end;
    }
    if (end - i < 2) {
      addAllReduce(request, tensors[i], opts.reduceOp);
      ++i;
      continue;
    }
    at::Tensor bucket = emptyElements(static_cast<int64_t>(bytes / tensors[i].itemsize()),
                                      tensors[i].scalar_type());
    const Span span = writable(bucket);
    int64_t offset = 0;
    for (; i < end; ++i) {
      pack(request.premultiply(tensors[i], opts.reduceOp), span.begin() + offset);
      request.copyBacks.emplace_back(bucket, tensors[i], offset);
      offset += static_cast<int64_t>(tensors[i].nbytes());
    }
    Call& call = request.addReduction(OpKind::kAllReduce, bucket, opts.reduceOp);
    call.in.push_back(span);
    call.out.push_back(span);
    request.keep.add(bucket);
  }
  return run(request, given, given);
}

MycollBackend::WorkPtr MycollBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                          const c10d::AllgatherOptions& opts) {
  const CallSite site = enter("all_gather_coalesced");
  if (inputs.empty()) refuse(site, "input_tensor_list must hold a tensor, but it is empty");
  // output_tensor_lists[rank][i] receives inputs[i] of that rank.
  if (outputs.size() != static_cast<size_t>(size_)) {
    refuse(site, c10::str("output lists should be equal to world size: output_tensor_lists must "
                          "hold one list for each of the ",
                          size_, " ranks, but it holds ", outputs.size()));
  }
  for (size_t rank = 0; rank < outputs.size(); ++rank) {
    if (outputs[rank].size() == inputs.size()) continue;
    refuse(site, c10::str("output_tensor_lists[", rank, "] must hold one tensor for each of the ",
                          inputs.size(), " inputs, but it holds ", outputs[rank].size()));
  }
  if (shown_ != nullptr) checkAsGloo(site, outputs, inputs);
  Request request(site, c10d::OpType::ALLGATHER_COALESCED, "mycoll:all_gather_coalesced",
                  opts.timeout, opts.asyncOp);
  request.perList = inputs.size();
  for (size_t i = 0; i < inputs.size(); ++i) {
    checkTensor(site, Argument{"input_tensor_list", static_cast<int64_t>(i)}, inputs[i]);
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
  const CallSite site = enter("all_gather_into_tensor_coalesced");
  if (inputs.empty() || outputs.size() != inputs.size()) {
    refuse(site, c10::str("there must be one output for each input, but there are ", outputs.size(),
                          " outputs and ", inputs.size(), " inputs"));
  }
  Request request(site, c10d::OpType::COALESCED, "mycoll:all_gather_into_tensor_coalesced",
                  opts.timeout, opts.asyncOp);
  for (size_t i = 0; i < inputs.size(); ++i) {
    addAllGatherInto(request, outputs[i], inputs[i], static_cast<int64_t>(i));
  }
  return run(request, inputs, outputs);
}

MycollBackend::WorkPtr MycollBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  const CallSite site = enter("reduce_scatter_tensor_coalesced");
  if (inputs.empty() || outputs.size() != inputs.size()) {
    refuse(site, c10::str("there must be one output for each input, but there are ", outputs.size(),
                          " outputs and ", inputs.size(), " inputs"));
  }
  Request request(site, c10d::OpType::COALESCED, "mycoll:reduce_scatter_tensor_coalesced",
                  opts.timeout, opts.asyncOp);
  for (size_t i = 0; i < inputs.size(); ++i) {
    addReduceScatterFrom(request, outputs[i], inputs[i], opts.reduceOp, static_cast<int64_t>(i));
  }
  return run(request, inputs, outputs);
}

}  // namespace mycoll
