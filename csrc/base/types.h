// The types that every layer shares: element types, operations, spans of bytes. Plain values: no
// threads, no ownership.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

namespace mycoll {

// Element types that mycoll can compute with. A type that is only moved (any other type of torch)
// travels as kOpaque + a number from the caller, so that ranks that disagree still detect it.
enum class DType : uint8_t {
  kFloat32,
  kFloat64,
  kFloat16,
  kBFloat16,
  kFloat8E4M3,  // e4m3fn: no infinities
  kFloat8E5M2,
  kInt8,
  kUInt8,
  kInt16,
  kUInt16,
  kInt32,
  kUInt32,
  kInt64,
  kUInt64,
  kBool,
  kComplex64,
  kComplex128,
  kCount,
  kOpaque = 64,
};

// 0 for opaque types, whose size only the caller knows.
size_t elementSize(DType dtype);
const char* name(DType dtype);

enum class ReduceOp : uint8_t { kSum, kProduct, kMin, kMax, kAvg, kBAnd, kBOr, kBXor, kCount };

const char* name(ReduceOp op);

// False where the pair has no meaning (BAND on floats, MAX on complex, anything on opaque).
bool isSupported(DType dtype, ReduceOp op);

enum class OpKind : uint8_t {
  kBarrier,
  kBroadcast,
  kAllReduce,
  kReduce,
  kAllGather,
  kGather,
  kScatter,
  kReduceScatter,
  kAllToAll,
  kMonitoredBarrier,
  kSend,
  kRecv,
  kPut,  // these three: one-sided, into a window
  kSignal,
  kWaitSignal,
  kWindow,  // a window is opened or closed
  kCount,
};

const char* name(OpKind kind);
// Messages between two ranks, which are not part of the order of collectives.
constexpr bool isMessage(OpKind kind) {
  return kind >= OpKind::kSend && kind <= OpKind::kWaitSignal;
}

// Memory of the caller. A Span does not own it.
struct Span {
  void* data = nullptr;
  size_t bytes = 0;
  char* begin() const { return static_cast<char*>(data); }
};

template <typename T>
Span spanOf(T& value) {
  return {&value, sizeof(value)};
}

// A list of spans. Most lists have one, which takes no memory of its own.
class Spans {
 public:
  Spans() = default;
  Spans(std::initializer_list<Span> spans) {
    for (const Span& span : spans) push_back(span);
  }
  void push_back(const Span& span) {
    if (!hasOne_) {
      hasOne_ = true;
      one_ = span;
      return;
    }
    if (many_.empty()) many_.push_back(one_);
    many_.push_back(span);
  }
  void reserve(size_t spans) {
    if (spans > 1) many_.reserve(spans);
  }
  size_t size() const { return many_.empty() ? hasOne_ : many_.size(); }
  bool empty() const { return !hasOne_; }
  Span* data() { return many_.empty() ? &one_ : many_.data(); }
  const Span* data() const { return many_.empty() ? &one_ : many_.data(); }
  Span* begin() { return data(); }
  Span* end() { return data() + size(); }
  const Span* begin() const { return data(); }
  const Span* end() const { return data() + size(); }
  Span& operator[](size_t index) { return data()[index]; }
  const Span& operator[](size_t index) const { return data()[index]; }
  Span& front() { return data()[0]; }
  const Span& front() const { return data()[0]; }

 private:
  bool hasOne_ = false;
  Span one_;
  std::vector<Span> many_;  // all of them, if there are several
};

constexpr size_t roundUp(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace mycoll
