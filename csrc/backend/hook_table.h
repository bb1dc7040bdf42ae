// HookTable: functions that the program has registered, by its ids.
//
// Thread contract: [any thread]. A function that is replaced or removed is destroyed without the
// lock, and may still be running. Lifetime: a table is shared with what calls its functions.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/mutex.h"

namespace mycoll {

template <typename... Args>
class HookTable {
 public:
  using Function = std::function<void(Args...)>;
  using Hook = std::shared_ptr<const Function>;

  void add(int64_t id, Function function) {
    Hook hook = std::make_shared<const Function>(std::move(function));
    const MutexLock lock(mutex_);
    std::swap(hooks_[id], hook);
    count_.store(hooks_.size(), std::memory_order_release);
  }
  void remove(int64_t id) {
    Hook removed;
    const MutexLock lock(mutex_);
    if (auto found = hooks_.extract(id)) removed.swap(found.mapped());
    count_.store(hooks_.size(), std::memory_order_release);
  }
  bool isEmpty() const { return count_.load(std::memory_order_acquire) == 0; }
  // By id.
  std::vector<Hook> all() const {
    std::vector<Hook> found;
    const MutexLock lock(mutex_);
    for (const auto& [id, hook] : hooks_) found.push_back(hook);
    return found;
  }

 private:
  mutable Mutex mutex_;
  std::map<int64_t, Hook> hooks_ GUARDED_BY(mutex_);
  std::atomic<size_t> count_{0};
};

}  // namespace mycoll
