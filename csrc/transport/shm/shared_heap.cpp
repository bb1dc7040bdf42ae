#include "transport/shm/shared_heap.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cassert>
#include <iterator>
#include <new>

#include "base/log.h"
#include "base/os.h"

namespace mycoll {
namespace {

constexpr size_t kHugePage = 2 * 1024 * 1024;

}  // namespace

SharedHeap& SharedHeap::process() {
  static SharedHeap* const kHeap = new SharedHeap;  // never destroyed, as tensors may be static
  return *kHeap;
}

SharedHeap::SharedHeap() {
  // The lock is held during a fork, so that no other thread is inside. Three functions share it,
  // which the analysis cannot follow.
  pthread_atfork([]() NO_THREAD_SAFETY_ANALYSIS { process().mutex_.lock(); },
                 []() NO_THREAD_SAFETY_ANALYSIS { process().mutex_.unlock(); },
                 []() NO_THREAD_SAFETY_ANALYSIS {
                   process().inherit();
                   process().mutex_.unlock();
                 });
}

// Runs in the child of a fork(), which has one thread.
void SharedHeap::inherit() {
  for (auto& [begin, region] : regions_) {
    Segment& segment = *region.segment;
    if (std::exchange(region.isInherited, true)) continue;
    if (mmap(begin, segment.bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, segment.fd(),
             0) == MAP_FAILED) {
      MYCOLL_LOG_ERROR("a forked child cannot map the shared tensors of its parent");
    }
  }
  byId_.clear();
  free_.clear();
  freeBySize_.clear();
  keptBytes_ = 0;
}

SharedHeap::Regions::iterator SharedHeap::regionOf(const void* address) {
  auto after = regions_.upper_bound(static_cast<char*>(const_cast<void*>(address)));
  if (after == regions_.begin()) return regions_.end();
  const auto region = std::prev(after);
  return address < region->second.end() ? region : regions_.end();
}

char* SharedHeap::addRegion(size_t bytes) {
  const size_t whole = std::max(kRegionBytes, roundUp(bytes + headBytes(), kHugePage));
  Region region;
  const Status made = Segment::create(whole, &region.segment, /*useHugePages=*/true);
  if (!made.ok()) {
    MYCOLL_LOG_WARN("no memory for shared tensors: %s", made.message().c_str());
    return nullptr;
  }
  // Children inherit it, but write to a copy: see inherit().
  (void)madvise(region.segment->data(), whole, MADV_DOFORK);
  new (region.segment->data()) RegionHead;
  region.id = ++lastId_;
  char* const key = region.segment->data();
  char* const begin = region.begin();
  addFree(begin, static_cast<size_t>(region.end() - begin));
  keptBytes_ += whole;
  byId_[region.id] = key;
  regions_.emplace(key, std::move(region));
  isUsed_.store(true, std::memory_order_relaxed);
  return begin;
}

void SharedHeap::drop(Regions::iterator at) {
  Region& region = at->second;
  const size_t bytes = region.segment->bytes();
  // One range, unless parts of the region were retired.
  for (auto range = free_.lower_bound(region.begin());
       range != free_.end() && range->first < region.end();) {
    removeFree(range++);
  }
  headOf(*region.segment).isDropped.store(1, std::memory_order_release);
  // Other processes may have it mapped, and check its head only in their next call.
  region.segment->discard(headBytes(), bytes - headBytes());
  keptBytes_ -= bytes;
  byId_.erase(region.id);
  regions_.erase(at);
}

void SharedHeap::addFree(char* begin, size_t bytes) {
  free_.emplace(begin, bytes);
  freeBySize_.emplace(bytes, begin);
}

void SharedHeap::removeFree(std::map<char*, size_t>::iterator range) {
  freeBySize_.erase({range->second, range->first});
  free_.erase(range);
}

void* SharedHeap::allocate(size_t bytes) {
  const size_t taken = roundUp(std::max<size_t>(bytes, 1), pageBytes());
  if (taken < bytes || taken > SIZE_MAX / 2) return nullptr;
  const MutexLock lock(mutex_);
  // A large block has a region of its own, and a small one must not keep a large region.
  const bool isLarge = taken > kRegionBytes / 2;
  auto best = freeBySize_.lower_bound({taken, nullptr});
  while (best != freeBySize_.end() && !isLarge &&
         regionOf(best->second)->second.segment->bytes() > kRegionBytes) {
    ++best;
  }
  if (best == freeBySize_.end()) {
    char* const added = addRegion(taken);
    if (added == nullptr) return nullptr;
    best = freeBySize_.find({free_.at(added), added});
  }
  const auto [size, begin] = *best;
  removeFree(free_.find(begin));
  const size_t used = isLarge ? size : taken;
  if (size > used) addFree(begin + used, size - used);
  Region& region = regionOf(begin)->second;
  if (region.blocks++ == 0) keptBytes_ -= region.segment->bytes();
  blocks_[begin].bytes = used;
  return begin;
}

bool SharedHeap::free(void* block) {
  const MutexLock lock(mutex_);
  char* begin = static_cast<char*>(block);
  const auto found = blocks_.find(begin);
  if (found == blocks_.end()) return false;
  size_t bytes = found->second.bytes;
  const bool isExposed = found->second.exposures > 0;
  blocks_.erase(found);
  const auto at = regionOf(begin);
  Region& region = at->second;
  if (region.isInherited) return true;  // the parent uses it again
  if (isExposed) return retire(begin, bytes, at), true;
  auto next = free_.lower_bound(begin);
  if (next != free_.end() && next->first == begin + bytes && begin + bytes < region.end()) {
    bytes += next->second;
    removeFree(next++);
  }
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == begin && begin > region.begin()) {
      begin = previous->first;
      bytes += previous->second;
      removeFree(previous);
    }
  }
  addFree(begin, bytes);
  if (--region.blocks > 0) return true;
  keptBytes_ += region.segment->bytes();
  if (keptBytes_ > kKeptBytes || region.isSpoiled) drop(at);
  return true;
}

