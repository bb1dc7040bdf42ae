#include "engine/control_tree.h"

#include <algorithm>
#include <map>
#include <string>

namespace mycoll {
namespace {

constexpr int kChildren = 16;

}  // namespace

std::vector<int> hostsOf(const GroupAddress& group) {
  std::map<std::string, int> known;
  std::vector<int> hosts;
  for (const PeerAddress& peer : group.peers) {
    const int rank = static_cast<int>(hosts.size());
    hosts.push_back(known.try_emplace(peer.hostIdentity, rank).first->second);
  }
  return hosts;
}

ControlTree::ControlTree(const GroupAddress& group) : hostOf_(group.peers.size()) {
  const std::vector<int> firsts = hostsOf(group);
  for (size_t rank = 0; rank < firsts.size(); ++rank) {
    const bool isFirst = firsts[rank] == static_cast<int>(rank);
    hostOf_[rank] = isFirst ? static_cast<int>(members_.size()) : hostOf_[firsts[rank]];
    if (isFirst) members_.emplace_back();
    members_[hostOf_[rank]].push_back(static_cast<int>(rank));
  }
}

int ControlTree::parentOf(int rank) const {
  const int host = hostOf_[rank];
  if (members_[host][0] != rank) return members_[host][0];
  return host == 0 ? -1 : members_[(host - 1) / kChildren][0];
}

void ControlTree::addChildren(int rank, std::vector<int>* ranks) const {
  const int host = hostOf_[rank];
  const std::vector<int>& members = members_[host];
  if (members[0] != rank) return;
  ranks->insert(ranks->end(), members.begin() + 1, members.end());
  const int hosts = static_cast<int>(members_.size());
  const int first = kChildren * host + 1;
  for (int child = first; child < std::min(first + kChildren, hosts); ++child) {
    ranks->push_back(members_[child][0]);
  }
}

int ControlTree::parentOf(int rank, const HasLeft& hasLeft) const {
  do rank = parentOf(rank);
  while (rank >= 0 && hasLeft(rank));
  return rank;
}

std::vector<int> ControlTree::childrenOf(int rank, const HasLeft& hasLeft) const {
  std::vector<int> below, children;
  addChildren(rank, &below);
  const int root = members_[0][0];
  if (rank != root && parentOf(rank, hasLeft) < 0) addChildren(root, &below);
  while (!below.empty()) {
    const int next = below.back();
    below.pop_back();
    if (next == rank) continue;
    hasLeft(next) ? addChildren(next, &below) : children.push_back(next);
  }
  return children;
}

}  // namespace mycoll
