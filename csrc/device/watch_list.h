// WatchList: a group's operations that the watchdog watches to their end, and the memory of those
// that are over until it can be handed back.
//
// Threads: add(), onOver() and what only reads are for [any thread]; the functions under "for the
// watchdog" are for one thread at a time. Devices are asked without the mutex, which every call of
// the user's takes. Lifetimes: a part of its DeviceGroup.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "device/operation.h"
#include "engine/communicator.h"

namespace mycoll {

// A message through NCCL, or a batch of them. They have a deadline, as no group of the engine's
// watches over them.
struct WatchedMessages {
  bool isOfPair = false;  // a communicator of its own carries it
  std::vector<Operation> each;
  std::vector<OpRecord> records;
  uint32_t calledAt = 0;  // place in the program; 0: not known
  std::chrono::milliseconds timeout{0};
  Deadline deadline;

  std::string place() const;  // "train.py:57 in step", if it is known
};

// An operation that is watched.
struct Watched {
  DeviceOperationPtr operation;
  // A collective of NCCL's: its place in the control group. Null: a message, or the host path.
  std::shared_ptr<CollectiveOp> collective{};
  bool isMessage = false;  // or a batch of them
  // Of messages on NCCL.
  std::shared_ptr<const WatchedMessages> messages{};

  std::string place() const;  // as there
};

class WatchList {
 public:
  // False: others were watched already.
  bool add(Watched watched);
  // The group uses it, or is bound to it.
  void addDevice(c10::Device device);
  // Runs fn once on the watchdog (it must not block) when the operation is over.
  void onOver(const DeviceOperationPtr& operation, std::function<void(const Status&)> fn);

  bool isBusy() const;
  // Devices have not passed all collectives, or messages that were waited for on a stream.
  bool hasUndrained() const;
  // The group's communicator has operations outstanding.
  bool hasOfGroup() const;
  std::vector<c10::Device> devices() const;
  // What is not on its stream yet. No messages: their other ends may come after a barrier.
  std::vector<DeviceOperationPtr> queued() const;

  // --- for the watchdog

  // Lets go of what is over, finishes its records and calls who waits for it. False: nothing is.
  // onDeviceError: gets what a device has said, before the engine hears that the operation failed.
  using OnDeviceError = std::function<void(const Status&)>;
  bool takeOver(const OnDeviceError& onDeviceError);
  void callAwaited();
  // The first message that is past its deadline; null: none.
  std::shared_ptr<const WatchedMessages> late() const;
  // Fails what is not over, each with its own text where the engine has one. What the program went
  // on from, as if it were over, is lost; so are results on NCCL only: what the host path has
  // enqueued has come from the other ranks by then.
  struct Failed {
    bool isAny = false;
    std::optional<Watched> lost;  // the first of those that were taken last
  };
  Failed failAll(const Status& cause);
  // Hands on the memory of what is over, once devices do not use it any more. False: there is more.
  bool releaseMemory();

  // Drops the memory that was handed on, of any group; for the user's threads, now and then.
  static void clearReleased();

 private:
  struct Awaited {
    DeviceOperationPtr operation;
    std::function<void(const Status&)> fn;
  };

  void addDeviceLocked(c10::Device device) REQUIRES(mutex_);
  using Collective = std::pair<DeviceOperationPtr, std::shared_ptr<CollectiveOp>>;

  static void markPassed(std::span<const Collective> oldest);
  void takeEndedCollectives(std::vector<Watched>* ended, const OnDeviceError& onDeviceError);
  // Takes mutex_, which guards the entries.
  template <typename Entry>
  std::vector<Entry> takeOverOf(std::vector<Entry>* entries);
  template <typename Fn>
  void forEach(Fn fn) const REQUIRES(mutex_) {
    for (const Watched& each : collectives_) fn(each);
    for (const Watched& each : others_) fn(each);
  }

  mutable Mutex mutex_;
  // Oldest first: NCCL's collectives, which end one after another, of which there are thousands
  // where a program runs ahead of its device; and all others.
  std::deque<Watched> collectives_ GUARDED_BY(mutex_);
  std::vector<Watched> others_ GUARDED_BY(mutex_);
  std::vector<Awaited> awaited_ GUARDED_BY(mutex_);
  std::vector<c10::Device> devices_ GUARDED_BY(mutex_);
  // The watchdog's own: over, but after a failure the device may still use their memory.
  std::vector<DeviceOperationPtr> lingering_;
};

}  // namespace mycoll
