#include "backend/callback_pool.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "base/per_process.h"
#include "base/signals.h"

namespace mycoll {

struct CallbackPool::State {
  std::mutex mutex;
  std::condition_variable posted;
  std::condition_variable ended;
  std::deque<std::function<void()>> tasks;
  size_t idle = 0;
  size_t threads = 0;
  bool draining = false;

  void runTasks(std::unique_lock<std::mutex>& lock);
  void serve();
};

namespace {
thread_local bool isPoolThread = false;
}  // namespace

bool CallbackPool::isHere() { return isPoolThread; }

CallbackPool& CallbackPool::get() {
  static CallbackPool pool;
  return pool;
}

CallbackPool::State& CallbackPool::state() { return perProcess<State>(); }

void CallbackPool::State::runTasks(std::unique_lock<std::mutex>& lock) {
  while (!tasks.empty()) {
    {
      std::function<void()> next = std::move(tasks.front());
      tasks.pop_front();
      lock.unlock();
      next();
    }  // what the task held is dropped here, without the lock
    lock.lock();
  }
}

void CallbackPool::State::serve() {
  pthread_setname_np(pthread_self(), "mycoll-callback");
  isPoolThread = true;
  std::unique_lock<std::mutex> lock(mutex);
  while (true) {
    runTasks(lock);
    if (draining) break;
    ++idle;
    posted.wait_for(lock, std::chrono::seconds(1), [this] { return !tasks.empty() || draining; });
    --idle;
    if (tasks.empty()) break;
  }
  --threads;
  ended.notify_all();
}

void CallbackPool::post(std::function<void()> task) {
  State& pool = state();
  std::unique_lock<std::mutex> lock(pool.mutex);
  pool.tasks.push_back(std::move(task));
  if (pool.idle >= pool.tasks.size()) {
    lock.unlock();
    pool.posted.notify_one();
    return;
  }
  ++pool.threads;
  lock.unlock();
  try {
    const SignalsBlocked blocked;
    std::thread([&pool] { pool.serve(); }).detach();
  } catch (const std::system_error&) {
    lock.lock();
    --pool.threads;
    // Those that are there come to it in a while. Where there are none this one has to do it:
    // whoever waits for a future would wait for ever.
    if (pool.threads == 0) pool.runTasks(lock);
    pool.ended.notify_all();
  }
}

bool CallbackPool::drain(std::chrono::milliseconds timeout) {
  State& pool = state();
  std::unique_lock<std::mutex> lock(pool.mutex);
  pool.draining = true;
  pool.posted.notify_all();
  const bool isEmpty = pool.ended.wait_for(lock, timeout, [&pool] { return pool.threads == 0; });
  pool.draining = false;
  return isEmpty;
}

}  // namespace mycoll
