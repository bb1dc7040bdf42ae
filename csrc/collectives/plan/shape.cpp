#include "collectives/plan/shape.h"

#include <algorithm>
#include <bit>
#include <map>

namespace mycoll {
namespace {

// More lanes between two hosts gain nothing.
constexpr int kMostLanes = 16;

using Ranks = std::vector<int>::const_iterator;

// Adds the largest nodes below this one that consist of the ranks from first to last, all of which
// are below it.
void addLargestNodes(Node node, Ranks first, Ranks last, SumTree tree, std::vector<Node>* nodes) {
  if (first == last) return;
  if (last - first == node.ranks()) return nodes->push_back(node);
  const int middle = tree.middle(node.lo, node.hi);
  const Ranks split = std::lower_bound(first, last, middle);
  addLargestNodes({node.lo, middle}, first, split, tree, nodes);
  addLargestNodes({middle, node.hi}, split, last, tree, nodes);
}

int log2Up(int value) { return std::bit_width(static_cast<unsigned>(value - 1)); }

// Returns the unit sizes of as few levels as possible, with about as many units in a unit on each
// level: powers of two, like the nodes of the tree.
std::vector<int> unitSizes(int hosts, int mostInUnit) {
  const int bits = log2Up(hosts), most = log2Up(mostInUnit);
  const int levels = std::max(1, (bits + most - 1) / most);
  std::vector<int> sizes;
  for (int level = 0; level <= levels; ++level) sizes.push_back(1 << (bits * level / levels));
  return sizes;
}

}  // namespace

std::vector<Node> largestNodes(const std::vector<int>& members, int ranks, SumTree tree) {
  std::vector<Node> nodes;
  addLargestNodes({0, ranks}, members.begin(), members.end(), tree, &nodes);
  return nodes;
}

Shape::Shape(const std::vector<int>& hostOf, SumTree tree, int mostInUnit) {
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
      level.nodes.push_back(largestNodes(ranksOf, ranks(), tree));
    }
  }
}

int betterSumBlock(const std::vector<int>& hostOf, SumTree tree) {
  auto sumsOf = [&](SumTree each) {
    const Shape shape(hostOf, each);
    size_t sums = 0;
    for (int host = 0; host < shape.hosts(); ++host) sums += shape.nodesOf(host).size();
    return sums;
  };
  int best = 0;
  size_t least = sumsOf(tree);
  for (const int block : {1, 3, 5, 7}) {
    const size_t sums = sumsOf(SumTree(block));
    if (sums >= least) continue;
    least = sums;
    best = block;
  }
  return best;
}

}  // namespace mycoll
