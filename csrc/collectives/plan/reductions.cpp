// all_reduce, reduce and reduce_scatter: slots from all ranks' inputs to their owners, which add
// them up; then, where others need the results, a gather.
#include <map>

#include "collectives/plan/gathers.h"

namespace mycoll {
namespace {

// Up to this size, a hop costs more than the bytes.
constexpr uint64_t kWholeBytes = 16 * 1024;

class ReducePlanner final : public GatherPlanner {
 public:
  using GatherPlanner::GatherPlanner;

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
      const std::vector<int> owners = inOrderOfTheirWays();
      const int pieces = shape_.lanes() * shape_.hosts();
      for (int lane = 0; lane < shape_.lanes(); ++lane) {
        for (const int host : owners) {
          const int index = static_cast<int>(slots.size());
          slots.push_back({shape_.driver(host, lane), lane, piece(in, index, pieces),
                           piece(out, index, pieces)});
        }
      }
    }
    if (isAll) return shareSlots(reduceSlots(0, slots), slots);
    const int home = shape_.hostOf(job_.root);
    std::vector<std::vector<int>> ways;
    for (Slot& slot : slots) {
      const std::vector<int>& way = ways.emplace_back(wayFromRoot(slot));
      const bool isOnWay = std::find(way.begin(), way.end(), rank_) != way.end();
      if (!hasOutput && isOnWay) slot.result = scratch(slot.result.bytes);
    }
    int phase = reduceSlots(0, slots);
    for (size_t i = 0; i < slots.size(); ++i) {
      const std::vector<int>& way = ways[i];
      for (int at = shape_.levels(); at > 0 && slots[i].result.bytes > 0; --at) {
        pass(phase + shape_.levels() - at, way[at], way[at - 1], slots[i].result);
      }
    }
    // The root's host now has all slots: the root itself, or other ranks of the host.
    const bool isAllThere =
        std::all_of(ways.begin(), ways.end(), [&](const auto& way) { return way[0] == job_.root; });
    if (isAllThere) return;
    if (hasHelpers()) phase += shape_.levels();
    if (isShared_ && isRoots(host_)) return giveToRoot(phase, slots);
    for (const Slot& slot : slots) pass(phase, gate(slot, home), job_.root, slot.result);
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

 private:
  // With two hosts, each of which sends one node, adding up everything on both moves no more bytes.
  bool isBetterWhole(uint64_t bytes) const {
    if (bytes <= kWholeBytes) return true;
    if (shape_.hosts() != 2) return false;
    for (int host = 0; host < 2; ++host) {
      const std::vector<Node>& nodes = shape_.nodesOf(host);
      if (nodes.size() > 1 || isWide(nodes[0])) return false;
    }
    return true;
  }

  // The other ranks of the root's host give it the slots that they have.
  void giveToRoot(int phase, const std::vector<Slot>& slots) {
    for (const Slot& slot : slots) {
      if (gate(slot, host_) == rank_ && rank_ != job_.root) {
        copy(phase, shared(rank_, slot.in), slot.result);
      }
    }
    mark(phase, Mark::kShared);
    if (rank_ != job_.root) return;
    waitFor(phase, Mark::kShared);
    for (const Slot& slot : slots) {
      const int from = gate(slot, host_);
      if (from != rank_) copy(phase, slot.result, shared(from, slot.in));
    }
  }

