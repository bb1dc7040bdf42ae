// Where code of the user's runs when an operation is done: callbacks of futures, completion hooks.
//
// Never the thread that completes the operation: that one may be the engine's only progress thread,
// or a thread that works on the queue for a while inside its own wait(), and a callback may well
// wait for further operations (DDP's PowerSGD hook does). A pool and not one thread, because such a
// callback waits for a future that has to be completed by somebody else: there is always an idle
// thread for the next task, started when needed and gone after a second without work. Where the
// system gives no thread, tasks wait for those that are there, or run in the poster's.
// [any thread]
#pragma once

#include <c10/util/SmallVector.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "base/mutex.h"

namespace mycoll {

// Whether a future is complete and its callbacks have run, for who waits for its Work: with gloo
// they have by then.
class Told {
 public:
  void set();
  // A second at most: a callback may wait for what the program does next. Not at all inside a
  // callback, which may be one of those.
  void await();

 private:
  Mutex mutex_;
  std::condition_variable changed_;
  bool isSet_ GUARDED_BY(mutex_) = false;
};

// Runs `complete`, which completes a future of such an operation, and with that its callbacks. What
// they throw is logged: it must neither end the thread nor keep the next callbacks from running.
// (torch catches what Python's callbacks raise.)
void runCallbacks(c10d::OpType type, const std::function<void()>& complete);

// For the scope of a wait of the program's: what CallbackPool::drop() is given on this thread is
// dropped at the end. Then the thread works on no queue any more, and goes back to the program.
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
  // The process's. Never destroyed.
  static CallbackPool& get();

  // This thread is one of its.
  static bool isHere();

  // Tasks start in the order posted, and must not throw.
  void post(std::function<void()> task);
  // As post(), where a thread of the pool will run it; else false, and the task stays as it is.
  bool tryPost(std::function<void()>& task);

  // Drops a reference where taking the GIL and running the program's code delay nothing else: at
  // the end of this thread's DropScope, else on a thread of the pool.
  void drop(std::shared_ptr<void> last);

  // Waits until everything posted has run, and for the threads to end; for the interpreter's exit.
  // False when that took longer than the timeout.
  bool drain(std::chrono::milliseconds timeout);

 private:
  CallbackPool() = default;
  struct Workers;
  static Workers& workers();
};

}  // namespace mycoll
