// Element-wise reduction of many arrays into one.
// All [any thread]; nothing is kept after a call.
#pragma once

#include <cstddef>

#include "base/sum_tree.h"
#include "base/types.h"

namespace mycoll {

// out[i] = T[0, n) of in[k][i], for i < count, along one tree over the inputs' numbers
// (sum_tree.h), sumTree().
//
// fp16, bf16 and fp8 accumulate in float, all others in their own type (integers wrap), and are
// rounded once, at the end. AVG divides the accumulator by `divisor` before that (integers: as C
// does, towards zero; complex: both parts). MIN and MAX propagate NaN as torch.minimum does. bool
// takes any byte other than 0 for true and yields 0 or 1: SUM and MAX are OR, PRODUCT and MIN are
// AND. An element's bits do not depend on count, alignment or where a chunk ends.
//
// out may be the same pointer as any in[k], but must not overlap one otherwise. No alignment is
// asked for; streaming wants `out` aligned to its elements and does without otherwise.
// streaming: non-temporal stores, for a large out that nobody reads soon.
// The pair must be one that isSupported() allows; n >= 1; divisor >= 1.
void reduce(DType dtype, ReduceOp op, void* out, const void* const* in, int n, size_t count,
            int divisor, bool streaming);

struct BytesToCopy {
  void* to;
  const void* from;
  size_t bytes;
};

// The same, and a copy, made in one loop: what the one waits for in memory, and the other in a
// cache shared with another core, is waited for together. `to` overlaps nothing else that is named
// here; `from` may lie beside an input or out, but overlaps no byte of out.
void reduceAndCopy(DType dtype, ReduceOp op, void* out, const void* const* in, int n, size_t count,
                   int divisor, bool streaming, const BytesToCopy& copied);

// The same result in two places, each with its own way to be stored. out and out2 do not overlap;
// either may be one of in, as above.
void reduce2(DType dtype, ReduceOp op, void* out, void* out2, const void* const* in, int n,
             size_t count, int divisor, bool streaming, bool streaming2);

// An input of foldTree(): what has been combined of some inputs that stand in a row.
struct Partial {
  int lo;  // combined are the inputs lo to hi: one, or a node of the tree over all
  int hi;
  const void* data;
  bool isWide;  // in wideType(); otherwise it is one input as it was given
};

// What reduce() accumulates in.
DType wideType(DType dtype);

// reduce() in steps: combines the partials, which are in order and leave out nothing, into the node
// that they make up. The same bits as if it were done at once, for every way to cut the tree.
// isResult: divided by `divisor` (AVG) and rounded to dtype; otherwise in wideType().
void foldTree(DType dtype, ReduceOp op, void* out, bool isResult, const Partial* partials, int n,
              size_t count, int divisor);

// The tree of this process, with blocks of MYCOLL_SUM_BLOCK; all ranks alike.
SumTree sumTree();

// What becomes of numbers beyond 448 in float8_e4m3fn: the largest number (true, as torch since
// 2.13), or NaN (torch before). Whoever knows the torch sets it once; all ranks alike.
void setFloat8Saturates(bool saturates);

}  // namespace mycoll
