#include "engine/control_tree.h"

#include <map>
#include <string>

namespace mycoll {

std::vector<int> hostsOf(const GroupAddress& group) {
  std::map<std::string, int> known;
  std::vector<int> hosts;
  const std::string* before = nullptr;  // its ranks are mostly in a row
  for (const PeerAddress& peer : group.peers) {
    const int rank = static_cast<int>(hosts.size());
    const bool isSame = before && *before == peer.hostIdentity;
    hosts.push_back(isSame ? hosts.back()
                           : known.try_emplace(peer.hostIdentity, rank).first->second);
    before = &peer.hostIdentity;
  }
  return hosts;
}

int ControlTree::standsFor(int host, const HasLeft& hasLeft) const {
  for (const int rank : shape_.membersOf(host)) {
    if (!hasLeft(rank)) return rank;
  }
  return -1;
}

int ControlTree::parentOf(int rank, const HasLeft& hasLeft) const {
  int host = shape_.hostOf(rank);
  int above = standsFor(host, hasLeft);
  while ((above < 0 || above == rank) && host != 0) {
    host &= host - 1;
    above = standsFor(host, hasLeft);
  }
  return above == rank ? -1 : above;
}

void ControlTree::addBelow(int host, const HasLeft& hasLeft, std::vector<int>* ranks) const {
  for (int bit = 1; host + bit < shape_.hosts() && (host & bit) == 0; bit *= 2) {
    const int rank = standsFor(host + bit, hasLeft);
    if (rank >= 0) {
      ranks->push_back(rank);
    } else {
      addBelow(host + bit, hasLeft, ranks);
    }
  }
}

std::vector<int> ControlTree::childrenOf(int rank, const HasLeft& hasLeft) const {
  std::vector<int> children;
  const int host = shape_.hostOf(rank);
  if (standsFor(host, hasLeft) != rank) return children;
  for (const int other : shape_.membersOf(host)) {
    if (other != rank && !hasLeft(other)) children.push_back(other);
  }
  addBelow(host, hasLeft, &children);
  if (host != 0 && parentOf(rank, hasLeft) < 0) {
    addBelow(0, hasLeft, &children);
    std::erase(children, rank);
  }
  return children;
}

}  // namespace mycoll
