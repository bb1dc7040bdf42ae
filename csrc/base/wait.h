// How to wait for another core. All [any thread].
#pragma once

#include <atomic>
#include <chrono>
#include <string>

namespace mycoll {

// Tells the core that this is a spin loop: saves power, and leaves the pipeline to its sibling.
inline void cpuRelax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // "yield" is a no-op on most cores; isb waits a little
#else
  asm volatile("" ::: "memory");
#endif
}

// While a thread sleeps in the kernel: how often it looks at signals, deadlines and peers.
inline constexpr std::chrono::milliseconds kWaitTick(50);

// Cores that this process may keep busy: the affinity mask, cut by the cgroup's cpu quota (rounded
// down, as a spinner that exceeds its quota is stopped for the rest of the period). At least 1.
// Read once; a change of affinity later is not seen.
int usableCores();

// A waiter spins for `pauses` pauses, goes on spinning up to spinMicros in all, then calls
// sched_yield() up to yieldMicros, and then sleeps in the kernel (futex, epoll).
struct SpinPolicy {
  int pauses = 0;
  int spinMicros = 0;
  int yieldMicros = 0;
  int longYields = 1;  // this many in a row: others compute on our cores (CoreContention)
};

// localRanks: those of one host, each with a thread that waits. When they outnumber the cores,
// whoever spins keeps the one that it waits for from running. MYCOLL_SPIN_US overrides spinMicros.
SpinPolicy choose(int localRanks);

// Whether programs that compute share our cores. Ranks that wait as we do give the core back soon
// when we yield to them; whoever keeps it for longer is given a slice of milliseconds by every
// yield, while a thread that sleeps is put before it when it wakes. So for a while after that it is
// better to sleep at once. Where ranks outnumber the cores a single yield proves nothing: one of us
// may be computing, and the scheduler may let one wait that has yielded often.
// [any thread]; what threads overwrite of each other's is only a hint.
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

// What a waiting thread does between two looks at its operation: it spins, then yields its core,
// then sleeps, for as long as the operation does not advance. Of one wait, by one thread.
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
  bool trickles_ = false;  // bytes come more slowly than a thread can look for them
};

namespace detail {

// For tests. The cgroup's quota in whole cores, 0 when there is none. procCgroup: the text of
// /proc/self/cgroup; mountRoot: where the cgroup file systems are mounted.
int cgroupCores(const std::string& procCgroup, const std::string& mountRoot);

SpinPolicy choosePolicy(int localRanks, int cores, int spinMicrosOverride);

}  // namespace detail
}  // namespace mycoll
