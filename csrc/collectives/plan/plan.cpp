#include "collectives/plan/plan.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

namespace mycoll {
namespace {

// Up to this size, a hop costs more than the bytes.
constexpr uint64_t kWholeBytes = 16 * 1024;
// Up to this size, a tree of whole messages is fastest for a broadcast.
constexpr uint64_t kTreeBytes = 64 * 1024;
// Up to this size, blocks of a host's ranks for those of another are sent in one message. Beyond
// it, the cost of a message for each is less than that of copying.
constexpr uint64_t kTogetherBytes = 256 * 1024;
// In smaller worlds, waiting for the other ranks of the host costs more than messages do: in an
// all_to_all, and in an exchange between a root and all others.
constexpr int kLeastTogether = 8;
constexpr int kLeastTogetherForRoot = 65;
// One chunk is added up while the next one is in flight. Each needs scratch memory, which should
// stay in the caches; but messages should be long enough to outweigh the cost of each.
constexpr uint64_t kMessageBytes = 256 * 1024;
constexpr uint64_t kLeastChunk = 512 * 1024;
constexpr uint64_t kMostChunk = 2 * 1024 * 1024;
// Bytes in flight in one phase: 1 Gbit/s over 30 ms.
constexpr uint64_t kUnderWay = 4 * 1024 * 1024;
constexpr uint64_t kLeastBlock = 4 * 1024;  // of a chunk that has a block for each rank
constexpr uint64_t kMostChunks = 60'000;    // a tag must hold the chunk and the phase
// Pieces begin at cache lines.
constexpr uint64_t kUnit = 64;

// Most bytes that two hosts send together: an area has room for everything that the ranks of a host
// may give to all hosts, and may receive from them.
uint64_t mostTogether(const Shape& shape) {
  return std::min(kTogetherBytes, areaBytes(shape) / (2 * static_cast<uint64_t>(shape.hosts())));
}

// A piece of the data that is reduced or gathered. in: its place in each rank's input. result: its
// place on the ranks that need it, its owner among them.
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
  Planner(const Shape& shape, const Job& job, int rank, bool sharesMemory)
      : shape_(shape),
        job_(job),
        rank_(rank),
        host_(shape.hostOf(rank)),
        isShared_(sharesMemory && shape.membersOf(host_).size() > 1) {}

