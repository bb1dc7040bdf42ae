#include "backend/callback_order.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "backend/callback_pool.h"
#include "backend/python.h"
#include "base/wait.h"

namespace mycoll {

// Returns the number of callbacks of a future. torch has no function for that, and its class is
// final; but an explicit instantiation may name private members.
size_t callbacksOf(c10::ivalue::Future& future);
template <auto kMutex, auto kCallbacks>
struct FutureMembers {
  friend size_t callbacksOf(c10::ivalue::Future& future) {
    const std::lock_guard<std::mutex> lock(future.*kMutex);
    return (future.*kCallbacks).size();
  }
};
template struct FutureMembers<&c10::ivalue::Future::mutex_, &c10::ivalue::Future::callbacks_>;

namespace {

using Future = c10::ivalue::Future;

// How long a ready future waits for its place before it is completed alongside a running callback.
// Not zero: it then occupies a thread of the pool until its place is reached.
constexpr std::chrono::milliseconds kPatience(2);

}  // namespace

struct CallbackOrder::Entry {
  std::function<void()> begin;  // of a collective
  bool isCollective = false;
  bool isOver = false;  // a collective: it has begun
};

// Guarded by the order's mutex.
struct CallbackOrder::Turn {
  Turn(Ptr itsOrder, FuturePtr itsFuture)
      : order(std::move(itsOrder)), future(std::move(itsFuture)) {}

