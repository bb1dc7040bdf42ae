// Slots: the pieces of the data of a reduction or a gather, each with an owner, and the messages
// that move them.
#pragma once

#include <map>
#include <utility>
#include <vector>

#include "collectives/plan/planner.h"

namespace mycoll {

// A piece of the data that is reduced or gathered. in: its place in each rank's input. result: its
// place on the ranks that need it, its owner among them.
struct Slot {
  int owner = -1;  // -1: each host's driver of the lane ("whole")
  int lane = 0;
  Place in;
  Place result;
};

// The places that are sent to, or received from, each rank; adjacent ones form one message.
class Runs {
 public:
  // Ignores empty places, and rank -1.
  void add(int peer, const Place& place);
  // By the first place of each.
  const std::vector<std::pair<int, Place>>& all() const { return runs_; }

 private:
  std::vector<std::pair<int, Place>> runs_;
  std::map<int, size_t> last_;  // by rank
};

class SlotPlanner : public Planner {
 protected:
  using Planner::Planner;

  // The part of a block that is in this chunk.
  Place part(Space space, int block, uint64_t blockBytes) const {
    return {space, block, 0, std::min(length_, blockBytes - std::min(begin_, blockBytes))};
  }
  // The i-th of n pieces.
  Place piece(const Place& whole, int i, int n) const;
  // The place in the area of a rank of this host for its data at a place of an input or output.
  Place shared(int rank, const Place& place) const;
  bool isWhole(const Slot& slot) const { return slot.owner < 0; }
  // Whether the root of a broadcast or reduce is on the host.
  bool isRoots(int host) const;
  bool hasHelpers() const { return shape_.ranks() >= kLeastTogetherForRoot; }  // the root has
  // The rank of a host that has the slot, or receives it for the others.
  int holder(const Slot& slot, int host) const;
  // The same if hosts pass the slot on for a root. On its own host, a root without helpers does
  // that itself.
  int gate(const Slot& slot, int host) const;

  // Calls visit(key, place) for each run of adjacent places with the same key; leaves out key -1.
  template <typename Key, typename PlaceOf, typename Visit>
  static void forRuns(const std::vector<Slot>& slots, Key key, PlaceOf placeOf, Visit visit) {
    Runs runs;
    for (const Slot& slot : slots) runs.add(key(slot), placeOf(slot));
    for (const auto& [peer, run] : runs.all()) visit(peer, run);
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
  void move(int phase, const Runs& leaving, const Runs& coming);
  void pass(int phase, int from, int to, const Place& place);

  // Returns all hosts in an order in which the pieces of neighbours take the same way for as many
  // levels as possible.
  std::vector<int> inOrderOfTheirWays() const;
  // Returns the ranks on the way of a slot from the root's host to its owner.
  std::vector<int> wayFromRoot(const Slot& slot) const;
};

}  // namespace mycoll
