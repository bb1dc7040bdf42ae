// Between two looks at what a device does, on a thread that has to wait for it: short at first, as
// most operations are, then an eighth of the time waited so far, so that the end is seen late by no
// more than that.
// Thread contract: one thread.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace mycoll {

class Pause {
 public:
  // True every 50 ms: time to look at signals.
  [[nodiscard]] bool rest() {
    const Clock::duration waited = Clock::now() - began_;
    if (waited < kAtOnce) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::min<Clock::duration>(waited / 8, kMost));
    }
    if (waited < nextTick_) return false;
    nextTick_ = waited + kTick;
    return true;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr auto kAtOnce = std::chrono::microseconds(50);  // a sleep would take longer
  static constexpr auto kMost = std::chrono::microseconds(500);
  static constexpr auto kTick = std::chrono::milliseconds(50);

  const Clock::time_point began_ = Clock::now();
  Clock::duration nextTick_ = kTick;
};

}  // namespace mycoll
