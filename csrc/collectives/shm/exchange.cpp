// Collectives that only move data.
//
// A rank publishes small data with its arrival, larger data in rounds, through its bulk areas in
// turn. While the others copy round k from one area, it copies round k+1 to the next:
//
//   writer   fill 0 | fill 1 | fill 2 | ...
//   readers           take 0 | take 1 | ...
//
// A rank that only writes runs ahead of its readers, until it reaches an area that one of them has
// not finished (roundsBefore).
//
// If a rank offers its data (PeerMemory), the others read it from its own memory, before the rounds
// of the ranks that offer nothing. In one more round each rank reports that it has read the offers:
// the ranks that offer wait for that.
#include <algorithm>
#include <cstring>
#include <vector>

#include "collectives/shm/collectives.h"
#include "kernels/copy.h"
#include "transport/mailbox.h"

namespace mycoll {
namespace {

uint64_t maxRounds(const Arena& arena) {
  uint64_t rounds = 0;
  for (int rank = 0; rank < arena.ranks(); ++rank) {
    rounds = std::max(rounds, arena.roundsOf(rank));
  }
  return rounds;
}

// The memory that this rank publishes to all, and where it wants the data of the others.
struct Published {
  Span mine;
  const Span* theirs = nullptr;  // by rank; null: wants none
  int only = -1;                 // >= 0: wants that rank's alone, in theirs[0]

  Span from(int rank) const {
    if (!theirs) return {};
    if (only >= 0) return rank == only ? theirs[0] : Span{};
    return theirs[rank];
  }
};

Published published(const Call& call, int rank) {
  Published result;
  switch (call.kind) {
    case OpKind::kBroadcast:
      if (rank == call.root) {
        result.mine = call.in.empty() ? call.out[0] : call.in[0];
      } else {
        result.theirs = call.out.data();
        result.only = call.root;
      }
      break;
    case OpKind::kGather:
      result.mine = call.in[0];
      if (rank == call.root) result.theirs = call.out.data();
      break;
    default: result.mine = call.in[0]; result.theirs = call.out.data();
  }
  return result;
}

// Awaited after the last piece was read. Not ok: the group has failed meanwhile, so the owner may
// have used the memory for something else. Not ready while a rank writes the cause, because the
// owner may not have waited for that; and not if an owner has ended: the group is about to fail.
class ReadInTime final : public Condition {
 public:
  explicit ReadInTime(const ShmGroup& group)
      : arena_(group.arena), areAlive_(group.memory.areOwnersAlive(group.arena)) {}
  bool ready() override {
    // Reads the state after the data. An owner that writes data marks the failure before:
    // Arena::fail().
    std::atomic_thread_fence(std::memory_order_acquire);
    return !arena_.isFailing() && (areAlive_ || arena_.hasFailed());
  }
  Status status() const { return arena_.failure(); }