void SharedHeap::retire(char* begin, size_t bytes, Regions::iterator at) {
  Region& region = at->second;
  region.isSpoiled = true;
  if (--region.blocks == 0) {
    keptBytes_ += region.segment->bytes();
    return drop(at);
  }
  region.segment->discard(static_cast<size_t>(begin - region.segment->data()), bytes);
}

SharedHeap::Block* SharedHeap::blockOf(const Span& memory) {
  auto after = blocks_.upper_bound(memory.begin());
  if (after == blocks_.begin()) return nullptr;
  const auto block = std::prev(after);
  const auto offset = static_cast<size_t>(memory.begin() - block->first);
  const size_t bytes = block->second.bytes;
  return offset <= bytes && memory.bytes <= bytes - offset ? &block->second : nullptr;
}

bool SharedHeap::expose(const Span& memory) {
  if (!isUsed_.load(std::memory_order_relaxed) || memory.bytes == 0) return false;
  const MutexLock lock(mutex_);
  Block* const block = blockOf(memory);
  if (block == nullptr || regionOf(memory.begin())->second.isInherited) return false;
  ++block->exposures;
  return true;
}

void SharedHeap::conceal(const Span& memory) {
  const MutexLock lock(mutex_);
  Block* const block = blockOf(memory);
  assert(block == nullptr || block->exposures > 0);
  if (block != nullptr && block->exposures > 0) --block->exposures;
}

SharedPlace SharedHeap::find(const Span& memory) const {
  if (!isUsed_.load(std::memory_order_relaxed) || memory.bytes == 0) return {};
  const MutexLock lock(mutex_);
  auto after = regions_.upper_bound(memory.begin());
  if (after == regions_.begin()) return {};
  const Region& region = std::prev(after)->second;
  if (region.isInherited || memory.begin() < region.begin() || memory.begin() >= region.end() ||
      memory.bytes > static_cast<size_t>(region.end() - memory.begin())) {
    return {};
  }
  return {region.id, static_cast<uint64_t>(memory.begin() - region.segment->data()),
          region.segment->bytes(),
          headOf(*region.segment).revocations.load(std::memory_order_relaxed)};
}

void SharedHeap::revoke(const SharedPlace& place) {
  const std::shared_ptr<Segment> segment = segmentOf(place.region);
  if (!segment) return;  // the region was dropped with all its blocks
  headOf(*segment).revocations.fetch_add(1, std::memory_order_seq_cst);
  // The program writes to the memory after this. Pairs with the fence of the reader, which reads
  // the count after the data (SharedReads::read).
  std::atomic_thread_fence(std::memory_order_release);
}

std::shared_ptr<Segment> SharedHeap::segmentOf(uint64_t region) const {
  const MutexLock lock(mutex_);
  const auto found = byId_.find(region);
  return found == byId_.end() ? nullptr : regions_.at(found->second).segment;
}

const char* SharedHeap::memoryAt(const Segment& region, uint64_t offset, uint64_t bytes) {
  const bool isInside =
      offset >= headBytes() && offset <= region.bytes() && bytes <= region.bytes() - offset;
  return isInside ? region.data() + offset : nullptr;
}

SharedHeap::Usage SharedHeap::usageForTest() const {
  const MutexLock lock(mutex_);
  Usage usage;
  for (const auto& [begin, region] : regions_) usage.regionBytes += region.segment->bytes();
  for (const auto& [begin, block] : blocks_) usage.blockBytes += block.bytes;
  return usage;
}

}  // namespace mycoll
