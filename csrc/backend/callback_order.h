// CallbackOrder: the order of a group's collectives and of the callbacks that Python adds to its
// futures.
//
// A callback may begin collectives of its own; DDP's PowerSGD hook does. All ranks must begin a
// group's collectives in one order, but a callback runs when its future completes, or immediately
// in then() if it is complete already, and this differs between ranks. So everything takes the
// place that it has in the program's text, as if every future were complete immediately (NCCL's
// are):
//
//   - The place of a callback is where it is added to its future. Callbacks run one after another.
//   - The place of a collective is where it is called. It begins when the callbacks added before
//     have run: a synchronous one waits in its caller, and so does one whose inputs are copied
//     first; an asynchronous one is held, and begun by the thread that ran the last of these
//     callbacks. Callbacks added later run later.
//   - A callback is a program, too. The collectives that it calls, and the callbacks that it adds
//     to their futures, have an order of their own, beneath it. All of these come before what
//     comes after the callback.
//
// So a callback may wait for everything that was called before it was added: by Work.wait(), by the
// future, or by polling. The operation has begun; and a future is complete when its operation is
// done, whatever other callbacks still do (only its own callbacks wait for their place). A callback
// that queries the Work of a collective that was held outside of it begins that collective, with
// all that is held before it.
//
// The order includes only futures of collectives that Python asks for: the callbacks of torch's C++
// (DDP's own) begin nothing, and messages have no common order. torch does not report when a
// callback is added or a future is waited for, so two cases are not covered: callbacks that are
// added to several futures between two calls of collectives, in another order than that in which
// the futures were asked for; and callbacks of a future that then() made, which count as added with
// the callback that completes it.
//
//   entries:  part of f1 | part of f2 | all_reduce | part of f1 | ...
//
// A part is the callbacks that were added to a future between two collectives. It ends with a
// callback of ours, a mark; the first callback of each future is the gate. Both wait, on the thread
// that completes the future, until the future's next part is at the front.
//
// Thread contract: [any thread]; no lock is held during calls out of this class. pass() must not be
// called with the GIL held. Futures are completed on the CallbackPool, one at a time; several at a
// time only if the running callback takes long.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

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
  // A future that is not over: its operation or its callbacks still run.
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

  // Returns the order that applies to this thread in the group of `order`: the one beneath the
  // callback that the thread runs, or the group's own.
  static Ptr here(const Ptr& order);

  // Adds a future that has no callbacks yet, of a collective called under `order`, and that this
  // thread asks for. Returns null if it is in no order: `order` is null, or Python does not ask.
  static TurnPtr add(const Ptr& order, const FuturePtr& future);
  // Called when the operation is over: `complete` will complete the future, on the CallbackPool. It
  // must not throw. The caller keeps no reference to the turn, whose future holds tensors of the
  // program. turn: null if the future is in no order.
  static void ready(TurnPtr turn, std::function<void()> complete);

  // Returns true if a collective that is called now must wait for callbacks or held collectives.
  bool isBlocked();
  // Calls `begin` when its place is reached. If nothing is before it, that is immediately, and
  // returns null. `begin` must not throw.
  EntryPtr hold(std::function<void()> begin);
  // Begins a held collective immediately, with those before it, if it is held behind the callback
  // of the group that this thread runs: the callback waits for it. One that the callback itself has
  // called waits for other callbacks only.
  void beginIfInside(const EntryPtr& entry);
  // Waits until a held collective has begun. isInterrupted may be null.
  Outcome await(const EntryPtr& entry, Deadline deadline, bool (*isInterrupted)());
  // As hold() and await(), for a collective that the caller begins itself.
  Outcome pass(Deadline deadline, bool (*isInterrupted)());

  // Whether futures or collectives are pending in any order of this process.
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
  // Begins held collectives, and releases the lock meanwhile.
  void beginAll(c10::ArrayRef<EntryPtr> held, MutexLock& lock) REQUIRES(mutex_);
  // Begins the collectives that may begin, as beginAll().
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
  std::deque<TurnPtr> ready_ GUARDED_BY(mutex_);  // those of them that are to be completed
  std::deque<EntryPtr> entries_ GUARDED_BY(mutex_);
  bool isBeginning_ GUARDED_BY(mutex_) = false;  // a thread begins collectives
  bool isAttended_ GUARDED_BY(mutex_) = false;   // a thread takes the next of ready_
};

}  // namespace mycoll
