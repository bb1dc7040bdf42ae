// Shape: which ranks of a group are on which host. Plans depend on it and on nothing else of the
// world. Derived by every rank alike.
//
// Plain values: no threads, nothing blocks.
#pragma once

#include <cstddef>
#include <vector>

namespace mycoll {

// A node of the tree by which reductions are computed (kernels/reduce.h): ranks lo to hi.
struct Node {
  int lo = 0;
  int hi = 0;
  int ranks() const { return hi - lo; }
  bool operator==(const Node&) const = default;
};

// The largest nodes of the tree over `ranks` ranks that `members`, in order, make up.
std::vector<Node> largestNodes(const std::vector<int>& members, int ranks);

class Shape {
 public:
  // hostOf[rank]: a number that ranks of one host have in common.
  explicit Shape(const std::vector<int>& hostOf);

  int ranks() const { return static_cast<int>(hostOf_.size()); }
  // In the order of their lowest ranks.
  int hosts() const { return static_cast<int>(members_.size()); }
  const std::vector<int>& membersOf(int host) const { return members_[host]; }
  int hostOf(int rank) const { return hostOf_[rank]; }
  int indexOf(int rank) const { return indexOf_[rank]; }  // among the members of its host
  const std::vector<Node>& nodesOf(int host) const { return nodes_[host]; }

  // What hosts exchange is cut into lanes. A lane is driven by one rank of each host, which talks
  // to the drivers of the same lane; where a host has few ranks, one drives several.
  int lanes() const { return lanes_; }
  int driver(int host, int lane) const {
    return members_[host][static_cast<size_t>(lane) % members_[host].size()];
  }

 private:
  std::vector<std::vector<int>> members_;  // by host
  std::vector<std::vector<Node>> nodes_;   // by host
  std::vector<int> hostOf_;                // by rank
  std::vector<int> indexOf_;               // by rank
  int lanes_ = 1;
};

}  // namespace mycoll
