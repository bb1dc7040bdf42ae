// ControlTree: along which ranks a group's news travels: who is late, who was called otherwise,
// that the group has failed. The first rank of each host stands for its host; those are a tree of
// sixteen children each, in the order of hosts, and the other ranks of a host hang below theirs.
// A pure function of the group, equal on all ranks.
//
// Plain values: no threads, nothing blocks.
#pragma once

#include <functional>
#include <vector>

#include "transport/peer.h"

namespace mycoll {

// By rank: the first rank of the same host.
std::vector<int> hostsOf(const GroupAddress& group);

class ControlTree {
 public:
  explicit ControlTree(const GroupAddress& group);

  // The next ones on the way to the root, and away from it, that have not left. -1: there is none;
  // then the rank stands for the root, and where several do so, each tells the others, too.
  using HasLeft = std::function<bool(int rank)>;
  int parentOf(int rank, const HasLeft& hasLeft) const;
  std::vector<int> childrenOf(int rank, const HasLeft& hasLeft) const;

 private:
  int parentOf(int rank) const;
  void addChildren(int rank, std::vector<int>* ranks) const;

  std::vector<std::vector<int>> members_;  // by host
  std::vector<int> hostOf_;                // by rank
};

}  // namespace mycoll
