// Mutexes that clang can check: a field says which mutex guards it, a function says which it needs,
// and `./dev lint` fails where the code does otherwise (clang's -Wthread-safety). Other compilers
// see plain std::mutex and std::unique_lock.
//
//   Mutex mutex_;
//   int count_ GUARDED_BY(mutex_) = 0;
//   void add() REQUIRES(mutex_);       // the caller holds it
//   ...
//   MutexLock lock(mutex_);            // until the end of the block
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define MYCOLL_THREAD_ANNOTATION(...) __attribute__((__VA_ARGS__))
#else
#define MYCOLL_THREAD_ANNOTATION(...)
#endif

#define CAPABILITY(name) MYCOLL_THREAD_ANNOTATION(capability(name))
#define SCOPED_CAPABILITY MYCOLL_THREAD_ANNOTATION(scoped_lockable)
#define GUARDED_BY(...) MYCOLL_THREAD_ANNOTATION(guarded_by(__VA_ARGS__))
#define REQUIRES(...) MYCOLL_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define EXCLUDES(...) MYCOLL_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))
#define ACQUIRE(...) MYCOLL_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define RELEASE(...) MYCOLL_THREAD_ANNOTATION(release_capability(__VA_ARGS__))
#define TRY_ACQUIRE(...) MYCOLL_THREAD_ANNOTATION(try_acquire_capability(__VA_ARGS__))
// For a function that the analysis cannot follow; say why beside it.
#define NO_THREAD_SAFETY_ANALYSIS MYCOLL_THREAD_ANNOTATION(no_thread_safety_analysis)

namespace mycoll {

class CAPABILITY("mutex") Mutex {
 public:
  void lock() ACQUIRE() { mutex_.lock(); }
  bool tryLock() TRY_ACQUIRE(true) { return mutex_.try_lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }

 private:
  friend class MutexLock;
  std::mutex mutex_;
};

// Holds a mutex until it is destroyed; may release and lock it again meanwhile.
class SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ACQUIRE(mutex) : lock_(mutex.mutex_) {}
  // Adopts a mutex that tryLock() has locked.
  MutexLock(Mutex& mutex, std::adopt_lock_t adopt) REQUIRES(mutex) : lock_(mutex.mutex_, adopt) {}
  ~MutexLock() RELEASE() {}
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void unlock() RELEASE() { lock_.unlock(); }
  void lock() ACQUIRE() { lock_.lock(); }
  // For std::condition_variable::wait.
  std::unique_lock<std::mutex>& native() { return lock_; }

 private:
  std::unique_lock<std::mutex> lock_;
};

// Wakes a thread. [any thread]
class Wakeup {
 public:
  void notify() EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    isThere_ = true;
    changed_.notify_one();
  }
  // Returns when it was notified since the last call, or after atMost. For one thread.
  void wait(std::chrono::milliseconds atMost) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    changed_.wait_for(lock.native(), atMost, [this]() REQUIRES(mutex_) { return isThere_; });
    isThere_ = false;
  }

 private:
  Mutex mutex_;
  std::condition_variable changed_;
  bool isThere_ GUARDED_BY(mutex_) = false;
};

}  // namespace mycoll
