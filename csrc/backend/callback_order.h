// CallbackOrder: the order in which callbacks of a group's futures run, and what waits for them.
//
// A callback that Python hangs on the future of a Work may begin operations of its own; DDP's
// PowerSGD hook does. All ranks have to begin a group's operations in one order, but nobody knows
// which thread will run a callback (the one that completes the future, or the one that hangs on the
// callback when the future is complete already), nor when. So it is made not to matter:
//
//   - futures are completed, and with that their callbacks run, one after another, in the order in
//     which they were asked for;
//   - the program's next collective in the group begins when all of them have run: a synchronous
//     one waits for that in its caller, an asynchronous one is held and begun by whoever ran the
//     last callback, while the program goes on;
//   - a callback is a program, too: the futures that it asks for have an order of their own,
//     beneath it, and its collectives wait for those only.
//
// What the ranks see is what they would see if a future was complete at once, as NCCL's are; but
// the program goes on computing meanwhile. Only futures that Python asks for are held to it: the
// callbacks of torch's C++ (DDP's own) begin nothing.
//
// Not covered: futures of one group on which callbacks are hung in another order than that in which
// they were asked for.
//
// Thread contract: [any thread]; none of it holds a lock while it calls out. wait() must not be
// called with the GIL held. Callbacks run on the CallbackPool.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>

#include "base/deadline.h"
#include "base/mutex.h"

namespace mycoll {

class CallbackOrder : public std::enable_shared_from_this<CallbackOrder> {
 public:
  // The place of one future in the order, or of an operation that is held.
  struct Turn {
    std::shared_ptr<CallbackOrder> order;
    std::function<void()> complete;  // set by ready(); guarded by the order's mutex
    bool hasCallbacks = true;
  };
  using TurnPtr = std::shared_ptr<Turn>;

  enum class Outcome { kIdle, kInterrupted, kTimeout };

  // The order of a group, or one beneath a callback of the group whose order is `root`.
  explicit CallbackOrder(const CallbackOrder* root = nullptr) : root_(root ? root : this) {}
  ~CallbackOrder() {
    const MutexLock lock(mutex_);
    count(-static_cast<int>(pending_.load()));
  }

  // Called on a group's order: the order that this thread is subject to. Inside a callback of that
  // group it is the one beneath the callback.
  std::shared_ptr<CallbackOrder> here();

  // Takes the next place.
  TurnPtr add();
  // The operation is over: `complete` completes the future when those before it have had theirs.
  // It must not throw.
  static void ready(const TurnPtr& turn, std::function<void()> complete);
  // Calls `begin` when everything added so far has run; at once if there is nothing. It must not
  // throw.
  void hold(std::function<void()> begin);

  // In any order of this process.
  static bool isAnyPending() { return allPending_.load(std::memory_order_acquire) > 0; }
  bool isIdle() const { return pending_.load(std::memory_order_acquire) == 0; }
  // Waits until everything added or held so far, and beneath it, has run.
  Outcome wait(Deadline deadline, bool (*isInterrupted)());

 private:
  void run();
  void count(int change) REQUIRES(mutex_);

  static inline std::atomic<int64_t> allPending_{0};
  const CallbackOrder* const root_;  // only compared: it may be gone
  std::atomic<size_t> pending_{0};
  Mutex mutex_;
  std::condition_variable changed_;
  std::deque<TurnPtr> turns_ GUARDED_BY(mutex_);
  bool isRunning_ GUARDED_BY(mutex_) = false;
};

}  // namespace mycoll
