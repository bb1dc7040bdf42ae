// Pause: the intervals at which a thread that waits for a device checks it: short at first, as most
// operations are, then an eighth of the time waited so far, so that the end is detected at most
// that much later. Thread contract: one thread.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/wait.h"

namespace mycoll {

class Pause {
 public:
  // Returns true once per kWaitTick: then the thread checks for signals.
  [[nodiscard]] bool rest() {
    const Clock::duration waited = Clock::now() - began_;
    if (waited < kYielding) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::min<Clock::duration>(waited / 8, kLongest));
    }
    if (waited < nextTick_) return false;
    nextTick_ = waited + kWaitTick;
    return true;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr auto kYielding = std::chrono::microseconds(50);  // a sleep would take longer
  static constexpr auto kLongest = std::chrono::microseconds(500);

  const Clock::time_point began_ = Clock::now();
  Clock::duration nextTick_ = kWaitTick;
};

}  // namespace mycoll
