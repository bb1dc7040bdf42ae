// A call of the user's, checked and translated: what the engine has to do, what must live until
// then, and what is to be copied back at the end.
// Lifetime: made on the stack of one call and consumed by MycollBackend::run().
#pragma once

#include <c10/util/SmallVector.h>

#include <chrono>
#include <optional>
#include <span>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "backend/kept.h"
#include "backend/layout.h"
#include "backend/validation.h"
#include "base/call.h"
#include "engine/communicator.h"

namespace mycoll {

struct Request;
// One, or those of a batch.
using Requests = std::span<Request* const>;

struct Request {
  Request(const CallSite& callSite, c10d::OpType opType, const char* profilingTitle,
          std::chrono::milliseconds opTimeout, bool isAsync)
      : site(callSite), type(opType), title(profilingTitle), timeout(opTimeout), async(isAsync) {}
  Request(Request&&) = default;
  // What no operation has taken is dropped by the caller.
  ~Request() {
    keep.dropHere();
    for (CopyBack& copy : copyBacks) copy.memory.dropHere();
  }

  CallSite site;
  c10::Device device = c10::kCPU;  // of all its tensors
  c10d::OpType type;
  const char* title;                  // "mycoll:all_reduce"; a literal
  std::chrono::milliseconds timeout;  // as torch says it: not positive means the group's
  bool async;
  at::TensorList given;  // for a profiler: the inputs as the caller has them; not kept alive
  // Point to point only; the one call then has one span, `in` to send and `out` to receive.
  int peer = -1;
  uint64_t tag = 0;
  size_t perList = 0;  // the future's value is lists of so many outputs each; 0: one of all
  c10::SmallVector<Call, 1> calls;  // run in this order
  // A promise that holds on all ranks or on none, for devices: the parts of each call's lists are
  // equal in size and lie one after the other. No list, no promise.
  bool isFlat() const { return areListsFlat_.value_or(false); }
  void addList(bool isFlatList) { areListsFlat_ = areListsFlat_.value_or(true) && isFlatList; }
  OpKind compositeKind = OpKind::kAllReduce;
  Composite composite;  // instead of calls, where these depend on each other
  Kept keep;            // the memory behind the spans of the calls
  CopyBacks copyBacks;

  // The description of the next call, for elements as the tensor's. What is still to be added are
  // its spans and its root. The reference holds until the next call is added.
  Call& addCall(OpKind kind, const at::Tensor& tensor);
  // As addCall(), for one that reduces. Refuses an operation that the elements do not have.
  Call& addReduction(OpKind kind, const at::Tensor& tensor, const c10d::ReduceOp& op);

  // Memory for a tensor that is read; a packed copy unless it is plain.
  Span input(const at::Tensor& tensor);
  // Memory for a tensor that is written, and that is not read by the operation.
  Span output(const at::Tensor& tensor);
  // Memory for a tensor that is read and then written.
  Span inOut(const at::Tensor& tensor);
  // The same for lists with a tensor for each rank, where all ranks know all sizes. On a device,
  // parts of equal size become one piece of memory: there is one function for that.
  std::vector<Span> inputs(const std::vector<at::Tensor>& tensors);
  std::vector<Span> outputs(const std::vector<at::Tensor>& tensors);
  // The tensor times the factor of a PREMUL_SUM; the tensor itself for other operations.
  at::Tensor premultiply(const at::Tensor& tensor, const c10d::ReduceOp& op);

  // Takes everything that must live until a device has passed the operation: the memory behind the
  // spans, and what is copied back to.
  Kept takeKept();

  // Copies those inputs that share memory with an output, except where a call of this kind allows
  // it: an input that is the output for this very rank.
  void separateInputs(Call& call);

 private:
  // For a tensor on another device than `device`: the first tensor sets it, a later one is refused.
  void admit(const at::Tensor& tensor);
  // The operation writes `packed`, which is then copied to the target.
  Span standIn(const at::Tensor& packed, const at::Tensor& target);
  bool isOnDevice() const { return !device.is_cpu(); }
  at::Tensor pack(const at::Tensor& tensor) const;
  void copyAll(Call& call);
  at::Tensor emptyPacked(const at::Tensor& tensor) const;

  std::optional<bool> areListsFlat_;
};

inline bool isPointToPoint(const Call& call) {
  return call.kind == OpKind::kSend || call.kind == OpKind::kRecv;
}
// Bytes of device memory as a tensor that owns nothing.
at::Tensor bytesOnDevice(const Span& span, c10::Device device);

}  // namespace mycoll
