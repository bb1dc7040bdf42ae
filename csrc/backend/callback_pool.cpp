#include "backend/callback_pool.h"

#include <condition_variable>
#include <deque>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "backend/errors.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/os.h"

namespace mycoll {

struct CallbackPool::Workers {
  Mutex mutex;
  std::condition_variable posted;
  std::condition_variable ended;
  std::deque<std::function<void()>> tasks GUARDED_BY(mutex);
  std::vector<std::shared_ptr<void>> dropped GUARDED_BY(mutex);
  bool isDropping GUARDED_BY(mutex) = false;  // a task is posted that empties `dropped`
  size_t idle GUARDED_BY(mutex) = 0;
  size_t threads GUARDED_BY(mutex) = 0;
  bool draining GUARDED_BY(mutex) = false;

  // Releases the lock, which locks `mutex`, while a task runs.
  void runTasks(MutexLock& lock) REQUIRES(mutex);
  void serve();
  void dropAll();
};

namespace {
thread_local bool isPoolThread = false;
}  // namespace

bool CallbackPool::isHere() { return isPoolThread; }

void CallbacksDone::set() {
  MutexLock lock(mutex_);
  isSet_ = true;
  changed_.notify_all();
}

void CallbacksDone::await() {
  if (CallbackPool::isHere()) return;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  MutexLock lock(mutex_);
  while (!isSet_ && changed_.wait_until(lock.native(), end) != std::cv_status::timeout) {
  }
}

void runCallbacks(c10d::OpType type, const std::function<void()>& complete) {
  try {
    complete();
  } catch (...) {
    MYCOLL_LOG_AT(LogLevel::kFailure, "a callback of a future has failed after %s: %s",
                  c10d::opTypeToString(type).c_str(), describeException().c_str());
  }
}

CallbackPool& CallbackPool::get() {
  static CallbackPool pool;
  return pool;
}

CallbackPool::Workers& CallbackPool::workers() { return perProcess<Workers>(); }

void CallbackPool::Workers::runTasks(MutexLock& lock) NO_THREAD_SAFETY_ANALYSIS {
  while (!tasks.empty()) {
    {
      std::function<void()> next = std::move(tasks.front());
      tasks.pop_front();
      lock.unlock();
      next();
    }  // the task's captures are dropped here, without the lock
    lock.lock();
  }
}

void CallbackPool::Workers::serve() {
  pthread_setname_np(pthread_self(), "mycoll-callback");
  isPoolThread = true;
  MutexLock lock(mutex);
  while (true) {
    runTasks(lock);
    if (draining) break;
    ++idle;
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    while (tasks.empty() && !draining &&
           posted.wait_until(lock.native(), end) != std::cv_status::timeout) {
    }
    --idle;
    if (tasks.empty()) break;
  }
  --threads;
  ended.notify_all();
}

void CallbackPool::post(std::function<void()> task) {
  // If there is no thread for the task, this one must run it: otherwise a thread that waits for a
  // future would wait forever.
  if (!tryPost(task)) task();
}

bool CallbackPool::tryPost(std::function<void()>& task) {
  Workers& pool = workers();
  MutexLock lock(pool.mutex);
  if (pool.idle <= pool.tasks.size()) {
    try {
      const SignalsBlocked blocked;
      std::thread([&pool] { pool.serve(); }).detach();
      ++pool.threads;
    } catch (const std::system_error&) {
      if (pool.threads == 0) return false;
      // An existing thread will run it later.
    }
  }
  pool.tasks.push_back(std::move(task));
  lock.unlock();
  pool.posted.notify_one();
  return true;
}

void CallbackPool::Workers::dropAll() {
  MutexLock lock(mutex);
  while (!dropped.empty()) {
    std::vector<std::shared_ptr<void>> last = std::exchange(dropped, {});
    lock.unlock();
    last.clear();
    lock.lock();
  }
  isDropping = false;
}

namespace {
thread_local DropScope* dropScope = nullptr;
}  // namespace

DropScope::DropScope() : outer_(std::exchange(dropScope, this)) {}
DropScope::~DropScope() { dropScope = outer_; }

void CallbackPool::drop(std::shared_ptr<void> last) {
  if (dropScope != nullptr) return dropScope->dropped_.push_back(std::move(last));
  Workers& pool = workers();
  {
    MutexLock lock(pool.mutex);
    pool.dropped.push_back(std::move(last));
    if (std::exchange(pool.isDropping, true)) return;
  }
  try {
    post([&pool] { pool.dropAll(); });
  } catch (const std::bad_alloc&) {
    MutexLock lock(pool.mutex);
    pool.isDropping = false;  // the next call posts the task for all of them
  }
}

bool CallbackPool::drain(std::chrono::milliseconds timeout) {
  Workers& pool = workers();
  MutexLock lock(pool.mutex);
  pool.draining = true;
  pool.posted.notify_all();
  const auto end = std::chrono::steady_clock::now() + timeout;
  while (pool.threads != 0 &&
         pool.ended.wait_until(lock.native(), end) != std::cv_status::timeout) {
  }
  pool.draining = false;
  return pool.threads == 0;
}

}  // namespace mycoll
