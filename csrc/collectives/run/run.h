// Carries out plans (plan/plan.h): the collectives of a group that spans hosts, or may not use an
// arena. Ranks send messages between hosts, and also inside a host whose ranks share no memory.
//
// Chunks form a pipeline: in its n-th step a rank begins phase 0 of chunk n, phase 1 of chunk n - s
// and so on, and waits for what it began s = stepsOfAPhase() steps before. All ranks do the same,
// so no rank waits for something that another begins later.
//
// Thread contract: as Task. The objects of a NetGroup, the call and its memory must outlive the
// task.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "base/call.h"
#include "base/mutex.h"
#include "base/task.h"
#include "collectives/batch.h"
#include "collectives/plan/plan.h"

namespace mycoll {

class Arena;

// The scratch memory of plans, kept from call to call up to a limit. All groups of the process
// share it. [any thread]
class ScratchPool {
 public:
  static ScratchPool& process();
  ScratchPool();  // for process()

  // Returns to the pool when it is destroyed. Messages that are received into it must have ended by
  // then: declare it before their Batch.
  class Memory {
   public:
    Memory() = default;
    Memory(std::unique_ptr<char[]> data, size_t bytes) : data_(std::move(data)), bytes_(bytes) {}
    Memory(Memory&&) = default;
    Memory& operator=(Memory&&) = default;
    ~Memory() {
      if (data_) process().giveBack(std::move(data_), bytes_);
    }
    char* data() const { return data_.get(); }  // not zeroed

   private:
    std::unique_ptr<char[]> data_;
    size_t bytes_ = 0;
  };
  Memory take(size_t bytes);

 private:
  struct Block {
    std::unique_ptr<char[]> data;
    size_t bytes;
  };
  void giveBack(std::unique_ptr<char[]> data, size_t bytes);  // allocates nothing

  Mutex mutex_;
  std::vector<Block> free_ GUARDED_BY(mutex_);
  size_t freeBytes_ GUARDED_BY(mutex_) = 0;
};

// The plans of a group's latest collectives: programs repeat them, and so do chunks. Planning takes
// as long as a small collective between few hosts, and far longer between many.
// [the group's run lock]
class PlanCache {
 public:
  std::shared_ptr<const Plan> planOf(const Shape& shape, const Job& job, int rank,
                                     const Chunking& chunking, uint64_t chunk, bool sharesMemory);

 private:
  struct Entry {
    Job job;
    bool sharesMemory;
    uint64_t chunk;
    std::shared_ptr<const Plan> plan;
  };
  std::vector<Entry> entries_;  // the latest last
};

struct NetGroup : CallContext {
  const Shape& shape;
  PlanCache& plans;
  Arena* arena;  // of this host's ranks, with areas as plans need them; may be null
};

// Most bytes that a rank publishes when it arrives at a collective.
size_t blobBytes(const Shape& shape);

Task netCollective(NetGroup group, const Call& call);

}  // namespace mycoll
