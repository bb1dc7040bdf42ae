// How to wait for another core. All [any thread].
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "base/deadline.h"

namespace mycoll {

// Hints to the core that this is a spin loop: saves power, and leaves the pipeline to its sibling.
inline void cpuRelax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // "yield" is a no-op on most cores; isb waits a little
#else
  asm volatile("" ::: "memory");
#endif
}

// How often a thread that sleeps in the kernel checks signals, deadlines and peers.
inline constexpr std::chrono::milliseconds kWaitTick = grace(50);

// Cores that this process may keep busy: the affinity mask, limited by the cgroup's cpu quota
// (rounded down, as a spinner that exceeds its quota is stopped for the rest of the period). At
// least 1. Read once; later changes of the affinity have no effect.
int usableCores();

// A waiter spins for `pauses` pauses, continues to spin up to spinMicros in all, then calls
// sched_yield() up to yieldMicros, and then sleeps in the kernel (futex, epoll).
struct SpinPolicy {
  int pauses = 0;
  int spinMicros = 0;
  int yieldMicros = 0;
  int longYields = 1;  // this many in a row: others compute on our cores (CoreContention)
};

// localRanks: the ranks of one host, each with a thread that waits. When they outnumber the cores,
// a thread that spins may keep the one that it waits for from running. MYCOLL_SPIN_US overrides
// spinMicros.
SpinPolicy choose(int localRanks);

// Detects that programs which compute share our cores. When we yield to ranks that also wait, they
// soon give the core back; a program that computes keeps it for a slice of milliseconds after every
// yield, while a thread that sleeps is scheduled before it when it wakes. So, for a while after
// long yields, a waiter sleeps without yielding first. Where ranks outnumber the cores a single
// long yield proves nothing: one of the ranks may be computing, and the scheduler may delay a
// thread that has yielded often.
// [any thread]; threads may overwrite each other's values, which are only hints.
class CoreContention {
 public:
  using Clock = std::chrono::steady_clock;

  explicit CoreContention(int longYields) : enough_(longYields) {}
  bool isHere(Clock::time_point now) const { return now < until_.load(kRelaxed); }
  // A sched_yield() took from `from` to `back`.
  void yielded(Clock::time_point from, Clock::time_point back);

 private:
  static constexpr auto kRelaxed = std::memory_order_relaxed;

  const int enough_;
  std::atomic<int> inRow_{0};
  std::atomic<Clock::time_point> last_{Clock::time_point::min()};  // long yield
  std::atomic<Clock::time_point> until_{Clock::time_point::min()};
};

// Decides how a thread pauses between two checks of its operation: while the operation does not
// advance, it spins, then yields its core, then sleeps. For one wait, by one thread.
class Backoff {
 public:
  using Clock = std::chrono::steady_clock;
  enum class Pause { kSpin, kYield, kSleep };

  Backoff(const SpinPolicy& policy, CoreContention& contention)
      : policy_(policy), contention_(contention) {}
  // The operation, or something of this host, has advanced.
  void advanced() { idleSince_ = Clock::time_point::min(); }
  // Bytes have moved, but the operation has not advanced.
  void moved();
  // Nothing has moved. isFast: what the thread waits for does not come over a network.
  Pause next(Clock::time_point now, bool isFast);
  void yield(Clock::time_point now);

 private:
  const SpinPolicy& policy_;
  CoreContention& contention_;
  Clock::time_point idleSince_ = Clock::time_point::min();
  bool trickles_ = false;  // bytes arrive more slowly than a thread polls for them
};

// The intervals at which a thread checks a device or NCCL: short at first, as most operations are,
// then an eighth of the time waited so far, so that the end is detected at most that much later.
// For one wait, by one thread.
class DevicePause {
 public:
  // Returns true once per kWaitTick: then the thread checks for signals.
  bool rest() {
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

namespace detail {

// For tests. The cgroup's quota in whole cores, 0 when there is none. procCgroup: the text of
// /proc/self/cgroup; mountRoot: where the cgroup file systems are mounted.
int cgroupCores(const std::string& procCgroup, const std::string& mountRoot);

SpinPolicy choosePolicy(int localRanks, int cores, int spinMicrosOverride);

}  // namespace detail
}  // namespace mycoll
