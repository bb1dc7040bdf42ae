// TimeoutExtensions: what addEphemeralTimeout() adds to the timeouts of a group's operations for a
// while. An extension counts for the operations that are called after it was added, until the first
// of them ends. Several add up.
//
// Thread contract: [any thread]; the mutex is a leaf. Lifetime: shared by the group and the
// operations that end an extension.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <utility>

#include "base/mutex.h"

namespace mycoll {

class TimeoutExtensions : public std::enable_shared_from_this<TimeoutExtensions> {
 public:
  using Milliseconds = std::chrono::milliseconds;

  void add(Milliseconds extension) {
    const MutexLock lock(mutex_);
    active_ += extension;
    unclaimed_ += extension;
    isAny_.store(true, std::memory_order_relaxed);
  }

  // False at the cost of one read. Another thread's add() may not be visible yet.
  bool isAny() const { return isAny_.load(std::memory_order_relaxed); }

  // Returns the extended timeout of an operation. If it is the first one with some of the
  // extensions, these end when *claim is dropped.
  Milliseconds extend(Milliseconds timeout, std::shared_ptr<void>* claim) {
    const MutexLock lock(mutex_);
    if (unclaimed_ != Milliseconds(0)) {
      *claim = {this,  // not null, as its holders ask whether there is one
                [self = shared_from_this(), claimed = std::exchange(unclaimed_, {})](void*) {
                  const MutexLock ending(self->mutex_);
                  self->active_ -= claimed;
                  self->isAny_.store(self->active_ != Milliseconds(0), std::memory_order_relaxed);
                }};
    }
    return timeout > Milliseconds::max() - active_ ? Milliseconds::max() : timeout + active_;
  }

 private:
  std::atomic<bool> isAny_{false};
  Mutex mutex_;
  Milliseconds active_ GUARDED_BY(mutex_){0};
  Milliseconds unclaimed_ GUARDED_BY(mutex_){0};  // no operation has been called since
};

}  // namespace mycoll
