#include "kernels/reduce.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "base/env.h"
#include "kernels/copy.h"
#include "kernels/fold.h"

namespace mycoll {
namespace {

// Fits into the first-level cache together with as many bytes of each of a few inputs.
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

// The parameters and the kernel of one call, chosen once for all its blocks.
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
    // Returning would leave garbage in the user's gradients.
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
  // The only input is the result. (Not for bool: its bytes may have to become 0 or 1.)
  bool isCopy() const { return n_ == 1 && divisor_ == 1 && dtype_ != DType::kBool; }

  DType dtype_;
  const char* const* in_;
  int n_;
  int divisor_;
  size_t elementBytes_;
  Isa isa_;
  Fold fold_;
};

Conversion conversionFor(DType dtype) {
  const Isa isa = activeIsa();
  if (dtype == DType::kFloat16 || dtype == DType::kBFloat16) return conversionForHalf(isa, dtype);
  return conversionForFloat8(isa, dtype, float8Saturates.load(std::memory_order_relaxed));
}

// Along a binary tree over the inputs, whatever the block size of sumTree().
void reduceBinary(DType dtype, ReduceOp op, void* out, const void* const* in, int n, size_t count,
                  int divisor, bool streaming, const BytesToCopy& copied = {});

// One call of foldTree(). Processes blocks that stay in the first-level cache.
class TreeFold {
 public:
  TreeFold(DType dtype, ReduceOp op, const Partial* partials, int n)
      : dtype_(dtype),
        wide_(wideType(dtype)),
        op_(op == ReduceOp::kAvg ? ReduceOp::kSum : op),
        isAverage_(op == ReduceOp::kAvg),
        partials_(partials),
        n_(n),
        tree_(sumTree()) {}

  void run(char* out, bool isResult, size_t count, int divisor) {
    const bool isNarrow = dtype_ != wide_;
    const int by = isAverage_ && isResult ? divisor : 1;
    // The usual cases: nodes of one size are the leaves of a binary tree.
    const bool isAsGiven =
        std::none_of(partials_, partials_ + n_, [](const Partial& each) { return each.isWide; });
    if (isEven() && (!isNarrow || (isResult && isAsGiven))) {
      std::vector<const void*> in(n_);
      for (int i = 0; i < n_; ++i) in[i] = partials_[i].data;
      return reduceBinary(dtype_, by > 1 ? ReduceOp::kAvg : op_, out, in.data(), n_, count, by,
                          false);
    }
    const size_t outBytes = elementSize(isResult ? dtype_ : wide_);
    alignas(64) char folded[kBlockBytes];
    const size_t block = kBlockBytes / elementSize(wide_);
    // Room for all widened partials and all sums.
    memory_ = std::make_unique_for_overwrite<char[]>(2 * static_cast<size_t>(n_) * kBlockBytes);
    for (size_t first = 0; first < count; first += block) {
      first_ = first;
      length_ = std::min(block, count - first);
      used_ = 0;
      next_ = 0;
      const void* node[1] = {foldNode(partials_[0].lo, partials_[n_ - 1].hi)};
      // Needed also where nothing is divided: a bool becomes 0 or 1.
      reduceBinary(wide_, by > 1 ? ReduceOp::kAvg : op_, folded, node, 1, length_, by, false);
      char* const to = out + first * outBytes;
      if (isResult && isNarrow) {
        conversionFor(dtype_).narrow(to, folded, length_);
      } else {
        copy(to, folded, length_ * outBytes);
      }
    }
  }

 private:
  // All partials but the last are nodes of one size, and the tree above them is a binary one.
  bool isEven() const {
    if (n_ <= 2) return true;
    const int size = partials_[0].hi - partials_[0].lo;
    for (int i = 0; i < n_; ++i) {
      const int length = partials_[i].hi - partials_[i].lo;
      if (i + 1 < n_ ? length != size : length > size) return false;
    }
    // The size must be a power of two of blocks; that of single ranks is where blocks are single
    // ranks.
    return size % tree_.block() == 0 &&
           std::has_single_bit(static_cast<unsigned>(size / tree_.block()));
  }

