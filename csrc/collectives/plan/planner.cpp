#include "collectives/plan/planner.h"

namespace mycoll {

Plan Planner::finish() {
  if (isShared_) mark(lastShared_, Mark::kDone);
  auto order = [](const Step& step) { return 2 * step.phase + (step.act >= Step::Act::kSend); };
  std::stable_sort(plan_.steps.begin(), plan_.steps.end(),
                   [&](const Step& a, const Step& b) { return order(a) < order(b); });
  plan_.phases = plan_.steps.empty() ? 0 : plan_.steps.back().phase + 1;
  return std::move(plan_);
}

void Planner::fold(int phase, const Place& to, bool isResult, uint64_t count,
                   std::vector<FoldInput> inputs) {
  std::sort(inputs.begin(), inputs.end(),
            [](const FoldInput& a, const FoldInput& b) { return a.node.lo < b.node.lo; });
  Step& step = add(Step::Act::kFold, phase);
  step.isResult = isResult;
  step.place = to;
  step.count = count;
  step.first = static_cast<uint32_t>(plan_.inputs.size());
  step.inputs = static_cast<uint32_t>(inputs.size());
  plan_.inputs.insert(plan_.inputs.end(), inputs.begin(), inputs.end());
}

void Planner::copy(int phase, const Place& to, const Place& from) {
  if (to.bytes == 0) return;
  Step& step = add(Step::Act::kCopy, phase);
  step.place = to;
  step.first = static_cast<uint32_t>(plan_.inputs.size());
  step.inputs = 1;
  plan_.inputs.push_back({{}, from, false});
}

void Planner::barrier(int phase) {
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

}  // namespace mycoll
