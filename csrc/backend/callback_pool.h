// CallbackPool: the threads that run the user's code when an operation is done: callbacks of
// futures and completion hooks.
//
// The thread that completes the operation must not run them: it may be the engine's only progress
// thread, or a thread that works on the queue inside its own wait(), and a callback may wait for
// further operations (DDP's PowerSGD hook does). One thread would not do, because such a callback
// waits for a future that another thread must complete: there is always an idle thread for the next
// task. It is started when needed and ends after a second without work. If the system cannot start
// a thread, tasks wait for the existing threads or run on the posting thread.
// [any thread]
#pragma once

#include <c10/util/SmallVector.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "base/mutex.h"

namespace mycoll {

// Set when a future is complete and its callbacks have run. Work.wait() waits for it: with gloo,
// the callbacks have run when wait() returns.
class CallbacksDone {
 public:
  void set();
  // Waits for set(), at most one second: a callback may wait for what the program does next.
  // Returns immediately inside a callback, which may be one of those.
  void await();

 private:
  Mutex mutex_;
  std::condition_variable changed_;
  bool isSet_ GUARDED_BY(mutex_) = false;
};

// Runs `complete`, which completes a future of an operation of this type and so runs its callbacks.
// Logs an exception that they throw: it must not end the thread or stop the next callbacks. (torch
// catches what Python's callbacks raise.)
void runCallbacks(c10d::OpType type, const std::function<void()>& complete);

// The scope of a wait that the program called: references passed to CallbackPool::drop() on this
// thread are dropped at its end, when the thread no longer works on a queue and returns to the
// program.
class DropScope {
 public:
  DropScope();
  ~DropScope();
  DropScope(const DropScope&) = delete;
  DropScope& operator=(const DropScope&) = delete;

 private:
  friend class CallbackPool;
  DropScope* const outer_;
  c10::SmallVector<std::shared_ptr<void>, 2> dropped_;
};

class CallbackPool {
 public:
  // The pool of the process: see perProcess().
  static CallbackPool& get();

  // Whether this thread belongs to the pool.
  static bool isHere();

  // Tasks start in the order posted, and must not throw.
  void post(std::function<void()> task);
  // As post(), if a thread of the pool will run the task. Otherwise returns false, and leaves the
  // task unchanged.
  bool tryPost(std::function<void()>& task);

  // Drops a reference where taking the GIL and running the program's code delay nothing else: at
  // the end of this thread's DropScope, or else on a thread of the pool.
  void drop(std::shared_ptr<void> last);

  // Waits until all posted tasks have run and the threads have ended; for the interpreter's exit.
  // Returns false if that takes longer than the timeout.
  bool drain(std::chrono::milliseconds timeout);

 private:
  // Releases the lock, which locks mutex_, while a task runs.
  void runTasks(MutexLock& lock) REQUIRES(mutex_);
  void serve();
  void dropAll();

  Mutex mutex_;
  std::condition_variable posted_;
  std::condition_variable ended_;
  std::deque<std::function<void()>> tasks_ GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<void>> dropped_ GUARDED_BY(mutex_);
  bool isDropping_ GUARDED_BY(mutex_) = false;  // a task is posted that empties dropped_
  size_t idle_ GUARDED_BY(mutex_) = 0;
  size_t threads_ GUARDED_BY(mutex_) = 0;
  bool isDraining_ GUARDED_BY(mutex_) = false;
};

}  // namespace mycoll
