#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

namespace standin {
namespace {

constexpr unsigned char kPoison =
    0xDB;  // as a float: -1.2e17; as an int64: a large negative number
constexpr unsigned char kStrip = 0xA5;
constexpr size_t kUnit = 512;  // the alignment of allocations, as in CUDA
constexpr size_t kQuarantineBytes = size_t{128} << 20;
constexpr size_t kQuarantineBlocks = 4096;

std::string place(uintptr_t address) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%zx", static_cast<size_t>(address));
  return text;
}

size_t firstOther(const unsigned char* bytes, size_t count, unsigned char value) {
  // The fast path, for large blocks: the first byte has the value, and each byte equals the next.
  if (count != 0 && *bytes == value && std::memcmp(bytes, bytes + 1, count - 1) == 0) return count;
  return static_cast<size_t>(
      std::find_if(bytes, bytes + count, [&](unsigned char b) { return b != value; }) - bytes);
}

}  // namespace

Memory& Memory::get() {
  static Memory& memory = *new Memory;  // tensors may be freed during static destruction
  return memory;
}

Memory::Memory() {
  const char* text = std::getenv("STANDIN_MEMORY_MB");
  size_ = (text != nullptr ? std::strtoull(text, nullptr, 10) : 8192) << 20;
  void* both =
      mmap(nullptr, 2 * size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (both == MAP_FAILED) die("cannot reserve " + std::to_string(2 * (size_ >> 20)) + " MiB");
  base_ = reinterpret_cast<uintptr_t>(both);
  if (mprotect(storage(base_), size_, PROT_READ | PROT_WRITE) != 0) die("cannot map its memory");
  gaps_[base_] = size_;
}

unsigned char* Memory::storage(uintptr_t address) const {
  return reinterpret_cast<unsigned char*>(isInArena(address) ? address + size_ : address);
}

// First fit.
uintptr_t Memory::take(size_t span) {
  for (auto gap = gaps_.begin(); gap != gaps_.end(); ++gap) {
    const auto [start, size] = *gap;
    if (size < span) continue;
    gaps_.erase(gap);
    if (size > span) gaps_[start + span] = size - span;
    return start;
  }
  return 0;
}

void Memory::giveBack(uintptr_t start, size_t span) {
  auto next = gaps_.lower_bound(start);
  if (next != gaps_.end() && next->first == start + span) {
    span += next->second;
    next = gaps_.erase(next);
  }
  if (next != gaps_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == start) {
      before->second += span;
      return;
    }
  }
  gaps_[start] = span;
}

Memory::Blocks::iterator Memory::find(uintptr_t address) {
  auto block = blocks_.upper_bound(address);
  if (block == blocks_.begin()) return blocks_.end();
  --block;
  return address < block->first + block->second.span ? block : blocks_.end();
}

void* Memory::allocate(size_t bytes, Stream* stream) {
  const std::shared_ptr<Graph> graph = stream->capture();
  const size_t span = (bytes + kUnit) / kUnit * kUnit + kUnit;  // at least one unit of strip
  if (!graph) reclaim(stream);
  std::lock_guard<std::mutex> lock(mutex_);
  const uintptr_t address = take(span);
  if (address == 0) return nullptr;
  Block block;
  block.bytes = bytes;
  block.span = span;
  block.stream = stream;
  block.graph = graph;
  blocks_[address] = std::move(block);
  // A read before the first write returns poison.
  std::memset(storage(address), kPoison, bytes);
  std::memset(storage(address) + bytes, kStrip, span - bytes);
  ++totals_.liveAllocations;
  totals_.liveBytes += static_cast<int64_t>(bytes);
  return reinterpret_cast<void*>(address);
}

void* Memory::allocatePinned(size_t bytes) {
  const size_t span = (bytes + kUnit) / kUnit * kUnit + kUnit;
  void* memory = std::aligned_alloc(kUnit, span);
  if (memory == nullptr) return nullptr;
  const auto address = reinterpret_cast<uintptr_t>(memory);
  std::memset(memory, kPoison, bytes);
  std::memset(static_cast<unsigned char*>(memory) + bytes, kStrip, span - bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  Block block;
  block.bytes = bytes;
  block.span = span;
  blocks_[address] = std::move(block);
  totals_.pinnedBytes += static_cast<int64_t>(bytes);
  return memory;
}

Memory::Block& Memory::liveBlock(void* address, const char* verb) {
  auto block = blocks_.find(reinterpret_cast<uintptr_t>(address));
  const std::string where = place(reinterpret_cast<uintptr_t>(address));
  if (block == blocks_.end()) die(where + " is " + verb + ", which was never allocated");
  if (block->second.state != State::kLive) die(where + " is " + verb + " after it was freed");
  return block->second;
}

void Memory::release(void* address) {
  if (address == nullptr) return;
  Stream* stream = nullptr;
  std::shared_ptr<Graph> graph;
  std::vector<Stream*> others;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Block& block = liveBlock(address, "freed");
    block.state = State::kReleased;
    stream = block.stream;
    graph = block.graph.lock();
    others.swap(block.alsoUsedBy);
    const auto bytes = static_cast<int64_t>(block.bytes);
    if (stream == nullptr) {
      totals_.pinnedBytes -= bytes;
    } else {
      --totals_.liveAllocations;
      totals_.liveBytes -= bytes;
    }
  }
  if (stream == nullptr) {
    retire(address);
  } else if (graph) {
    graph->keep(address);  // each launch may write to it
  } else {
    Released entry{address, {}};
    for (Stream* other : others) entry.uses.push_back(other->mark());
    std::lock_guard<std::mutex> lock(mutex_);
    released_[stream].push_back(std::move(entry));
  }
}