 private:
  const Arena& arena_;
  const bool areAlive_;
};

Task readOffer(ShmGroup group, int rank, size_t index, Span to, bool isStreaming) {
  constexpr size_t kPieceBytes = 1024 * 1024;
  const uint64_t pieces = roundsFor(to.bytes, kPieceBytes);
  for (uint64_t i = 0; i < pieces; ++i) {
    if (i > 0) MYCOLL_CO_RETURN_IF_ERROR(co_await shmPause(group));
    const Span part = piece(to, i, kPieceBytes);
    if (group.memory.read(group.arena, rank, index, i * kPieceBytes, part, isStreaming)) continue;
    Status status = co_await group.memory.unreadable(group, rank);
    co_return status;
  }
  co_return Status();
}

}  // namespace

Task shmPause(ShmGroup group) {
  Pause pause;
  co_await pause;
  co_return group.arena.failure();
}

Task endOffers(ShmGroup group, uint64_t rounds, bool isOffer) {
  Arena& arena = group.arena;
  ReadInTime inTime(group);
  co_await inTime;
  MYCOLL_CO_RETURN_IF_ERROR(inTime.status());
  arena.publish(Counter::kDone, rounds + 1);
  if (isOffer) {
    RoundReached isRead(arena, Counter::kDone, rounds + 1);
    co_await isRead;
  }
  arena.endRounds(rounds + 1);
  co_return Status();
}

Task shmAgain(ShmGroup group, const Call& call, PeerMemory::News news) {
  if (news.isRegion) MYCOLL_CO_RETURN_IF_ERROR(co_await group.memory.introduceRegions(group));
  if (news.isProcess) MYCOLL_CO_RETURN_IF_ERROR(co_await group.memory.introduceProcesses(group));
  if (news.isUnmeasured && group.memory.hasAccess()) {
    MYCOLL_CO_RETURN_IF_ERROR(co_await shmMeasure(group, call));
  }
  Status status = co_await shmCollective(group, call);
  co_return status;
}

uint64_t roundsFor(size_t bytes, size_t perRound) { return (bytes + perRound - 1) / perRound; }

Span piece(Span whole, uint64_t round, size_t perRound) {
  size_t begin = std::min<size_t>(round * perRound, whole.bytes);
  return {whole.begin() + begin, std::min(perRound, whole.bytes - begin)};
}

Status arrivalMismatch(const CallContext& context, const AllArrived& arrived) {
  const Mailbox& names = context.mailbox;
  Cause fields;
  fields.sequence = context.sequence;
  return Status(
      Code::kMismatch,
      mismatchText(names.group().name, "collective #" + std::to_string(context.sequence),
                   names.describeRank(names.rank()), context.signature,
                   names.describeRank(arrived.differingRank()), arrived.differingSignature()),
      fields);
}

Status sizeMismatch(const CallContext& context, int from, uint64_t sent, int to,
                    uint64_t expected) {
  const Mailbox& names = context.mailbox;
  Cause fields;
  fields.sequence = context.sequence;
  return Status(Code::kMismatch,
                "mycoll group '" + names.group().name + "': MISMATCH of sizes at collective #" +
                    std::to_string(context.sequence) + ", " + context.signature.describe() +
                    "\n  " + names.describeRank(from) + " sends " + std::to_string(sent) +
                    " bytes to rank " + std::to_string(to) + "\n  " + names.describeRank(to) +
                    " expects " + std::to_string(expected) +
                    " bytes from it\n  Each pair of ranks must agree on the size of what one sends "
                    "to the other.",
                fields);
}

Task shmArrive(ShmGroup group, size_t blobBytes, uint64_t rounds, bool isOffer) {
  group.arena.arrive(group.signature, blobBytes, rounds, isOffer);
  AllArrived arrived(group.arena, group.signature);
  co_await arrived;
  if (arrived.differingRank() >= 0) co_return arrivalMismatch(group, arrived);
  co_return Status();
}

Task shmBarrier(ShmGroup group) {
  group.arena.beginBlob(0);
  Status status = co_await shmArrive(group, 0);
  co_return status;
}

// The blob is the data itself if small; otherwise its size, or its location.
Task shmPublish(ShmGroup group, const Call& call) {
  Arena& arena = group.arena;
  const int self = arena.rank();
  const Signature& signature = group.signature;
  const Published plan = published(call, self);
  const bool isSmall = plan.mine.bytes <= arena.shape().smallBytes;
  const uint64_t myBytes = plan.mine.bytes;
  std::vector<SharedSpan> offered;
  if (!isSmall) offered = group.memory.offer(arena, call, {plan.mine}, myBytes);
  const bool isOffer = !offered.empty();
  const size_t blobBytes = isSmall ? myBytes : isOffer ? sizeof(SharedSpan) : sizeof(myBytes);
  char* blob = arena.beginBlob(blobBytes);
  const size_t chunk = arena.shape().chunkBytes;
  const uint64_t myRounds = isSmall || isOffer ? 0 : roundsFor(myBytes, chunk);
  if (isSmall) {
    arena.fill(blob, plan.mine.data, blobBytes);
  } else if (isOffer) {
    std::memcpy(blob, offered.data(), blobBytes);
  } else {
    std::memcpy(blob, &myBytes, blobBytes);
  }
  // This rank's output for its own data, which it fills round by round.
  const Span kept =
      myRounds > 0 && plan.from(self).data != plan.mine.data ? plan.from(self) : Span();
  const bool isKeptStreaming = kept.bytes >= kStreamingOutput;
  const auto fill = [&](uint64_t round) {
    const Span part = piece(plan.mine, round, chunk);
    char* const staged = arena.bulk(self, round);
    if (kept.bytes > 0) {
      copyToBoth(staged, arena.isStreaming(), piece(kept, round, chunk).data, isKeptStreaming,
                 part.data, part.bytes);
    } else {
      arena.fill(staged, part.data, part.bytes);
    }
    arena.publish(Counter::kFilled, round + 1);
  };
  const bool isEarly = myRounds > 0 && arena.isFirstAreaFree();
  if (isEarly) fill(0);
  arena.arrive(signature, blobBytes, myRounds, isOffer);
  AllArrived arrived(arena, signature);
  co_await arrived;
  if (arrived.differingRank() >= 0) co_return arrivalMismatch(group, arrived);
  if (const PeerMemory::News news = group.memory.newsIn(arena); news.isAny()) {
    Status status = co_await shmAgain(group, call, news);
    co_return status;
  }

  bool isStreaming = false;
  for (int rank = 0; rank < arena.ranks(); ++rank) {
    Span target = plan.from(rank);
    if (!plan.theirs || (plan.only >= 0 && rank != plan.only)) continue;
    isStreaming |= target.bytes >= kStreamingOutput;
    if (rank == self) {
      const bool isThere = target.data == plan.mine.data || target.bytes == 0 || myRounds > 0;
      if (!isThere) copy(target.begin(), plan.mine.begin(), target.bytes, isStreaming);
      continue;
    }
    const char* theirs = arena.blobOf(rank);
    uint64_t bytes = arena.blobBytesOf(rank);
    if (arena.isOffer(rank)) {
      bytes = PeerMemory::offerOf(arena, rank, 0).bytes;
    } else if (theirs && arena.roundsOf(rank) > 0) {
      std::memcpy(&bytes, theirs, sizeof(bytes));
    }
    if (!theirs || bytes != target.bytes) {
      co_return sizeMismatch(group, rank, bytes, group.mailbox.rank(), target.bytes);
    }
    if (arena.roundsOf(rank) == 0 && !arena.isOffer(rank)) copy(target.data, theirs, bytes);
  }
  for (int step = 1; step < arena.ranks(); ++step) {
    const int rank = (self + step) % arena.ranks();
    const Span target = plan.from(rank);
    if (!arena.isOffer(rank) || target.bytes == 0) continue;
    MYCOLL_CO_RETURN_IF_ERROR(co_await readOffer(group, rank, 0, target, isStreaming));
  }

  const uint64_t rounds = maxRounds(arena);
  if (myRounds > 0 && !isEarly) fill(0);
  for (uint64_t round = 0; round < rounds; ++round) {
    if (round + 1 < myRounds) {
      RoundReached isFree(arena, Counter::kDone, arena.roundsBefore(round + 1));
      co_await isFree;
      fill(round + 1);
    }
    for (int step = 1; step < arena.ranks(); ++step) {
      const int rank = (self + step) % arena.ranks();
      Span part = piece(plan.from(rank), round, chunk);
      if (part.bytes == 0 || arena.roundsOf(rank) == 0) continue;
      RoundReached isFilled(arena, rank, Counter::kFilled, round + 1);
      co_await isFilled;
      copy(part.begin(), arena.bulk(rank, round), part.bytes, isStreaming);
    }
    arena.publish(Counter::kDone, round + 1);
  }
  if (PeerMemory::isAnyOffered(arena)) {
    Status status = co_await endOffers(group, rounds, isOffer);
    co_return status;
  }
  if (rounds) arena.endRounds(rounds);
  co_return Status();
}

// The blob is a table of sizes by destination, followed by the data if that is small; or the
// location of each block. In the rounds, a bulk area is divided evenly between the destinations.
Task shmPairwise(ShmGroup group, const Call& call) {
  Arena& arena = group.arena;
  const int self = arena.rank();
  const int ranks = arena.ranks();
  const Signature& signature = group.signature;
  const bool isScatter = call.kind == OpKind::kScatter;
  const bool sends = !isScatter || self == call.root;
  auto incoming = [&](int rank) {
    if (isScatter) return rank == call.root ? call.out[0] : Span{};
    return call.out[rank];
  };
  const size_t tableBytes = sends ? static_cast<size_t>(ranks) * sizeof(uint64_t) : 0;
  size_t dataBytes = 0;
  size_t largest = 0;
  for (int rank = 0; sends && rank < ranks; ++rank) {
    if (rank == self) continue;
    dataBytes += call.in[rank].bytes;
    largest = std::max(largest, call.in[rank].bytes);
  }
  const bool isSmall = tableBytes + dataBytes <= arena.shape().smallBytes;
  std::vector<SharedSpan> offered;
  if (!isSmall) offered = group.memory.offer(arena, call, call.in, dataBytes);
  const bool isOffer = !offered.empty();
  const size_t blobBytes =
      isOffer ? offered.size() * sizeof(SharedSpan) : tableBytes + (isSmall ? dataBytes : 0);
  char* blob = arena.beginBlob(blobBytes);
  if (isOffer) std::memcpy(blob, offered.data(), blobBytes);
  // offset() is where the part of `to` begins in the area of `from`, which has no part for itself.
  const size_t part =
      arena.shape().chunkBytes / static_cast<size_t>(std::max(1, ranks - 1)) & ~(kSliceUnit - 1);
  auto offset = [&](int from, int to) {
    return static_cast<size_t>(to < from ? to : to - 1) * part;
  };
  const uint64_t myRounds = isSmall || isOffer ? 0 : roundsFor(largest, part);
  char* end = blob + tableBytes;
  for (int rank = 0; sends && !isOffer && rank < ranks; ++rank) {
    const uint64_t bytes = call.in[rank].bytes;
    std::memcpy(blob + static_cast<size_t>(rank) * sizeof(bytes), &bytes, sizeof(bytes));
    if (!isSmall || rank == self || !bytes) continue;
    arena.fill(end, call.in[rank].data, bytes);
    end += bytes;
  }
  const auto fill = [&](uint64_t round) {
    for (int rank = 0; rank < ranks; ++rank) {
      if (rank == self) continue;
      const Span slice = piece(call.in[rank], round, part);
      arena.fill(arena.bulk(self, round) + offset(self, rank), slice.data, slice.bytes);
    }
    arena.publish(Counter::kFilled, round + 1);
  };
  const bool isEarly = myRounds > 0 && arena.isFirstAreaFree();
  if (isEarly) fill(0);
  arena.arrive(signature, blobBytes, myRounds, isOffer);
  AllArrived arrived(arena, signature);
  co_await arrived;
  if (arrived.differingRank() >= 0) co_return arrivalMismatch(group, arrived);
  if (const PeerMemory::News news = group.memory.newsIn(arena); news.isAny()) {
    Status status = co_await shmAgain(group, call, news);
    co_return status;
  }

  bool isStreaming = false;
  for (int rank = 0; rank < ranks; ++rank) {
    if (isScatter && rank != call.root) continue;
    Span target = incoming(rank);
    isStreaming |= target.bytes >= kStreamingOutput / 2;
    if (rank == self) {
      if (target.bytes != call.in[self].bytes) {
        co_return sizeMismatch(group, rank, call.in[self].bytes, group.mailbox.rank(),
                               target.bytes);
      }
      if (target.bytes && target.data != call.in[self].data) {
        copy(target.begin(), call.in[self].begin(), target.bytes, isStreaming);
      }
      continue;
    }
    if (arena.isOffer(rank)) {
      const SharedSpan theirs = PeerMemory::offerOf(arena, rank, static_cast<size_t>(self));
      if (theirs.bytes != target.bytes) {
        co_return sizeMismatch(group, rank, theirs.bytes, group.mailbox.rank(), target.bytes);
      }
      continue;
    }
    const char* theirs = arena.blobOf(rank);
    if (!theirs || arena.blobBytesOf(rank) < static_cast<size_t>(ranks) * sizeof(uint64_t)) {
      co_return Status(Code::kInternal, group.mailbox.describeRank(rank) + " published no sizes");
    }
    uint64_t before = 0, bytes = 0;
    for (int to = 0; to <= self; ++to) {
      std::memcpy(&bytes, theirs + static_cast<size_t>(to) * sizeof(bytes), sizeof(bytes));
      if (to < self && to != rank) before += bytes;
    }
    if (bytes != target.bytes) {
      co_return sizeMismatch(group, rank, bytes, group.mailbox.rank(), target.bytes);
    }
    if (arena.roundsOf(rank) == 0) {
      copy(target.data, theirs + static_cast<size_t>(ranks) * sizeof(uint64_t) + before, bytes);
    }
  }
  for (int step = 1; step < ranks; ++step) {
    const int rank = (self + step) % ranks;
    const Span target = incoming(rank);
    if (!arena.isOffer(rank) || target.bytes == 0) continue;
    const auto index = static_cast<size_t>(self);
    MYCOLL_CO_RETURN_IF_ERROR(co_await readOffer(group, rank, index, target, isStreaming));
  }

  const uint64_t rounds = maxRounds(arena);
  if (myRounds > 0 && !isEarly) fill(0);
  for (uint64_t round = 0; round < rounds; ++round) {
    if (round + 1 < myRounds) {
      RoundReached isFree(arena, Counter::kDone, arena.roundsBefore(round + 1));
      co_await isFree;
      fill(round + 1);
    }
    for (int step = 1; step < ranks; ++step) {
      const int rank = (self + step) % ranks;
      if (arena.roundsOf(rank) == 0) continue;
      Span slice = piece(incoming(rank), round, part);
      if (slice.bytes == 0) continue;
      RoundReached isFilled(arena, rank, Counter::kFilled, round + 1);
      co_await isFilled;
      copy(slice.begin(), arena.bulk(rank, round) + offset(rank, self), slice.bytes, isStreaming);
    }
    arena.publish(Counter::kDone, round + 1);
  }
  if (PeerMemory::isAnyOffered(arena)) {
    Status status = co_await endOffers(group, rounds, isOffer);
    co_return status;
  }
  if (rounds) arena.endRounds(rounds);
  co_return Status();
}

}  // namespace mycoll
