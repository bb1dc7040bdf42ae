// What a library with threads of its own needs from the operating system: no signals for those
// threads, a state for each side of a fork, the size of a page.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <new>

namespace mycoll {

// What the system maps at a time. Not everywhere 4096. [any thread]
inline size_t pageBytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

// Signals are for the user's threads: a thread that is started while this lives has all of them
// blocked, for good. [any thread]
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

// Apart from the guard of a static, which another thread may be holding while this one forks.
template <typename T>
inline std::atomic<T*> processInstance{nullptr};

// The one T of this process, for what all groups share: made at first use and never destroyed, as
// it may be used during static destruction. A forked child begins with a T of its own; the parent's
// knows threads that the child does not have, and may be locked.
//
// [any thread]. The child's T is made between fork() and its return, where only the thread that
// forked is left: T's constructor takes no lock, and asks for no other T.
template <typename T>
T& perProcess() {
  if (T* const made = processInstance<T>.load(std::memory_order_acquire)) return *made;
  static T* const value = [] {
    processInstance<T>.store(new T, std::memory_order_release);
    pthread_atfork(nullptr, nullptr, [] { new (processInstance<T>.load()) T; });
    return processInstance<T>.load();
  }();
  return *value;
}

}  // namespace mycoll
