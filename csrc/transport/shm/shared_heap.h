// SharedHeap: memory of this process that other processes of its host can read where it lies, and
// write to where it has been exposed. It hands out blocks of regions; a region is one segment, and
// has a number that no other region of the process ever gets. A block is whole pages: others map
// pages, and so nothing of another block.
//
//   region   head | block | free | block | ...
//
// What is freed is used again. A region without blocks is kept for the next ones, up to
// kKeptBytes in all; beyond that its memory goes back to the system at once, also where others have
// mapped it, and its head says so to them.
//
// A block that is freed while others may write to it is never used again: its pages go back to the
// system, and so does its region, as soon as it has no other blocks. Whatever somebody still writes
// there later, he writes to memory that is nobody's.
//
// After a fork() the child has the contents of the parent's blocks, but writes to copies of its
// own, and allocates from regions of its own. What the parent writes after the fork the child may
// see, also when the parent uses a block again that the child still knows.
//
// Thread contract: all [any thread]. One lock, which fork() takes, too. Under it the locks of the
// log and of the segments' registry are taken.
// Lifetime: of the process; blocks may be freed while it exits.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>
#include <utility>

#include "base/mutex.h"
#include "base/types.h"
#include "transport/shm/segment.h"

namespace mycoll {

// At the beginning of each region.
struct RegionHead {
  static constexpr uint64_t kMagic = 0x6e6f69676572636d;
  uint64_t magic = kMagic;
  std::atomic<uint32_t> isDropped;  // nothing is in it any more, or ever will be
  // How often its owner has taken back something that others were told to read.
  std::atomic<uint32_t> revocations;
};

// Where memory lies that another process of the host may read. region 0: nowhere.
struct SharedPlace {
  uint64_t region = 0;
  uint64_t offset = 0;       // from the beginning of the segment
  uint64_t regionBytes = 0;  // of the segment
  uint64_t revocations = 0;  // as RegionHead's: more by now means that it may hold something else
};

class SharedHeap {
 public:
  static constexpr size_t kHeadBytes = 4096;
  // Blocks of more than half of this have a region of their own.
  static constexpr size_t kRegionBytes = 64 * 1024 * 1024;
  // Regions without blocks are kept, up to this many bytes together.
  static constexpr size_t kKeptBytes = 256 * 1024 * 1024;

  static SharedHeap& process();

  // Null where the system has no memory or descriptor left. Not initialised.
  void* allocate(size_t bytes);
  // False: it is no block of this heap.
  bool free(void* block);

  // From here on others may write to this memory, which lies in one block: see above. As often as
  // it is exposed, conceal() takes it back: nobody can write to it any more on that account. False:
  // it is in no block of this process that others can have.
  bool expose(const Span& memory);
  void conceal(const Span& memory);

  // Region 0: it is in no region of this process.
  SharedPlace find(const Span& memory) const;
  // Whoever was told to read there, and has not finished, will see that he must not believe it.
  void revoke(const SharedPlace& place);
  // Null: there is no such region any more.
  std::shared_ptr<Segment> segmentOf(uint64_t region) const;
  static RegionHead& headOf(const Segment& region) {
    return *reinterpret_cast<RegionHead*>(region.data());
  }
  // What another process says that lies there in a region of its own. Null: no block can.
  static const char* memoryAt(const Segment& region, uint64_t offset, uint64_t bytes);

  // For tests: what is mapped, and what of it is in blocks.
  struct Usage {
    size_t regionBytes = 0;
    size_t blockBytes = 0;
  };
  Usage usageForTest() const;

 private:
  struct Region {
    uint64_t id = 0;
    std::shared_ptr<Segment> segment;
    size_t blocks = 0;
    bool isInherited = false;  // of the process that this one was forked from
    bool isSpoiled = false;    // some of it is never used again

    char* begin() const { return segment->data() + kHeadBytes; }
    char* end() const { return segment->data() + segment->bytes(); }
  };
  struct Block {
    size_t bytes = 0;
    int exposures = 0;  // for how many windows others may write to it
  };
  using Regions = std::map<char*, Region>;  // by the beginning of the segment

  SharedHeap();
  // The block that all of this memory lies in, or null.
  Block* blockOf(const Span& memory) REQUIRES(mutex_);
  void retire(char* begin, size_t bytes, Regions::iterator region) REQUIRES(mutex_);
  Regions::iterator regionOf(const void* address) REQUIRES(mutex_);
  // Where its memory begins, which is free. Null: there is none.
  char* addRegion(size_t bytes) REQUIRES(mutex_);
  void drop(Regions::iterator region) REQUIRES(mutex_);
  void addFree(char* begin, size_t bytes) REQUIRES(mutex_);
  void removeFree(std::map<char*, size_t>::iterator range) REQUIRES(mutex_);
  void inherit() REQUIRES(mutex_);

  mutable Mutex mutex_;
  Regions regions_ GUARDED_BY(mutex_);
  std::unordered_map<uint64_t, char*> byId_ GUARDED_BY(mutex_);  // a key of regions_
  std::map<char*, Block> blocks_ GUARDED_BY(mutex_);
  std::map<char*, size_t> free_ GUARDED_BY(mutex_);                   // by address, not adjacent
  std::set<std::pair<size_t, char*>> freeBySize_ GUARDED_BY(mutex_);  // the same
  uint64_t lastId_ GUARDED_BY(mutex_) = 0;
  size_t keptBytes_ GUARDED_BY(mutex_) = 0;  // of regions without blocks
  std::atomic<bool> isUsed_{false};
};

}  // namespace mycoll
