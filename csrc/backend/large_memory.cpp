#include "backend/large_memory.h"

#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Storage.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <cstdint>
#include <vector>

#include "base/mutex.h"
#include "base/types.h"

namespace mycoll {
namespace {

constexpr size_t kHugePage = size_t{1} << 21;
constexpr size_t kMostKeptBytes = size_t{512} << 20;

struct KeptBlock {
  void* start;
  size_t bytes;  // whole huge pages
};

void* mapPages(size_t bytes) {
  // Begins at a huge page: unmaps the memory before and after the block.
  void* const found = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return nullptr;
  char* const begin = static_cast<char*>(found);
  const auto address = reinterpret_cast<uintptr_t>(begin);
  const size_t before = roundUp(address, kHugePage) - address;
  if (before > 0) munmap(begin, before);
  if (before < kHugePage) munmap(begin + before + bytes, kHugePage - before);
  madvise(begin + before, bytes, MADV_HUGEPAGE);
  return begin + before;
}

// Only tries the mutex: in a child of fork() it may be locked forever; the child then keeps no
// memory.
class KeptMemory {
 public:
  // Returns a block that was freed, or a new one; start is null if the system has no memory.
  KeptBlock take(size_t bytes) {
    if (mutex_.tryLock()) {
      const MutexLock lock(mutex_, std::adopt_lock);
      // Latest block first: its pages are most likely to be still there.
      for (size_t i = blocks_.size(); i-- > 0;) {
        if (blocks_[i].bytes != bytes) continue;
        const KeptBlock found = blocks_[i];
        remove(i);
        return found;
      }
    }
    return {mapPages(bytes), bytes};
  }

  void giveBack(const KeptBlock& block) {
    std::vector<KeptBlock> surplus;
    if (block.bytes <= kMostKeptBytes && mutex_.tryLock()) {
      const MutexLock lock(mutex_, std::adopt_lock);
      madvise(block.start, block.bytes, MADV_FREE);
      blocks_.push_back(block);
      bytes_ += block.bytes;
      while (bytes_ > kMostKeptBytes) {
        surplus.push_back(blocks_.front());
        remove(0);
      }
    } else {
      surplus.push_back(block);
    }
    for (const KeptBlock& each : surplus) munmap(each.start, each.bytes);
  }

 private:
  void remove(size_t index) REQUIRES(mutex_) {
    bytes_ -= blocks_[index].bytes;
    blocks_.erase(blocks_.begin() + static_cast<std::ptrdiff_t>(index));
  }

  Mutex mutex_;
  std::vector<KeptBlock> blocks_ GUARDED_BY(mutex_);  // the oldest first
  size_t bytes_ GUARDED_BY(mutex_) = 0;
};

// Never destroyed: tensors may be freed at any time.
KeptMemory& keptMemory() {
  static KeptMemory* const kMemory = new KeptMemory;
  return *kMemory;
}

void release(void* context) {
  const auto* block = static_cast<KeptBlock*>(context);
  keptMemory().giveBack(*block);
  delete block;
}

}  // namespace

at::Tensor newLargeMemory(size_t bytes) {
  const KeptBlock block = keptMemory().take(roundUp(bytes, kHugePage));
  TORCH_CHECK_WITH(OutOfMemoryError, block.start != nullptr, "mycoll: no memory for an object of ",
                   bytes, " bytes that arrives");
  c10::DataPtr data(block.start, new KeptBlock(block), &release, c10::Device(c10::kCPU));
  const c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(data),
                             c10::GetCPUAllocator(), /*resizable=*/true);
  at::Tensor tensor = at::empty({0}, at::TensorOptions(at::kByte).device(at::kCPU));
  return tensor.set_(storage, 0, {static_cast<int64_t>(bytes)}, {1});
}

}  // namespace mycoll
