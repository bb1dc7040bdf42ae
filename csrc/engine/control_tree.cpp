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

std::vector<int> ControlTree::childrenOf(int rank) const {
  const int host = hostOf_[rank];
  if (members_[host][0] != rank) return {};
  std::vector<int> children(members_[host].begin() + 1, members_[host].end());
  const int hosts = static_cast<int>(members_.size());
  const int first = kChildren * host + 1;
  for (int child = first; child < std::min(first + kChildren, hosts); ++child) {
    children.push_back(members_[child][0]);
  }
  return children;
}

}  // namespace mycoll
