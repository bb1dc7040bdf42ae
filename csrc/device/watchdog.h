// Watchdog: the process's one thread that watches operations on devices: it detects their ends,
// deadlines and errors, and advances the host path. It never uses users' tensors, and never takes
// the GIL.
//
// Thread contract: [any thread]. The thread holds no lock while it queries a device. If a driver
// blocks forever, this thread does, too, and no longer detects the deadlines of device operations.
// Lifetime: see perProcess(). The thread starts with the first group that is busy, and sleeps while
// none is; a forked process starts its own. It queries devices at least every 20 ms while there is
// something to watch, and for a second after that, so that the next operation need not wake it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <vector>

#include "base/mutex.h"

namespace mycoll {

class DeviceGroup;

class Watchdog {
 public:
  static Watchdog& get();

  // Watches the group from now on, until it is idle. isUrgent: wakes the thread.
  void add(std::shared_ptr<DeviceGroup> group, bool isUrgent);
  // Makes the thread poll its groups now.
  void wake();
  // The process ends: existing groups do not call NCCL any more. To end NCCL, all ranks of the host
  // would have to take part, and the others may be busy for minutes.
  void beginExit() { isExiting_.store(true); }
  bool isExiting() const { return isExiting_.load(); }
  // When this has returned, devices are not queried any more.
  void stop();

 private:
  void run();

  Mutex mutex_;
  std::condition_variable woken_;
  std::vector<std::shared_ptr<DeviceGroup>> groups_ GUARDED_BY(mutex_);  // busy ones
  bool isWoken_ GUARDED_BY(mutex_) = false;
  bool isRunning_ GUARDED_BY(mutex_) = false;
  bool isAsleep_ GUARDED_BY(mutex_) = false;   // until it is woken
  bool isPolling_ GUARDED_BY(mutex_) = false;  // groups, without the mutex
  bool isStopped_ GUARDED_BY(mutex_) = false;
  std::condition_variable hasPolled_;
  std::atomic<bool> isExiting_{false};
};

}  // namespace mycoll
