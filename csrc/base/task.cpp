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

// Plain memory, which lasts as long as its thread: tasks may still come and go while the thread's
// own objects are destroyed, and in static destruction after that.
struct FrameCache {
  std::array<FreeFrame*, kClasses> heads{};
  std::array<int, kClasses> counts{};
};
constinit thread_local FrameCache frames;

// At the thread's end: what is kept is freed, and nothing is kept from then on.
struct Emptier {
  bool isNeeded = false;
  ~Emptier() {
    for (FreeFrame*& head : frames.heads) {
      while (head) std::free(std::exchange(head, head->next));
    }
    frames.counts.fill(kKeptPerClass);
  }
};
thread_local Emptier emptier;

size_t classOf(size_t bytes) { return (bytes + kGranule - 1) / kGranule - 1; }

const Status noMemory(Code::kInternal, "this process is out of memory");

}  // namespace

const Status& outOfMemory() { return noMemory; }

void* allocateFrame(size_t bytes) {
  size_t index = classOf(bytes);
  if (index < kClasses) {
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
    if (frames.counts[index] < kKeptPerClass) {
      emptier.isNeeded = true;  // makes it, the first time
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
