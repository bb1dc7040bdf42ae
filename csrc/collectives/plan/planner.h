// Planner: writes the steps of one rank's plan. Its subclasses plan a family of operations each:
//
//   reductions.cpp   all_reduce, reduce, reduce_scatter   } of pieces of the data that have owners:
//   gathers.cpp      all_gather, broadcast                } slots.h
//   exchange.cpp     all_to_all, gather, scatter
//
// Thread contract: one thread. Lifetime: what the context refers to outlives the planner.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "collectives/plan/plan.h"

namespace mycoll {

// Pieces begin at cache lines.
constexpr uint64_t kUnit = 64;
// In smaller worlds, an exchange between a root and all others gains nothing if other ranks of the
// root's host help: waiting for them costs more than messages do.
constexpr int kLeastTogetherForRoot = 65;
// Most bytes that two hosts send together: an area has room for everything that the ranks of a host
// may give to all hosts, and may receive from them.
uint64_t mostTogether(const Shape& shape);

// The arguments of planOf().
struct PlanContext {
  const Shape& shape;
  const Job& job;
  int rank;
  bool sharesMemory;
  uint64_t begin;   // of the chunk, in each block
  uint64_t length;  // of the chunk, at most
};

Plan planReduction(const PlanContext& context);
Plan planGathering(const PlanContext& context);
Plan planExchange(const PlanContext& context);

class Planner {
 public:
  explicit Planner(const PlanContext& context)
      : shape_(context.shape),
        job_(context.job),
        rank_(context.rank),
        host_(shape_.hostOf(rank_)),
        isShared_(context.sharesMemory && shape_.membersOf(host_).size() > 1),
        begin_(context.begin),
        length_(context.length) {}

  // The ranks of a host meet at its first rank; the first ranks notify each other, at distances
  // that double.
  void barrier(int phase);
  // Returns the plan, once.
  Plan finish();

 protected:
  void message(Step::Act act, int phase, int peer, const Place& place) {
    Step& step = add(act, phase);
    step.peer = peer;
    step.place = place;
  }
  void send(int phase, int peer, const Place& place) {
    message(Step::Act::kSend, phase, peer, place);
  }
  void receive(int phase, int peer, const Place& place) {
    message(Step::Act::kReceive, phase, peer, place);
  }
  void fold(int phase, const Place& to, bool isResult, uint64_t count,
            std::vector<FoldInput> inputs);
  void copy(int phase, const Place& to, const Place& from);
  void mark(int phase, Mark mark) { meet(Step::Act::kMark, phase, mark); }
  void waitFor(int phase, Mark mark) { meet(Step::Act::kWait, phase, mark); }
  // The areas of the host are needed up to this phase.
  void needAreas(int phase) { lastShared_ = std::max(lastShared_, phase); }
  Place scratch(uint64_t bytes) {
    const Place place{Space::kScratch, 0, plan_.scratchBytes, bytes};
    plan_.scratchBytes += roundUp(bytes, kUnit);
    return place;
  }

  const Shape& shape_;
  const Job& job_;
  const int rank_;
  const int host_;
  const bool isShared_;  // through memory, with the other ranks of the host
  const uint64_t begin_, length_;

 private:
  Step& add(Step::Act act, int phase) {
    Step& step = plan_.steps.emplace_back();
    step.act = act;
    step.phase = static_cast<uint8_t>(phase);
    return step;
  }
  void meet(Step::Act act, int phase, Mark mark) {
    add(act, phase).mark = mark;
    needAreas(phase);
  }

  int lastShared_ = 0;
  Plan plan_;
};

}  // namespace mycoll