  const Ptr order;
  const FuturePtr future;
  std::function<void()> complete;
  bool isTaken = false;        // a thread completes it
  std::deque<EntryPtr> parts;  // that are not over
  bool isOpen = false;  // the last part has no mark at its end yet: callbacks added now join it
  size_t seen = 1;      // callbacks up to the last mark; the gate is the first
};

namespace {

// The callbacks that this thread is running, innermost first.
struct Running {
  const CallbackOrder* root;
  std::shared_ptr<CallbackOrder> beneath;
  Running* outer;
};
thread_local Running* innermost = nullptr;

// The turn to whose future this thread is adding a mark. Null afterwards: the mark ran immediately.
thread_local const void* marking = nullptr;

Running* running(const CallbackOrder* root) {
  Running* found = innermost;
  while (found != nullptr && found->root != root) found = found->outer;
  return found;
}

}  // namespace

// ---- futures and their parts

CallbackOrder::Ptr CallbackOrder::here(const Ptr& order) {
  const Ptr& root = order->root_ ? order->root_ : order;
  const Running* const inside = running(root.get());
  return inside != nullptr ? inside->beneath : root;
}

// A future belongs to the order in which its collective was called, even if a callback is the first
// to ask for it. If it is asked for in an outer order, it belongs there: the callback that called
// the collective may be over.
CallbackOrder::TurnPtr CallbackOrder::add(const Ptr& called, const FuturePtr& future) {
  if (!called || !isCalledByPython()) return nullptr;
  const Ptr asked = here(called);
  const Ptr& order = called->depth_ < asked->depth_ ? called : asked;
  const auto turn = std::make_shared<Turn>(order, future);
  future->addCallback([turn](Future&) { turn->order->enter(*turn); });
  const MutexLock lock(order->mutex_);
  order->turns_.push_back(turn);
  order->count(1);
  return turn;
}

void CallbackOrder::count(int change) {
  pending_.fetch_add(static_cast<size_t>(change), std::memory_order_release);
  allPending_.fetch_add(change, std::memory_order_release);
}

CallbackOrder::EntryPtr CallbackOrder::append(std::function<void()> begin) {
  auto entry = std::make_shared<Entry>();
  entry->isCollective = begin != nullptr;
  entry->begin = std::move(begin);
  entries_.push_back(entry);
  count(1);
  return entry;
}

// Opens a part for each future up to `last`, which were asked for earlier, if callbacks have been
// added to it, or may have been. isCertain: `last` gets a part in any case.
void CallbackOrder::addParts(const Turn& last, bool isCertain) {
  for (const TurnPtr& turn : turns_) {
    const bool isLast = turn.get() == &last;
    if (!turn->isOpen &&
        (turn->isTaken || (isLast && isCertain) || callbacksOf(*turn->future) > turn->seen)) {
      turn->parts.push_back(append(nullptr));
      turn->isOpen = true;
    }
    if (isLast) return;
  }
}

// Ends the part: callbacks added from now on come after the collective that is called now.
void CallbackOrder::mark(const TurnPtr& turn) {
  const size_t before = callbacksOf(*turn->future);
  marking = turn.get();
  turn->future->addCallback([turn](Future&) {
    if (marking == turn.get()) {
      marking = nullptr;  // the future is complete: callbacks added from now on run in then()
    } else {
      turn->order->leavePart(*turn);
    }
  });
  if (std::exchange(marking, nullptr) == nullptr) return;
  turn->seen = before + 1;
  turn->isOpen = false;
}

// ---- on the thread that completes a future

void CallbackOrder::enter(Turn& turn) {
  MutexLock lock(mutex_);
  awaitPart(turn, lock);
}

void CallbackOrder::leavePart(Turn& turn) {
  running(root_ ? root_.get() : this)->beneath->awaitIdle();
  MutexLock lock(mutex_);
  turn.parts.front()->isOver = true;
  turn.parts.pop_front();
  advance(lock);
  awaitPart(turn, lock);
}

// Callbacks may have been added since the last check.
void CallbackOrder::awaitPart(Turn& turn, MutexLock& lock) {
  if (turn.parts.empty() && !entries_.empty()) addParts(turn, /*isCertain=*/true);
  while (!turn.parts.empty() && entries_.front() != turn.parts.front()) {
    changed_.wait(lock.native());
  }
}

void CallbackOrder::complete(const TurnPtr& turn) {
  const Ptr root = root_ ? root_ : shared_from_this();
  Running inside{root.get(), std::make_shared<CallbackOrder>(root, depth_ + 1), innermost};
  innermost = &inside;
  turn->complete();
  turn->complete = nullptr;  // its captures are dropped without the lock
  innermost = inside.outer;
  inside.beneath->awaitIdle();
  MutexLock lock(mutex_);
  for (const EntryPtr& part : turn->parts) part->isOver = true;
  turn->parts.clear();
  std::erase(turns_, turn);
  count(-1);
  advance(lock);
}

void CallbackOrder::ready(TurnPtr turn, std::function<void()> complete) {
  if (!turn) return CallbackPool::get().post(std::move(complete));
  const Ptr order = turn->order;
  {
    const MutexLock lock(order->mutex_);
    turn->complete = std::move(complete);
    order->ready_.push_back(std::move(turn));
    if (!order->isToBeServed()) return;
  }
  CallbackPool::get().post([order] { order->serve(); });
}

// Returns true if the caller must find a thread for serve().
bool CallbackOrder::isToBeServed() { return !ready_.empty() && !std::exchange(isAttended_, true); }

// Returns the first ready future whose place is reached, or null.
CallbackOrder::TurnPtr CallbackOrder::takeReady() {
  for (auto each = ready_.begin(); each != ready_.end(); ++each) {
    const TurnPtr turn = *each;
    addParts(*turn, /*isCertain=*/false);
    const bool hasCome =
        turn->parts.empty() ? entries_.empty() : entries_.front() == turn->parts.front();
    if (!hasCome) continue;
    ready_.erase(each);
    return turn;
  }
  return nullptr;
}

void CallbackOrder::serve() {
  MutexLock lock(mutex_);
  while (!ready_.empty()) {
    TurnPtr turn = takeReady();
    if (!turn) {
      if (changed_.wait_for(lock.native(), kPatience) != std::cv_status::timeout) continue;
      turn = ready_.front();
      ready_.pop_front();
    }
    turn->isTaken = true;
    // Another thread serves the others; if the pool has none, this thread does, afterwards.
    isAttended_ = false;
    const bool areOthers = isToBeServed();
    lock.unlock();
    std::function<void()> others = [self = shared_from_this()] { self->serve(); };
    const bool isFirst = areOthers && !CallbackPool::get().tryPost(others);
    complete(turn);
    turn.reset();
    lock.lock();
    if (!isFirst && std::exchange(isAttended_, true)) return;
  }
  isAttended_ = false;
}

// ---- collectives

bool CallbackOrder::isBlockedNow() {
  for (const TurnPtr& turn : turns_) {
    if (!turn->isOpen && !turn->isTaken && callbacksOf(*turn->future) <= turn->seen) continue;
    addParts(*turn, /*isCertain=*/false);
    mark(turn);
  }
  return !entries_.empty();
}

bool CallbackOrder::isBlocked() {
  const MutexLock lock(mutex_);
  return isBlockedNow();
}

CallbackOrder::EntryPtr CallbackOrder::hold(std::function<void()> begin) {
  {
    const MutexLock lock(mutex_);
    if (isBlockedNow()) return append(std::move(begin));
  }
  begin();
  return nullptr;
}

void CallbackOrder::beginAll(c10::ArrayRef<EntryPtr> held,
                             MutexLock& lock) NO_THREAD_SAFETY_ANALYSIS {
  isBeginning_ = true;
  lock.unlock();
  for (const EntryPtr& each : held) {
    each->begin();
    each->begin = nullptr;
  }
  lock.lock();
  isBeginning_ = false;
  for (const EntryPtr& each : held) each->isOver = true;
}

void CallbackOrder::advance(MutexLock& lock) NO_THREAD_SAFETY_ANALYSIS {
  while (!isBeginning_ && !entries_.empty()) {
    const EntryPtr first = entries_.front();
    if (!first->isCollective && !first->isOver) break;
    if (first->isCollective) beginAll(first, lock);
    entries_.pop_front();
    count(-1);
  }
  changed_.notify_all();
}

void CallbackOrder::beginIfInside(const EntryPtr& entry) {
  const Running* const inside = running(root_ ? root_.get() : this);
  if (inside == nullptr || inside->beneath.get() == this) return;
  MutexLock lock(mutex_);
  while (isBeginning_) changed_.wait(lock.native());
  const auto end = std::find(entries_.begin(), entries_.end(), entry);
  if (end == entries_.end()) return;  // it has begun
  const auto parts = std::stable_partition(entries_.begin(), end + 1,
                                           [](const EntryPtr& each) { return each->isCollective; });
  const std::vector<EntryPtr> begun(entries_.begin(), parts);
  entries_.erase(entries_.begin(), parts);
  count(-static_cast<int>(begun.size()));
  beginAll(begun, lock);
  advance(lock);
}

CallbackOrder::Outcome CallbackOrder::await(const EntryPtr& entry, Deadline deadline,
                                            bool (*isInterrupted)()) {
  MutexLock lock(mutex_);
  const auto isOver = [&]() REQUIRES(mutex_) { return entry->isOver; };
  while (!changed_.wait_for(lock.native(), kWaitTick, isOver)) {
    lock.unlock();
    if (deadline.expired()) return Outcome::kTimeout;
    if (isInterrupted && isInterrupted()) return Outcome::kInterrupted;
    lock.lock();
  }
  return Outcome::kIdle;
}

CallbackOrder::Outcome CallbackOrder::pass(Deadline deadline, bool (*isInterrupted)()) {
  MutexLock lock(mutex_);
  if (!isBlockedNow()) return Outcome::kIdle;
  const EntryPtr own = append([] {});
  lock.unlock();
  const Outcome outcome = await(own, deadline, isInterrupted);
  if (outcome == Outcome::kIdle) return outcome;
  lock.lock();
  while (isBeginning_) changed_.wait(lock.native());
  if (own->isOver) return Outcome::kIdle;
  std::erase(entries_, own);
  count(-1);
  advance(lock);
  return outcome;
}

void CallbackOrder::awaitIdle() {
  MutexLock lock(mutex_);
  while (!turns_.empty() || !entries_.empty()) changed_.wait(lock.native());
}

}  // namespace mycoll