void Memory::reclaim(Stream* stream) {
  std::vector<Released> released;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    released.swap(released_[stream]);
  }
  if (released.empty()) return;
  stream->enqueueNow([this, released = std::move(released)] {
    for (const Released& entry : released) {
      for (const auto& use : entry.uses) use->await();
      retire(entry.address);
    }
  });
}

void Memory::retire(void* address) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto start = reinterpret_cast<uintptr_t>(address);
  Block& block = blocks_.at(start);
  checkStrip(start, block);
  block.state = State::kQuarantined;
  std::memset(storage(start), kPoison, block.bytes);
  quarantine_.push_back(start);
  quarantinedBytes_ += block.span;
  while (quarantinedBytes_ > kQuarantineBytes || quarantine_.size() > kQuarantineBlocks) {
    leaveQuarantine();
  }
}

void Memory::leaveQuarantine() {
  const uintptr_t start = quarantine_.front();
  quarantine_.pop_front();
  const Block& block = blocks_.at(start);
  checkPoison(start, block);
  const size_t span = block.span;
  quarantinedBytes_ -= span;
  blocks_.erase(start);
  if (!isInArena(start)) {
    std::free(reinterpret_cast<void*>(start));
    return;
  }
  // Return large blocks to the system: the arena may be larger than the machine's memory.
  if (span >= kQuarantineBytes / 16) {
    const uintptr_t page = reinterpret_cast<uintptr_t>(storage(start) + 4095) & ~uintptr_t{4095};
    const uintptr_t end = reinterpret_cast<uintptr_t>(storage(start) + span) & ~uintptr_t{4095};
    madvise(reinterpret_cast<void*>(page), end - page, MADV_DONTNEED);
  }
  giveBack(start, span);
}

void Memory::checkStrip(uintptr_t address, const Block& block) const {
  const size_t strip = block.span - block.bytes;
  const size_t first = firstOther(storage(address) + block.bytes, strip, kStrip);
  if (first < strip) {
    die("something wrote " + std::to_string(first) + " bytes past the end of the " +
        std::to_string(block.bytes) + " bytes at " + place(address));
  }
}

void Memory::checkPoison(uintptr_t address, const Block& block) const {
  const size_t first = firstOther(storage(address), block.bytes, kPoison);
  if (first < block.bytes) {
    die("something wrote to byte " + std::to_string(first) + " of the " +
        std::to_string(block.bytes) + " bytes at " + place(address) + " after they were freed");
  }
  checkStrip(address, block);
}

void Memory::recordUse(void* address, Stream* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++totals_.recordedUses;
  Block& block = liveBlock(address, "used on another stream");
  if (block.stream != stream) block.alsoUsedBy.push_back(stream);
}

void* Memory::touch(const void* address, size_t bytes, const char* what) {
  const auto start = reinterpret_cast<uintptr_t>(address);
  if (bytes == 0) return storage(start);
  std::lock_guard<std::mutex> lock(mutex_);
  const auto block = find(start);
  const auto sentence = [&](const char* mistake) {
    return std::string(what) + " touches " + std::to_string(bytes) + " bytes at " + place(start) +
           ", " + mistake;
  };
  if (block == blocks_.end()) {
    if (isInArena(start)) die(sentence("which are not allocated"));
    return const_cast<void*>(address);  // host memory
  }
  if (block->second.state == State::kQuarantined) die(sentence("which were freed"));
  if (start + bytes > block->first + block->second.bytes) {
    die(sentence("more than the allocation holds"));
  }
  return storage(start);
}

bool Memory::isPinned(const void* address) {
  const auto start = reinterpret_cast<uintptr_t>(address);
  std::lock_guard<std::mutex> lock(mutex_);
  const auto block = find(start);
  return block != blocks_.end() && block->second.stream == nullptr &&
         block->second.state == State::kLive;
}

int Memory::deviceOf(const void* address) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto block = find(reinterpret_cast<uintptr_t>(address));
  return block == blocks_.end() || block->second.stream == nullptr ? -1
                                                                   : block->second.stream->device;
}

void Memory::verify() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const uintptr_t address : quarantine_) checkPoison(address, blocks_.at(address));
  for (const auto& [address, block] : blocks_) checkStrip(address, block);
}

mycoll_standin_counts Memory::totals() {
  std::lock_guard<std::mutex> lock(mutex_);
  return totals_;
}

}  // namespace standin
