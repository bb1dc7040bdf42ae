// Device and pinned memory of the stand-in: checks each access, and detects writes to freed memory.
//
// Device addresses are in the first half of one reservation, mapped without access; the bytes are
// at the same offset in the second half (storage()). Each block is followed by a guard strip. Freed
// blocks are filled with kPoison and wait in a queue ("quarantine") before their addresses are used
// again; a write in the meantime is detected when they leave the queue.
//
// Thread contract: [any thread]. One lock, held for bookkeeping and while the bytes of a block are
// checked; never while a stream is called.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "standin_device.h"
#include "stream.h"

namespace standin {

class Memory {
 public:
  static Memory& get();

  void* allocate(size_t bytes, Stream* stream);  // null: the arena is full
  void* allocatePinned(size_t bytes);
  // Frees pinned memory immediately. Device memory is freed in the order of its stream, but not
  // before the next allocation there: until then a caching allocator would not reuse it either, and
  // FSDP2 relies on that.
  void release(void* address);
  // Frees what was released, as an allocation on the stream would.
  void reclaim(Stream* stream);
  // Poisons the memory and puts it into the quarantine. For release() and graphs.
  void retire(void* address);
  void recordUse(void* address, Stream* stream);

  void* touch(const void* address, size_t bytes, const char* what);
  bool isPinned(const void* address);
  int deviceOf(const void* address);  // -1: not device memory
  void verify();

  mycoll_standin_counts totals();

 private:
  // kReleased: the owner has freed it, but work on streams may still use it.
  enum class State { kLive, kReleased, kQuarantined };

  struct Block {
    size_t bytes = 0;          // as requested
    size_t span = 0;           // including the strip, in whole units
    Stream* stream = nullptr;  // null: pinned
    State state = State::kLive;
    std::weak_ptr<Graph> graph;  // the capture under which it was allocated
    std::vector<Stream*> alsoUsedBy;
  };
  using Blocks = std::map<uintptr_t, Block>;

  Memory();
  bool isInArena(uintptr_t address) const { return address - base_ < size_; }
  unsigned char* storage(uintptr_t address) const;
  uintptr_t take(size_t span);  // 0: no gap is large enough
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
  mycoll_standin_counts totals_{};
};

}  // namespace standin
