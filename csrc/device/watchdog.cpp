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

void Watchdog::stop() {
  MutexLock lock(mutex_);
  isStopped_ = true;
  hasPolled_.wait_for(lock.native(), std::chrono::seconds(1),
                      [this]() REQUIRES(mutex_) { return !isPolling_; });
}

void Watchdog::run() {
  auto pause = kLeast;
  int idle = 0;  // intervals without anything to watch
  MutexLock lock(mutex_);
  for (;;) {
    isWoken_ = false;
    const bool isIdle = groups_.empty() || isStopped_;
    idle = isIdle ? idle + 1 : 0;
    DeviceGroup::Progress all;
    if (!isIdle) {
      std::vector<std::shared_ptr<DeviceGroup>> round = groups_;
      isPolling_ = true;
      lock.unlock();
      std::vector<DeviceGroup*> done;
      for (const auto& group : round) {
        const DeviceGroup::Progress seen = group->poll();
        all.hasMoved |= seen.hasMoved;
        all.wantsSoon |= seen.wantsSoon;
        if (!seen.isBusy) done.push_back(group.get());
      }
      lock.lock();
      for (DeviceGroup* group : done) {
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
    }
    pause = isIdle || all.hasMoved ? kLeast : std::min(pause * 2, kMost);
    const auto isWoken = [this]() REQUIRES(mutex_) { return isWoken_; };
    isAsleep_ = idle > kLinger;
    if (isAsleep_) {
      woken_.wait(lock.native(), isWoken);
    } else {
      woken_.wait_for(lock.native(), isIdle ? kMost : all.wantsSoon ? kSoon : pause, isWoken);
    }
    isAsleep_ = false;
  }
}

}  // namespace mycoll
