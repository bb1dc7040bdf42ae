// Collectives that compute. Every element is reduced over all ranks' inputs along one tree
// (kernels/reduce.h) and rounded once, by one rank or by each in the same way: so all ranks get the
// same bits, whatever the size or the transport.
//
// Large tensors are reduced in rounds of one bulk area per rank. If there are two ranks, each
// stages its own input, and reduces everything. A byte crosses memory as often as if they divided
// the work, and they wait for each other once per round instead of twice. Near ranks stage round
// k+1 in the loop that reduces round k: staging waits for memory, reducing for the other core's
// cache.
//
// More ranks divide the work. In each round every rank owns one slice:
//
//                   slice 0      slice 1      slice 2
//   area of rank 0  result of 0  input of 0   input of 0     rank 0 reduces slice 0: its own input
//   area of rank 1  input of 1   result of 1  input of 1     from the caller's memory, the others'
//   area of rank 2  input of 2   input of 2   result of 2    from their areas
//
// An owner does not stage its own input, so the result takes its place, from which the others copy
// it.
//
// If all ranks offer their tensors (PeerMemory) in an all_reduce or a reduce_scatter, nothing is
// staged: an owner reads its slice of all inputs, and the others copy the result from its output.
// This is safe in place, because a slice of an input is replaced only after its owner has reduced
// it.
#include <algorithm>
#include <cstring>
#include <vector>

#include "collectives/shm/collectives.h"
#include "kernels/copy.h"
#include "kernels/reduce.h"

namespace mycoll {
namespace {

// Beyond this, reducing everything on every rank costs more than dividing the work.
constexpr size_t kMaxSymmetricWork = 256 * 1024;

// In place, the memory to write has just been read: stores past the caches would have to evict it
// first.
bool isStreamingResult(const Call& call) {
  return call.out[0].bytes >= kStreamingOutput && call.out[0].data != call.in[0].data;
}

// For tensors that are read in place: rounds of this size wait seldom, and their results are still
// in the caches when they are copied.
constexpr size_t kDirectChunk = 4 * 1024 * 1024;

// Offers this rank's tensors to the others: its inputs, and the output if that is read.
std::vector<SharedSpan> offerTensors(const ShmGroup& group, const Call& call) {
  if (call.kind == OpKind::kReduce) return {};  // the root would read alone
  const size_t bytes = totalBytes(call.in);
  if (call.kind != OpKind::kAllReduce) return group.memory.offer(group.arena, call, call.in, bytes);
  return group.memory.offer(group.arena, call, {call.in[0], call.out[0]}, bytes);
}

// How a tensor is cut into rounds and slices; the same on all ranks.
struct Slices {
  Slices(size_t rankCount, size_t chunkBytes, size_t totalBytes)
      : ranks(rankCount),
        total(totalBytes),
        stride(chunkBytes / ranks & ~(kSliceUnit - 1)),
        rounds((total + ranks * stride - 1) / (ranks * stride)) {}

  // In the tensor.
  Span of(int rank, uint64_t round, void* tensor) const {
    const size_t begin = round * ranks * stride;
    const size_t bytes = std::min(total - begin, ranks * stride);
    const size_t slice = roundUp((bytes + ranks - 1) / ranks, kSliceUnit);
    const size_t from = std::min(bytes, static_cast<size_t>(rank) * slice);
    return {static_cast<char*>(tensor) + begin + from, std::min(bytes - from, slice)};
  }

