// The collectives of a group whose ranks are all on one host, in its arena.
//
// Large tensors that other ranks can read (PeerMemory) are offered to them; all others go through
// the bulk areas. A rank that offers one waits at the end until no rank reads it any more.
// Thread contract: as Task. The objects of the ShmGroup, the call and its memory must outlive the
// task.
#pragma once

#include "base/call.h"
#include "base/task.h"
#include "collectives/batch.h"
#include "collectives/shm/arena.h"
#include "collectives/shm/peer_memory.h"

namespace mycoll {

struct ShmGroup : CallContext {
  Arena& arena;
  PeerMemory& memory;
};

Task shmCollective(ShmGroup group, const Call& call);

// ---- by kind of work; shmCollective chooses from these and from those of reduction.cpp

// The ranks only meet.
Task shmBarrier(ShmGroup group);
// Each rank publishes one piece of memory, and copies those of others for which it has an output:
// broadcast, all_gather, gather.
Task shmPublish(ShmGroup group, const Call& call);
// A rank has a piece for each other rank: all_to_all, scatter.
Task shmPairwise(ShmGroup group, const Call& call);

// ---- shared by them

// Outputs of at least this size are written past the caches, except for results that all_reduce and
// reduce write over their input.
constexpr size_t kStreamingOutput = 1024 * 1024;

// In the round after the last one, each rank reports that it has read the offers. isOffer: this
// rank waits for all of them.
Task endOffers(ShmGroup group, uint64_t rounds, bool isOffer);

// After Arena::beginBlob(): arrives, and waits for all ranks. Fails if one makes another call.
Task shmArrive(ShmGroup group, size_t blobBytes, uint64_t rounds = 0, bool isOffer = false);

// Between two pieces of a long call that waits for nothing. Fails if the group has failed.
Task shmPause(ShmGroup group);

// Prepares what the offers need, and begins the call again.
Task shmAgain(ShmGroup group, const Call& call, PeerMemory::News news);
// Makes the call both ways, on scratch memory, and chooses the faster one for this kind and
// size of call: the same on all ranks.
Task shmMeasure(ShmGroup group, const Call& call);

uint64_t roundsFor(size_t bytes, size_t perRound);
// The part of `whole` that belongs to a round.
Span piece(Span whole, uint64_t round, size_t perRound);

// The error if a rank makes another call than this one.
Status arrivalMismatch(const CallContext& context, const AllArrived& arrived);
// The error if one rank sends another a size that the receiver does not expect.
Status sizeMismatch(const CallContext& context, int from, uint64_t sent, int to, uint64_t expected);
}  // namespace mycoll
