#include "backend/shared_tensors.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <atomic>

#include "base/mutex.h"
#include "base/os.h"
#include "transport/shm/shared_heap.h"

namespace mycoll {
namespace {

thread_local int depth = 0;

struct Opening : Mutex {};

class SharedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (depth == 0) return former_.load(std::memory_order_relaxed)->allocate(bytes);
    if (bytes == 0) return {nullptr, nullptr, &c10::NoDelete, c10::Device(c10::kCPU)};
    void* const block = SharedHeap::process().allocate(bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, block != nullptr,
                     "mycoll: no memory for a shared tensor of ", bytes,
                     " bytes: the system gives no more, or the process has too many ",
                     "descriptors (ulimit -n)");
    return {block, block, &release, c10::Device(c10::kCPU)};
  }
  // For libraries that allocate plain memory, oneDNN for instance, and free it on any thread, at
  // any time.
  c10::DeleterFnPtr raw_deleter() const override { return &releaseAny; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  void open() {
    const MutexLock lock(perProcess<Opening>());
    c10::Allocator* const current = c10::GetCPUAllocator();
    if (current != this && !asksThis(current)) {
      former_ = current;
      c10::SetCPUAllocator(this);
      TORCH_CHECK(c10::GetCPUAllocator() == this,
                  "mycoll.shared_tensors: another library has put its allocator of CPU tensors "
                  "before all others; ordinary tensors work, shared ones cannot be made");
    }
    ++depth;
  }
  static bool isDeleter(c10::DeleterFnPtr deleter) { return deleter == &release; }
  void close() {
    TORCH_CHECK(depth > 0,
                "mycoll.shared_tensors: a scope must be left on the thread that entered it");
    --depth;
  }

 private:
  // Whether another allocator, which was installed after this one, gets its memory from this one.
  // It can stay; it must not become former_, as the two would call each other endlessly.
  static bool asksThis(c10::Allocator* other) {
    ++depth;
    const c10::DataPtr probe = other->allocate(1);
    --depth;
    return isSharedMemory(reinterpret_cast<uintptr_t>(probe.get()), 1);
  }

  static void release(void* block) { SharedHeap::process().free(block); }
  static void releaseAny(void* block);

  // Set before this allocator is installed.
  std::atomic<c10::Allocator*> former_{c10::GetDefaultCPUAllocator()};
};

// Never destroyed: tensors may refer to it as long as the process lives.
SharedAllocator& allocator() {
  static SharedAllocator* const kAllocator = new SharedAllocator;
  return *kAllocator;
}

void SharedAllocator::releaseAny(void* block) {
  if (!SharedHeap::process().free(block)) allocator().former_.load()->raw_deleter()(block);
}

}  // namespace

void openSharedTensors() { allocator().open(); }

void closeSharedTensors() { allocator().close(); }

bool isSharedTensorDeleter(c10::DeleterFnPtr deleter) {
  return SharedAllocator::isDeleter(deleter);
}

bool isSharedMemory(uintptr_t address, size_t bytes) {
  return SharedHeap::process().find({reinterpret_cast<void*>(address), bytes}).region != 0;
}

}  // namespace mycoll
