// CallbackOrder: the order of a group's collectives and of the callbacks that Python hangs on its
// futures.
//
// A callback may begin collectives of its own; DDP's PowerSGD hook does. All ranks have to begin a
// group's collectives in one order, but a callback runs where its future completes, or at once in
// then() if that has happened, and this differs between ranks. So everything takes the place that
// it has in the program's text, as if every future was complete at once (those of NCCL are):
//
//   - A callback's place is where it is hung on its future. Callbacks run one after another.
//   - A collective's place is where it is called. It begins when the callbacks have run that were
//     hung before that: a synchronous one waits in its caller, an asynchronous one is held and
//     begun by the thread that ran the last callback. Callbacks hung later come later.
//   - A callback is a program, too. The collectives that it calls, and the callbacks that it hangs
//     on their futures, have an order of their own, beneath it. All of these come before what comes
//     after the callback.
//
// So a callback may wait for everything that was called before it was hung: by Work.wait(), by the
// future, or by asking again and again. That has begun; and a future is complete when its operation
// is done, whatever other callbacks still do (only its callbacks wait for their place). A callback
// that asks the Work of a collective that is held begins it, with all that is held before it.
//
// Only futures that Python asks for are held to it: the callbacks of torch's C++ (DDP's own) begin
// nothing. Not covered, as torch says neither when callbacks are hung nor that a future is waited
// for: between two calls of collectives, callbacks hung on several futures in another order than
// that in which the futures were asked for; and callbacks of a future that then() made, which count
// as hung with the callback that completes it.
//
//   entries:  part of f1 | part of f2 | all_reduce | part of f1 | ...
//
// A part is what was hung on a future between two collectives. At its end stands a callback of
// ours, a mark; the first callback of each future is the gate. Both wait, on the thread that
// completes the future, until the future's next part is at the front.
//
// Thread contract: [any thread]; none of it holds a lock while it calls out. pass() must not be
// called with the GIL held. Futures are completed on the CallbackPool, one at a time, and several
// only where the running callback takes its time.
#pragma once

#include <ATen/core/ivalue.h>

#include <atomic>
#include <deque>
#include <functional>
#include <memory>

#include "base/deadline.h"
#include "base/mutex.h"

namespace mycoll {

class CallbackOrder : public std::enable_shared_from_this<CallbackOrder> {
 public:
  using Ptr = std::shared_ptr<CallbackOrder>;
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;
  // A future that is not over: its operation runs, or its callbacks.
  struct Turn;
  using TurnPtr = std::shared_ptr<Turn>;
  // A held collective, or a part.
  struct Entry;
  using EntryPtr = std::shared_ptr<Entry>;

  enum class Outcome { kIdle, kInterrupted, kTimeout };

  // The order of a group, or one beneath a callback of the group whose order is `root`.
  explicit CallbackOrder(const Ptr& root = nullptr, int depth = 0) : root_(root), depth_(depth) {}
  ~CallbackOrder() {
    const MutexLock lock(mutex_);
    count(-static_cast<int>(pending_.load()));
  }

  // The order that this thread is subject to, in the group of `order`: that beneath the callback
  // which it runs, or the group's own.
  static Ptr here(const Ptr& order);
  // The order of a future that this thread asks for, of a collective called under `order`.
  static Ptr ofFuture(const Ptr& order);

  // Takes in a future on which nothing has been hung.
  static TurnPtr add(const Ptr& order, const FuturePtr& future);
  // The operation is over: `complete` completes the future. It must not throw.
  static void ready(const TurnPtr& turn, std::function<void()> complete);

  // A collective that is called now has callbacks, or held collectives, to wait for.
  bool isBlocked();
  // Calls `begin` in its place; at once if nothing is before it. It must not throw.
  EntryPtr hold(std::function<void()> begin);
  // Begins a held collective at once, with those before it, if this thread runs a callback of the
  // group: the callback waits for it.
  void beginIfInside(const EntryPtr& entry);
  // As hold(), for a collective of the caller's: returns when it may begin. isInterrupted may be
  // null.
  Outcome pass(Deadline deadline, bool (*isInterrupted)());

  // In any order of this process.
  static bool isAnyPending() { return allPending_.load(std::memory_order_acquire) > 0; }
  bool isIdle() const { return pending_.load(std::memory_order_acquire) == 0; }

 private:
  void count(int change) REQUIRES(mutex_);
  bool isBlockedNow() REQUIRES(mutex_);
  EntryPtr append(std::function<void()> begin) REQUIRES(mutex_);
  void addParts(const Turn& last, bool isCertain) REQUIRES(mutex_);
  void mark(const TurnPtr& turn) REQUIRES(mutex_);
  void enter(Turn& turn);
  void leavePart(Turn& turn);
  void awaitPart(Turn& turn, MutexLock& lock) REQUIRES(mutex_);
  // Begins what may begin. Lets go of the lock meanwhile.
  void advance(MutexLock& lock) REQUIRES(mutex_);
  TurnPtr takeReady() REQUIRES(mutex_);
  bool isToBeServed() REQUIRES(mutex_);
  void serve();
  void complete(const TurnPtr& turn);
  void awaitIdle();

  static inline std::atomic<int64_t> allPending_{0};
  const Ptr root_;  // null: this is a root
  const int depth_;
  std::atomic<size_t> pending_{0};  // turns and entries
  Mutex mutex_;
  std::condition_variable changed_;
  std::deque<TurnPtr> turns_ GUARDED_BY(mutex_);  // in the order in which they were asked for
  std::deque<TurnPtr> ready_ GUARDED_BY(mutex_);  // of these: to be completed
  std::deque<EntryPtr> entries_ GUARDED_BY(mutex_);
  bool isBeginning_ GUARDED_BY(mutex_) = false;  // a thread begins collectives
  bool isAttended_ GUARDED_BY(mutex_) = false;   // a thread takes the next one of ready_
};

}  // namespace mycoll