  // Moves all ranks' inputs to the owners, which add them up. Returns the phase in which it ends;
  // the results may be sent in that phase.
  int reduceSlots(int phase, const std::vector<Slot>& slots) {
    const std::vector<int>& members = shape_.membersOf(host_);
    const int end = phase + shape_.levels() + 1;
    auto holderHere = [&](const Slot& slot) { return holder(slot, host_); };
    auto inputOf = [](const Slot& slot) { return slot.in; };
    auto mine = [&](const Slot& slot) { return holderHere(slot) == rank_ ? rank_ : -1; };
    // Collect the inputs of the host's ranks.
    if (isShared_) {
      waitFor(phase + 1, Mark::kDone);
      forRuns(
          slots, [&](const Slot& slot) { return holderHere(slot) == rank_ ? -1 : 0; }, inputOf,
          [&](int, const Place& run) { copy(phase + 1, shared(rank_, run), run); });
      mark(phase + 1, Mark::kGiven);
      const bool holdsSome = std::any_of(
          slots.begin(), slots.end(), [&](const Slot& slot) { return holderHere(slot) == rank_; });
      if (holdsSome) waitFor(phase + 1, Mark::kGiven);
      needAreas(end);
    } else {
      forRuns(
          slots,
          [&](const Slot& slot) { return holderHere(slot) == rank_ ? -1 : holderHere(slot); },
          inputOf, [&](int peer, const Place& run) { send(phase, peer, run); });
    }
    std::vector<std::vector<std::pair<Place, Place>>> came(members.size());  // input, where it is
    for (size_t i = 0; i < members.size() && !isShared_; ++i) {
      if (members[i] == rank_) continue;
      forRuns(slots, mine, inputOf, [&](int, const Place& run) {
        came[i].emplace_back(run, scratch(run.bytes));
        receive(phase, members[i], came[i].back().second);
      });
    }
    auto rawInput = [&](size_t i, const Place& wanted) {
      if (members[i] == rank_) return wanted;
      if (isShared_) return shared(members[i], wanted);
      for (const auto& [input, at] : came[i]) {
        if (input.block == wanted.block && input.begin <= wanted.begin &&
            wanted.begin + wanted.bytes <= input.begin + input.bytes) {
          return Place{at.space, at.block, at.begin + wanted.begin - input.begin, wanted.bytes};
        }
      }
      return Place{};
    };
    std::vector<Held> held;
    for (const Slot& slot : slots) {
      if (slot.in.bytes == 0 || holderHere(slot) != rank_) continue;
      Held& mine = held.emplace_back(slot, slot.in.bytes / job_.elementBytes);
      for (size_t i = 0; i < members.size(); ++i) {
        mine.inputs.push_back({{members[i], members[i] + 1}, rawInput(i, slot.in), false});
      }
    }
    for (int level = 1; level <= shape_.levels(); ++level) {
      std::map<int, std::vector<Place>> leaving;
      std::map<int, std::vector<Coming>> coming;
      for (Held& mine : held) {
        isWhole(mine.slot) ? exchangeNodes(phase + level, level, mine, &leaving, &coming)
                           : moveNodes(phase + level, level, mine, &leaving, &coming);
      }
      for (const auto& [peer, places] : leaving)
        send(phase + level, peer, pack(phase + level, places));
      for (const auto& [peer, nodes] : coming) receiveNodes(phase + level, peer, nodes);
    }
    for (const Held& mine : held) {
      if (isOwner(mine.slot)) fold(end, mine.slot.result, true, mine.count, mine.inputs);
    }
    return end;
  }

  // A slot whose inputs on this host this rank collects, and the inputs that it has.
  struct Held {
    Held(const Slot& which, uint64_t elements) : slot(which), count(elements) {}
    const Slot& slot;
    uint64_t count;
    std::vector<FoldInput> inputs;
  };
  // A node that another rank sends for a held slot.
  struct Coming {
    Held* held;
    Node node;
  };

  // All hosts of a unit receive the nodes of its parts, each from one host of the part.
  void exchangeNodes(int phase, int level, Held& held, std::map<int, std::vector<Place>>* leaving,
                     std::map<int, std::vector<Coming>>* coming) {
    const int unit = shape_.unitOf(level, host_), part = shape_.unitOf(level - 1, host_);
    const int first = shape_.firstHost(level, unit), hosts = shape_.hostsIn(level, unit);
    bool isFolded = false;
    for (int host = first; host < first + hosts; ++host) {
      if (shape_.unitOf(level - 1, host) == part) continue;
      if (shape_.agent(level - 1, part, host) != host_) continue;
      if (!isFolded) foldNodes(phase, shape_.nodesOf(level - 1, part), held);
      isFolded = true;
      for (const FoldInput& node : held.inputs) {
        (*leaving)[holder(held.slot, host)].push_back(node.place);
      }
    }
    forParts(level, unit, [&](int other) {
      if (other == part) return;
      const int from = holder(held.slot, shape_.agent(level - 1, other, host_));
      for (const Node& node : shape_.nodesOf(level - 1, other)) {
        (*coming)[from].push_back({&held, node});
      }
    });
  }

