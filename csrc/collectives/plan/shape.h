// Shape: which ranks of a group are on which host. Plans depend on it and on nothing else of the
// world. Derived by every rank alike.
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

// The largest nodes of the tree over `ranks` ranks that `members`, in order, make up.
std::vector<Node> largestNodes(const std::vector<int>& members, int ranks,
                               SumTree tree = SumTree());

// A block of the tree (MYCOLL_SUM_BLOCK) with which hosts have fewer partial sums to send; 0: none.
int betterSumBlock(const std::vector<int>& hostOf, SumTree tree);

class Shape {
 public:
  // Hosts that talk to each other directly, at most; a power of two.
  static constexpr int kMostInUnit = 16;

  // hostOf[rank]: a number that ranks of one host have in common.
  explicit Shape(const std::vector<int>& hostOf, SumTree tree = SumTree(),
                 int mostInUnit = kMostInUnit);

  int ranks() const { return static_cast<int>(hostOf_.size()); }
  // In the order of their lowest ranks.
  int hosts() const { return static_cast<int>(members_.size()); }
  const std::vector<int>& membersOf(int host) const { return members_[host]; }
  int hostOf(int rank) const { return hostOf_[rank]; }
  int indexOf(int rank) const { return indexOf_[rank]; }  // among the members of its host
  const std::vector<Node>& nodesOf(int host) const { return units_[0].nodes[host]; }

  // Many hosts are in units, these in larger ones and so on. What hosts exchange goes from unit to
  // unit of one level, so that each talks to few others. A host is a unit of level 0, and all of
  // them are the one of the last.
  int levels() const { return static_cast<int>(units_.size()) - 1; }
  // A unit of this level has so many hosts, the last one maybe fewer.
  int unitSize(int level) const { return units_[level].size; }
  int unitOf(int level, int host) const { return host / unitSize(level); }
  int firstHost(int level, int unit) const { return unit * unitSize(level); }
  int hostsIn(int level, int unit) const {
    return std::min(unitSize(level), hosts() - firstHost(level, unit));
  }
  // The host of a unit that acts for it in what concerns `host`, which acts for its own ones.
  int agent(int level, int unit, int host) const {
    return firstHost(level, unit) + host % unitSize(level) % hostsIn(level, unit);
  }
  const std::vector<Node>& nodesOf(int level, int unit) const { return units_[level].nodes[unit]; }

  // What hosts exchange is cut into lanes. A lane is driven by one rank of each host, which talks
  // to the drivers of the same lane; where a host has few ranks, one drives several.
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
