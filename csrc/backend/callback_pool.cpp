#include "backend/callback_pool.h"

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

namespace mycoll {

struct CallbackPool::State {
  std::mutex mutex;
  std::condition_variable posted;
  std::condition_variable ended;
  std::deque<std::function<void()>> tasks;
  size_t idle = 0;
  size_t threads = 0;
  bool draining = false;
};

CallbackPool& CallbackPool::get() {
  static CallbackPool pool;
  return pool;
}

CallbackPool::State& CallbackPool::state() {
  // Never destroyed: threads may outlive static destruction.
  static State* const kState = [] {
    // A forked child has none of the threads, and perhaps a locked mutex: it starts afresh.
    pthread_atfork(nullptr, nullptr, [] { new (&CallbackPool::state()) State; });
    return new State;
  }();
  return *kState;
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
  std::thread([&pool] {
    pthread_setname_np(pthread_self(), "mycoll-callback");
    std::unique_lock<std::mutex> own(pool.mutex);
    while (true) {
      if (pool.tasks.empty()) {
        if (pool.draining) break;
        ++pool.idle;
        pool.posted.wait_for(own, std::chrono::seconds(1),
                             [&pool] { return !pool.tasks.empty() || pool.draining; });
        --pool.idle;
        if (pool.tasks.empty()) break;
      }
      {
        std::function<void()> next = std::move(pool.tasks.front());
        pool.tasks.pop_front();
        own.unlock();
        next();
      }  // what the task held is dropped here, without the lock
      own.lock();
    }
    --pool.threads;
    pool.ended.notify_all();
  }).detach();
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
