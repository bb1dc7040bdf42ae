// Recycler: memory for objects that each call makes and another thread frees. malloc is slow in
// that case, and both threads would wait for its lock. For std::allocate_shared.
//
// Thread contract: [any thread]. Never blocks: if the lock is taken, falls back to malloc.
// Lifetime: blocks may be returned during static destruction (see perProcess()).
#pragma once

#include <cstddef>
#include <new>
#include <vector>

#include "base/mutex.h"
#include "base/os.h"

namespace mycoll {

// Free blocks, for objects of this type.
template <typename T>
class Shelf {
 public:
  // Null: none is available.
  void* take() {
    if (!mutex_.tryLock()) return nullptr;
    MutexLock lock(mutex_, std::adopt_lock);
    if (blocks_.empty()) return nullptr;
    void* const block = blocks_.back();
    blocks_.pop_back();
    return block;
  }
  // False: the block was not kept.
  bool put(void* block) {
    if (!mutex_.tryLock()) return false;
    MutexLock lock(mutex_, std::adopt_lock);
    if (blocks_.size() == kMost) return false;
    blocks_.push_back(block);
    return true;
  }

 private:
  static constexpr size_t kMost = 1024;

  Mutex mutex_;
  std::vector<void*> blocks_ GUARDED_BY(mutex_);
};

template <typename T>
class Recycler {
 public:
  using value_type = T;

  Recycler() = default;
  template <typename U>
  Recycler(const Recycler<U>&) {}

  T* allocate(size_t count) {
    void* const block = isKept(count) ? shelf().take() : nullptr;
    return static_cast<T*>(block != nullptr ? block : ::operator new(count * sizeof(T)));
  }
  void deallocate(T* block, size_t count) {
    if (!isKept(count) || !shelf().put(block)) ::operator delete(block);
  }
  bool operator==(const Recycler&) const { return true; }

 private:
  static_assert(alignof(T) <= __STDCPP_DEFAULT_NEW_ALIGNMENT__);
#ifdef __SANITIZE_ADDRESS__
  static constexpr bool kKeeps = false;  // ASan must detect a use of a freed block
#else
  static constexpr bool kKeeps = true;
#endif

  static Shelf<T>& shelf() { return perProcess<Shelf<T>>(); }
  static bool isKept(size_t count) { return kKeeps && count == 1; }
};

}  // namespace mycoll
