// The one T of this process, for what is shared by all groups, which may end during static
// destruction: made at first use, never destroyed. A forked child begins with a T of its own; the
// parent's speaks of threads that the child does not have, and may be locked.
#pragma once

#include <pthread.h>

#include <new>

namespace mycoll {

template <typename T>
T& perProcess() {
  static T* const value = [] {
    pthread_atfork(nullptr, nullptr, [] { new (&perProcess<T>()) T; });
    return new T;
  }();
  return *value;
}

}  // namespace mycoll