  Plan plan(const Chunking& chunking, uint64_t chunk) {
    begin_ = chunking.begin(chunk);
    length_ = chunking.chunkBytes;
    switch (job_.kind) {
      case OpKind::kAllReduce:
      case OpKind::kReduce: reduce(); break;
      case OpKind::kReduceScatter: reduceScatter(); break;
      case OpKind::kAllGather: allGather(); break;
      case OpKind::kBroadcast: broadcast(); break;
      case OpKind::kGather:
      case OpKind::kScatter:
      case OpKind::kAllToAll: exchange(); break;
      default: barrier(0); break;
    }
    if (isShared_) mark(lastShared_, Mark::kDone);
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
  void meet(Step::Act act, int phase, Mark mark) {
    Step step;
    step.act = act;
    step.phase = static_cast<uint8_t>(phase);
    step.mark = mark;
    plan_.steps.push_back(step);
    lastShared_ = std::max(lastShared_, phase);
  }
  void mark(int phase, Mark mark) { meet(Step::Act::kMark, phase, mark); }
  void waitFor(int phase, Mark mark) { meet(Step::Act::kWait, phase, mark); }
  Place scratch(uint64_t bytes) {
    const Place place{Space::kScratch, 0, plan_.scratchBytes, bytes};
    plan_.scratchBytes += roundUp(bytes, kUnit);
    return place;
  }

  // ---- pieces

  // The part of a block that is in this chunk.
  Place part(Space space, int block, uint64_t blockBytes) const {
    return {space, block, 0, std::min(length_, blockBytes - std::min(begin_, blockBytes))};
  }
  // The i-th of n pieces.
  Place piece(const Place& whole, int i, int n) const {
    const uint64_t unit = std::lcm(kUnit, job_.elementBytes);
    const uint64_t units = (whole.bytes + unit - 1) / unit;
    const uint64_t lo = std::min(units * i / n * unit, whole.bytes);
    const uint64_t hi = std::min(units * (i + 1) / n * unit, whole.bytes);
    return {whole.space, whole.block, whole.begin + lo, hi - lo};
  }
  // The place in the area of a rank of this host for its data at a place of an input or output.
  Place shared(int rank, const Place& place) const {
    const bool isOfOneRank = job_.kind == OpKind::kReduceScatter || job_.kind == OpKind::kAllGather;
    const uint64_t block = isOfOneRank ? static_cast<uint64_t>(place.block) * length_ : 0;
    return {Space::kShared, shape_.indexOf(rank), block + place.begin, place.bytes};
  }
  bool isWhole(const Slot& slot) const { return slot.owner < 0; }
  // Whether the root of a broadcast or reduce is on the host.
  bool isRoots(int host) const {
    const bool hasRoot = job_.kind == OpKind::kBroadcast || job_.kind == OpKind::kReduce;
    return hasRoot && shape_.hostOf(job_.root) == host;
  }
  bool hasHelpers() const { return shape_.ranks() >= kLeastTogetherForRoot; }  // the root has
  // The rank of a host that has the slot, or receives it for the others.
  int holder(const Slot& slot, int host) const {
    const bool isHome = !isWhole(slot) && shape_.hostOf(slot.owner) == host;
    return isHome ? slot.owner : shape_.driver(host, slot.lane);
  }
  // The same if hosts pass the slot on for a root. On its own host, a root without helpers does
  // that itself.
  int gate(const Slot& slot, int host) const {
    const bool isRootItself = isRoots(host) && shape_.hostOf(slot.owner) != host && !hasHelpers();
    return isRootItself ? job_.root : holder(slot, host);
  }
  bool isOwner(const Slot& slot) const {
    return isWhole(slot) ? holder(slot, host_) == rank_ : slot.owner == rank_;
  }

  // Calls visit(key, place) for each run of adjacent places with the same key; leaves out key -1.
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

  // ---- reduce: from all ranks' inputs to the owners' results. Returns the phase in which it ends;
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
      lastShared_ = std::max(lastShared_, end);
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

  // Visits the units of the level below that make up a unit.
  template <typename Visit>
  void forParts(int level, int unit, Visit visit) const {
    const int size = shape_.unitSize(level - 1);
    const int end = shape_.firstHost(level, unit) + shape_.hostsIn(level, unit);
    for (int first = shape_.firstHost(level, unit); first < end; first += size) {
      visit(first / size);
    }
  }

  // Folds inputs to the wanted nodes. An input that is such a node already stays as it is.
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
      const Place at = scratch(held.count * job_.wideBytes);
      nodes.push_back({node, at, isWide(node)});
      fold(phase, at, false, held.count, std::move(inputs));
    }
    held.inputs = std::move(nodes);
  }

  // ---- gather: from the owners to all ranks

  void shareSlots(int phase, const std::vector<Slot>& slots) {
    shareBetweenHosts(phase, slots);
    shareInHost(phase, slots);
  }

  // Sends the slots to their holders on all hosts except the root's, which has them already.
  void shareBetweenHosts(int phase, const std::vector<Slot>& slots) {
    for (int level = shape_.levels(); level > 0; --level) {
      const int when = phase + shape_.levels() - level;
      Runs leaving, coming;
      for (const Slot& slot : slots) {
        if (isWhole(slot) || gate(slot, host_) != rank_) continue;
        shareSlot(level, slot, &leaving, &coming);
      }
      leaving.addTo(*this, Step::Act::kSend, when);
      coming.addTo(*this, Step::Act::kReceive, when);
    }
  }

