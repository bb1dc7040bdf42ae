// SharedHeap: memory of this process that other processes of its host can read in place, and write
// to if it is exposed. It allocates blocks in regions. A region is one segment, with a number that
// no other region of the process ever gets. A block is whole pages, so that a process that maps one
// maps nothing of another.
//
//   region   head | block | free | block | ...
//
// Freed memory is used again. Regions without blocks are kept for later blocks, up to kKeptBytes in
// all. The memory of a region beyond that is returned to the system immediately, even if others
// have mapped it, and its head reports that to them.
//
// A block that is freed while others may write to it is never used again: its pages are returned to
// the system, and so is its region once it has no other blocks. Later writes of other processes go
// to memory that is not used.
//
// After a fork() the child has the contents of the parent's blocks, but writes to copies of its
// own, and allocates from regions of its own. The child may see what the parent writes after the
// fork, also if the parent uses a block again that the child still has.
//
// Thread contract: all [any thread]. One lock, which fork() takes, too. While it is held, the locks
// of the log and of the segments' registry are taken.
// Lifetime: that of the process; blocks may be freed while it exits.
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
#include "base/os.h"
#include "base/types.h"
#include "transport/shm/segment.h"

namespace mycoll {

// At the beginning of each region.
struct RegionHead {
  static constexpr uint64_t kMagic = 0x6e6f69676572636d;
  uint64_t magic = kMagic;
  std::atomic<uint32_t> isDropped;  // it is empty, and stays so
  // How often its owner has revoked an offer to read from the region.
  std::atomic<uint32_t> revocations;
};

// The place of memory that another process of the host may read. region 0: none.
struct SharedPlace {
  // From here on: memory of the owner's process, not of a region. `offset` and `regionBytes` are
  // addresses, the latter of the head with the revocations.
  static constexpr uint64_t kProcess = UINT64_MAX - 64;
  bool isOfProcess() const { return region >= kProcess; }

  uint64_t region = 0;
  uint64_t offset = 0;       // from the beginning of the segment
  uint64_t regionBytes = 0;  // of the segment
  uint64_t revocations = 0;  // RegionHead's then: if it has changed, the data may differ
};

class SharedHeap {
 public:
  // A whole page, as blocks are.
  static size_t headBytes() { return pageBytes(); }
  // Blocks of more than half of this have a region of their own.
  static constexpr size_t kRegionBytes = 64 * 1024 * 1024;
  // Regions without blocks are kept, up to this many bytes together.
  static constexpr size_t kKeptBytes = 256 * 1024 * 1024;

  static SharedHeap& process();

  // Null if the system has no memory or descriptor left. Not initialised.
  void* allocate(size_t bytes);
  // Returns false if it is not a block of this heap.
  bool free(void* block);

  // From now on others may write to this memory, which is in one block: see above. Each expose() is
  // undone by one conceal(), once no process can write to the memory because of it. Returns false
  // if the memory is not in a block of this process that others can map.
  bool expose(const Span& memory);
  void conceal(const Span& memory);

  // Region 0 if it is in no region of this process.
  SharedPlace find(const Span& memory) const;
  // Revokes an offer: a process that has not finished reading there detects that the data is
  // invalid.
  void revoke(const SharedPlace& place);
  // Null if the region no longer exists.
  std::shared_ptr<Segment> segmentOf(uint64_t region) const;
  static RegionHead& headOf(const Segment& region) {
    return *reinterpret_cast<RegionHead*>(region.data());
  }
  // Whether its owner has dropped this region, so that a mapping of it is no longer needed.
  static bool isDropped(const Segment& region) {
    return headOf(region).isDropped.load(std::memory_order_acquire) != 0;
  }
  // The memory that another process names in a region of its own. Null if no block can be there.
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
    bool isSpoiled = false;    // part of it is never used again

    char* begin() const { return segment->data() + headBytes(); }
    char* end() const { return segment->data() + segment->bytes(); }
  };
  struct Block {
    size_t bytes = 0;
    int exposures = 0;  // for how many windows others may write to it
  };
  using Regions = std::map<char*, Region>;  // by the beginning of the segment

  SharedHeap();
  // The block that contains all of this memory, or null.
  Block* blockOf(const Span& memory) REQUIRES(mutex_);
  void retire(char* begin, size_t bytes, Regions::iterator region) REQUIRES(mutex_);
  Regions::iterator regionOf(const void* address) REQUIRES(mutex_);
  // Returns the beginning of its memory, which is free, or null if there is none.
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
