// ControlTree: the tree along which the ranks of a group forward notices: late ranks, mismatched
// calls, the failure of the group. The first rank of each host, of those that have not left,
// represents its host; the host's other ranks are its children. The hosts are numbered in order,
// and the parent of a host has the same number without the lowest set bit: a barrier and other
// small collectives exchange messages between these two as well, so that notices need no
// connections of their own. A pure function of the group's shape and of the ranks that have left.
//
// Plain values: no threads, nothing blocks.
#pragma once

#include <functional>
#include <vector>

#include "collectives/plan/shape.h"
#include "transport/peer.h"

namespace mycoll {

// By rank: the first rank of the same host.
std::vector<int> hostsOf(const GroupAddress& group);

class ControlTree {
 public:
  // The shape outlives it.
  explicit ControlTree(const Shape& shape) : shape_(shape) {}

  // The nearest ranks that have not left, towards the root and away from it. Parent -1: this rank
  // acts as the root; if several ranks do so, the others are among its children.
  using HasLeft = std::function<bool(int rank)>;
  int parentOf(int rank, const HasLeft& hasLeft) const;
  std::vector<int> childrenOf(int rank, const HasLeft& hasLeft) const;

 private:
  // The first rank of the host that has not left; -1: all have left.
  int standsFor(int host, const HasLeft& hasLeft) const;
  void addBelow(int host, const HasLeft& hasLeft, std::vector<int>* ranks) const;

  const Shape& shape_;
};

}  // namespace mycoll