  // One host of a unit receives the nodes of its parts: on the last level, the owner's host.
  void moveNodes(int phase, int level, Held& held, std::map<int, std::vector<Place>>* leaving,
                 std::map<int, std::vector<Coming>>* coming) {
    const int home = shape_.hostOf(held.slot.owner);
    const int unit = shape_.unitOf(level, host_), part = shape_.unitOf(level - 1, host_);
    const int to = shape_.agent(level, unit, home);
    if (to != host_) {
      if (shape_.agent(level - 1, part, home) != host_) return;
      foldNodes(phase, shape_.nodesOf(level - 1, part), held);
      for (const FoldInput& node : held.inputs) {
        (*leaving)[holder(held.slot, to)].push_back(node.place);
      }
      held.inputs.clear();
      return;
    }
    forParts(level, unit, [&](int other) {
      const int from = shape_.agent(level - 1, other, home);
      if (from == host_) return;
      for (const Node& node : shape_.nodesOf(level - 1, other)) {
        (*coming)[holder(held.slot, from)].push_back({&held, node});
      }
    });
  }

  // All nodes for one rank are sent in one message, each at a multiple of kUnit: from where they
  // are if they are so arranged, or from a copy.
  Place pack(int phase, const std::vector<Place>& places) {
    Place message = places[0];
    bool isInARow = true;
    for (size_t i = 1; i < places.size(); ++i) {
      const Place& last = places[i - 1];
      isInARow &= last.space == places[i].space && last.block == places[i].block &&
                  last.begin + roundUp(last.bytes, kUnit) == places[i].begin;
    }
    message.bytes = packedBytes(places);
    if (isInARow) return message;
    message = scratch(message.bytes);
    uint64_t at = message.begin;
    for (const Place& place : places) {
      copy(phase, {message.space, message.block, at, place.bytes}, place);
      at += roundUp(place.bytes, kUnit);
    }
    return message;
  }

  static uint64_t packedBytes(const std::vector<Place>& places) {
    uint64_t bytes = 0;
    for (const Place& place : places) bytes = roundUp(bytes, kUnit) + place.bytes;
    return bytes;
  }

  void receiveNodes(int phase, int peer, const std::vector<Coming>& nodes) {
    std::vector<Place> places;
    for (const Coming& each : nodes) {
      places.push_back(
          {Space::kScratch, 0, 0,
           each.held->count * (isWide(each.node) ? job_.wideBytes : job_.elementBytes)});
    }
    const Place message = scratch(packedBytes(places));
    receive(phase, peer, message);
    uint64_t at = message.begin;
    for (size_t i = 0; i < nodes.size(); ++i) {
      const Node& node = nodes[i].node;
      nodes[i].held->inputs.push_back(
          {node, {Space::kScratch, 0, at, places[i].bytes}, isWide(node)});
      at += roundUp(places[i].bytes, kUnit);
    }
  }

  bool isWide(const Node& node) const {
    return node.ranks() > 1 && job_.wideBytes > job_.elementBytes;
  }

  // Folds inputs to the wanted nodes. An input that is such a node already stays as it is. A single
  // node of an all_reduce can wait where its result will be, which saves scratch memory.
  void foldNodes(int phase, const std::vector<Node>& wanted, Held& held) {
    std::vector<FoldInput> nodes;
    for (const Node& node : wanted) {
      std::vector<FoldInput> inputs;
      for (const FoldInput& each : held.inputs) {
        if (each.node.lo >= node.lo && each.node.hi <= node.hi) inputs.push_back(each);
      }
      if (inputs.size() == 1) {
        nodes.push_back(inputs[0]);
        continue;
      }
      const bool isInPlace = job_.kind == OpKind::kAllReduce && wanted.size() == 1 && !isWide(node);
      const Place at = isInPlace ? held.slot.result : scratch(held.count * job_.wideBytes);
      nodes.push_back({node, at, isWide(node)});
      fold(phase, at, false, held.count, std::move(inputs));
    }
    held.inputs = std::move(nodes);
  }

  bool isOwner(const Slot& slot) const {
    return isWhole(slot) ? holder(slot, host_) == rank_ : slot.owner == rank_;
  }
};

}  // namespace

Plan planReduction(const PlanContext& context) {
  ReducePlanner planner(context);
  context.job.kind == OpKind::kReduceScatter ? planner.reduceScatter() : planner.reduce();
  return planner.finish();
}

}  // namespace mycoll
