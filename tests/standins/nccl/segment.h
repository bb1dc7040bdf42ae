// The memory that the ranks of one communicator share: who is there, and a ring of bytes for each
// ordered pair. Found through a unique id, which names a memfd of the process that made it: nothing
// has a name in a file system, so nothing is left behind when processes are killed.
//
// Thread contract: attach() and the bulletin are for one thread of a rank at a time, each ring for
// one writer and one reader.
// Lifetimes: the mapping lives as long as the Segment; each rank has its own, also within a
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
    std::atomic<uint32_t> isSenderHere, isReceiverHere;  // have called once, at least
    char bytes[kRingBytes];
  };

  // What a rank tells the others.
  struct alignas(64) Bulletin {
    std::atomic<int32_t> pid;  // 0: not here yet
    std::atomic<uint64_t> startTicks;
    std::atomic<uint32_t> isGone;
    std::atomic<uint32_t> isLeaving;  // has begun to finalize or to destroy
    std::atomic<uint64_t> connected;  // kinds and size classes of collectives, as bits
    // Making a child communicator, round by round: what this rank wants...
    std::atomic<uint64_t> asked;
    std::atomic<int32_t> color, key;
    // ... the id of the child that this rank leads ...
    std::atomic<uint64_t> answered;
    mycoll::nccl::UniqueId child;
    // ... and that it needs nothing more of this round.
    std::atomic<uint64_t> finished;
  };

  // The memory is made here, and kept open until drop(id) or the end of the process.
  static bool create(mycoll::nccl::UniqueId* id);
  static void drop(const mycoll::nccl::UniqueId& id);

  // Null: the id is no id, its process is gone, or another rank named another size.
  static std::unique_ptr<Segment> attach(const mycoll::nccl::UniqueId& id, int rank, int ranks);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  bool isTaken() const { return isTaken_; }  // somebody else has this rank
  bool isComplete() const;
  bool isPeerDead(int peer) const;  // its process ended without a word

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
