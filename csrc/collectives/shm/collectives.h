// The collectives of a group whose ranks all share one host, on its arena.
//
// Large tensors that other ranks can read where they lie (PeerMemory) are offered to them; others
// go through the bulk areas. Whoever offers one waits at the end until nobody reads it any more.
// Thread contract: as Task. The arena, the names, the signature, the call and its memory must
// outlive the task.
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

// Nothing but the meeting.
Task shmBarrier(ShmGroup group);
// Everybody publishes one piece of memory, and takes those of others that it has room for:
// broadcast, all_gather, gather.
Task shmPublish(ShmGroup group, const Call& call);
// Everybody has a piece for each other rank: all_to_all, scatter.
Task shmPairwise(ShmGroup group, const Call& call);
// all_reduce, reduce: small ones, and those of two ranks, are reduced by every rank that wants
// them, others by parts.
Task shmReduceSmall(ShmGroup group, const Call& call);
Task shmReduceOfTwo(ShmGroup group, const Call& call);
Task shmReduceLarge(ShmGroup group, const Call& call);
// What all ranks have offered; goes on from the arrival of the others.
Task shmReduceDirect(ShmGroup group, const Call& call);
Task shmReduceScatterSmall(ShmGroup group, const Call& call);
Task shmReduceScatterLarge(ShmGroup group, const Call& call);

// ---- shared by them

// Outputs of this size and more are written past the caches, but for what all_reduce and reduce put
// in the place of their input.
constexpr size_t kStreamingOutput = 1024 * 1024;

// Smaller tensors are copied: that is quicker than the wait at the end. What is reduced also goes
// from one core's cache to another's when it is read where it lies, which takes longer than a copy.
constexpr size_t kLeastOffer = 128 * 1024;
constexpr size_t kLeastReduceOffer = 1024 * 1024;

// After the last piece was read where it lies. Not ok: the group has failed meanwhile, so its owner
// may have used it for something else.
inline Status shmReadInTime(const ShmGroup& group) {
  std::atomic_thread_fence(std::memory_order_acquire);  // looks after it has read
  return group.arena.failure();
}

// The ranks' memory is introduced, and the call begins anew.
Task shmAgain(ShmGroup group, const Call& call);

uint64_t roundsFor(size_t bytes, size_t perRound);
// The part of `whole` that belongs to a round.
Span piece(Span whole, uint64_t round, size_t perRound);

// The rank that was found to differ was called otherwise than this one.
Status arrivalMismatch(const Mailbox& names, uint64_t sequence, const Signature& mine,
                       const AllArrived& arrived);
// What one rank sends to another is not what that expects.
Status sizeMismatch(const Mailbox& names, uint64_t sequence, const Signature& signature, int from,
                    uint64_t sent, int to, uint64_t expected);
Status shmMismatch(const ShmGroup& group, const AllArrived& arrived);
// A rank offers what it has not.
Status shmBadOffer(const ShmGroup& group, int rank);
Status shmSizeMismatch(const ShmGroup& group, int rank, size_t theirs, size_t expected);

}  // namespace mycoll
