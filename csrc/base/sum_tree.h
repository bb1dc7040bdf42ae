// SumTree: the tree over rank numbers along which reductions are computed. It depends on the number
// of ranks and on MYCOLL_SUM_BLOCK, which is equal on all of them, and on nothing else.
//
//   T[lo, hi) = T[lo, mid) op T[mid, hi)
//
// Blocks of `block` consecutive ranks are added from left to right: mid = hi - 1. They are the
// leaves of a binary tree: for more than one block, mid = lo + the largest power of two of blocks
// below hi - lo. With blocks of one or two, that is a binary tree over ranks.
//
// Plain values: no threads.
#pragma once

#include <bit>

namespace mycoll {

class SumTree {
 public:
  explicit SumTree(int block = 1) : block_(block) {}

  int block() const { return block_; }
  // Where a node of at least two ranks is split.
  int middle(int lo, int hi) const {
    const int blocks = (hi - lo + block_ - 1) / block_;
    if (blocks == 1) return hi - 1;
    return lo + block_ * static_cast<int>(std::bit_floor(static_cast<unsigned>(blocks - 1)));
  }

 private:
  int block_;
};

}  // namespace mycoll
