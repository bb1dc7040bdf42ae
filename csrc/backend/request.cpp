#include "backend/request.h"

#include <ATen/ops/mul.h>

#include <algorithm>
#include <cstring>

#include "backend/plain_dispatch.h"
#include "backend/torch_version.h"

namespace mycoll {
namespace {

bool overlap(const Span& a, const Span& b) {
  return a.bytes != 0 && b.bytes != 0 && a.begin() < b.begin() + b.bytes &&
         b.begin() < a.begin() + a.bytes;
}

// The smallest span that holds all of them.
Span envelope(const std::vector<Span>& spans) {
  char* begin = nullptr;
  char* end = nullptr;
  for (const Span& span : spans) {
    if (span.bytes == 0) continue;
    if (begin == nullptr || span.begin() < begin) begin = span.begin();
    end = std::max(end, span.begin() + span.bytes);
  }
  return Span{begin, static_cast<size_t>(end - begin)};
}

}  // namespace

Call& Request::addCall(OpKind kind, const at::Tensor& tensor) {
  const ElementType element = elementType(tensor);
  Call& call = calls.emplace_back();
  call.kind = kind;
  call.dtype = element.dtype;
  call.opaqueType = element.opaqueType;
  call.elementBytes = element.bytes;
  return call;
}

Span Request::input(const at::Tensor& tensor) {
  if (isPlain(tensor)) [[likely]] {
    keep.push_back(tensor);
    return readable(tensor);
  }
  at::Tensor packed = emptyLike(tensor);
  const Span span = writable(packed);
  pack(tensor, span.data);
  keep.push_back(std::move(packed));
  return span;
}

Span Request::output(const at::Tensor& tensor) {
  if (isPlain(tensor)) [[likely]] {
    keep.push_back(tensor);
    return writable(tensor);
  }
  at::Tensor packed = emptyLike(tensor);
  const Span span = writable(packed);
  keep.push_back(packed);
  copyBacks.push_back({std::move(packed), tensor});
  return span;
}

Span Request::inOut(const at::Tensor& tensor) {
  const Span span = output(tensor);
  if (!isPlain(tensor)) pack(tensor, span.data);
  return span;
}

at::Tensor Request::premultiply(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) [[likely]] {
    return tensor;
  }
  const auto& supplement = static_cast<const PreMulSum&>(*op.supplement_);
  const PlainDispatch guard;
  const at::ScalarType type = tensor.scalar_type();
  // In the accumulator's type, with one rounding at the end.
  const at::ScalarType wide = type == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor factor = supplement.tensor_factor.defined()
                                ? supplement.tensor_factor.to(at::kCPU, wide).reshape({})
                                : at::scalar_tensor(supplement.double_factor, wide);
  return at::mul(tensor.to(wide), factor).to(type).contiguous();
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
      const size_t own = static_cast<size_t>(site.rank);
      const bool isOwn = in.data == out.data && in.bytes == out.bytes &&
                         ((call.kind == OpKind::kAllGather && o == own) ||
                          (call.kind == OpKind::kReduceScatter && (i == own || !listIn)));
      mustCopy = !isOwn;
    }
    if (!mustCopy) continue;
    at::Tensor copy = emptyElements(static_cast<int64_t>(in.bytes), at::kByte);
    std::memcpy(copy.mutable_data_ptr(), in.data, in.bytes);
    in.data = copy.mutable_data_ptr();
    keep.push_back(std::move(copy));
  }
}

}  // namespace mycoll
