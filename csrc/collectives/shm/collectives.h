// The collectives of a group whose ranks are all on one host, in its arena.
//
// Large tensors that other ranks can read in place (PeerMemory) are offered to them; all others go
// through the bulk areas. A rank that offers one waits at the end until no rank reads it any more.
// Thread contract: as Task. The objects of the ShmGroup, the call and its memory must outlive the
// task.
#pragma once

#include <atomic>

#include "base/call.h"
#include "base/task.h"
#include "collectives/shm/arena.h"
#include "collectives/shm/peer_memory.h"

namespace mycoll {

class Mailbox;

struct ShmGroup {
  Arena& arena;
  PeerMemory& memory;
  Mailbox& mailbox;            // for names, and to introduce memory
  uint64_t sequence;           // of the collective
  const Signature& signature;  // of the call
};

Task shmCollective(ShmGroup group, const Call& call);

// ---- by kind of work; shmCollective chooses

// The ranks only meet.
Task shmBarrier(ShmGroup group);
// Each rank publishes one piece of memory, and copies those of others for which it has an output:
// broadcast, all_gather, gather.
Task shmPublish(ShmGroup group, const Call& call);
// A rank has a piece for each other rank: all_to_all, scatter.
Task shmPairwise(ShmGroup group, const Call& call);
// all_reduce, reduce: every rank that needs the result of a small one, or one of two ranks, reduces
// all of it; otherwise the ranks divide the work.
Task shmReduceSmall(ShmGroup group, const Call& call);
Task shmReduceOfTwo(ShmGroup group, const Call& call);
Task shmReduceLarge(ShmGroup group, const Call& call);
// Reduces what all ranks have offered; begins after the arrival of the others.
Task shmReduceDirect(ShmGroup group, const Call& call);
Task shmReduceScatterSmall(ShmGroup group, const Call& call);
Task shmReduceScatterLarge(ShmGroup group, const Call& call);

// ---- shared by them

// Outputs of at least this size are written past the caches, except for results that all_reduce and
// reduce write over their input.
constexpr size_t kStreamingOutput = 1024 * 1024;

// Smaller tensors are copied: that is faster than the wait at the end. Inputs of a reduction, if
// read in place, also move from one core's cache to another's, which takes longer than a copy.
constexpr size_t kLeastOffer = 128 * 1024;
constexpr size_t kLeastReduceOffer = 1024 * 1024;

// Awaited after the last piece was read in place. Not ok: the group has failed meanwhile, so the
// owner may have used the memory for something else. Not ready while a rank writes the cause: the
// owner may not have waited for that.
class ReadInTime final : public Condition {
 public:
  explicit ReadInTime(const ShmGroup& group) : arena_(group.arena) {}
  bool ready() override {
    // Reads the state after the data. An owner that writes data marks the failure before:
    // Arena::fail().
    std::atomic_thread_fence(std::memory_order_acquire);
    return !arena_.isFailing();
  }
  Status status() const { return arena_.failure(); }

 private:
  const Arena& arena_;
};

// Introduces the ranks' memory, and begins the call again.
Task shmAgain(ShmGroup group, const Call& call);

uint64_t roundsFor(size_t bytes, size_t perRound);
// The part of `whole` that belongs to a round.
Span piece(Span whole, uint64_t round, size_t perRound);

// The error if a rank makes another call than this one.
Status arrivalMismatch(const Mailbox& names, uint64_t sequence, const Signature& mine,
                       const AllArrived& arrived);
// The error if one rank sends another a size that the receiver does not expect.
Status sizeMismatch(const Mailbox& names, uint64_t sequence, const Signature& signature, int from,
                    uint64_t sent, int to, uint64_t expected);
Status shmMismatch(const ShmGroup& group, const AllArrived& arrived);
// The error if a rank offers memory that it has not shared.
Status shmBadOffer(const ShmGroup& group, int rank);
Status shmSizeMismatch(const ShmGroup& group, int rank, size_t theirs, size_t expected);

}  // namespace mycoll
