// The process's one thread that follows operations on devices: it sees their ends, deadlines and
// errors, and moves the host road on. It never touches users' tensors and takes no GIL.
//
// Thread contract: [any thread].
// Nothing is locked while it asks a device: where that does not come back, the engine's thread ends
// the groups (DeviceGroup::standIn()).
// Lifetimes: never destroyed; the thread starts with the first group that is busy, and sleeps while
// none is. A process that was forked starts its own. It looks at devices at least every 20 ms while
// there is something to follow, and for a while after, so that what comes then need not wake it.
#pragma once

#include <memory>

namespace mycoll {

class DeviceGroup;

class Watchdog {
 public:
  static Watchdog& get();

  // The group has something to follow from now on. isUrgent: look at once.
  void add(std::shared_ptr<DeviceGroup> group, bool isUrgent);
  // There is something to look at now.
  void wake();
  // The process ends: devices are not asked any more when this has returned.
  void stop();

 private:
  Watchdog() = default;
  struct State;
  static State& state();
};

}  // namespace mycoll
