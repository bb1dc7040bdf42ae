// GatherPlanner: all_gather, broadcast, and the second half of an all_reduce: slots from their
// owners to all ranks.
#pragma once

#include <vector>

#include "collectives/plan/slots.h"

namespace mycoll {

class GatherPlanner : public SlotPlanner {
 public:
  using SlotPlanner::SlotPlanner;

  void allGather();
  void broadcast();

 protected:
  void shareSlots(int phase, const std::vector<Slot>& slots);

 private:
  void shareBetweenHosts(int phase, const std::vector<Slot>& slots);
  void shareSlot(int level, const Slot& slot, Runs* leaving, Runs* coming);
  void shareInHost(int phase, const std::vector<Slot>& slots, int except = -1);
  void shareInMemory(int phase, const std::vector<Slot>& slots);
  void giveInMemory(int phase, int from, const Place& data);
  std::vector<int> othersAtHome() const;
  std::vector<int> ranksAway() const;
  void broadcastWhole(const Place& data);
  int treeFrom(int phase, const std::vector<int>& ranks, const Place& data);
};

}  // namespace mycoll
