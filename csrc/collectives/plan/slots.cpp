#include "collectives/plan/slots.h"

#include <numeric>

namespace mycoll {
namespace {

bool follows(const Place& left, const Place& right) {
  return left.space == right.space && left.block == right.block &&
         left.begin + left.bytes == right.begin;
}

}  // namespace

void Runs::add(int peer, const Place& place) {
  if (peer < 0 || place.bytes == 0) return;
  const auto [last, isFirst] = last_.try_emplace(peer, runs_.size());
  if (!isFirst && follows(runs_[last->second].second, place)) {
    runs_[last->second].second.bytes += place.bytes;
    return;
  }
  last->second = runs_.size();
  runs_.emplace_back(peer, place);
}

Place SlotPlanner::piece(const Place& whole, int i, int n) const {
  const uint64_t unit = std::lcm(kUnit, job_.elementBytes);
  const uint64_t units = (whole.bytes + unit - 1) / unit;
  const uint64_t lo = std::min(units * i / n * unit, whole.bytes);
  const uint64_t hi = std::min(units * (i + 1) / n * unit, whole.bytes);
  return {whole.space, whole.block, whole.begin + lo, hi - lo};
}

Place SlotPlanner::shared(int rank, const Place& place) const {
  const bool isOfOneRank = job_.kind == OpKind::kReduceScatter || job_.kind == OpKind::kAllGather;
  const uint64_t block = isOfOneRank ? static_cast<uint64_t>(place.block) * length_ : 0;
  return {Space::kShared, shape_.indexOf(rank), block + place.begin, place.bytes};
}

bool SlotPlanner::isRoots(int host) const {
  const bool hasRoot = job_.kind == OpKind::kBroadcast || job_.kind == OpKind::kReduce;
  return hasRoot && shape_.hostOf(job_.root) == host;
}

int SlotPlanner::holder(const Slot& slot, int host) const {
  const bool isHome = !isWhole(slot) && shape_.hostOf(slot.owner) == host;
  return isHome ? slot.owner : shape_.driver(host, slot.lane);
}

int SlotPlanner::gate(const Slot& slot, int host) const {
  const bool isRootItself = isRoots(host) && shape_.hostOf(slot.owner) != host && !hasHelpers();
  return isRootItself ? job_.root : holder(slot, host);
}

void SlotPlanner::move(int phase, const Runs& leaving, const Runs& coming) {
  for (const auto& [peer, run] : leaving.all()) send(phase, peer, run);
  for (const auto& [peer, run] : coming.all()) receive(phase, peer, run);
}

void SlotPlanner::pass(int phase, int from, int to, const Place& place) {
  if (from == to) return;
  if (rank_ == from) send(phase, to, place);
  if (rank_ == to) receive(phase, from, place);
}

std::vector<int> SlotPlanner::inOrderOfTheirWays() const {
  std::vector<int> hosts(shape_.hosts());
  std::iota(hosts.begin(), hosts.end(), 0);
  std::stable_sort(hosts.begin(), hosts.end(), [&](int a, int b) {
    for (int level = 1; level <= shape_.levels(); ++level) {
      const int size = shape_.unitSize(level);
      if (a % size != b % size) return a % size < b % size;
    }
    return false;
  });
  return hosts;
}

std::vector<int> SlotPlanner::wayFromRoot(const Slot& slot) const {
  const int home = shape_.hostOf(job_.root), goal = shape_.hostOf(slot.owner);
  std::vector<int> way{gate(slot, home)};
  for (int level = 1; level < shape_.levels(); ++level) {
    way.push_back(gate(slot, shape_.agent(level, shape_.unitOf(level, home), goal)));
  }
  if (shape_.levels() > 0) way.push_back(slot.owner);
  // With units of unequal size, the way may lead back to its first rank: it then begins there.
  const auto last = std::find(way.rbegin(), way.rend(), way[0]);
  std::fill(last, way.rend(), way[0]);
  return way;
}

}  // namespace mycoll
