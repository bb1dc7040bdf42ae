#include "collectives/plan/cost.h"

#include <algorithm>
#include <set>

#include "collectives/plan/plan.h"

namespace mycoll {
namespace {

double timeOf(const PhaseCost& phase, uint64_t longest, const Network& network) {
  const double onLink = static_cast<double>(std::max(phase.sent, phase.received));
  const double hops = longest > network.eagerBytes ? 3 : 1;
  return (phase.messages > 0 ? hops * network.latency : 0) +
         static_cast<double>(phase.perRank) * network.overhead + onLink / network.bandwidth +
         static_cast<double>(phase.inside) / network.memoryRate;
}

double chunksOf(const Job& job, const Chunking& chunking) {
  if (chunking.chunks == 1) return 1;
  uint64_t block = 0;
  for (const uint64_t bytes : job.in) block = std::max(block, bytes);
  for (const uint64_t bytes : job.out) block = std::max(block, bytes);
  return static_cast<double>(block) / static_cast<double>(chunking.chunkBytes);
}

}  // namespace

PlanCost costOf(const Shape& shape, OpKind kind, int root, uint64_t bytes, uint64_t elementBytes,
                uint64_t wideBytes, const Network& network) {
  PlanCost cost;
  double chunks = 1;                                  // the last one may be smaller
  std::vector<std::vector<uint64_t>> sent, received;  // by phase and host
  std::vector<uint64_t> longest;                      // message, by phase
  for (int rank = 0; rank < shape.ranks(); ++rank) {
    auto jobOf = [&](int each) {
      return evenJob(kind, shape.ranks(), each, root, bytes, elementBytes, wideBytes);
    };
    Job job = jobOf(rank);
    for (const int member : shape.membersOf(shape.hostOf(rank))) {
      if (goesByHost(shape, kind)) job.rows.push_back(rowOf(jobOf(member), shape.ranks(), member));
    }
    const Chunking chunking = chunkingOf(shape, job);
    const int host = shape.hostOf(rank);
    const bool shares = shape.membersOf(host).size() > 1 && isShared(shape, job, chunking);
    const Plan plan = planOf(shape, job, rank, chunking, 0, shares);
    cost.chunks = chunking.chunks;
    chunks = chunksOf(job, chunking);
    const uint64_t underWay = stepsOfAPhase(shape) * static_cast<uint64_t>(plan.phases);
    const uint64_t shared =
        shares ? areaBytes(shape) * std::min(chunking.chunks, areaCount(shape)) : 0;
    cost.scratch =
        std::max(cost.scratch, plan.scratchBytes * std::min(chunking.chunks, underWay) + shared);
    if (cost.phases.size() < static_cast<size_t>(plan.phases)) {
      cost.phases.resize(plan.phases);
      longest.resize(plan.phases);
      sent.resize(plan.phases, std::vector<uint64_t>(shape.hosts()));
      received.resize(plan.phases, std::vector<uint64_t>(shape.hosts()));
    }
    std::set<int> peers;
    std::vector<uint64_t> messages(plan.phases), inside(plan.phases);
    for (const Step& step : plan.steps) {
      const bool isMessage = step.act >= Step::Act::kSend;
      if (!isMessage || shape.hostOf(step.peer) == host) {
        inside[step.phase] += step.place.bytes;
        for (uint32_t i = 0; i < step.inputs; ++i) {
          inside[step.phase] += plan.inputs[step.first + i].place.bytes;
        }
        messages[step.phase] += isMessage;
        continue;
      }
      ++messages[step.phase];
      peers.insert(step.peer);
      const bool isSend = step.act == Step::Act::kSend;
      (isSend ? sent : received)[step.phase][host] += step.place.bytes;
      cost.phases[step.phase].messages += isSend;
      longest[step.phase] = std::max(longest[step.phase], step.place.bytes);
    }
    for (int phase = 0; phase < plan.phases; ++phase) {
      PhaseCost& each = cost.phases[phase];
      each.perRank = std::max(each.perRank, messages[phase]);
      each.inside = std::max(each.inside, inside[phase]);
    }
    cost.peers = std::max<uint64_t>(cost.peers, peers.size());
  }
  uint64_t sentMost = 0, receivedMost = 0;
  double work = 0, slowest = 0;
  for (int host = 0; host < shape.hosts(); ++host) {
    uint64_t out = 0, in = 0;
    for (size_t phase = 0; phase < cost.phases.size(); ++phase) {
      PhaseCost& each = cost.phases[phase];
      each.sent = std::max(each.sent, sent[phase][host]);
      each.received = std::max(each.received, received[phase][host]);
      out += sent[phase][host];
      in += received[phase][host];
    }
    sentMost = std::max(sentMost, out);
    receivedMost = std::max(receivedMost, in);
  }
  for (size_t phase = 0; phase < cost.phases.size(); ++phase) {
    PhaseCost& each = cost.phases[phase];
    each.seconds = timeOf(each, longest[phase], network);
    cost.seconds += each.seconds;
    slowest = std::max(slowest, each.seconds);
    cost.messages += each.messages * cost.chunks;
    work += static_cast<double>(each.perRank) * network.overhead +
            static_cast<double>(each.inside) / network.memoryRate;
  }
  cost.sent = static_cast<uint64_t>(static_cast<double>(sentMost) * chunks);
  // Chunks follow each other as fast as the link, the busiest rank or the way to the other host
  // lets them.
  const double onLink = static_cast<double>(std::max(sentMost, receivedMost)) / network.bandwidth;
  const double step = slowest / static_cast<double>(stepsOfAPhase(shape));
  cost.seconds += (chunks - 1) * std::max({onLink, work, step});
  return cost;
}

}  // namespace mycoll
