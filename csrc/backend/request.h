// Request: a call of the user, checked and translated: the calls for the engine, the memory that
// must live until they are done, and the results to copy back at the end.
// Lifetime: made on the stack of one call and consumed by MycollBackend::run().
#pragma once

#include <c10/util/SmallVector.h>

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "backend/generation.h"
#include "backend/kept.h"
#include "backend/layout.h"
#include "base/call.h"
#include "engine/communicator.h"

namespace mycoll {

struct Request;
// One request, or those of a batch.
using Requests = std::span<Request* const>;

struct Request {
  Request(UserCall itsCaller, c10d::OpType opType, std::chrono::milliseconds opTimeout,
          bool isAsync)
      : caller(std::move(itsCaller)), type(opType), timeout(opTimeout), async(isAsync) {}
  // options: torch's, of the operation.
  template <typename Options>
  Request(const UserCall& itsCaller, c10d::OpType opType, const Options& options)
      : Request(itsCaller, opType, options.timeout, options.asyncOp) {}
  Request(Request&&) = default;
  // The caller drops the memory that no operation has taken.
  ~Request() {
    keep.dropHere();
    for (CopyBack& copy : copyBacks) copy.memory.dropHere();
  }

  UserCall caller;
  c10::Device device = c10::kCPU;  // of all its tensors
  c10d::OpType type;
  const char* title = caller.function;  // for the profiler
  std::chrono::milliseconds timeout;    // as torch passes it: not positive means the group's
  std::shared_ptr<void> extension;      // see TimeoutExtensions: dropped when the operation ends
  bool async;
  // Messages are matched by rank and tag, not by their order among the collectives.
  bool isMessage() const {
    return type == c10d::OpType::SEND || type == c10d::OpType::RECV ||
           type == c10d::OpType::RECVANYSOURCE;
  }
  bool isProfiled = false;
  std::vector<at::Tensor> given;  // if it is profiled: the inputs as the caller has them
  uint32_t place = 0;             // where the program made the call: see callSiteOfCall()
  // Messages only; the one call then has one span, `in` to send and `out` to receive.
  int peer = -1;
  uint64_t tag = 0;
  size_t perList = 0;  // the future's value is lists of this many outputs each; 0: one list of all
  c10::SmallVector<Call, 1> calls;  // run in this order
  // For devices; the same on all ranks: whether the parts of each call's lists are equal in size
  // and adjacent in memory. False if there is no list.
  bool isFlat() const { return areListsFlat_.value_or(false); }
  void addList(bool isFlatList) { areListsFlat_ = areListsFlat_.value_or(true) && isFlatList; }
  OpKind compositeKind = OpKind::kAllReduce;
  Composite composite;  // instead of calls, if these depend on each other
  Kept keep;            // the memory behind the spans of the calls
  CopyBacks copyBacks;

  // Adds a call for elements of the tensor's type; the caller adds its spans and its root. The
  // reference is valid until the next call is added.
  Call& addCall(OpKind kind, const at::Tensor& tensor);
  // As addCall(), with the spans. Copies the inputs that share memory with an output.
  Call& addCall(OpKind kind, const at::Tensor& tensor, Spans in, Spans out);
  // As addCall(), for a reduction. Refuses an operation that is not defined for the elements.
  Call& addReduction(OpKind kind, const at::Tensor& tensor, const c10d::ReduceOp& op);

  // Returns memory for a tensor that is read: a packed copy unless the tensor is plain.
  Span input(const at::Tensor& tensor);
  // Returns memory for a tensor that the operation writes and does not read.
  Span output(const at::Tensor& tensor);
  // Returns memory for a tensor that is read and then written.
  Span inOut(const at::Tensor& tensor);
  // The same for a tensor that shares memory with another one of the call.
  Span separateInOut(const at::Tensor& tensor) {
    return admit(tensor), standIn(pack(tensor), tensor);
  }
  // The same for lists whose tensors may have any sizes.
  Spans oneByOne(const std::vector<at::Tensor>& tensors, bool areOutputs);
  // The same for lists with a tensor for each rank, if all ranks know all sizes. On a device, parts
  // of equal size become one piece of memory, for which NCCL has one function.
  Spans inputs(const std::vector<at::Tensor>& tensors) { return spansOf(tensors, false); }
  Spans outputs(const std::vector<at::Tensor>& tensors) { return spansOf(tensors, true); }
  // Returns the tensor times the factor of a PREMUL_SUM; the tensor itself for other operations.
  at::Tensor premultiply(const at::Tensor& tensor, const c10d::ReduceOp& op);

  // Takes everything that must live until a device has finished the operation: the memory behind
  // the spans, and the targets of the copies back.
  Kept takeKept();

  // To be called before inputs are read, which is earlier than the operation begins: callbacks that
  // were added before the call may write them.
  void awaitCallbacks() const;

  // Copies the inputs that share memory with an output, except where a call of this kind allows it:
  // an input that is also this rank's own output.
  void separateInputs(Call& call);

 private:
  // Sets `device` to that of the first tensor, and refuses a later tensor on another one.
  void admit(const at::Tensor& tensor) {
    if (tensor.device() != device) [[unlikely]]
      setDevice(tensor);
  }
  void setDevice(const at::Tensor& tensor);
  // The operation writes `packed`, which is then copied to the target.
  Span standIn(const at::Tensor& packed, const at::Tensor& target);
  Spans spansOf(const std::vector<at::Tensor>& tensors, bool areOutputs);
  bool isOnDevice() const { return !device.is_cpu(); }
  at::Tensor pack(const at::Tensor& tensor) const;
  void copyAll(Call& call);
  at::Tensor emptyPacked(const at::Tensor& tensor) const;

  std::optional<bool> areListsFlat_;
};

// A request that is launched later, with others: when a block of coalesced calls ends.
struct Coalesced {
  Request request;
  std::vector<at::Tensor> outputs;
};

// Returns device memory as a byte tensor that does not own it.
at::Tensor bytesOnDevice(const Span& span, c10::Device device);

}  // namespace mycoll