  // Sends the slots from their holders on this host to its other ranks. except: a rank that has
  // them all.
  void shareInHost(int phase, const std::vector<Slot>& slots, int except = -1) {
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
  void shareInMemory(int phase, const std::vector<Slot>& slots) {
    const bool isThere = !slots.empty() && isWhole(slots[0]);
    const int when = phase + (isThere ? 0 : shape_.levels());
    auto resultOf = [](const Slot& slot) { return slot.result; };
    waitFor(when, Mark::kDone);
    forRuns(
        slots, [&](const Slot& slot) { return holder(slot, host_) == rank_ ? 0 : -1; }, resultOf,
        [&](int, const Place& run) { copy(when, shared(rank_, run), run); });
    mark(when, Mark::kShared);
    const bool holdsAll = std::all_of(
        slots.begin(), slots.end(), [&](const Slot& slot) { return holder(slot, host_) == rank_; });
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
  void giveInMemory(int phase, int from, const Place& data) {
    waitFor(phase, Mark::kDone);
    if (rank_ == from) copy(phase, shared(rank_, data), data);
    mark(phase, Mark::kGiven);
    if (rank_ == from) return;
    waitFor(phase, Mark::kGiven);
    copy(phase, data, shared(from, data));
  }

  // The places that are sent to, or received from, each rank; adjacent ones form one message.
  class Runs {
   public:
    void add(int peer, const Place& place) {
      const auto [last, isFirst] = last_.try_emplace(peer, runs_.size());
      if (!isFirst && follows(runs_[last->second].second, place)) {
        runs_[last->second].second.bytes += place.bytes;
        return;
      }
      last->second = runs_.size();
      runs_.emplace_back(peer, place);
    }
    void addTo(Planner& planner, Step::Act act, int phase) const {
      for (const auto& [peer, run] : runs_) planner.message(act, phase, peer, run);
    }

   private:
    std::vector<std::pair<int, Place>> runs_;
    std::map<int, size_t> last_;  // by rank
  };

  // Sends a slot from the host that acts for a unit to those that act for its parts.
  void shareSlot(int level, const Slot& slot, Runs* leaving, Runs* coming) {
    if (slot.result.bytes == 0) return;
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

  // Returns all hosts in an order in which the pieces of neighbours take the same way for as many
  // levels as possible.
  std::vector<int> inOrderOfTheirWays() const {
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

  // ---- operations

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
    shareSlots(0, slots);
  }

  void broadcast() {
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
        if (slot.result.bytes == 0 || from == to) continue;
        if (from == rank_) leaving.add(to, slot.result);
        if (to == rank_) coming.add(from, slot.result);
      }
      leaving.addTo(*this, Step::Act::kSend, at + 1);
      coming.addTo(*this, Step::Act::kReceive, at + 1);
    }
    const int phase = shape_.levels() + 1;
    shareBetweenHosts(phase, slots);
    if (isShared_ && isRoots(host_)) return giveInMemory(1, job_.root, data);
    shareInHost(phase, slots, job_.root);
  }

  std::vector<int> othersAtHome() const {
    std::vector<int> ranks = shape_.membersOf(shape_.hostOf(job_.root));
    std::erase(ranks, job_.root);
    return ranks;
  }

  std::vector<int> ranksAway() const {
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

  // Returns the ranks on the way of a slot from the root's host to its owner.
  std::vector<int> wayFromRoot(const Slot& slot) const {
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

  void pass(int phase, int from, int to, const Place& place) {
    if (from == to) return;
    if (rank_ == from) send(phase, to, place);
    if (rank_ == to) receive(phase, from, place);
  }

  // A binomial tree over hosts, then one inside each.
  void broadcastWhole(const Place& data) {
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

  // The ranks of a host meet at its first rank; the first ranks notify each other, at distances
  // that double.
  void barrier(int phase) {
    const std::vector<int>& members = shape_.membersOf(host_);
    const int first = members[0];
    const int hosts = shape_.hosts();
    if (isShared_) {
      mark(phase, Mark::kGiven);
      if (rank_ == first) waitFor(phase, Mark::kGiven);
    }
    for (const int member : members) {
      if (member == first || isShared_) continue;
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
    if (isShared_) {
      mark(phase, Mark::kShared);
      if (rank_ != first) waitFor(phase, Mark::kShared);
      return;
    }
    for (const int member : members) {
      if (member == first) continue;
      if (rank_ == first) send(phase, member, {});
      if (rank_ == member) receive(phase, first, {});
    }
  }

  // ---- exchange. Phase 0: the ranks of a host give the blocks that are sent together; 1: all
  // messages between hosts, and those from rank to rank; 2: the ranks of a host get the blocks that
  // were sent together.

  void exchange() {
    if (isMeant(rank_, rank_)) copy(0, incoming(rank_), outgoing(rank_));
    layOut();
    const int hosts = shape_.hosts();
    if (isShared_) give();
    // No two hosts begin with the same host, and no two ranks of a host with the same rank.
    for (int distance = 0; distance < hosts; ++distance) {
      receiveFrom((host_ - distance + hosts) % hosts);
    }
    for (int distance = 0; distance < hosts; ++distance) sendTo((host_ + distance) % hosts);
    if (isShared_) take();
  }

  // Whether there is a block for this pair.
  bool isMeant(int from, int to) const {
    return job_.kind == OpKind::kAllToAll ||
           (job_.kind == OpKind::kGather ? to : from) == job_.root;
  }
  bool isBetween(int from, int to) const {  // the same of hosts
    return job_.kind == OpKind::kAllToAll ||
           (job_.kind == OpKind::kGather ? to : from) == shape_.hostOf(job_.root);
  }
  Place outgoing(int to) const {
    const int block = job_.kind == OpKind::kGather ? 0 : to;
    return {Space::kInput, block, 0, job_.in[block]};
  }
  Place incoming(int from) const {
    const int block = job_.kind == OpKind::kScatter ? 0 : from;
    return {Space::kOutput, block, 0, job_.out[block]};
  }
  // The rank that sends and receives for a host what it exchanges with another one.
  int speaker(int host, int other) const {
    const std::vector<int>& members = shape_.membersOf(host);
    return members[static_cast<size_t>(other) % members.size()];
  }
  // For two ranks, one of which is on this host.
  uint64_t blockBytes(int from, int to) const {
    return shape_.hostOf(from) == host_ ? job_.rows[shape_.indexOf(from)].sends[to]
                                        : job_.rows[shape_.indexOf(to)].receives[from];
  }
  // The bytes of the one message from a host to another, sender by sender. It is never empty: a
  // host that sends its blocks separately announces that with an empty message, so that two hosts
  // that disagree about the sizes detect it.
  uint64_t togetherBytes(int from, int to) const {
    uint64_t bytes = job_.elementBytes;
    for (const int sender : shape_.membersOf(from)) {
      for (const int receiver : shape_.membersOf(to)) bytes += blockBytes(sender, receiver);
    }
    return bytes;
  }
  bool mayGoTogether(int from, int to) const {
    return isBetween(from, to) && goesByHost(shape_, job_.kind) && (from != to || isShared_) &&
           shape_.membersOf(from).size() + shape_.membersOf(to).size() > 2;
  }
  bool goesTogether(int from, int to) const {
    return !job_.rows.empty() && mayGoTogether(from, to) &&
           togetherBytes(from, to) <= mostTogether(shape_);
  }
  static constexpr uint64_t kNowhere = ~uint64_t{0};

  // Sets where in its area each rank of this host gives its blocks for a host, one after the other,
  // and where the speaker for a host has what it received from there.
  void layOut() {
    const std::vector<int>& members = shape_.membersOf(host_);
    const auto hosts = static_cast<size_t>(shape_.hosts());
    givenAt_.assign(members.size(), std::vector<uint64_t>(hosts, kNowhere));
    cameAt_.assign(hosts, kNowhere);
    std::vector<uint64_t> used(members.size());
    for (int host = 0; host < shape_.hosts(); ++host) {
      if (!goesTogether(host_, host)) continue;
      for (size_t i = 0; i < members.size(); ++i) {
        givenAt_[i][host] = used[i];
        if (host != host_ && members[i] == speaker(host_, host)) continue;  // needs no area for it
        for (const int to : shape_.membersOf(host)) used[i] += job_.rows[i].sends[to];
      }
    }
    for (int host = 0; host < shape_.hosts(); ++host) {
      if (host == host_ || !goesTogether(host, host_)) continue;
      uint64_t& end = used[shape_.indexOf(speaker(host_, host))];
      cameAt_[host] = end;
      end += togetherBytes(host, host_);
    }
  }
  bool sendsTogether(int host) const { return givenAt_[0][host] != kNowhere; }
  bool receivesTogether(int host) const { return cameAt_[host] != kNowhere; }
  Place area(int rank, uint64_t begin, uint64_t bytes) const {
    return {Space::kShared, shape_.indexOf(rank), begin, bytes};
  }

  void give() {
    bool usesArea = false;
    for (int host = 0; host < shape_.hosts(); ++host) {
      usesArea |= sendsTogether(host) || receivesTogether(host);
    }
    if (usesArea) waitFor(0, Mark::kDone);
    for (int host = 0; host < shape_.hosts(); ++host) {
      const bool speaks = host != host_ && speaker(host_, host) == rank_;
      if (!sendsTogether(host) || speaks) continue;
      uint64_t at = givenAt_[shape_.indexOf(rank_)][host];
      for (const int to : shape_.membersOf(host)) {
        const uint64_t bytes = blockBytes(rank_, to);
        if (bytes > 0 && to != rank_) copy(0, area(rank_, at, bytes), outgoing(to));
        at += bytes;
      }
    }
    mark(0, Mark::kGiven);
    bool needsOthers = sendsTogether(host_);
    for (int host = 0; host < shape_.hosts(); ++host) {
      needsOthers |= sendsTogether(host) && speaker(host_, host) == rank_;
    }
    if (needsOthers) waitFor(1, Mark::kGiven);
  }

  void sendTo(int host) {
    if (host != host_ && sendsTogether(host)) return sendTogether(host);
    if (!isBetween(host_, host) || (host == host_ && sendsTogether(host))) return;
    const bool saysSo = host != host_ && mayGoTogether(host_, host);
    if (saysSo && speaker(host_, host) == rank_) send(1, speaker(host, host_), {});
    const std::vector<int>& members = shape_.membersOf(host);
    for (size_t i = 0; i < members.size(); ++i) {
      const int to = members[(shape_.indexOf(rank_) + i) % members.size()];
      if (to != rank_ && isMeant(rank_, to)) send(1, to, outgoing(to));
    }
  }

  void receiveFrom(int host) {
    if (host != host_ && receivesTogether(host)) return receiveTogether(host);
    if (!isBetween(host, host_) || (host == host_ && sendsTogether(host))) return;
    const bool saysSo = host != host_ && mayGoTogether(host, host_);
    if (saysSo && speaker(host_, host) == rank_) receive(1, speaker(host, host_), {});
    for (const int from : shape_.membersOf(host)) {
      if (from != rank_ && isMeant(from, rank_)) receive(1, from, incoming(from));
    }
  }

  void sendTogether(int host) {
    const int mine = speaker(host_, host);
    if (isShared_ && rank_ != mine) return;  // give() has copied its blocks
    Place message;
    if (rank_ == mine) message = scratch(togetherBytes(host_, host));
    uint64_t at = message.begin;
    for (const int from : shape_.membersOf(host_)) {
      uint64_t given = givenAt_[shape_.indexOf(from)][host];
      for (const int to : shape_.membersOf(host)) {
        const uint64_t bytes = blockBytes(from, to);
        if (bytes == 0) continue;
        const Place there{message.space, message.block, at, bytes};
        if (from == rank_ && rank_ == mine) copy(1, there, outgoing(to));
        if (from != rank_ && rank_ == mine) {
          isShared_ ? copy(1, there, area(from, given, bytes)) : receive(0, from, there);
        }
        if (from == rank_ && rank_ != mine) send(0, mine, outgoing(to));
        at += bytes, given += bytes;
      }
    }
    if (rank_ == mine) send(1, speaker(host, host_), message);
  }

  void receiveTogether(int host) {
    const int mine = speaker(host_, host);
    const uint64_t bytes = togetherBytes(host, host_);
    Place message = area(mine, cameAt_[host], bytes);
    if (!isShared_ && rank_ == mine) message = scratch(bytes);
    if (rank_ == mine) receive(1, speaker(host, host_), message);
    if (isShared_) return;  // take() copies the blocks
    uint64_t at = message.begin;
    for (const int from : shape_.membersOf(host)) {
      for (const int to : shape_.membersOf(host_)) {
        const uint64_t each = blockBytes(from, to);
        if (each == 0) continue;
        const Place there{message.space, message.block, at, each};
        if (to == rank_ && rank_ == mine) copy(2, incoming(from), there);
        if (to != rank_ && rank_ == mine) send(2, to, there);
        if (to == rank_ && rank_ != mine) receive(2, mine, incoming(from));
        at += each;
      }
    }
  }

  void take() {
    mark(2, Mark::kShared);
    bool isFromOthers = false;
    for (int host = 0; host < shape_.hosts(); ++host) {
      isFromOthers |= receivesTogether(host) && speaker(host_, host) != rank_;
    }
    if (isFromOthers) waitFor(2, Mark::kShared);
    for (int host = 0; host < shape_.hosts(); ++host) {
      if (host == host_ ? !sendsTogether(host) : !receivesTogether(host)) continue;
      uint64_t at = cameAt_[host];
      for (const int from : shape_.membersOf(host)) {
        if (host == host_) at = givenAt_[shape_.indexOf(from)][host];
        for (const int to : shape_.membersOf(host_)) {
          const uint64_t bytes = blockBytes(from, to);
          const int where = host == host_ ? from : speaker(host_, host);
          if (to == rank_ && from != rank_ && bytes > 0) {
            copy(2, incoming(from), area(where, at, bytes));
          }
          at += bytes;
        }
      }
    }
  }

  const Shape& shape_;
  const Job& job_;
  const int rank_;
  const int host_;
  const bool isShared_;  // through memory, with the other ranks of the host
  uint64_t begin_ = 0;
  uint64_t length_ = 0;
  int lastShared_ = 0;  // the last phase in which areas of the host are needed
  std::vector<std::vector<uint64_t>> givenAt_;  // by member of the host, by host
  std::vector<uint64_t> cameAt_;                // by host
  Plan plan_;
};

uint64_t usualChunk(const Shape& shape) {
  const auto pieces = static_cast<uint64_t>(shape.lanes() * shape.hosts());
  return std::clamp(pieces * kMessageBytes, kLeastChunk, kMostChunk);
}

}  // namespace

bool goesByHost(const Shape& shape, OpKind kind) {
  if (shape.hosts() == 1) return false;
  switch (kind) {
    case OpKind::kAllToAll: return shape.ranks() >= kLeastTogether;
    case OpKind::kGather:
    case OpKind::kScatter: return shape.ranks() >= kLeastTogetherForRoot;
    default: return false;
  }
}

bool goesByItself(const Shape& shape, const Job& job, int rank) {
  if (job.kind != OpKind::kAllToAll) return false;
  auto isLarge = [&](const std::vector<uint64_t>& blocks, int host) {
    uint64_t bytes = 0;
    for (const int other : shape.membersOf(host)) bytes += blocks[other];
    return bytes > mostTogether(shape);
  };
  for (int host = 0; host < shape.hosts(); ++host) {
    const bool isAlone = host == shape.hostOf(rank) && shape.membersOf(host).size() == 1;
    if (!isAlone && !(isLarge(job.in, host) && isLarge(job.out, host))) return false;
  }
  return true;
}

Job::Row rowOf(const Job& job, int ranks, int rank) {
  if (job.kind == OpKind::kAllToAll) return {job.in, job.out};
  const std::vector<uint64_t> none(ranks);
  Job::Row row{none, none};
  const bool isGather = job.kind == OpKind::kGather;
  if (rank == job.root) (isGather ? row.receives : row.sends) = isGather ? job.out : job.in;
  (isGather ? row.sends : row.receives)[job.root] = isGather ? job.in[0] : job.out[0];
  return row;
}

Chunking chunkingOf(const Shape& shape, const Job& job) {
  uint64_t block = 0, bytes = usualChunk(shape);
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
  bytes = std::max(unit, std::min(bytes, roundUp(block, unit)));  // small ones fit into areas
  return {std::max<uint64_t>(1, (block + bytes - 1) / bytes), bytes};
}

bool areAlike(const Job& job, const Chunking& chunking, uint64_t chunk, uint64_t other) {
  if (chunk == other) return true;
  auto has = [&](uint64_t each, uint64_t blockBytes) {
    return std::min(chunking.chunkBytes, blockBytes - std::min(chunking.begin(each), blockBytes));
  };
  auto isAlike = [&](uint64_t blockBytes) {
    return has(chunk, blockBytes) == has(other, blockBytes);
  };
  return std::all_of(job.in.begin(), job.in.end(), isAlike) &&
         std::all_of(job.out.begin(), job.out.end(), isAlike);
}

Plan planOf(const Shape& shape, const Job& job, int rank, const Chunking& chunking, uint64_t chunk,
            bool sharesMemory) {
  return Planner(shape, job, rank, sharesMemory).plan(chunking, chunk);
}

bool isShared(const Shape& shape, const Job& job, const Chunking& chunking) {
  if (shape.hosts() == 1) return false;
  switch (job.kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduce:
    case OpKind::kBroadcast: return chunking.chunkBytes <= areaBytes(shape);
    case OpKind::kReduceScatter:
    case OpKind::kAllGather:
      return chunking.chunkBytes <= areaBytes(shape) / static_cast<uint64_t>(shape.ranks());
    case OpKind::kGather:
    case OpKind::kScatter:
    case OpKind::kAllToAll: return goesByHost(shape, job.kind);
    default: return true;
  }
}

uint64_t stepsOfAPhase(const Shape& shape) { return kUnderWay / usualChunk(shape); }

uint64_t areaBytes(const Shape& shape) {
  return usualChunk(shape) + static_cast<uint64_t>(shape.ranks()) * kUnit;  // for rounding up
}

// In an all_reduce an area is filled in phase 1 and read up to phase 2 * levels + 1.
uint64_t areaCount(const Shape& shape) {
  return stepsOfAPhase(shape) * 2 * static_cast<uint64_t>(shape.levels()) + 1;
}

}  // namespace mycoll
