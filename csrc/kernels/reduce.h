// Element-wise reduction of many arrays into one.
// All [any thread]; nothing is kept after a call.
#pragma once

#include <cstddef>

#include "base/sum_tree.h"
#include "base/types.h"

namespace mycoll {

// out[i] = T[0, n) of in[k][i], for i < count, along the tree sumTree() over the inputs' numbers
// (sum_tree.h).
//
// fp16, bf16 and fp8 accumulate in float, all others in their own type (integers wrap), and are
// rounded once, at the end. AVG divides the accumulator by `divisor` before that (integers: towards
// zero, as in C; complex: both parts). MIN and MAX propagate NaN as torch.minimum does. bool treats
// any byte other than 0 as true and yields 0 or 1: SUM and MAX are OR, PRODUCT and MIN are AND. An
// element's bits do not depend on count, alignment or where a chunk ends.
//
// out may be the same pointer as any in[k], but must not overlap one otherwise. Any alignment is
// accepted; streaming has an effect only if `out` is aligned to its elements.
// streaming: non-temporal stores, for a large out that is not read soon.
// The pair must be one that isSupported() allows; n >= 1; divisor >= 1.
void reduce(DType dtype, ReduceOp op, void* out, const void* const* in, int n, size_t count,
            int divisor, bool streaming);

struct BytesToCopy {
  void* to;
  const void* from;
  size_t bytes;
};

// The same, and a copy, in one loop: waiting for the inputs in memory overlaps with waiting for
// `from`, which is in the cache of another core. `to` must not overlap any other argument; `from`
// may lie beside an input or out, but must not overlap out.
void reduceAndCopy(DType dtype, ReduceOp op, void* out, const void* const* in, int n, size_t count,
                   int divisor, bool streaming, const BytesToCopy& copied);

// Stores the same result in two places, each with its own kind of store. out and out2 must not
// overlap; either may be one of in, as above.
void reduce2(DType dtype, ReduceOp op, void* out, void* out2, const void* const* in, int n,
             size_t count, int divisor, bool streaming, bool streaming2);

// An input of foldTree(): the combination of some consecutive inputs.
struct Partial {
  int lo;  // combines the inputs lo to hi: one, or a node of the tree over all
  int hi;
  const void* data;
  bool isWide;  // in wideType(); otherwise it is one input as it was given
};

// The type in which reduce() accumulates.
DType wideType(DType dtype);

// reduce() in steps: combines the partials, which are in order and without gaps, into the node that
// they make up. The bits are those of one reduce(), however the tree is cut. isResult: divided by
// `divisor` (AVG) and rounded to dtype; otherwise in wideType().
void foldTree(DType dtype, ReduceOp op, void* out, bool isResult, const Partial* partials, int n,
              size_t count, int divisor);

// The tree of this process, with blocks of MYCOLL_SUM_BLOCK; the same on all ranks.
SumTree sumTree();

// The result for numbers beyond 448 in float8_e4m3fn: the largest number (true, as torch since
// 2.13), or NaN (torch before). Set once, to match the installed torch; the same on all ranks.
void setFloat8Saturates(bool saturates);

}  // namespace mycoll
