// What each thread of this process waits for: so that a rank which is waited for can say why it
// does not come.
//
// Thread contract: all [any thread]. One lock, a leaf.
// Lifetime: entries stand for as long as their wait; they keep the op alive, and its group weakly.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "engine/op.h"

namespace mycoll {

class Communicator;

// The number of the calling thread. No other thread ever gets it, and no thread gets 0.
uint64_t threadNumber();

struct Wait {
  uint64_t thread = 0;
  std::weak_ptr<Communicator> group;
  OpPtr op;
  std::chrono::steady_clock::time_point since;
};

// A wait that cannot end before others have come.
struct Block {
  std::shared_ptr<Communicator> group;
  uint64_t identity = 0;  // of what is waited for; another wait has another one
  std::string text;       // "all_reduce ... (call #3) of group 'x', for 2.1 s, waits for rank 1"
  bool isMessage = false;
  uint64_t number = 0;
  std::vector<int> ranks;  // of the group: all of them must come
};

class WaitBoard {
 public:
  // Enters a wait, for as long as it lives. Only for waits that last, and that nothing but their op
  // ends: who looks now and then is not stuck.
  class Entry {
   public:
    Entry(WaitBoard& board, Wait wait);
    ~Entry();
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;

   private:
    WaitBoard& board_;
    std::list<Wait>::iterator at_;
  };

  std::optional<Wait> of(uint64_t thread) const;

 private:
  mutable Mutex mutex_;
  std::list<Wait> waits_ GUARDED_BY(mutex_);
};

// The one thread that a group is called from, as far as that is known.
class Caller {
 public:
  // True if that is news.
  bool note() {
    const uint64_t self = threadNumber();
    return thread_.load(std::memory_order_relaxed) != self && noteOther(self);
  }
  // From here on it counts as called from many threads.
  void noteMany() { thread_.store(kMany, std::memory_order_relaxed); }
  // 0: nobody yet.
  uint64_t thread() const { return thread_.load(std::memory_order_relaxed); }
  bool isMany() const { return thread() == kMany; }

 private:
  static constexpr uint64_t kMany = ~uint64_t{0};
  bool noteOther(uint64_t self);
  std::atomic<uint64_t> thread_{0};
};

}  // namespace mycoll
