// How the threads of a process sleep until something may have happened. One thread, the leader, is
// in epoll_wait; the others wait for it. A thread that wakes for the event of another thread
// notifies that thread, so no wake-up is lost:
//
//   Sleeper::Nap nap(sleeper, sleeper.generation());   <- from here on wakeSleepers() wakes it,
//   <ask peers to ring: setAsleep>                     <- and peers ring: before the last check
//   if (<what I wait for is there>) ...
//   nap.sleep(deadline);
//
// The progress thread leads when no other thread wants to (idle): it then wakes for sockets but is
// not counted as asleep, so peers do not ring for it. A thread that really waits takes the lead
// from it.
//
// Thread contract: all [any thread].
#pragma once

#include <sys/epoll.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>

#include "base/deadline.h"
#include "base/fd.h"
#include "base/mutex.h"
#include "base/status.h"

namespace mycoll {

class Sleeper {
 public:
  static constexpr int kMaxEvents = 64;
  // Called by the leader with the result of epoll_wait, before any other thread is woken.
  using HandleEvents = std::function<void(const epoll_event* events, int count)>;

  Status open(HandleEvents handleEvents);
  // Edge triggered: in, out and hang-up.
  Status watch(int fd);
  // Reports again what is already there.
  void watchAgain(int fd);
  int epollFd() const { return epoll_.get(); }

  uint64_t generation() const { return generation_.load(std::memory_order_seq_cst); }
  // A thread that may sleep in a moment.
  class Nap {
   public:
    Nap(Sleeper& sleeper, uint64_t generation) : sleeper_(sleeper), generation_(generation) {
      sleeper_.sleepers_.fetch_add(1, std::memory_order_seq_cst);
    }
    ~Nap() { sleeper_.sleepers_.fetch_sub(1, std::memory_order_seq_cst); }
    Nap(const Nap&) = delete;
    Nap& operator=(const Nap&) = delete;
    // Returns when the generation has changed, at the deadline, or spuriously.
    void sleep(Deadline deadline) { sleeper_.sleep(generation_, deadline); }

   private:
    Sleeper& sleeper_;
    const uint64_t generation_;
  };

  // As Nap's sleep(), for the progress thread when it waits for nothing in particular.
  void idle(uint64_t generation, Deadline deadline);
  // Notifies all threads that something has happened which they may be waiting for.
  void wakeAll();
  // As wakeAll(), but cheap if there is no Nap.
  void wakeSleepers() {
    // A read that is ordered after what the caller has just published: a thread whose Nap begins
    // later sees that in its last check.
    if (sleepers_.fetch_add(0, std::memory_order_seq_cst) > 0) wakeAll();
  }

 private:
  void sleep(uint64_t generation, Deadline deadline);
  // Releases the lock, which is mutex_'s, while it is in epoll_wait.
  void lead(MutexLock& lock, Deadline deadline) REQUIRES(mutex_);
  void kick();

  HandleEvents handleEvents_;
  Fd epoll_;
  Fd event_;  // eventfd: wakes the leader in epoll_wait
  Mutex mutex_;
  std::condition_variable changed_;
  bool hasLeader_ GUARDED_BY(mutex_) = false;
  bool leaderIsIdle_ GUARDED_BY(mutex_) = false;
  int followers_ GUARDED_BY(mutex_) = 0;
  std::atomic<uint64_t> generation_{1};
  std::atomic<int> sleepers_{0};  // naps
};

}  // namespace mycoll
