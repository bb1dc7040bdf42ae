#include "collectives/plan/plan.h"

#include <algorithm>
#include <numeric>

#include "collectives/plan/planner.h"

namespace mycoll {
namespace {

// Up to this size, blocks of a host's ranks for those of another are sent in one message. Beyond
// it, the cost of a message for each is less than that of copying.
constexpr uint64_t kTogetherBytes = 256 * 1024;
// In smaller worlds, waiting for the other ranks of the host costs more than messages do in an
// all_to_all.
constexpr int kLeastTogether = 8;
// One chunk is added up while the next one is in flight. Each needs scratch memory, which should
// stay in the caches; but messages should be long enough to outweigh the cost of each.
constexpr uint64_t kMessageBytes = 256 * 1024;
constexpr uint64_t kLeastChunk = 512 * 1024;
constexpr uint64_t kMostChunk = 2 * 1024 * 1024;
// Bytes in flight in one phase: 1 Gbit/s over 30 ms.
constexpr uint64_t kUnderWay = 4 * 1024 * 1024;
constexpr uint64_t kLeastBlock = 4 * 1024;  // of a chunk that has a block for each rank
constexpr uint64_t kMostChunks = 60'000;    // a tag must hold the chunk and the phase

uint64_t usualChunk(const Shape& shape) {
  const auto pieces = static_cast<uint64_t>(shape.lanes() * shape.hosts());
  return std::clamp(pieces * kMessageBytes, kLeastChunk, kMostChunk);
}

}  // namespace

uint64_t mostTogether(const Shape& shape) {
  return std::min(kTogetherBytes, areaBytes(shape) / (2 * static_cast<uint64_t>(shape.hosts())));
}

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
  const PlanContext context{
      shape, job, rank, sharesMemory, chunking.begin(chunk), chunking.chunkBytes};
  switch (job.kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduce:
    case OpKind::kReduceScatter: return planReduction(context);
    case OpKind::kAllGather:
    case OpKind::kBroadcast: return planGathering(context);
    case OpKind::kGather:
    case OpKind::kScatter:
    case OpKind::kAllToAll: return planExchange(context);
    default: break;
  }
  Planner planner(context);
  planner.barrier(0);
  return planner.finish();
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
