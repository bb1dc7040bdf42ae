// PeerMemory: the shared tensors (SharedHeap) of the other ranks that a rank has mapped, to read
// them in place.
//
// A rank that offers its tensors publishes their locations with its arrival: a list of SharedSpan.
// Each algorithm defines the meaning of the list. All ranks see the same offers, so all know which
// regions are new, and introduce them before the collective begins again:
//
//   owner     its size, descriptor, to each ->
//   others                                      (map it)
//   all                                                   arrive: which are mapped
//
// A region is read if all ranks have mapped it. If one of them could not, the region is not offered
// for a while, and its tensors go through the arena, like any others.
//
// No rank writes to another rank's memory: it is mapped for reading only. So a rank whose call has
// failed may use its tensors immediately, whatever the others are doing: those that have read them
// check afterwards that the group had not failed (ReadInTime).
//
// Thread contract: as Arena: the thread that holds the run lock.
// Lifetime: that of the group.
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

  // Returns false if the memory is not shared, or the others cannot map it. Memory of 0 bytes can
  // always be offered.
  bool offer(const Span& mine, SharedSpan* offered) const;

  // ---- after all arrivals, the same on all ranks
  // The number of SharedSpan that the rank has offered.
  static size_t offersOf(const Arena& arena, int rank);
  static SharedSpan offerOf(const Arena& arena, int rank, size_t index);
  static bool isAnyOffered(const Arena& arena);
  static bool areAllOffered(const Arena& arena);
  // Whether some offered regions have yet to be introduced.
  bool isAnyNew(const Arena& arena) const;
  // Called by all ranks if isAnyNew(): they make the regions known to each other.
  Task introduce(ShmGroup group);
  // Returns where the memory can be read, or null if it is not in a region that the rank has
  // shared.
  const char* find(int rank, const SharedSpan& offered) const;
  // The same for the rank's offer, which may change at any time. Also null if that has another
  // size.
  const char* find(const Arena& arena, int rank, size_t index, size_t bytes) const;

 private:
  struct Known {
    std::shared_ptr<Segment> segment;  // null: a rank could not map it, or it is our own
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
