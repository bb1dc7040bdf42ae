#include "device/watchdog.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "base/os.h"
#include "device/device_group.h"

namespace mycoll {
namespace {

// The intervals at which devices are queried: kSoon if the CPU must continue an operation;
// otherwise from kLeast to kMost, doubled while nothing ends.
constexpr auto kSoon = std::chrono::microseconds(100);
constexpr auto kLeast = std::chrono::microseconds(1'000);
constexpr auto kMost = std::chrono::microseconds(20'000);
// How many intervals of kMost the thread waits without anything to watch, before it sleeps.
constexpr int kLinger = 50;

}  // namespace

Watchdog& Watchdog::get() { return perProcess<Watchdog>(); }

void Watchdog::add(std::shared_ptr<DeviceGroup> group, bool isUrgent) {
  MutexLock lock(mutex_);
  if (std::find(groups_.begin(), groups_.end(), group) == groups_.end()) {
    groups_.push_back(std::move(group));
  }
  if (isUrgent || isAsleep_) {
    isWoken_ = true;
    woken_.notify_one();
  }
  if (isRunning_) return;
  const SignalsBlocked blocked;
  std::thread([this] {
    pthread_setname_np(pthread_self(), "mycoll-watchdog");
    run();
  }).detach();
  isRunning_ = true;  // if the thread cannot start, the next call tries again
}

void Watchdog::wake() {
  MutexLock lock(mutex_);
  isWoken_ = true;
  woken_.notify_one();
}

void Watchdog::beginExit() { isExiting_.store(true); }

bool Watchdog::isExiting() { return isExiting_.load(); }

void Watchdog::stop() {
  MutexLock lock(mutex_);
  isStopped_ = true;
  hasPolled_.wait_for(lock.native(), std::chrono::seconds(1),
                      [this]() REQUIRES(mutex_) { return !isPolling_; });
}

void Watchdog::awaitGroups(MutexLock& lock) {
  const auto isThere = [this]() REQUIRES(mutex_) {
    const bool isBusy = !groups_.empty() && !isStopped_;
    return isWoken_ || isBusy;
  };
  for (int round = 0; round < kLinger && !isThere(); ++round) {
    woken_.wait_for(lock.native(), kMost, isThere);
  }
  isAsleep_ = true;
  woken_.wait(lock.native(), isThere);
  isAsleep_ = false;
}

void Watchdog::run() {
  auto pause = kLeast;
  MutexLock lock(mutex_);
  for (;;) {
    if (groups_.empty() || isStopped_) {
      awaitGroups(lock);
      pause = kLeast;
    }
    isWoken_ = false;
    if (isStopped_) continue;
    std::vector<std::shared_ptr<DeviceGroup>> round = groups_;
    isPolling_ = true;
    lock.unlock();
    DeviceGroup::Progress all;
    std::vector<DeviceGroup*> idle;
    for (const auto& group : round) {
      const DeviceGroup::Progress seen = group->poll();
      all.hasMoved |= seen.hasMoved;
      all.wantsSoon |= seen.wantsSoon;
      if (!seen.isBusy) idle.push_back(group.get());
    }
    lock.lock();
    for (DeviceGroup* group : idle) {
      // It may have become busy since its poll: the mutex orders add() and this check.
      if (!group->needsWatch()) {
        std::erase_if(groups_, [&](const auto& entry) { return entry.get() == group; });
      }
    }
    lock.unlock();
    round.clear();  // may drop the last references
    lock.lock();
    isPolling_ = false;
    hasPolled_.notify_all();
    pause = all.hasMoved ? kLeast : std::min(pause * 2, kMost);
    if (groups_.empty()) continue;
    woken_.wait_for(lock.native(), all.wantsSoon ? kSoon : pause,
                    [this]() REQUIRES(mutex_) { return isWoken_; });
  }
}

}  // namespace mycoll
