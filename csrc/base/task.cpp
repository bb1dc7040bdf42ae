#include "base/task.h"

#include <array>
#include <cstdlib>
#include <new>

namespace mycoll::detail {
namespace {

// Frames are a few hundred bytes; what is larger than the largest class goes to malloc directly.
constexpr size_t kGranule = 256;
constexpr size_t kClasses = 8;
constexpr int kKeptPerClass = 8;

struct FreeFrame {
  FreeFrame* next;
};

struct FrameCache {
  std::array<FreeFrame*, kClasses> heads{};
  std::array<int, kClasses> counts{};
  ~FrameCache() {
    for (FreeFrame* head : heads) {
      while (head) std::free(std::exchange(head, head->next));
    }
  }
};

FrameCache& cache() {
  thread_local FrameCache instance;
  return instance;
}

size_t classOf(size_t bytes) { return (bytes + kGranule - 1) / kGranule - 1; }

const Status noMemory(Code::kInternal, "this process is out of memory");

}  // namespace

const Status& outOfMemory() { return noMemory; }

void* allocateFrame(size_t bytes) {
  size_t index = classOf(bytes);
  if (index < kClasses) {
    FrameCache& frames = cache();
    if (FreeFrame* head = frames.heads[index]) {
      frames.heads[index] = head->next;
      --frames.counts[index];
      return head;
    }
    bytes = (index + 1) * kGranule;
  }
  void* frame = std::malloc(bytes);
  if (!frame) throw std::bad_alloc();
  return frame;
}

void freeFrame(void* frame, size_t bytes) {
  size_t index = classOf(bytes);
  if (index < kClasses) {
    FrameCache& frames = cache();
    if (frames.counts[index] < kKeptPerClass) {
      auto* head = static_cast<FreeFrame*>(frame);
      head->next = frames.heads[index];
      frames.heads[index] = head;
      ++frames.counts[index];
      return;
    }
  }
  std::free(frame);
}

}  // namespace mycoll::detail
