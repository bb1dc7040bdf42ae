// Helpers for a library that has threads of its own: no signals for those threads, a state for each
// side of a fork, the size of a page.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <new>

namespace mycoll {

// The page size, which is not always 4096. [any thread]
inline size_t pageBytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

// Signals are for the user's threads: a thread that is started while this object lives has all of
// them blocked, permanently. [any thread]
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

template <typename T>
inline std::atomic<T*> processInstance{nullptr};

// Separate from perProcess(), so that its small callers, which run often, do not contain it.
template <typename T>
[[gnu::noinline, gnu::cold]] T& makeForProcess() {
  auto own = std::make_unique<T>();
  pthread_atfork(nullptr, nullptr, [] {
    if (T* const parents = processInstance<T>.load()) new (parents) T;
  });
  T* first = nullptr;
  return processInstance<T>.compare_exchange_strong(first, own.get()) ? *own.release() : *first;
}

// The single T of this process, for state that all groups share: made at first use and never
// destroyed, as it may be used during static destruction. A forked child starts with a new T; the
// parent's refers to threads that the child does not have, and may be locked.
//
// [any thread]. The child's T is made before fork() returns, when only the forking thread exists:
// T's constructor must take no lock and must not use another T. Two threads may each make a T at
// first use, and one of them discards its own: a child would wait forever for the guard of a static
// that another thread was making.
template <typename T>
T& perProcess() {
  T* const made = processInstance<T>.load(std::memory_order_acquire);
  return made ? *made : makeForProcess<T>();
}

}  // namespace mycoll
