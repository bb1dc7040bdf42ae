#include "engine/waits.h"

#include <utility>

namespace mycoll {

uint64_t threadNumber() {
  static std::atomic<uint64_t> next{1};
  static thread_local const uint64_t number = next.fetch_add(1, std::memory_order_relaxed);
  return number;
}

WaitBoard::Entry::Entry(WaitBoard& board, Wait wait) : board_(board) {
  MutexLock lock(board_.mutex_);
  at_ = board_.waits_.insert(board_.waits_.end(), std::move(wait));
}

WaitBoard::Entry::~Entry() {
  Wait last;  // dropped without the lock: it may be the op's last owner
  MutexLock lock(board_.mutex_);
  last = std::move(*at_);
  board_.waits_.erase(at_);
}

std::optional<Wait> WaitBoard::of(uint64_t thread) const {
  MutexLock lock(mutex_);
  for (const Wait& wait : waits_) {
    if (wait.thread == thread) return wait;
  }
  return std::nullopt;
}

bool Caller::noteOther(uint64_t self) {
  if (isMany()) return false;
  uint64_t nobody = 0;
  if (!thread_.compare_exchange_strong(nobody, self, std::memory_order_relaxed)) {
    thread_.store(kMany, std::memory_order_relaxed);
  }
  return true;
}

}  // namespace mycoll
