#include "kernels/reduce.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "kernels/copy.h"
#include "kernels/fold.h"

namespace mycoll {
namespace {

// Fits in the first-level cache together with as many bytes of each of a few inputs.
constexpr size_t kBlockBytes = 4096;

std::atomic<bool> float8Saturates{true};

bool isInteger(DType dtype) { return dtype >= DType::kInt8 && dtype <= DType::kUInt64; }

Fold foldFor(Isa isa, DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kFloat64: return foldForFloat(isa, dtype, op);
    case DType::kFloat16:
    case DType::kBFloat16: return foldForHalf(isa, dtype, op);
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
      return foldForFloat8(isa, dtype, op, float8Saturates.load(std::memory_order_relaxed));
    case DType::kBool: return foldForBool(isa, dtype, op);
    case DType::kComplex64:
    case DType::kComplex128:
      if (op == ReduceOp::kProduct) return foldForComplexProduct(isa, dtype);
      return foldForFloat(isa, dtype, op);
    default: return isInteger(dtype) ? foldForInteger(isa, dtype, op) : Fold();
  }
}

// One call's worth of decisions, so that blocks do not take them again.
class Reducer {
 public:
  Reducer(DType dtype, ReduceOp op, const void* const* in, int n, int divisor)
      : dtype_(dtype),
        in_(reinterpret_cast<const char* const*>(in)),
        n_(n),
        divisor_(op == ReduceOp::kAvg ? divisor : 1),
        elementBytes_(elementSize(dtype)),
        isa_(activeIsa()),
        fold_(foldFor(isa_, dtype, op)) {
    if (fold_.function != nullptr && n >= 1) return;
    // Going on would leave garbage in somebody's gradients.
    std::fprintf(stderr, "mycoll: bug: reduce(%s, %s) of %d inputs\n", name(dtype), name(op), n);
    std::abort();
  }

  bool dividesIntegers() const { return divisor_ != 1 && isInteger(dtype_); }
  size_t elementBytes() const { return elementBytes_; }
  size_t blockCount() const { return kBlockBytes / elementBytes_; }

  // Elements first..first+count of the inputs, into out.
  void run(char* out, size_t first, size_t count, bool streaming,
           const BytesToCopy& copied = {}) const {
    if (isCopy()) {
      copy(copied.to, copied.from, copied.bytes);
      const char* from = in_[0] + first * elementBytes_;
      if (streaming) {
        copyStreamingUnfenced(out, from, count * elementBytes_);
      } else {
        copy(out, from, count * elementBytes_);
      }
      return;
    }
    fold_.function({.out = out,
                    .in = in_,
                    .inOffset = first * elementBytes_,
                    .n = n_,
                    .count = count * fold_.lanesPerElement,
                    .divisor = divisor_,
                    .streaming = streaming,
                    .copyTo = static_cast<char*>(copied.to),
                    .copyFrom = static_cast<const char*>(copied.from),
                    .copyBytes = copied.bytes});
    if (dividesIntegers()) divideIntegers(isa_, dtype_, out, count, divisor_);
  }

 private:
  // One input that is its own result. (A bool is not: it may have to become 0 or 1.)
  bool isCopy() const { return n_ == 1 && divisor_ == 1 && dtype_ != DType::kBool; }

  DType dtype_;
  const char* const* in_;
  int n_;
  int divisor_;
  size_t elementBytes_;
  Isa isa_;
  Fold fold_;
};

}  // namespace

void reduce(DType dtype, ReduceOp op, void* out, const void* const* in, int n, size_t count,
            int divisor, bool streaming) {
  reduceAndCopy(dtype, op, out, in, n, count, divisor, streaming, {});
}

void reduceAndCopy(DType dtype, ReduceOp op, void* out, const void* const* in, int n, size_t count,
                   int divisor, bool streaming, const BytesToCopy& copied) {
  if (count == 0) return copy(copied.to, copied.from, copied.bytes);
  const Reducer reducer(dtype, op, in, n, divisor);
  char* const to = static_cast<char*>(out);
  if (reducer.dividesIntegers()) {
    copy(copied.to, copied.from, copied.bytes);
    // Divided while the block is in the cache. Stores past the cache would defeat that.
    const size_t block = reducer.blockCount();
    for (size_t first = 0; first < count; first += block) {
      reducer.run(to + first * reducer.elementBytes(), first, std::min(block, count - first),
                  false);
    }
    return;
  }
  reducer.run(to, 0, count, streaming, copied);
  if (streaming) streamingFence();
}

void reduce2(DType dtype, ReduceOp op, void* out, void* out2, const void* const* in, int n,
             size_t count, int divisor, bool streaming, bool streaming2) {
  if (count == 0) return;
  const Reducer reducer(dtype, op, in, n, divisor);
  // A block is reduced into out2, or beside it when that is not to be cached, and goes on from
  // there while it is in the first-level cache.
  const size_t block = reducer.blockCount();
  alignas(64) char scratch[kBlockBytes];
  for (size_t first = 0; first < count; first += block) {
    const size_t offset = first * reducer.elementBytes();
    const size_t length = std::min(block, count - first);
    const size_t bytes = length * reducer.elementBytes();
    char* const to = static_cast<char*>(out) + offset;
    char* const to2 = static_cast<char*>(out2) + offset;
    char* const result = streaming2 ? scratch : to2;
    reducer.run(result, first, length, false);
    if (streaming2) copyStreamingUnfenced(to2, result, bytes);
    if (streaming) {
      copyStreamingUnfenced(to, result, bytes);
    } else {
      copy(to, result, bytes);
    }
  }
  if (streaming || streaming2) streamingFence();
}

void setFloat8Saturates(bool saturates) {
  float8Saturates.store(saturates, std::memory_order_relaxed);
}

}  // namespace mycoll
