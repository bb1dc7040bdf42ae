#include "backend/request.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>

#include <algorithm>

#include "backend/layout.h"
#include "backend/mycoll_backend.h"
#include "backend/plain_dispatch.h"
#include "backend/torch_version.h"
#include "kernels/copy.h"

namespace mycoll {
namespace {

bool overlap(const Span& a, const Span& b) {
  return a.bytes != 0 && b.bytes != 0 && a.begin() < b.begin() + b.bytes &&
         b.begin() < a.begin() + a.bytes;
}

// The smallest span that holds all of them.
Span envelope(const Spans& spans) {
  char* begin = nullptr;
  char* end = nullptr;
  for (const Span& span : spans) {
    if (span.bytes == 0) continue;
    if (begin == nullptr || span.begin() < begin) begin = span.begin();
    end = std::max(end, span.begin() + span.bytes);
  }
  return Span{begin, static_cast<size_t>(end - begin)};
}

// Whether the tensors are on a device and of equal size: such lists are transferred as one piece of
// memory.
bool canBeFlat(const std::vector<at::Tensor>& tensors) {
  if (tensors.front().device().is_cpu()) return false;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.nbytes() != tensors.front().nbytes()) return false;
  }
  return true;
}

// Whether the tensors are plain and adjacent in memory, as the chunks of one tensor are.
bool areAdjacent(const std::vector<at::Tensor>& tensors) {
  const char* next = nullptr;
  for (const at::Tensor& tensor : tensors) {
    if (!isPlain(tensor)) return false;
    const char* begin = readable(tensor).begin();
    if (next != nullptr && begin != next) return false;
    next = begin + tensor.nbytes();
  }
  return true;
}

}  // namespace

at::Tensor bytesOnDevice(const Span& span, c10::Device device) {
  return at::from_blob(
      span.data, {static_cast<int64_t>(span.bytes)}, [](void*) {},
      at::TensorOptions(at::kByte).device(device), device);
}

Call& Request::addCall(OpKind kind, const at::Tensor& tensor) {
  return calls.emplace_back(makeCall(kind, tensor));
}

Call& Request::addCall(OpKind kind, const at::Tensor& tensor, Spans in, Spans out) {
  Call& call = addCall(kind, tensor);
  call.in = std::move(in);
  call.out = std::move(out);
  separateInputs(call);
  return call;
}

Call& Request::addReduction(OpKind kind, const at::Tensor& tensor, const c10d::ReduceOp& op) {
  Call& call = addCall(kind, tensor);
  const bool isLinear = op.op_ == c10d::ReduceOp::SUM || op.op_ == c10d::ReduceOp::AVG;
  if (isLinear && tensor.scalar_type() == at::kComplexHalf) {  // of each part by itself
    call.dtype = DType::kFloat16;
    call.opaqueType = 0;
    call.elementBytes = sizeof(c10::Half);
  }
  call.reduceOp = checkReduceOp(caller, op, tensor, call.dtype);
  call.isScaled = op.op_ == c10d::ReduceOp::PREMUL_SUM;
  return call;
}

void Request::setDevice(const at::Tensor& tensor) {
  if (!keep.empty()) {
    refuse(caller, "all tensors of a call must be on one device, but there are ", device, " and ",
           tensor.device());
  }
  device = tensor.device();
}

at::Tensor Request::emptyPacked(const at::Tensor& tensor) const {
  if (!isOnDevice()) return emptyOfShape(tensor.sizes(), tensor.scalar_type());
  const PlainDispatch guard;
  return at::empty(tensor.sizes(), at::TensorOptions(tensor.scalar_type()).device(device));
}

void Request::awaitCallbacks() const { caller.backend->awaitCallbacks(*this); }

at::Tensor Request::pack(const at::Tensor& tensor) const {
  awaitCallbacks();
  at::Tensor packed = emptyPacked(tensor);
  if (isOnDevice()) {
    const PlainDispatch guard;
    packed.copy_(tensor, /*non_blocking=*/true);
  } else {
    mycoll::pack(tensor, packed.mutable_data_ptr());
  }
  return packed;
}

Span Request::standIn(const at::Tensor& packed, const at::Tensor& target) {
  keep.add(packed);
  copyBacks.emplace_back(packed, target);
  return writable(packed);
}

Span Request::input(const at::Tensor& tensor) {
  admit(tensor);
  if (isPlain(tensor)) [[likely]] {
    keep.add(tensor);
    return readable(tensor);
  }
  const at::Tensor packed = pack(tensor);
  keep.add(packed);
  return readable(packed);
}

