// The process's one thread that watches operations on devices: it sees their ends, deadlines and
// errors, and moves the host path on. It never touches users' tensors and takes no GIL.
//
// Threads: every function [any thread]. Nothing is locked while it asks a device. Where a driver
// never answers, this thread hangs with it, and deadlines of device operations are not seen any
// more. Lifetimes: never destroyed; the thread starts with the first group that is busy, and sleeps
// while none is. A process that was forked starts its own. It looks at devices at least every 20 ms
// while there is something to watch, and for a while after, so that what comes then need not wake
// it.
#pragma once

#include <memory>

namespace mycoll {

class DeviceGroup;

class Watchdog {
 public:
  static Watchdog& get();

  // The group has something to watch from now on. isUrgent: look at once.
  void add(std::shared_ptr<DeviceGroup> group, bool isUrgent);
  // There is something to look at now.
  void wake();
  // The process ends: groups that still live leave NCCL alone from here on. Its ending is a call of
  // all ranks of the host, of which the others may be busy with something else for minutes.
  void beginExit();
  bool isExiting();
  // Devices are not asked any more when this has returned.
  void stop();

 private:
  Watchdog() = default;
  struct Shared;
  static Shared& shared();
};

}  // namespace mycoll