  size_t ranks;
  size_t total;
  size_t stride;
  uint64_t rounds;
};

// In a reduce_scatter, each rank reduces its own part.
Task shmReduceSmall(ShmGroup group, const Call& call) {
  Arena& arena = group.arena;
  const int self = arena.rank();
  const Signature& signature = group.signature;
  const bool isScatter = call.kind == OpKind::kReduceScatter;
  const size_t bytes = totalBytes(call.in);
  char* end = arena.beginBlob(bytes);
  size_t before = 0;  // this rank's part
  for (size_t part = 0; part < call.in.size(); ++part) {
    arena.fill(end, call.in[part].data, call.in[part].bytes);
    end += call.in[part].bytes;
    if (isScatter && static_cast<int>(part) < self) before += call.in[part].bytes;
  }
  arena.arrive(signature, bytes, 0);
  AllArrived arrived(arena, signature);
  co_await arrived;
  if (arrived.differingRank() >= 0) co_return arrivalMismatch(group, arrived);
  if (call.out.empty() || call.out[0].bytes == 0) co_return Status();

  constexpr int kFew = 8;
  const void* few[kFew];
  std::vector<const void*> many(arena.ranks() > kFew ? arena.ranks() : 0);
  const void** inputs = many.empty() ? few : many.data();
  for (int rank = 0; rank < arena.ranks(); ++rank) {
    inputs[rank] = rank == self ? call.in[isScatter ? self : 0].data : arena.blobOf(rank) + before;
  }
  reduce(call.dtype, call.reduceOp, call.out[0].data, inputs, arena.ranks(),
         call.out[0].bytes / call.elementBytes, arena.ranks(), false);
  co_return Status();
}

// Reduces what all ranks have offered; called after the arrival. Publishes results in rounds only
// if ranks wait for each other's.
Task shmReduceDirect(ShmGroup group, const Call& call) {
  if (const PeerMemory::News news = group.memory.newsIn(group.arena); news.isAny()) {
    Status status = co_await shmAgain(group, call, news);
    co_return status;
  }
  Arena& arena = group.arena;
  const int self = arena.rank();
  const int ranks = arena.ranks();
  const bool isAll = call.kind == OpKind::kAllReduce;
  const size_t index = isAll ? 0 : static_cast<size_t>(self);
  const Span mine = call.in[index];
  const bool isStreaming = isStreamingResult(call);
  // The copied result replaces an input that another rank has read, and often still has in its
  // cache: stores through the caches would have to request each line, and fetch it, first.
  const bool isFetchStreaming = isAll && call.out[0].bytes >= kStreamingOutput;

  // A part of a reduce_scatter is one slice.
  const Slices slices(isAll ? static_cast<size_t>(ranks) : 1, kDirectChunk, mine.bytes);
  const int slot = isAll ? self : 0;
  const size_t viewBytes = PeerMemory::viewBytes(arena);
  std::vector<const void*> pieces(ranks);
  for (uint64_t round = 0; round < slices.rounds; ++round) {
    const Span slice = slices.of(slot, round, mine.data);
    for (size_t done = 0; done < slice.bytes;) {
      const Span part{slice.begin() + done, std::min(slice.bytes - done, viewBytes)};
      const size_t begin = static_cast<size_t>(part.begin() - mine.begin());
      for (int rank = 0; rank < ranks; ++rank) {
        pieces[rank] =
            rank == self ? part.data : group.memory.view(arena, rank, index, begin, part.bytes);
        if (pieces[rank]) continue;
        Status status = co_await group.memory.unreadable(group, rank);
        co_return status;
      }
      reduce(call.dtype, call.reduceOp, call.out[0].begin() + begin, pieces.data(), ranks,
             part.bytes / call.elementBytes, ranks, isStreaming);
      done += part.bytes;
    }
    if (!isAll) {
      MYCOLL_CO_RETURN_IF_ERROR(co_await shmPause(group));
      continue;
    }
    arena.publish(Counter::kReduced, round + 1);
    for (int step = 1; step < ranks; ++step) {
      const int owner = (self + step) % ranks;
      const Span result = slices.of(owner, round, call.out[0].data);
      if (result.bytes == 0) continue;
      RoundReached isReduced(arena, owner, Counter::kReduced, round + 1);
      co_await isReduced;
      const auto offset = static_cast<size_t>(result.begin() - call.out[0].begin());
      if (group.memory.read(arena, owner, 1, offset, result, isFetchStreaming)) continue;
      Status status = co_await group.memory.unreadable(group, owner);
      co_return status;
    }
  }
  Status status = co_await endOffers(group, isAll ? slices.rounds - 1 : 0, /*isOffer=*/true);
  co_return status;
}

// Begins a call whose inputs fill(round) stages: all ranks have arrived, and round 0 is staged,
// before the arrival if its area is free. *isDone: all ranks have offered their tensors instead,
// and the call is over.
template <typename Fill>
Task shmBeginStaging(ShmGroup group, const Call& call, uint64_t rounds, Fill fill, bool* isDone) {
  Arena& arena = group.arena;
  const std::vector<SharedSpan> offered = offerTensors(group, call);
  const size_t blobBytes = offered.size() * sizeof(SharedSpan);
  char* const blob = arena.beginBlob(blobBytes);
  if (blobBytes > 0) std::memcpy(blob, offered.data(), blobBytes);
  const bool isEarly = offered.empty() && arena.isFirstAreaFree();
  if (isEarly) fill(0);
  MYCOLL_CO_RETURN_IF_ERROR(co_await shmArrive(group, blobBytes, rounds, !offered.empty()));
  *isDone = PeerMemory::areAllOffered(arena) || group.memory.newsIn(arena).isAny();
  if (*isDone) {
    Status status = co_await shmReduceDirect(group, call);
    co_return status;
  }
  if (!isEarly) fill(0);
  co_return Status();
}

Task shmReduceOfTwo(ShmGroup group, const Call& call) {
  Arena& arena = group.arena;
  const int self = arena.rank();
  const int other = 1 - self;
  const bool isAll = call.kind == OpKind::kAllReduce;
  const bool wantsResult = isAll || self == call.root;
  const bool isWanted = isAll || other == call.root;
  const size_t bytes = call.in[0].bytes;
  const bool isStreaming = wantsResult && isStreamingResult(call);
  // Large rounds are best at any distance: each has only one wait, which it hides.
  const size_t chunk = arena.shape().chunkBytes;
  const uint64_t rounds = roundsFor(bytes, chunk);

  const auto fill = [&](uint64_t round) {
    const Span mine = piece(call.in[0], round, chunk);
    if (isWanted) arena.fill(arena.bulk(self, round), mine.data, mine.bytes);
    arena.publish(Counter::kFilled, round + 1);
  };
  bool isDone = false;
  MYCOLL_CO_RETURN_IF_ERROR(co_await shmBeginStaging(group, call, rounds, fill, &isDone));
  if (isDone) co_return Status();

  for (uint64_t round = 0; round < rounds; ++round) {
    Span next;  // staged while this round is reduced
    if (round + 1 < rounds) {
      RoundReached isFree(arena, Counter::kDone, arena.roundsBefore(round + 1));
      co_await isFree;
      if (isAll && !arena.isStreaming()) {
        next = piece(call.in[0], round + 1, chunk);
      } else {
        fill(round + 1);
      }
    }
    if (wantsResult) {
      RoundReached isFilled(arena, Counter::kFilled, round + 1);
      co_await isFilled;
      const Span mine = piece(call.in[0], round, chunk);
      const void* inputs[2];
      inputs[self] = mine.data;
      inputs[other] = arena.bulk(other, round);
      reduceAndCopy(call.dtype, call.reduceOp, piece(call.out[0], round, chunk).data, inputs, 2,
                    mine.bytes / call.elementBytes, 2, isStreaming,
                    {arena.bulk(self, round + 1), next.data, next.bytes});
      if (next.bytes > 0) arena.publish(Counter::kFilled, round + 2);
    }
    arena.publish(Counter::kDone, round + 1);
  }
  arena.endRounds(rounds);
  co_return Status();
}

// all_reduce and reduce divide one tensor. A reduce_scatter has a tensor for each owner, as all
// ranks know: a part of each is a slice of a round.
Task shmReduceLarge(ShmGroup group, const Call& call) {
  Arena& arena = group.arena;
  const int self = arena.rank();
  const int ranks = arena.ranks();
  const bool isScatter = call.kind == OpKind::kReduceScatter;
  const bool wantsAll = call.kind == OpKind::kAllReduce || (!isScatter && self == call.root);
  const bool isStreaming =
      isScatter ? call.out[0].bytes >= kStreamingOutput : wantsAll && isStreamingResult(call);
  size_t largest = 0;
  for (const Span& span : call.in) largest = std::max(largest, span.bytes);
  const size_t chunk = arena.shape().chunkBytes;
  const Slices slices = isScatter ? Slices(1, chunk / std::max(1, ranks - 1), largest)
                                  : Slices(static_cast<size_t>(ranks), chunk, largest);
  const auto sliceOf = [&](const Span& tensor, int owner, uint64_t round) {
    return isScatter ? piece(tensor, round, slices.stride) : slices.of(owner, round, tensor.data);
  };
  const auto inputOf = [&](int owner, uint64_t round) {
    return sliceOf(call.in[isScatter ? owner : 0], owner, round);
  };
  // In a reduce_scatter, the area of a rank has no place for its own slice.
  const auto placeOf = [&](int from, int owner, uint64_t round) {
    const int index = isScatter && owner > from ? owner - 1 : owner;
    return arena.bulk(from, round) + static_cast<size_t>(index) * slices.stride;
  };
  const auto fill = [&](uint64_t round) {
    for (int step = 1; step < ranks; ++step) {
      const int owner = (self + step) % ranks;
      const Span slice = inputOf(owner, round);
      arena.fill(placeOf(self, owner, round), slice.data, slice.bytes);
    }
    arena.publish(Counter::kFilled, round + 1);
  };
  bool isDone = false;
  MYCOLL_CO_RETURN_IF_ERROR(co_await shmBeginStaging(group, call, slices.rounds, fill, &isDone));
  if (isDone) co_return Status();

  std::vector<const void*> inputs(ranks);
  for (uint64_t round = 0; round < slices.rounds; ++round) {
    if (round + 1 < slices.rounds) {
      RoundReached isFree(arena, Counter::kDone, arena.roundsBefore(round + 1));
      co_await isFree;
      fill(round + 1);
    }
    const Span mine = inputOf(self, round);
    if (mine.bytes) {
      RoundReached isFilled(arena, Counter::kFilled, round + 1);
      co_await isFilled;
      for (int rank = 0; rank < ranks; ++rank) {
        inputs[rank] = rank == self ? mine.data : placeOf(rank, self, round);
      }
      void* const shared = placeOf(self, self, round);
      void* const result = isScatter || wantsAll ? sliceOf(call.out[0], self, round).data : shared;
      const size_t count = mine.bytes / call.elementBytes;
      if (call.kind == OpKind::kAllReduce) {
        reduce2(call.dtype, call.reduceOp, result, shared, inputs.data(), ranks, count, ranks,
                isStreaming, arena.isStreaming());
      } else {
        reduce(call.dtype, call.reduceOp, result, inputs.data(), ranks, count, ranks, isStreaming);
      }
    }
    if (!isScatter) arena.publish(Counter::kReduced, round + 1);
    for (int step = 1; wantsAll && step < ranks; ++step) {
      const int owner = (self + step) % ranks;
      const Span slice = sliceOf(call.out[0], owner, round);
      if (slice.bytes == 0) continue;
      RoundReached isReduced(arena, owner, Counter::kReduced, round + 1);
      co_await isReduced;
      copy(slice.data, placeOf(owner, owner, round), slice.bytes, isStreaming);
    }
    arena.publish(Counter::kDone, round + 1);
  }
  arena.endRounds(slices.rounds);
  co_return Status();
}

}  // namespace

Task shmCollective(ShmGroup group, const Call& call) {
  const Arena& arena = group.arena;
  switch (call.kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduce: {
      const size_t bytes = call.in[0].bytes;
      bool isSmall = bytes <= arena.shape().smallBytes &&
                     bytes * static_cast<size_t>(arena.ranks()) <= kMaxSymmetricWork;
      if (isSmall) return shmReduceSmall(group, call);
      return arena.ranks() == 2 ? shmReduceOfTwo(group, call) : shmReduceLarge(group, call);
    }
    case OpKind::kReduceScatter:
      return totalBytes(call.in) <= arena.shape().smallBytes ? shmReduceSmall(group, call)
                                                             : shmReduceLarge(group, call);
    case OpKind::kAllToAll:
    case OpKind::kScatter: return shmPairwise(group, call);
    case OpKind::kBroadcast:
    case OpKind::kAllGather:
    case OpKind::kGather: return shmPublish(group, call);
    default: return shmBarrier(group);
  }
}

}  // namespace mycoll
