// The one T of this process, for what all groups share, which may end during static destruction:
// made at first use, never destroyed. A forked child begins with a T of its own; the parent's
// speaks of threads that the child does not have, and may be locked.
//
// Thread contract: [any thread]. T is also made in a child between fork() and its return, where
// only the thread that forked is left: its constructor takes no lock, and asks for no other T.
#pragma once

#include <pthread.h>

#include <atomic>
#include <new>

namespace mycoll {

// Apart from the guard of a static, which another thread may be holding while this one forks.
template <typename T>
inline std::atomic<T*> processInstance{nullptr};

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
