#include "collectives/plan/plan.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace mycoll {
namespace {

// Up to here one hop counts more than bytes.
constexpr uint64_t kWholeBytes = 16 * 1024;
// Up to here a tree of whole messages is fastest for a broadcast.
constexpr uint64_t kTreeBytes = 64 * 1024;
// One chunk is added up while the next one is on its way. Each needs scratch memory, which is to
// stay in caches; but messages should be long enough for what each costs.
constexpr uint64_t kMessageBytes = 256 * 1024;
constexpr uint64_t kLeastChunk = 512 * 1024;
constexpr uint64_t kMostChunk = 2 * 1024 * 1024;
constexpr uint64_t kLeastBlock = 4 * 1024;  // of a chunk that has a block for each rank
constexpr uint64_t kMostChunks = 60'000;    // messages are told apart by chunk and phase
// Pieces begin at cache lines.
constexpr uint64_t kUnit = 64;

uint64_t roundUp(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

// A piece of what is reduced or gathered. in: where it lies in each rank's input. result: where it
// lies with those that are to have it, its owner among them.
struct Slot {
  int owner = -1;  // -1: each host's driver of the lane ("whole")
  int lane = 0;
  Place in;
  Place result;
};

bool follows(const Place& left, const Place& right) {
  return left.space == right.space && left.block == right.block &&
         left.begin + left.bytes == right.begin;
}

class Planner {
 public:
  Planner(const Shape& shape, const Job& job, int rank)
      : shape_(shape), job_(job), rank_(rank), host_(shape.hostOf(rank)) {}

  Plan plan(const Chunking& chunking, uint64_t chunk) {
    begin_ = chunk == 0 ? 0 : chunk * chunking.chunkBytes;
    length_ = chunking.chunkBytes;
    switch (job_.kind) {
      case OpKind::kAllReduce:
      case OpKind::kReduce: reduce(); break;
      case OpKind::kReduceScatter: reduceScatter(); break;
      case OpKind::kAllGather: allGather(); break;
      case OpKind::kBroadcast: broadcast(); break;
      case OpKind::kGather: gather(); break;
      case OpKind::kScatter: scatter(); break;
      case OpKind::kAllToAll: allToAll(); break;
      case OpKind::kMonitoredBarrier: monitoredBarrier(); break;
      default: barrier(0); break;
    }
    auto order = [](const Step& step) { return 2 * step.phase + (step.act >= Step::Act::kSend); };
    std::stable_sort(plan_.steps.begin(), plan_.steps.end(),
                     [&](const Step& a, const Step& b) { return order(a) < order(b); });
    plan_.phases = plan_.steps.empty() ? 0 : plan_.steps.back().phase + 1;
    return std::move(plan_);
  }

 private:
  // ---- steps

  void message(Step::Act act, int phase, int peer, const Place& place) {
    Step step;
    step.act = act;
    step.phase = static_cast<uint8_t>(phase);
    step.peer = peer;
    step.place = place;
    plan_.steps.push_back(step);
  }
  void send(int phase, int peer, const Place& place) {
    message(Step::Act::kSend, phase, peer, place);
  }
  void receive(int phase, int peer, const Place& place) {
    message(Step::Act::kReceive, phase, peer, place);
  }
  void fold(int phase, const Place& to, bool isResult, uint64_t count,
            std::vector<FoldInput> inputs) {
    std::sort(inputs.begin(), inputs.end(),
              [](const FoldInput& a, const FoldInput& b) { return a.node.lo < b.node.lo; });
    Step step;
    step.act = Step::Act::kFold;
    step.phase = static_cast<uint8_t>(phase);
    step.isResult = isResult;
    step.place = to;
    step.count = count;
    step.first = static_cast<uint32_t>(plan_.inputs.size());
    step.inputs = static_cast<uint32_t>(inputs.size());
    plan_.inputs.insert(plan_.inputs.end(), inputs.begin(), inputs.end());
    plan_.steps.push_back(step);
  }
  void copy(int phase, const Place& to, const Place& from) {
    if (to.bytes == 0) return;
    Step step;
    step.act = Step::Act::kCopy;
    step.phase = static_cast<uint8_t>(phase);
    step.place = to;
    step.first = static_cast<uint32_t>(plan_.inputs.size());
    step.inputs = 1;
    plan_.inputs.push_back({{}, from, false});
    plan_.steps.push_back(step);
  }
  Place scratch(uint64_t bytes) {
    const Place place{Space::kScratch, 0, plan_.scratchBytes, bytes};
    plan_.scratchBytes += roundUp(bytes, kUnit);
    return place;
  }

  // ---- pieces

  // What this chunk has of a block.
  Place part(Space space, int block, uint64_t blockBytes) const {
    const uint64_t begin = std::min(begin_, blockBytes);
    return {space, block, begin, std::min(length_, blockBytes - begin)};
  }
  // The i-th of n pieces.
  Place piece(const Place& whole, int i, int n) const {
    const uint64_t unit = std::lcm(kUnit, job_.elementBytes);
    const uint64_t units = (whole.bytes + unit - 1) / unit;
    const uint64_t lo = std::min(units * i / n * unit, whole.bytes);
    const uint64_t hi = std::min(units * (i + 1) / n * unit, whole.bytes);
    return {whole.space, whole.block, whole.begin + lo, hi - lo};
  }
  bool isWhole(const Slot& slot) const { return slot.owner < 0; }
  // Who on a host has the slot, or gets it there for the others.
  int holder(const Slot& slot, int host) const {
    const bool isHome = !isWhole(slot) && shape_.hostOf(slot.owner) == host;
    return isHome ? slot.owner : shape_.driver(host, slot.lane);
  }
  bool isOwner(const Slot& slot) const {
    return isWhole(slot) ? holder(slot, host_) == rank_ : slot.owner == rank_;
  }

  // Calls visit(key, place) for what lies side by side and has one key; key -1: left out.
  template <typename Key, typename PlaceOf, typename Visit>
  static void forRuns(const std::vector<Slot>& slots, Key key, PlaceOf placeOf, Visit visit) {
    int runKey = -1;
    Place run;
    auto end = [&] {
      if (runKey >= 0 && run.bytes > 0) visit(runKey, run);
      runKey = -1;
    };
    for (const Slot& slot : slots) {
      const Place place = placeOf(slot);
      if (place.bytes == 0) continue;
      const int each = key(slot);
      if (runKey >= 0 && each == runKey && follows(run, place)) {
        run.bytes += place.bytes;
        continue;
      }
      end();
      runKey = each;
      run = place;
    }
    end();
  }

  // ---- reduce: from all ranks' inputs to the owners' results. Ends in the phase that it returns,
  // in which the results may be sent.

  int reduceSlots(int phase, const std::vector<Slot>& slots) {
    const std::vector<int>& members = shape_.membersOf(host_);
    auto holderHere = [&](const Slot& slot) { return holder(slot, host_); };
    auto inputOf = [](const Slot& slot) { return slot.in; };
    auto mine = [&](const Slot& slot) { return holderHere(slot) == rank_ ? rank_ : -1; };
    // Inputs of the host's ranks meet.
    forRuns(
        slots, [&](const Slot& slot) { return holderHere(slot) == rank_ ? -1 : holderHere(slot); },
        inputOf, [&](int peer, const Place& run) { send(phase, peer, run); });
    std::vector<std::vector<std::pair<Place, Place>>> came(members.size());  // input, where it is
    for (size_t i = 0; i < members.size(); ++i) {
      if (members[i] == rank_) continue;
      forRuns(slots, mine, inputOf, [&](int, const Place& run) {
        came[i].emplace_back(run, scratch(run.bytes));
        receive(phase, members[i], came[i].back().second);
      });
    }
    auto rawInput = [&](size_t i, const Place& wanted) {
      if (members[i] == rank_) return wanted;
      for (const auto& [input, at] : came[i]) {
        if (input.block == wanted.block && input.begin <= wanted.begin &&
            wanted.begin + wanted.bytes <= input.begin + input.bytes) {
          return Place{at.space, at.block, at.begin + wanted.begin - input.begin, wanted.bytes};
        }
      }
      return Place{};
    };
    for (const Slot& slot : slots) {
      if (slot.in.bytes == 0 || holderHere(slot) != rank_) continue;
      std::vector<FoldInput> raw;
      for (size_t i = 0; i < members.size(); ++i) {
        raw.push_back({{members[i], members[i] + 1}, rawInput(i, slot.in), false});
      }
      const uint64_t count = slot.in.bytes / job_.elementBytes;
      const bool isOurs = isOwner(slot);
      std::vector<FoldInput> inputs = std::move(raw);
      // The nodes of this host, for the owners on others.
      const bool leaves = !isOurs || (isWhole(slot) && shape_.hosts() > 1);
      if (leaves) {
        inputs = foldNodes(phase + 1, inputs, count);
        for (int host = 0; host < shape_.hosts(); ++host) {
          const bool isWanted = isWhole(slot) ? host != host_ : host == shape_.hostOf(slot.owner);
          if (!isWanted) continue;
          for (const FoldInput& node : inputs) send(phase + 1, holder(slot, host), node.place);
        }
      }
      if (!isOurs) continue;
      for (int host = 0; host < shape_.hosts(); ++host) {
        if (host == host_) continue;
        for (const Node& node : shape_.nodesOf(host)) {
          const bool isWide = node.ranks() > 1;
          const Place at = scratch(count * (isWide ? job_.wideBytes : job_.elementBytes));
          receive(phase + 1, holder(slot, host), at);
          inputs.push_back({node, at, isWide});
        }
      }
      fold(phase + 2, slot.result, true, count, std::move(inputs));
    }
    return phase + 2;
  }

  // A node of one rank stays as it is.
  std::vector<FoldInput> foldNodes(int phase, const std::vector<FoldInput>& raw, uint64_t count) {
    std::vector<FoldInput> nodes;
    for (const Node& node : shape_.nodesOf(host_)) {
      std::vector<FoldInput> inputs;
      for (const FoldInput& each : raw) {
        if (each.node.lo >= node.lo && each.node.hi <= node.hi) inputs.push_back(each);
      }
      if (inputs.size() == 1) {
        nodes.push_back(inputs[0]);
        continue;
      }
      const Place at = scratch(count * job_.wideBytes);
      nodes.push_back({node, at, true});
      fold(phase, at, false, count, std::move(inputs));
    }
    return nodes;
  }

  // ---- gather: from the owners to all ranks of some hosts but one

  void shareSlots(int phase, const std::vector<Slot>& slots, const std::vector<int>& hosts,
                  int except = -1) {
    auto resultOf = [](const Slot& slot) { return slot.result; };
    if (std::find(hosts.begin(), hosts.end(), host_) == hosts.end()) return;
    auto isHome = [&](const Slot& slot) {
      return isWhole(slot) || shape_.hostOf(slot.owner) == host_;
    };
    for (const int host : hosts) {
      if (host == host_) continue;
      for (const Slot& slot : slots) {
        if (isWhole(slot) || slot.result.bytes == 0) continue;
        if (slot.owner == rank_) send(phase, holder(slot, host), slot.result);
        if (shape_.hostOf(slot.owner) == host && holder(slot, host_) == rank_) {
          receive(phase, slot.owner, slot.result);
        }
      }
    }
    // Inside the host: its own slots at once, the others when they have come.
    for (const bool ofHome : {true, false}) {
      const int when = phase + (ofHome ? 0 : 1);
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

  std::vector<int> allHosts() const {
    std::vector<int> hosts(shape_.hosts());
    std::iota(hosts.begin(), hosts.end(), 0);
    return hosts;
  }

  // ---- operations

  // Adding everything up on both of two hosts moves no byte more, if each has one node to send.
  bool isBetterWhole(uint64_t bytes) const {
    if (bytes <= kWholeBytes) return true;
    if (shape_.hosts() != 2) return false;
    for (int host = 0; host < 2; ++host) {
      const std::vector<Node>& nodes = shape_.nodesOf(host);
      const bool isWider = nodes[0].ranks() > 1 && job_.wideBytes > job_.elementBytes;
      if (nodes.size() > 1 || isWider) return false;
    }
    return true;
  }

  void reduce() {
    const bool isAll = job_.kind == OpKind::kAllReduce;
    const uint64_t bytes = job_.in[0];
    if (bytes == 0) return barrier(0);
    const Place in = part(Space::kInput, 0, bytes);
    const bool hasOutput = isAll || rank_ == job_.root;
    const Place out{hasOutput ? Space::kOutput : Space::kScratch, 0, hasOutput ? in.begin : 0,
                    in.bytes};
    std::vector<Slot> slots;
    if (!isAll && bytes <= kWholeBytes) {
      slots.push_back({job_.root, 0, in, out});
    } else if (isAll && isBetterWhole(bytes)) {
      const int lanes = bytes <= kWholeBytes ? 1 : shape_.lanes();
      for (int lane = 0; lane < lanes; ++lane) {
        slots.push_back({-1, lane, piece(in, lane, lanes), piece(out, lane, lanes)});
      }
    } else {
      const int lanes = shape_.lanes(), hosts = shape_.hosts();
      for (int lane = 0; lane < lanes; ++lane) {
        for (int host = 0; host < hosts; ++host) {
          const int index = lane * hosts + host;
          slots.push_back({shape_.driver(host, lane), lane, piece(in, index, lanes * hosts),
                           piece(out, index, lanes * hosts)});
        }
      }
    }
    for (Slot& slot : slots) {
      if (!hasOutput && isOwner(slot)) slot.result = scratch(slot.result.bytes);
    }
    const int phase = reduceSlots(0, slots);
    if (isAll) return shareSlots(phase, slots, allHosts());
    auto ownerOf = [&](const Slot& slot) { return slot.owner == job_.root ? -1 : slot.owner; };
    forRuns(
        slots, ownerOf, [](const Slot& slot) { return slot.result; },
        [&](int owner, const Place& run) {
          if (owner == rank_) send(phase, job_.root, run);
          if (rank_ == job_.root) receive(phase, owner, run);
        });
  }

  void reduceScatter() {
    if (*std::max_element(job_.in.begin(), job_.in.end()) == 0) return barrier(0);
    std::vector<Slot> slots;
    for (int owner = 0; owner < shape_.ranks(); ++owner) {
      const Place in = part(Space::kInput, owner, job_.in[owner]);
      slots.push_back({owner, shape_.indexOf(owner), in, {Space::kOutput, 0, in.begin, in.bytes}});
    }
    reduceSlots(0, slots);
  }

  void allGather() {
    if (*std::max_element(job_.out.begin(), job_.out.end()) == 0) return barrier(0);
    std::vector<Slot> slots;
    for (int owner = 0; owner < shape_.ranks(); ++owner) {
      const Place out = part(Space::kOutput, owner, job_.out[owner]);
      slots.push_back({owner, shape_.indexOf(owner), {}, out});
    }
    copy(0, slots[rank_].result, part(Space::kInput, 0, job_.in[0]));
    shareSlots(0, slots, allHosts());
  }

  void broadcast() {
    const uint64_t bytes = job_.out[0];
    const Place data = part(Space::kOutput, 0, bytes);
    if (bytes <= kTreeBytes) return broadcastWhole(data);
    const int home = shape_.hostOf(job_.root);
    // Other hosts' ranks get a piece each, and share them; so do the ranks of the root's own host.
    std::vector<int> others = allHosts();
    std::erase(others, home);
    std::vector<int> away, near;
    for (const int host : others) {
      const std::vector<int>& members = shape_.membersOf(host);
      away.insert(away.end(), members.begin(), members.end());
    }
    for (const int member : shape_.membersOf(home)) {
      if (member != job_.root) near.push_back(member);
    }
    deal(away, data, others, -1);
    deal(near, data, {home}, job_.root);
  }

  void deal(const std::vector<int>& owners, const Place& data, const std::vector<int>& hosts,
            int except) {
    std::vector<Slot> slots;
    const int n = static_cast<int>(owners.size());
    for (int i = 0; i < n; ++i) {
      slots.push_back({owners[i], shape_.indexOf(owners[i]), {}, piece(data, i, n)});
      const Slot& slot = slots.back();
      if (slot.result.bytes == 0) continue;
      if (rank_ == job_.root) send(0, slot.owner, slot.result);
      if (rank_ == slot.owner) receive(0, job_.root, slot.result);
    }
    if (n > 0) shareSlots(1, slots, hosts, except);
  }

  // A binomial tree over hosts, then one inside each.
  void broadcastWhole(const Place& data) {
    const int home = shape_.hostOf(job_.root);
    auto agent = [&](int host) { return host == home ? job_.root : shape_.driver(host, 0); };
    std::vector<int> agents;
    for (int i = 0; i < shape_.hosts(); ++i) agents.push_back(agent((home + i) % shape_.hosts()));
    const int phase = treeFrom(0, agents, data);
    std::vector<int> members = shape_.membersOf(host_);
    std::erase(members, agent(host_));
    members.insert(members.begin(), agent(host_));
    treeFrom(phase, members, data);
  }

  // From the first of them to all. Returns the phase after it.
  int treeFrom(int phase, const std::vector<int>& ranks, const Place& data) {
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

  // Those of a host meet at its first rank; these hear of each other, the distance doubling.
  void barrier(int phase) {
    const std::vector<int>& members = shape_.membersOf(host_);
    const int first = members[0];
    const int hosts = shape_.hosts();
    for (const int member : members) {
      if (member == first) continue;
      if (rank_ == first) receive(phase, member, {});
      if (rank_ == member) send(phase, first, {});
    }
    for (int distance = 1; distance < hosts; distance *= 2) {
      ++phase;
      if (rank_ != first) continue;
      receive(phase, shape_.membersOf((host_ - distance + hosts) % hosts)[0], {});
      send(phase, shape_.membersOf((host_ + distance) % hosts)[0], {});
    }
    ++phase;
    for (const int member : members) {
      if (member == first) continue;
      if (rank_ == first) send(phase, member, {});
      if (rank_ == member) receive(phase, first, {});
    }
  }

  // Through rank 0, which so knows who has not come.
  void monitoredBarrier() {
    for (int rank = 1; rank < shape_.ranks(); ++rank) {
      if (rank_ == 0) receive(0, rank, {}), send(1, rank, {});
      if (rank_ == rank) send(0, 0, {}), receive(1, 0, {});
    }
  }

  void gather() {
    const Place mine{Space::kInput, 0, 0, job_.in[0]};
    if (rank_ != job_.root) return send(0, job_.root, mine);
    copy(0, {Space::kOutput, rank_, 0, mine.bytes}, mine);
    for (int rank = 0; rank < shape_.ranks(); ++rank) {
      if (rank != rank_) receive(0, rank, {Space::kOutput, rank, 0, job_.out[rank]});
    }
  }

  void scatter() {
    const Place mine{Space::kOutput, 0, 0, job_.out[0]};
    if (rank_ != job_.root) return receive(0, job_.root, mine);
    copy(0, mine, {Space::kInput, rank_, 0, mine.bytes});
    for (int rank = 0; rank < shape_.ranks(); ++rank) {
      if (rank != rank_) send(0, rank, {Space::kInput, rank, 0, job_.in[rank]});
    }
  }

  // No two ranks begin with the same one.
  void allToAll() {
    const int ranks = shape_.ranks();
    copy(0, {Space::kOutput, rank_, 0, job_.out[rank_]}, {Space::kInput, rank_, 0, job_.in[rank_]});
    for (int distance = 1; distance < ranks; ++distance) {
      const int from = (rank_ - distance + ranks) % ranks;
      receive(0, from, {Space::kOutput, from, 0, job_.out[from]});
    }
    for (int distance = 1; distance < ranks; ++distance) {
      const int to = (rank_ + distance) % ranks;
      send(0, to, {Space::kInput, to, 0, job_.in[to]});
    }
  }

  const Shape& shape_;
  const Job& job_;
  const int rank_;
  const int host_;
  uint64_t begin_ = 0;
  uint64_t length_ = 0;
  Plan plan_;
};

}  // namespace

Chunking chunkingOf(const Shape& shape, const Job& job) {
  const auto pieces = static_cast<uint64_t>(shape.lanes() * shape.hosts());
  uint64_t block = 0, bytes = std::clamp(pieces * kMessageBytes, kLeastChunk, kMostChunk);
  switch (job.kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduce: block = job.in[0]; break;
    case OpKind::kBroadcast: block = job.out[0]; break;
    case OpKind::kReduceScatter: block = *std::max_element(job.in.begin(), job.in.end()); break;
    case OpKind::kAllGather: block = *std::max_element(job.out.begin(), job.out.end()); break;
    default: return {};
  }
  if (job.kind == OpKind::kReduceScatter || job.kind == OpKind::kAllGather) {
    bytes = std::max(kLeastBlock, bytes / static_cast<uint64_t>(shape.ranks()));
  }
  const uint64_t unit = std::lcm(kUnit, job.elementBytes);
  bytes = roundUp(std::max(bytes, block / kMostChunks), unit);
  return {std::max<uint64_t>(1, (block + bytes - 1) / bytes), bytes};
}

Plan planOf(const Shape& shape, const Job& job, int rank, const Chunking& chunking,
            uint64_t chunk) {
  return Planner(shape, job, rank).plan(chunking, chunk);
}

}  // namespace mycoll
