#include "backend/callback_order.h"

#include <utility>

#include "backend/callback_pool.h"

namespace mycoll {
namespace {

using OrderPtr = std::shared_ptr<CallbackOrder>;

// How often whoever waits looks for signals.
constexpr std::chrono::milliseconds kTick(50);

// The callbacks that this thread is inside of, innermost first.
struct Running {
  const CallbackOrder* root;
  OrderPtr beneath;
  Running* outer;
};
thread_local Running* innermost = nullptr;

}  // namespace

OrderPtr CallbackOrder::here() {
  for (const Running* running = innermost; running != nullptr; running = running->outer) {
    if (running->root == root_) return running->beneath;
  }
  return shared_from_this();
}

CallbackOrder::TurnPtr CallbackOrder::add() {
  auto turn = std::make_shared<Turn>();
  turn->order = shared_from_this();
  const MutexLock lock(mutex_);
  turns_.push_back(turn);
  count(1);
  return turn;
}

void CallbackOrder::ready(const TurnPtr& turn, std::function<void()> complete) {
  const OrderPtr order = turn->order;
  {
    const MutexLock lock(order->mutex_);
    turn->complete = std::move(complete);
    if (order->isRunning_ || order->turns_.front() != turn) return;
    order->isRunning_ = true;
  }
  CallbackPool::get().post([order] { order->run(); });
}

void CallbackOrder::hold(std::function<void()> begin) {
  {
    const MutexLock lock(mutex_);
    if (!turns_.empty()) {
      auto turn = std::make_shared<Turn>();
      turn->complete = std::move(begin);
      turn->hasCallbacks = false;
      turns_.push_back(std::move(turn));
      count(1);
      return;
    }
  }
  begin();
}

void CallbackOrder::count(int change) {
  pending_.fetch_add(change, std::memory_order_release);
  allPending_.fetch_add(change, std::memory_order_release);
}

void CallbackOrder::run() {
  MutexLock lock(mutex_);
  while (!turns_.empty() && turns_.front()->complete) {
    const TurnPtr turn = turns_.front();
    std::function<void()> complete = std::move(turn->complete);
    lock.unlock();
    if (turn->hasCallbacks) {
      Running running{root_, std::make_shared<CallbackOrder>(root_), innermost};
      innermost = &running;
      complete();
      complete = nullptr;  // what it held is dropped without the lock
      innermost = running.outer;
      running.beneath->wait(Deadline::never(), nullptr);
    } else {
      complete();
      complete = nullptr;
    }
    lock.lock();
    turns_.pop_front();
    count(-1);
    changed_.notify_all();
  }
  isRunning_ = false;
}

CallbackOrder::Outcome CallbackOrder::wait(Deadline deadline, bool (*isInterrupted)()) {
  MutexLock lock(mutex_);
  while (!turns_.empty()) {
    changed_.wait_for(lock.native(), kTick);
    if (turns_.empty()) break;
    if (deadline.expired()) return Outcome::kTimeout;
    if (isInterrupted == nullptr) continue;
    lock.unlock();
    if (isInterrupted()) return Outcome::kInterrupted;
    lock.lock();
  }
  return Outcome::kIdle;
}

}  // namespace mycoll
