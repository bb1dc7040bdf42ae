#include "collectives/plan/gathers.h"

namespace mycoll {
namespace {

// Up to this size, a tree of whole messages is fastest for a broadcast.
constexpr uint64_t kTreeBytes = 64 * 1024;

}  // namespace

void GatherPlanner::shareSlots(int phase, const std::vector<Slot>& slots) {
  shareBetweenHosts(phase, slots);
  shareInHost(phase, slots);
}

// Sends the slots to their holders on all hosts except the root's, which has them already.
void GatherPlanner::shareBetweenHosts(int phase, const std::vector<Slot>& slots) {
  for (int level = shape_.levels(); level > 0; --level) {
    const int when = phase + shape_.levels() - level;
    Runs leaving, coming;
    for (const Slot& slot : slots) {
      if (isWhole(slot) || gate(slot, host_) != rank_) continue;
      shareSlot(level, slot, &leaving, &coming);
    }
    move(when, leaving, coming);
  }
}

// Sends the slots from their holders on this host to its other ranks. except: a rank that has
// them all.
void GatherPlanner::shareInHost(int phase, const std::vector<Slot>& slots, int except) {
  auto resultOf = [](const Slot& slot) { return slot.result; };
  auto isHome = [&](const Slot& slot) {
    return isWhole(slot) || shape_.hostOf(slot.owner) == host_;
  };
  if (isShared_) return shareInMemory(phase, slots);
  // Sends the host's own slots first, and the others when they have arrived.
  for (const bool ofHome : {true, false}) {
    const int when = phase + (ofHome ? 0 : shape_.levels());
    forRuns(
        slots,
        [&](const Slot& slot) {
          return isHome(slot) == ofHome && holder(slot, host_) == rank_ ? rank_ : -1;
        },
        resultOf,
        [&](int, const Place& run) {
          for (const int member : shape_.membersOf(host_)) {
            if (member != rank_ && member != except) send(when, member, run);
          }
        });
    if (rank_ == except) continue;
    forRuns(
        slots,
        [&](const Slot& slot) {
          const int from = holder(slot, host_);
          return isHome(slot) == ofHome && from != rank_ ? from : -1;
        },
        resultOf, [&](int from, const Place& run) { receive(when, from, run); });
  }
}

// The holders of slots on this host copy them to their areas, and the others copy them from
// there.
void GatherPlanner::shareInMemory(int phase, const std::vector<Slot>& slots) {
  const bool isThere = !slots.empty() && isWhole(slots[0]);
  const int when = phase + (isThere ? 0 : shape_.levels());
  auto resultOf = [](const Slot& slot) { return slot.result; };
  waitFor(when, Mark::kDone);
  forRuns(
      slots, [&](const Slot& slot) { return holder(slot, host_) == rank_ ? 0 : -1; }, resultOf,
      [&](int, const Place& run) { copy(when, shared(rank_, run), run); });
  mark(when, Mark::kShared);
  const bool holdsAll = std::all_of(slots.begin(), slots.end(),
                                    [&](const Slot& slot) { return holder(slot, host_) == rank_; });
  if (holdsAll) return;
  waitFor(when, Mark::kShared);
  forRuns(
      slots,
      [&](const Slot& slot) {
        const int from = holder(slot, host_);
        return from == rank_ ? -1 : from;
      },
      resultOf, [&](int from, const Place& run) { copy(when, run, shared(from, run)); });
}

// Copies data from one rank to the others of its host.
void GatherPlanner::giveInMemory(int phase, int from, const Place& data) {
  waitFor(phase, Mark::kDone);
  if (rank_ == from) copy(phase, shared(rank_, data), data);
  mark(phase, Mark::kGiven);
  if (rank_ == from) return;
  waitFor(phase, Mark::kGiven);
  copy(phase, data, shared(from, data));
}

// Sends a slot from the host that acts for a unit to those that act for its parts.
void GatherPlanner::shareSlot(int level, const Slot& slot, Runs* leaving, Runs* coming) {
  const int home = shape_.hostOf(slot.owner);
  const int unit = shape_.unitOf(level, host_);
  const int from = shape_.agent(level, unit, home);
  forParts(level, unit, [&](int part) {
    const int to = shape_.agent(level - 1, part, home);
    if (to == from || isRoots(to)) return;
    if (from == host_) leaving->add(gate(slot, to), slot.result);
    if (to == host_) coming->add(gate(slot, from), slot.result);
  });
}

void GatherPlanner::allGather() {
  if (*std::max_element(job_.out.begin(), job_.out.end()) == 0) return barrier(0);
  std::vector<Slot> slots;
  for (int owner = 0; owner < shape_.ranks(); ++owner) {
    const Place out = part(Space::kOutput, owner, job_.out[owner]);
    slots.push_back({owner, shape_.indexOf(owner), {}, out});
  }
  copy(0, slots[rank_].result, part(Space::kInput, 0, job_.in[0]));
  shareSlots(0, slots);
}

void GatherPlanner::broadcast() {
  const uint64_t bytes = job_.out[0];
  const Place data = part(Space::kOutput, 0, bytes);
  if (bytes <= kTreeBytes) return broadcastWhole(data);
  // Each rank of the other hosts receives a piece, and they share the pieces. The root's host has
  // all pieces first: in large worlds its ranks send them, each its lane.
  const int home = shape_.hostOf(job_.root);
  const std::vector<int> owners = shape_.hosts() == 1 ? othersAtHome() : ranksAway();
  const int n = static_cast<int>(owners.size());
  std::vector<Slot> slots;
  for (int i = 0; i < n; ++i) {
    slots.push_back({owners[i], shape_.indexOf(owners[i]), {}, piece(data, i, n)});
  }
  for (int at = -1; at < shape_.levels(); ++at) {
    if (isShared_ && isRoots(host_) && at < 0) continue;
    Runs leaving, coming;
    for (const Slot& slot : slots) {
      const std::vector<int> way = wayFromRoot(slot);
      const int from = at < 0 ? job_.root : way[at];
      const int to = at < 0 ? holder(slot, home) : way[at + 1];
      if (from == to) continue;
      if (from == rank_) leaving.add(to, slot.result);
      if (to == rank_) coming.add(from, slot.result);
    }
    move(at + 1, leaving, coming);
  }
  const int phase = shape_.levels() + 1;
  shareBetweenHosts(phase, slots);
  if (isShared_ && isRoots(host_)) return giveInMemory(1, job_.root, data);
  shareInHost(phase, slots, job_.root);
}

std::vector<int> GatherPlanner::othersAtHome() const {
  std::vector<int> ranks = shape_.membersOf(shape_.hostOf(job_.root));
  std::erase(ranks, job_.root);
  return ranks;
}

std::vector<int> GatherPlanner::ranksAway() const {
  const int home = shape_.hostOf(job_.root);
  const std::vector<int> hosts = inOrderOfTheirWays();
  const size_t wanted = shape_.ranks() - shape_.membersOf(home).size();
  std::vector<int> ranks;
  for (size_t index = 0; ranks.size() < wanted; ++index) {
    for (const int host : hosts) {
      const std::vector<int>& members = shape_.membersOf(host);
      if (host != home && index < members.size()) ranks.push_back(members[index]);
    }
  }
  return ranks;
}

// A binomial tree over hosts, then one inside each.
void GatherPlanner::broadcastWhole(const Place& data) {
  const int home = shape_.hostOf(job_.root);
  auto agent = [&](int host) { return host == home ? job_.root : shape_.driver(host, 0); };
  std::vector<int> agents;
  for (int i = 0; i < shape_.hosts(); ++i) agents.push_back(agent((home + i) % shape_.hosts()));
  const int phase = treeFrom(0, agents, data);
  if (isShared_) return giveInMemory(phase, agent(host_), data);
  std::vector<int> members = shape_.membersOf(host_);
  std::erase(members, agent(host_));
  members.insert(members.begin(), agent(host_));
  treeFrom(phase, members, data);
}

// Sends data from the first of the ranks to all. Returns the phase after it.
int GatherPlanner::treeFrom(int phase, const std::vector<int>& ranks, const Place& data) {
  const int n = static_cast<int>(ranks.size());
  const int self = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank_) - ranks.begin());
  for (int distance = 1; distance < n; distance *= 2, ++phase) {
    if (self < distance && self + distance < n) send(phase, ranks[self + distance], data);
    if (self >= distance && self < 2 * distance && self < n) {
      receive(phase, ranks[self - distance], data);
    }
  }
  return phase;
}

Plan planGathering(const PlanContext& context) {
  GatherPlanner planner(context);
  context.job.kind == OpKind::kBroadcast ? planner.broadcast() : planner.allGather();
  return planner.finish();
}

}  // namespace mycoll
