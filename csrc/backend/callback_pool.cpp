#include "backend/callback_pool.h"

#include <new>
#include <system_error>
#include <thread>
#include <utility>

#include "backend/errors.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/os.h"

namespace mycoll {
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

CallbackPool& CallbackPool::get() { return perProcess<CallbackPool>(); }

void CallbackPool::runTasks(MutexLock& lock) NO_THREAD_SAFETY_ANALYSIS {
  while (!tasks_.empty()) {
    {
      std::function<void()> next = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      next();
    }  // the task's captures are dropped here, without the lock
    lock.lock();
  }
}

void CallbackPool::serve() {
  pthread_setname_np(pthread_self(), "mycoll-callback");
  isPoolThread = true;
  MutexLock lock(mutex_);
  while (true) {
    runTasks(lock);
    if (isDraining_) break;
    ++idle_;
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    while (tasks_.empty() && !isDraining_ &&
           posted_.wait_until(lock.native(), end) != std::cv_status::timeout) {
    }
    --idle_;
    if (tasks_.empty()) break;
  }
  --threads_;
  ended_.notify_all();
}

void CallbackPool::post(std::function<void()> task) {
  // If there is no thread for the task, this one must run it: otherwise a thread that waits for a
  // future would wait forever.
  if (!tryPost(task)) task();
}

bool CallbackPool::tryPost(std::function<void()>& task) {
  MutexLock lock(mutex_);
  if (idle_ <= tasks_.size()) {
    try {
      const SignalsBlocked blocked;
      std::thread([this] { serve(); }).detach();
      ++threads_;
    } catch (const std::system_error&) {
      if (threads_ == 0) return false;
      // An existing thread will run it later.
    }
  }
  tasks_.push_back(std::move(task));
  lock.unlock();
  posted_.notify_one();
  return true;
}

void CallbackPool::dropAll() {
  MutexLock lock(mutex_);
  while (!dropped_.empty()) {
    std::vector<std::shared_ptr<void>> last = std::exchange(dropped_, {});
    lock.unlock();
    last.clear();
    lock.lock();
  }
  isDropping_ = false;
}

namespace {
thread_local DropScope* dropScope = nullptr;
}  // namespace

DropScope::DropScope() : outer_(std::exchange(dropScope, this)) {}
DropScope::~DropScope() { dropScope = outer_; }

void CallbackPool::drop(std::shared_ptr<void> last) {
  if (dropScope != nullptr) return dropScope->dropped_.push_back(std::move(last));
  {
    MutexLock lock(mutex_);
    dropped_.push_back(std::move(last));
    if (std::exchange(isDropping_, true)) return;
  }
  try {
    post([this] { dropAll(); });
  } catch (const std::bad_alloc&) {
    MutexLock lock(mutex_);
    isDropping_ = false;  // the next call posts the task for all of them
  }
}

bool CallbackPool::drain(std::chrono::milliseconds timeout) {
  MutexLock lock(mutex_);
  isDraining_ = true;
  posted_.notify_all();
  const auto end = std::chrono::steady_clock::now() + timeout;
  while (threads_ != 0 && ended_.wait_until(lock.native(), end) != std::cv_status::timeout) {
  }
  isDraining_ = false;
  return threads_ == 0;
}

}  // namespace mycoll
