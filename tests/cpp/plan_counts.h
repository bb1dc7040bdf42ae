// Counts the messages, bytes, peers and scratch memory of the plans of all ranks. Tests compare
// these counts with the bounds of docs/performance.md.
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <vector>

#include "collectives/plan/plan.h"

namespace mycoll {

struct PlanCounts {
  uint64_t sent = 0;      // bytes sent to other hosts by the host that sends most
  uint64_t messages = 0;  // between hosts
  uint64_t scratch = 0;   // bytes of the rank that needs most
  uint64_t peers = 0;     // the most ranks on other hosts that one rank exchanges messages with
};

// The job of one rank where all blocks are equal: `bytes` is what a rank gives (kReduceScatter: all
// blocks of it together).
inline Job evenJob(OpKind kind, int ranks, int rank, int root, uint64_t bytes,
                   uint64_t elementBytes, uint64_t wideBytes) {
  Job job{kind, root, elementBytes, wideBytes, {}, {}};
  const std::vector<uint64_t> each(ranks, bytes);
  const bool isRoot = rank == root;
  switch (kind) {
    case OpKind::kBroadcast: job.out = {bytes}; break;
    case OpKind::kAllReduce: job.in = job.out = {bytes}; break;
    case OpKind::kReduce:
      job.in = {bytes};
      if (isRoot) job.out = {bytes};
      break;
    case OpKind::kAllGather: job.in = {bytes}, job.out = each; break;
    case OpKind::kGather:
      job.in = {bytes};
      if (isRoot) job.out = each;
      break;
    case OpKind::kScatter:
      job.out = {bytes};
      if (isRoot) job.in = each;
      break;
    case OpKind::kReduceScatter: {
      const uint64_t block = bytes / elementBytes / ranks * elementBytes;
      job.in.assign(ranks, block);
      job.out = {block};
      break;
    }
    case OpKind::kAllToAll: job.in = job.out = each; break;
    default: break;
  }
  return job;
}

// The last chunk may be smaller: a block is this many chunks long.
inline double chunksOf(const Job& job, const Chunking& chunking) {
  if (chunking.chunks == 1) return 1;
  uint64_t block = 0;
  for (const uint64_t bytes : job.in) block = std::max(block, bytes);
  for (const uint64_t bytes : job.out) block = std::max(block, bytes);
  return static_cast<double>(block) / static_cast<double>(chunking.chunkBytes);
}

// Blocks have equal sizes, as in evenJob().
inline PlanCounts countsOf(const Shape& shape, OpKind kind, uint64_t bytes, uint64_t elementBytes,
                           uint64_t wideBytes) {
  PlanCounts counts;
  double chunks = 1;
  std::vector<uint64_t> sent(shape.hosts());
  for (int rank = 0; rank < shape.ranks(); ++rank) {
    const auto jobOf = [&](int each) {
      return evenJob(kind, shape.ranks(), each, /*root=*/0, bytes, elementBytes, wideBytes);
    };
    Job job = jobOf(rank);
    for (const int member : shape.membersOf(shape.hostOf(rank))) {
      if (goesByHost(shape, kind)) job.rows.push_back(rowOf(jobOf(member), shape.ranks(), member));
    }
    const Chunking chunking = chunkingOf(shape, job);
    const int host = shape.hostOf(rank);
    const bool shares = shape.membersOf(host).size() > 1 && isShared(shape, job, chunking);
    const Plan plan = planOf(shape, job, rank, chunking, 0, shares);
    chunks = chunksOf(job, chunking);
    const uint64_t underWay = stepsOfAPhase(shape) * static_cast<uint64_t>(plan.phases);
    const uint64_t shared =
        shares ? areaBytes(shape) * std::min(chunking.chunks, areaCount(shape)) : 0;
    counts.scratch =
        std::max(counts.scratch, plan.scratchBytes * std::min(chunking.chunks, underWay) + shared);
    std::set<int> peers;
    for (const Step& step : plan.steps) {
      if (step.act < Step::Act::kSend || shape.hostOf(step.peer) == host) continue;
      peers.insert(step.peer);
      if (step.act != Step::Act::kSend) continue;
      sent[host] += step.place.bytes;
      counts.messages += chunking.chunks;
    }
    counts.peers = std::max<uint64_t>(counts.peers, peers.size());
  }
  const uint64_t most = *std::max_element(sent.begin(), sent.end());
  counts.sent = static_cast<uint64_t>(static_cast<double>(most) * chunks);
  return counts;
}

}  // namespace mycoll
