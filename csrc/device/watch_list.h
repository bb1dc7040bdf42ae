// WatchList: a group's operations that the watchdog watches until their end, and the memory of
// those that are over until it can be released.
//
// Thread contract: [any thread]; the functions under "for the watchdog" are for one thread at a
// time. Devices are queried without the mutex, which every call of the user takes. Lifetime: a part
// of its DeviceGroup.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "device/operation.h"
#include "engine/communicator.h"

namespace mycoll {

// A message through NCCL, or a batch of them. They have their own deadline, as no group of the
// engine watches them.
struct WatchedMessages {
  bool isOfPair = false;  // it uses the communicator of a pair of ranks
  std::vector<Operation> each;
  std::vector<OpRecord> records;
  uint32_t calledAt = 0;  // place in the program; 0: unknown
  std::chrono::milliseconds timeout{0};
  Deadline deadline;

  std::string place() const;  // "train.py:57 in step"; empty: unknown
};

using OnOver = std::function<void(const Status&)>;

// An operation that is watched.
struct Watched {
  DeviceOperationPtr operation;
  // A collective of NCCL: its operation in the control group. Null: a message, or the host path.
  std::shared_ptr<CollectiveOp> collective{};
  bool isMessage = false;  // or a batch of them
  // Messages on NCCL only.
  std::shared_ptr<const WatchedMessages> messages{};
  // Called once, on the watchdog (it must not block), when the operation is over. May be null.
  std::shared_ptr<OnOver> onOver{};

  std::string place() const;  // as above
};

class WatchList {
 public:
  // Returns false if others were watched already.
  bool add(Watched watched);
  // The group uses this device, or is bound to it.
  void addDevice(c10::Device device);

  bool isBusy() const;
  // Devices have not passed all collectives, and all messages for which a stream waits.
  bool hasUndrained() const;
  // The group's communicator has operations outstanding.
  bool hasOfGroup() const;
  std::vector<c10::Device> devices() const;
  // For a barrier: the collectives that are not on a stream of a channel, as those of the host
  // path. (The other rank of a message may take part after a barrier.)
  std::vector<DeviceOperationPtr> besideChannels() const;

  // --- for the watchdog

  // Removes the operations that are over, finishes their records and calls onOver. Returns false if
  // there are none. onDeviceError: receives an error of a device before the engine is notified of
  // the failure.
  using OnDeviceError = std::function<void(const Status&)>;
  bool takeOver(const OnDeviceError& onDeviceError);
  // Returns the first message that is past its deadline, or null.
  std::shared_ptr<const WatchedMessages> late() const;
  // Fails the operations that are not over, each with its own text if the engine has one. An
  // operation is lost if the program already relies on its results. Only operations on NCCL can be:
  // on the host path, the data has arrived before it is enqueued.
  struct Failed {
    bool isAny = false;
    std::optional<Watched> lost;  // the one on which the program has relied last
  };
  Failed failAll(const Status& cause);
  // Releases the memory of operations that are over, when devices no longer use it. Returns false
  // if there is more.
  bool releaseMemory();

 private:
  void addDeviceLocked(c10::Device device) REQUIRES(mutex_);
  // Takes mutex_, which guards the list. Returns the number of operations that were over.
  size_t takeOverOf(std::deque<Watched>* list, bool isInOrder, const OnDeviceError& onDeviceError);
  template <typename Fn>
  void forEach(Fn fn) const REQUIRES(mutex_) {
    for (const Watched& each : collectives_) fn(each);
    for (const Watched& each : others_) fn(each);
  }

  mutable Mutex mutex_;
  // NCCL's collectives, oldest first, which end one after another: thousands if a program is far
  // ahead of its device.
  std::deque<Watched> collectives_ GUARDED_BY(mutex_);
  // All other operations, and once more those for whose end a function waits.
  std::deque<Watched> others_ GUARDED_BY(mutex_);
  std::vector<c10::Device> devices_ GUARDED_BY(mutex_);
  // [watchdog] Over, but after a failure the device may still use their memory.
  std::vector<DeviceOperationPtr> lingering_;
};

}  // namespace mycoll
