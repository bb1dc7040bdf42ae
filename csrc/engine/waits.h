// Records what each thread of this process waits for, so that a missing rank can report why it is
// missing.
//
// Thread contract: all [any thread]. One lock, a leaf.
// Lifetime: an entry lives as long as its wait. It keeps the op alive, but not its group.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <utility>

#include "base/mutex.h"
#include "engine/op.h"

namespace mycoll {

class Communicator;

// The number of the calling thread. It is never 0, and no other thread ever gets it.
inline uint64_t threadNumber() {
  static std::atomic<uint64_t> next{1};
  static thread_local const uint64_t number = next.fetch_add(1, std::memory_order_relaxed);
  return number;
}

struct Wait {
  uint64_t thread = 0;
  std::weak_ptr<Communicator> group;
  OpPtr op;
};

class WaitBoard {
 public:
  // Registers a wait for its own lifetime. Only for long waits that only their op can end: a thread
  // that polls is not stuck.
  class Entry {
   public:
    Entry(WaitBoard& board, Wait wait) : board_(board) {
      MutexLock lock(board_.mutex_);
      at_ = board_.waits_.insert(board_.waits_.end(), std::move(wait));
    }
    ~Entry() {
      Wait last;  // dropped without the lock: it may be the op's last owner
      MutexLock lock(board_.mutex_);
      last = std::move(*at_);
      board_.waits_.erase(at_);
    }
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;

   private:
    WaitBoard& board_;
    std::list<Wait>::iterator at_;
  };

  std::optional<Wait> of(uint64_t thread) const {
    MutexLock lock(mutex_);
    for (const Wait& wait : waits_) {
      if (wait.thread == thread) return wait;
    }
    return std::nullopt;
  }

 private:
  mutable Mutex mutex_;
  std::list<Wait> waits_ GUARDED_BY(mutex_);
};

// The only thread that calls a group, if known.
class Caller {
 public:
  // Records the calling thread as a caller. True if that changes what is known.
  bool note() {
    const uint64_t self = threadNumber();
    return thread_.load(std::memory_order_relaxed) != self && noteOther(self);
  }
  // From here on the group counts as called from many threads.
  void noteMany() { thread_.store(kMany, std::memory_order_relaxed); }
  // 0: no thread has called yet.
  uint64_t thread() const { return thread_.load(std::memory_order_relaxed); }
  bool isMany() const { return thread() == kMany; }

 private:
  static constexpr uint64_t kMany = ~uint64_t{0};
  bool noteOther(uint64_t self) {
    if (isMany()) return false;
    uint64_t nobody = 0;
    if (!thread_.compare_exchange_strong(nobody, self, std::memory_order_relaxed)) noteMany();
    return true;
  }
  std::atomic<uint64_t> thread_{0};
};

}  // namespace mycoll