  // Computes the block of T[lo, hi), wide. Consumes the partials from left to right.
  const char* foldNode(int lo, int hi) {
    const Partial& partial = partials_[next_];
    if (partial.lo == lo && partial.hi == hi) {
      ++next_;
      return blockOf(partial);
    }
    const int middle = tree_.middle(lo, hi);
    const char* left = foldNode(lo, middle);
    const char* right = foldNode(middle, hi);
    char* const sum = newBlock();
    const void* both[2] = {left, right};
    reduceBinary(wide_, op_, sum, both, 2, length_, 1, false);
    return sum;
  }

  const char* blockOf(const Partial& partial) {
    const bool isWide = partial.isWide || dtype_ == wide_;
    const char* from =
        static_cast<const char*>(partial.data) + first_ * elementSize(isWide ? wide_ : dtype_);
    if (isWide) return from;
    char* const block = newBlock();
    conversionFor(dtype_).widen(block, from, length_);
    return block;
  }

  char* newBlock() { return memory_.get() + kBlockBytes * used_++; }

  const DType dtype_, wide_;
  const ReduceOp op_;
  const bool isAverage_;
  const Partial* const partials_;
  const int n_;
  const SumTree tree_;
  std::unique_ptr<char[]> memory_;
  size_t used_ = 0;  // blocks
  int next_ = 0;     // partial
  size_t first_ = 0, length_ = 0;
};

void reduceBinary(DType dtype, ReduceOp op, void* out, const void* const* in, int n, size_t count,
                  int divisor, bool streaming, const BytesToCopy& copied) {
  if (count == 0) return copy(copied.to, copied.from, copied.bytes);
  const Reducer reducer(dtype, op, in, n, divisor);
  char* const to = static_cast<char*>(out);
  if (reducer.dividesIntegers()) {
    copy(copied.to, copied.from, copied.bytes);
    // Divides while the block is in the cache, which non-temporal stores would prevent.
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

// A tree of at most three ranks, or with blocks of one or two, is a binary tree.
bool isBinary(int n) { return n <= 3 || sumTree().block() <= 2; }

// foldTree() with every input as a partial of its own.
void reduceInBlocks(DType dtype, ReduceOp op, void* out, const void* const* in, int n, size_t count,
                    int divisor) {
  std::vector<Partial> partials;
  partials.reserve(n);
  for (int k = 0; k < n; ++k) partials.push_back({k, k + 1, in[k], false});
  foldTree(dtype, op, out, true, partials.data(), n, count, divisor);
}

}  // namespace

void reduce(DType dtype, ReduceOp op, void* out, const void* const* in, int n, size_t count,
            int divisor, bool streaming) {
  reduceAndCopy(dtype, op, out, in, n, count, divisor, streaming, {});
}

void reduceAndCopy(DType dtype, ReduceOp op, void* out, const void* const* in, int n, size_t count,
                   int divisor, bool streaming, const BytesToCopy& copied) {
  if (isBinary(n)) return reduceBinary(dtype, op, out, in, n, count, divisor, streaming, copied);
  copy(copied.to, copied.from, copied.bytes);
  reduceInBlocks(dtype, op, out, in, n, count, divisor);
}

void reduce2(DType dtype, ReduceOp op, void* out, void* out2, const void* const* in, int n,
             size_t count, int divisor, bool streaming, bool streaming2) {
  if (count == 0) return;
  if (!isBinary(n)) {
    reduceInBlocks(dtype, op, out, in, n, count, divisor);
    return copy(out2, out, count * elementSize(dtype), streaming2);
  }
  const Reducer reducer(dtype, op, in, n, divisor);
  // Each block is reduced into out2, or into scratch if out2 is not to be cached, and copied from
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

DType wideType(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2: return DType::kFloat32;
    default: return dtype;
  }
}

void foldTree(DType dtype, ReduceOp op, void* out, bool isResult, const Partial* partials, int n,
              size_t count, int divisor) {
  TreeFold(dtype, op, partials, n).run(static_cast<char*>(out), isResult, count, divisor);
}

SumTree sumTree() { return SumTree(Env::process().sumBlock); }

void setFloat8Saturates(bool saturates) {
  float8Saturates.store(saturates, std::memory_order_relaxed);
}

}  // namespace mycoll
