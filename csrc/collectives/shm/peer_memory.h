// PeerMemory: what a rank has mapped of the other ranks' shared tensors (SharedHeap), to read them
// where they lie.
//
// A rank that offers its tensors says where they are with its arrival: a list of SharedSpan. What
// the list means is the algorithm's business. All ranks see the same offers, so all know which
// regions are new, and meet once for each, before the collective begins anew:
//
//   owner     a word, to each ->   the region, to each ->
//   others                                               (map it)
//   all                                                            arrive: which are mapped
//
// A region is read when all have it. One that somebody could not map is not offered for a while,
// and its tensors travel through the arena, like any others.
//
// Nobody ever writes to another rank's memory: it is mapped for reading only. So a rank whose call
// has failed may use its tensors at once, whatever the others are doing.
//
// Thread contract: as Arena: whoever holds the run lock.
// Lifetime: of the group. The mappings are those of the connections (PeerRegions).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/task.h"
#include "base/types.h"
#include "collectives/shm/arena.h"
#include "transport/shm/segment.h"

namespace mycoll {

struct ShmGroup;

// A piece of a rank's memory, for the other ranks. region 0: not offered.
struct SharedSpan {
  uint64_t region = 0;
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

class PeerMemory {
 public:
  explicit PeerMemory(int rank) : self_(rank) {}

  // False: it is not shared, or the others cannot have it. Memory of no bytes can always be had.
  bool offer(const Span& mine, SharedSpan* offered) const;

  // ---- after all arrivals, the same on all ranks
  // How many SharedSpan the rank has offered.
  static size_t offersOf(const Arena& arena, int rank);
  static SharedSpan offerOf(const Arena& arena, int rank, size_t index);
  static bool isAnyOffered(const Arena& arena);
  static bool areAllOffered(const Arena& arena);
  // Some of what is offered is still to be introduced.
  bool isAnyNew(const Arena& arena) const;
  // By all ranks, when isAnyNew(): they make the regions known to each other.
  Task introduce(ShmGroup group);
  // Where the memory can be read, or null, if it does not lie in what the rank has shared.
  const char* find(int rank, const SharedSpan& offered) const;
  // The same of what it offers, which may change at any time. Null, too, if that has another size.
  const char* find(const Arena& arena, int rank, size_t index, size_t bytes) const;

 private:
  struct Known {
    std::shared_ptr<Segment> segment;  // null: somebody could not map it, or it is our own
    std::weak_ptr<Segment> own;
    bool isUsable = false;
    Deadline retry;  // our own that is not usable: when it may be offered again
    int tries = 0;   // introductions, the same number on all ranks
  };
  using Name = std::pair<int, uint64_t>;  // a rank and its region

  std::vector<Name> newIn(const Arena& arena) const;
  void forgetDropped();

  const int self_;
  std::map<Name, Known> known_;
};

}  // namespace mycoll
