// ControlTree: along which ranks a group's news travels: who is late, who was called otherwise,
// that the group has failed. The first rank of each host, of those that have not left, stands for
// its host, and the others hang below it. Among the hosts, in their order, the one above another
// has its number without the lowest bit: in a barrier and other small collectives these two
// exchange something, too, so that news needs no connection of its own. A pure function of the
// group's shape, equal on all ranks.
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

  // The next ones on the way to the root, and away from it, that have not left. -1: there is none;
  // then the rank stands for the root, and where several do so, each tells the others, too.
  using HasLeft = std::function<bool(int rank)>;
  int parentOf(int rank, const HasLeft& hasLeft) const;
  std::vector<int> childrenOf(int rank, const HasLeft& hasLeft) const;

 private:
  // Its first rank that has not left; -1: all have.
  int standsFor(int host, const HasLeft& hasLeft) const;
  void addBelow(int host, const HasLeft& hasLeft, std::vector<int>* ranks) const;

  const Shape& shape_;
};

}  // namespace mycoll
