#include "base/task.h"

#include <array>
#include <cstdlib>
#include <new>

namespace mycoll::detail {
namespace {

// Frames are a few hundred bytes; malloc allocates those that are larger than the largest class.
constexpr size_t kGranule = 256;
constexpr size_t kClasses = 8;
constexpr int kKeptPerClass = 8;

struct FreeFrame {
  FreeFrame* next;
};

// Plain memory with the lifetime of its thread: tasks may be made and destroyed while the thread's
// own objects are destroyed, and in static destruction after that.
struct FrameCache {
  std::array<FreeFrame*, kClasses> heads{};
  std::array<int, kClasses> counts{};
};
constinit thread_local FrameCache frames;

// At the end of the thread, frees the kept frames; no frame is kept from then on.
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
      emptier.isNeeded = true;  // the first access constructs it
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
