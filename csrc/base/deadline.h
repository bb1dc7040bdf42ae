// A point in time by which something must end. A plain value on the steady clock.
#pragma once

#include <algorithm>
#include <chrono>

namespace mycoll {

// The time that a rank grants others before it acts without them, or lets pass before it looks
// again. The preset "hasty" divides all of them, so that what happens rarely, on a machine with too
// much to do, happens often (./dev soak).
#ifndef MYCOLL_HASTE
#define MYCOLL_HASTE 1
#endif
constexpr std::chrono::milliseconds grace(int milliseconds) {
  return std::chrono::milliseconds(std::max(1, milliseconds / MYCOLL_HASTE));
}

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;
  using Milliseconds = std::chrono::milliseconds;

  // The same as never().
  Deadline() = default;

  static Deadline never() { return Deadline(); }

  // Durations too long for the clock (torch passes milliseconds::max() for "no timeout") are never.
  static Deadline after(Milliseconds timeout) { return after(timeout, Clock::now()); }
  static Deadline after(Milliseconds timeout, Clock::time_point from) {
    if (timeout >= std::chrono::duration_cast<Milliseconds>(Clock::time_point::max() - from)) {
      return never();
    }
    return Deadline(from + std::max(timeout, Milliseconds(0)));
  }

  bool isNever() const { return when_ == Clock::time_point::max(); }
  bool expired() const { return !isNever() && Clock::now() >= when_; }
  Clock::time_point when() const { return when_; }

  // Rounded up: a thread that sleeps this long wakes after the deadline, not before. 0 when
  // expired, Milliseconds::max() for never.
  Milliseconds remaining() const {
    if (isNever()) return Milliseconds::max();
    const Clock::duration left = when_ - Clock::now();
    if (left <= Clock::duration::zero()) return Milliseconds(0);
    return std::chrono::ceil<Milliseconds>(left);
  }

  // For poll() and epoll_wait(): -1 for never.
  int pollMilliseconds() const {
    if (isNever()) return -1;
    return static_cast<int>(std::min<Milliseconds::rep>(remaining().count(), 1 << 30));
  }

  friend bool operator<(Deadline a, Deadline b) { return a.when_ < b.when_; }

 private:
  explicit Deadline(Clock::time_point when) : when_(when) {}

  Clock::time_point when_ = Clock::time_point::max();
};

inline Deadline earlier(Deadline a, Deadline b) { return b < a ? b : a; }

}  // namespace mycoll