Span Request::output(const at::Tensor& tensor) {
  admit(tensor);
  if (isPlain(tensor)) [[likely]] {
    keep.add(tensor);
    return writable(tensor);
  }
  return standIn(emptyPacked(tensor), tensor);
}

Span Request::inOut(const at::Tensor& tensor) {
  if (isPlain(tensor)) [[likely]] {
    return output(tensor);
  }
  return separateInOut(tensor);
}

Spans Request::oneByOne(const std::vector<at::Tensor>& tensors, bool areOutputs) {
  Spans spans;
  spans.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    spans.push_back(areOutputs ? output(tensor) : input(tensor));
  }
  return spans;
}

Spans Request::spansOf(const std::vector<at::Tensor>& tensors, bool areOutputs) {
  addList(canBeFlat(tensors));
  if (!canBeFlat(tensors) || areAdjacent(tensors)) return oneByOne(tensors, areOutputs);
  Spans spans;
  if (!areOutputs) awaitCallbacks();
  const PlainDispatch guard;
  const int64_t count = tensors.front().numel();
  const at::Tensor whole = at::empty({count * static_cast<int64_t>(tensors.size())},
                                     tensors.front().options().requires_grad(false));
  for (size_t i = 0; i < tensors.size(); ++i) {
    admit(tensors[i]);
    const at::Tensor part = whole.narrow(0, static_cast<int64_t>(i) * count, count);
    if (areOutputs) {
      spans.push_back(standIn(part, tensors[i]));
      continue;
    }
    part.view(tensors[i].sizes()).copy_(tensors[i], /*non_blocking=*/true);
    keep.add(part);
    spans.push_back(readable(part));
  }
  return spans;
}

at::Tensor Request::premultiply(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) [[likely]] {
    return tensor;
  }
  awaitCallbacks();
  const auto& supplement = static_cast<const PreMulSum&>(*op.supplement_);
  const PlainDispatch guard;
  // Multiplies in the accumulator's type and rounds once, at the end; with a number, torch does so
  // itself.
  if (!supplement.tensor_factor.defined()) {
    return at::mul(tensor, c10::Scalar(supplement.double_factor)).contiguous();
  }
  const at::ScalarType type = tensor.scalar_type();
  const at::ScalarType wide = type == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor factor = supplement.tensor_factor.to(tensor.device(), wide).reshape({});
  return at::mul(tensor.to(wide), factor).to(type).contiguous();
}

Kept Request::takeKept() {
  for (const CopyBack& copy : copyBacks) keep.add(copy.target);
  return std::move(keep);
}

// Copies all inputs, so that they stay adjacent: isFlat() must hold on all ranks, also on those
// whose inputs and outputs do not overlap.
void Request::copyAll(Call& call) {
  const Span all = envelope(call.in);
  const PlainDispatch guard;
  at::Tensor copy = bytesOnDevice(all, device).clone();
  auto* const memory = static_cast<char*>(copy.mutable_data_ptr());
  for (Span& in : call.in) {
    if (in.bytes != 0) in.data = memory + (in.begin() - all.begin());
  }
  keep.add(copy);
}

void Request::separateInputs(Call& call) {
  const Span allOut = envelope(call.out);
  if (!overlap(envelope(call.in), allOut)) return;
  const bool listIn = call.in.size() > 1;
  for (size_t i = 0; i < call.in.size(); ++i) {
    Span& in = call.in[i];
    if (!overlap(in, allOut)) continue;
    bool mustCopy = false;
    for (size_t o = 0; o < call.out.size() && !mustCopy; ++o) {
      const Span& out = call.out[o];
      if (!overlap(in, out)) continue;
      const size_t own = static_cast<size_t>(caller.rank);
      const bool isOwn = in.data == out.data && in.bytes == out.bytes &&
                         ((call.kind == OpKind::kAllGather && o == own) ||
                          (call.kind == OpKind::kReduceScatter && (i == own || !listIn)));
      mustCopy = !isOwn;
    }
    if (!mustCopy) continue;
    awaitCallbacks();
    if (isFlat() && isOnDevice()) return copyAll(call);
    at::Tensor separate;
    if (isOnDevice()) {
      const PlainDispatch guard;
      separate = bytesOnDevice(in, device).clone();
    } else {
      separate = emptyOfShape({static_cast<int64_t>(in.bytes)}, at::kByte);
      copy(separate.mutable_data_ptr(), in.data, in.bytes);
    }
    in.data = separate.mutable_data_ptr();
    keep.add(separate);
  }
}

}  // namespace mycoll
