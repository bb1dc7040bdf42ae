#include "collectives/plan/shape.h"

#include <algorithm>
#include <bit>
#include <map>

namespace mycoll {
namespace {

// More flows between two hosts gain nothing.
constexpr int kMostLanes = 16;

// Whether left and right are the two halves of a node.
bool areSiblings(Node left, Node right, int ranks) {
  const int size = left.ranks();
  return left.hi == right.lo && (size & (size - 1)) == 0 && left.lo % (2 * size) == 0 &&
         right.hi == std::min(left.lo + 2 * size, ranks);
}

int log2Up(int value) { return std::bit_width(static_cast<unsigned>(value - 1)); }

// As few levels as there can be, and about as many units in a unit on each: powers of two, as the
// nodes of the tree are.
std::vector<int> unitSizes(int hosts, int mostInUnit) {
  const int bits = log2Up(hosts), most = log2Up(mostInUnit);
  const int levels = std::max(1, (bits + most - 1) / most);
  std::vector<int> sizes;
  for (int level = 0; level <= levels; ++level) sizes.push_back(1 << (bits * level / levels));
  return sizes;
}

}  // namespace

std::vector<Node> largestNodes(const std::vector<int>& members, int ranks) {
  std::vector<Node> nodes;
  for (const int rank : members) {
    nodes.push_back({rank, rank + 1});
    while (nodes.size() > 1 && areSiblings(nodes[nodes.size() - 2], nodes.back(), ranks)) {
      const int end = nodes.back().hi;
      nodes.pop_back();
      nodes.back().hi = end;
    }
  }
  return nodes;
}

Shape::Shape(const std::vector<int>& hostOf, int mostInUnit) {
  std::map<int, int> known;
  for (int rank = 0; rank < static_cast<int>(hostOf.size()); ++rank) {
    const int host =
        known.try_emplace(hostOf[rank], static_cast<int>(members_.size())).first->second;
    if (host == hosts()) members_.emplace_back();
    hostOf_.push_back(host);
    indexOf_.push_back(static_cast<int>(members_[host].size()));
    members_[host].push_back(rank);
  }
  for (const std::vector<int>& members : members_) {
    lanes_ = std::max(lanes_, static_cast<int>(members.size()));
  }
  lanes_ = std::min(lanes_, kMostLanes);
  for (const int size : unitSizes(hosts(), mostInUnit)) {
    Level& level = units_.emplace_back();
    level.size = size;
    for (int first = 0; first < hosts(); first += size) {
      std::vector<int> ranksOf;
      for (int host = first; host < std::min(first + size, hosts()); ++host) {
        ranksOf.insert(ranksOf.end(), members_[host].begin(), members_[host].end());
      }
      std::sort(ranksOf.begin(), ranksOf.end());
      level.nodes.push_back(largestNodes(ranksOf, ranks()));
    }
  }
}

}  // namespace mycoll
