#include "device/watchdog.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
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

struct Watchdog::Shared {
  Mutex mutex;
  std::condition_variable woken;
  std::vector<std::shared_ptr<DeviceGroup>> groups GUARDED_BY(mutex);  // busy ones
  bool isWoken GUARDED_BY(mutex) = false;
  bool isRunning GUARDED_BY(mutex) = false;
  bool isAsleep GUARDED_BY(mutex) = false;   // until it is woken
  bool isPolling GUARDED_BY(mutex) = false;  // groups, without the mutex
  bool isStopped GUARDED_BY(mutex) = false;
  std::condition_variable hasPolled;
  std::atomic<bool> isExiting{false};

  void run();
  // Waits until there is something to watch. The lock locks `mutex`.
  void awaitGroups(MutexLock& lock) REQUIRES(mutex);
};

Watchdog& Watchdog::get() {
  static Watchdog watchdog;
  return watchdog;
}

Watchdog::Shared& Watchdog::shared() { return perProcess<Shared>(); }

void Watchdog::add(std::shared_ptr<DeviceGroup> group, bool isUrgent) {
  Shared& all = shared();
  MutexLock lock(all.mutex);
  if (std::find(all.groups.begin(), all.groups.end(), group) == all.groups.end()) {
    all.groups.push_back(std::move(group));
  }
  if (isUrgent || all.isAsleep) {
    all.isWoken = true;
    all.woken.notify_one();
  }
  if (all.isRunning) return;
  const SignalsBlocked blocked;
  std::thread([&all] {
    pthread_setname_np(pthread_self(), "mycoll-watchdog");
    all.run();
  }).detach();
  all.isRunning = true;  // if the thread cannot start, the next call tries again
}

void Watchdog::wake() {
  Shared& all = shared();
  MutexLock lock(all.mutex);
  all.isWoken = true;
  all.woken.notify_one();
}

void Watchdog::beginExit() { shared().isExiting.store(true); }

bool Watchdog::isExiting() { return shared().isExiting.load(); }

void Watchdog::stop() {
  Shared& all = shared();
  MutexLock lock(all.mutex);
  all.isStopped = true;
  all.hasPolled.wait_for(lock.native(), std::chrono::seconds(1),
                         [&all]() REQUIRES(all.mutex) { return !all.isPolling; });
}

void Watchdog::Shared::awaitGroups(MutexLock& lock) {
  const auto isThere = [this]() REQUIRES(mutex) {
    const bool isBusy = !groups.empty() && !isStopped;
    return isWoken || isBusy;
  };
  for (int round = 0; round < kLinger && !isThere(); ++round) {
    woken.wait_for(lock.native(), kMost, isThere);
  }
  isAsleep = true;
  woken.wait(lock.native(), isThere);
  isAsleep = false;
}

void Watchdog::Shared::run() {
  auto pause = kLeast;
  MutexLock lock(mutex);
  for (;;) {
    if (groups.empty() || isStopped) {
      awaitGroups(lock);
      pause = kLeast;
    }
    isWoken = false;
    if (isStopped) continue;
    std::vector<std::shared_ptr<DeviceGroup>> round = groups;
    isPolling = true;
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
        std::erase_if(groups, [&](const auto& entry) { return entry.get() == group; });
      }
    }
    lock.unlock();
    round.clear();  // may drop the last references
    lock.lock();
    isPolling = false;
    hasPolled.notify_all();
    pause = all.hasMoved ? kLeast : std::min(pause * 2, kMost);
    if (groups.empty()) continue;
    woken.wait_for(lock.native(), all.wantsSoon ? kSoon : pause,
                   [this]() REQUIRES(mutex) { return isWoken; });
  }
}

}  // namespace mycoll
