// Shape: which ranks of a group are on which host. Plans depend on it and on nothing else of the
// world. Every rank derives the same shape.
//
// Plain values: no threads, nothing blocks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "base/sum_tree.h"

namespace mycoll {

// A node of the tree along which reductions are computed (base/sum_tree.h): ranks lo to hi.
struct Node {
  int lo = 0;
  int hi = 0;
  int ranks() const { return hi - lo; }
  bool operator==(const Node&) const = default;
};

// Returns the largest nodes, of the tree over `ranks` ranks, that consist of `members`, which are
// in order.
std::vector<Node> largestNodes(const std::vector<int>& members, int ranks,
                               SumTree tree = SumTree());

// Returns a block of the tree (MYCOLL_SUM_BLOCK) with which hosts send fewer partial sums; 0: none.
int betterSumBlock(const std::vector<int>& hostOf, SumTree tree);

class Shape {
 public:
  // Most hosts that communicate with each other directly; a power of two.
  static constexpr int kMostInUnit = 16;

  // hostOf[rank]: a number that is the same for all ranks of a host.
  explicit Shape(const std::vector<int>& hostOf, SumTree tree = SumTree(),
                 int mostInUnit = kMostInUnit);

  int ranks() const { return static_cast<int>(hostOf_.size()); }
  // Hosts are in the order of their lowest ranks.
  int hosts() const { return static_cast<int>(members_.size()); }
  const std::vector<int>& membersOf(int host) const { return members_[host]; }
  int hostOf(int rank) const { return hostOf_[rank]; }
  int indexOf(int rank) const { return indexOf_[rank]; }  // among the members of its host
  const std::vector<Node>& nodesOf(int host) const { return units_[0].nodes[host]; }

  // Many hosts form units, these form larger ones, and so on. Hosts exchange data between the units
  // of one level after the other, so that each communicates with few others. A host is a unit of
  // level 0; the last level has one unit, with all hosts.
  int levels() const { return static_cast<int>(units_.size()) - 1; }
  // The hosts in a unit of this level; the last unit may have fewer.
  int unitSize(int level) const { return units_[level].size; }
  int unitOf(int level, int host) const { return host / unitSize(level); }
  int firstHost(int level, int unit) const { return unit * unitSize(level); }
  int hostsIn(int level, int unit) const {
    return std::min(unitSize(level), hosts() - firstHost(level, unit));
  }
  // The host of a unit that acts for the unit in what concerns `host`. In its own units, that is
  // `host` itself.
  int agent(int level, int unit, int host) const {
    return firstHost(level, unit) + host % unitSize(level) % hostsIn(level, unit);
  }
  const std::vector<Node>& nodesOf(int level, int unit) const { return units_[level].nodes[unit]; }

  // The data that hosts exchange is split into lanes. One rank of each host drives a lane, and
  // communicates with the drivers of the same lane; if a host has few ranks, one drives several.
  int lanes() const { return lanes_; }
  int driver(int host, int lane) const {
    return members_[host][static_cast<size_t>(lane) % members_[host].size()];
  }

 private:
  std::vector<std::vector<int>> members_;  // by host
  struct Level {
    int size = 1;                          // hosts in a unit
    std::vector<std::vector<Node>> nodes;  // by unit
  };
  std::vector<Level> units_;
  std::vector<int> hostOf_;   // by rank
  std::vector<int> indexOf_;  // by rank
  int lanes_ = 1;
};

}  // namespace mycoll
