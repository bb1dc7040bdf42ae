// Device and pinned memory of the stand-in: who may touch which bytes, and when they are gone.
//
// Device addresses lie in the first half of one reservation, mapped without access; the bytes lie
// at the same place of the second half (storage()). Each block is followed by a strip that nobody
// may write. Freed blocks are filled with kPoison and wait in a queue ("quarantine"), where writes
// into them are noticed, before their addresses are used again.
//
// Thread contract: [any thread]. One lock, held for bookkeeping and for looking through the bytes
// of a block; never while a stream is asked for anything.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "stream.h"

namespace standin {

class Memory {
 public:
  static Memory& get();

  void* allocate(size_t bytes, Stream* stream);  // null: the arena is full
  void* allocatePinned(size_t bytes);
  // Pinned memory is gone at once. Device memory is gone in the order of its stream, but not before
  // the next allocation there: until then a caching allocator gives it to nobody, and FSDP2 counts
  // on that.
  void release(void* address);
  // As an allocation on the stream would: what was released is gone.
  void reclaim(Stream* stream);
  // Poison, and into the quarantine: what release() comes to. For release() and graphs.
  void retire(void* address);
  void recordUse(void* address, Stream* stream);

  void* touch(const void* address, size_t bytes, const char* what);
  bool isPinned(const void* address);
  int deviceOf(const void* address);  // -1: not device memory
  void verify();

  struct Totals {
    int64_t allocations = 0, bytes = 0, pinnedBytes = 0, recordedUses = 0;
  };
  Totals totals();

 private:
  // kReleased: the owner has let go of it, and it may not be gone yet.
  enum class State { kLive, kReleased, kQuarantined };

  struct Block {
    size_t bytes = 0;          // as asked for
    size_t span = 0;           // with the strip, in whole units
    Stream* stream = nullptr;  // null: pinned
    State state = State::kLive;
    std::weak_ptr<Graph> graph;  // under whose capture it was allocated
    std::vector<Stream*> alsoUsedBy;
  };
  using Blocks = std::map<uintptr_t, Block>;

  Memory();
  bool isInArena(uintptr_t address) const { return address - base_ < size_; }
  unsigned char* storage(uintptr_t address) const;
  uintptr_t take(size_t span);  // 0: none is left
  void giveBack(uintptr_t start, size_t span);
  Blocks::iterator find(uintptr_t address);  // the block that contains it, or end()
  Block& liveBlock(void* address, const char* verb);
  void checkStrip(uintptr_t address, const Block& block) const;
  void checkPoison(uintptr_t address, const Block& block) const;
  void leaveQuarantine();  // the oldest block

  std::mutex mutex_;
  uintptr_t base_ = 0;
  size_t size_ = 0;
  struct Released {
    void* address;
    std::vector<std::shared_ptr<Moment>> uses;
  };

  Blocks blocks_;
  std::map<Stream*, std::vector<Released>> released_;
  std::map<uintptr_t, size_t> gaps_;  // of the arena: start, size
  std::deque<uintptr_t> quarantine_;
  size_t quarantinedBytes_ = 0;
  Totals totals_;
};

}  // namespace standin
