// The memory that the ranks of one communicator share: a bulletin for each rank, and a ring of
// bytes for each ordered pair. It is found through a unique id, which names a memfd of the process
// that made it. It has no name in a file system, so nothing remains when processes are killed.
//
// Thread contract: attach() and the bulletin are for one thread of a rank at a time, each ring for
// one writer and one reader.
// Lifetimes: the mapping lives as long as the Segment. Each rank has its own, even if ranks share a
// process.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "nccl/abi.h"

namespace standin::nccl {

class Segment {
 public:
  static constexpr size_t kRingBytes = 16 << 10;

  struct alignas(64) Ring {
    std::atomic<uint64_t> written;
    alignas(64) std::atomic<uint64_t> read;
    std::atomic<uint32_t> isSenderHere, isReceiverHere;  // have called at least once
    char bytes[kRingBytes];
  };

  // The data that a rank publishes to the others.
  struct alignas(64) Bulletin {
    std::atomic<int32_t> pid;  // 0: has not attached yet
    std::atomic<uint64_t> startTicks;
    std::atomic<uint32_t> isGone;
    std::atomic<uint32_t> isLeaving;  // has begun to finalize or to destroy
    std::atomic<uint64_t> connected;  // kinds and size classes of collectives, as bits
    // Child communicators are made in rounds. `asked`: color and key are set for this round.
    std::atomic<uint64_t> asked;
    std::atomic<int32_t> color, key;
    // `answered`: child is set for this round; it is the id of the child in which this rank is 0.
    std::atomic<uint64_t> answered;
    mycoll::nccl::UniqueId child;
    // `finished`: this rank has read everything it needs of this round.
    std::atomic<uint64_t> finished;
  };

  // Makes the memory, and keeps it open until drop(id) or the end of the process.
  static bool create(mycoll::nccl::UniqueId* id);
  static void drop(const mycoll::nccl::UniqueId& id);

  // Returns null if the id is invalid, its process is gone, or another rank has another number of
  // ranks.
  static std::unique_ptr<Segment> attach(const mycoll::nccl::UniqueId& id, int rank, int ranks);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  bool isTaken() const { return isTaken_; }  // another caller has this rank
  bool isComplete() const;
  bool isPeerDead(int peer) const;  // its process ended without closing the communicator

  Bulletin& bulletin(int rank) const;
  Ring& ring(int from, int to) const;

 private:
  Segment() = default;

  void* memory_ = nullptr;
  size_t bytes_ = 0;
  int ranks_ = 0;
  bool isTaken_ = false;
};

}  // namespace standin::nccl
