// DeviceGroup: executes a group's operations on device tensors. Requests have been checked and
// translated, as for the engine, and have spans of device memory. One of two paths executes them:
//
//   NCCL   (nccl_path.cpp)  if every rank has it
//   host   (host_path.h)    through pinned memory and the CPU engine, otherwise
//
// The ranks agree on one of them: path_choice.h. The engine is responsible for order, agreement,
// deadlines and deaths: NCCL's operations are external operations of a derived group, `control`.
// The host path has another group, so that neither shares an order with the group's CPU tensors. If
// one of the three groups fails, the others do, too.
//
//   kOpen -> kClosing (waits for pending operations) -> kLeaving -> kLeft
//
// kLeaving: the other ranks know that this one leaves, and NCCL ends, which waits for them.
// Failures are still detected, except that another rank has lost this one.
//
// Thread contract: [any thread] unless marked, without the GIL. Lifetime: held by the backend, by
// works and, while it is busy, by the watchdog.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backend/device_support.h"
#include "device/channels.h"
#include "device/host_path.h"
#include "device/nccl_memory.h"
#include "device/operation.h"
#include "device/path_choice.h"
#include "device/place.h"
#include "device/watch_list.h"

namespace mycoll {

class DeviceGroup final : public DeviceSupport, public std::enable_shared_from_this<DeviceGroup> {
 public:
  // To be called on all ranks that have an accelerator; exchanges nothing.
  static std::shared_ptr<DeviceSupport> create(std::string name,
                                               std::shared_ptr<Communicator> communicator,
                                               c10::intrusive_ptr<MycollOptions> options);
  explicit DeviceGroup(DevicePlace place);
  ~DeviceGroup() override;

  int rank() const { return place_.rank; }
  const std::string& name() const { return place_.name; }

  WorkPtr launch(Requests requests, at::TensorList outputs, Extras extras) override;
  std::shared_ptr<Condition> fence() override;
  Status waitFor(Condition& fence) const override;
  // The next four do nothing on the host path.
  void connect(c10::Device device) override;
  void split(DeviceSupport* child, int color, bool isWilling) override;
  void registerMemory(c10::Device device, void* address, size_t bytes, bool isSymmetric) override;
  void deregisterMemory(void* address) override;
  void* ncclComm() const override;
  uint64_t sequence() const override { return collectives_.load(std::memory_order_relaxed); }
  std::string path() const override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  Status error() const override { return place_.error(); }
  void whenFailed(const std::function<void()>& fn) override;
  void abort(const std::string& reason) override;
  Status drain(Deadline deadline) const override;
  void close(Deadline deadline) override;
  void detach() override;

  // The watchdog watches it from now on.
  void watch(Watched watched);

  // --- for the watchdog

  struct Progress {
    bool isBusy = false;     // there is more to watch
    bool hasMoved = false;   // an operation has ended
    bool wantsSoon = false;  // the CPU waits for a device
  };
  Progress poll();  // [watchdog]
  bool needsWatch() const;

 private:
  enum class State : uint8_t { kOpen, kClosing, kLeaving, kLeft };
  class Waiting;

  bool isOpen() const { return state_.load() == State::kOpen; }
  bool hasLeft() const { return state_.load() == State::kLeft; }
  bool isDead() const;
  // As error(), but ok if the cause is that this rank leaves.
  Status failure() const;
  void throwIfDead() const;
  void fail(const Status& cause);
  Status inContext(const Status& error) const;

  // Returns the path on which this rank and the others send the requests; connects if necessary.
  DevicePath pathOf(Requests requests, bool isBatch);
  // The same for a message between two ranks, which it connects.
  DevicePath connectWith(Request& request);

  // requests: one, or those of a batch, which become one launch; all on one device. A batch uses
  // the group's communicator, even a batch of one message.
  DeviceOperationPtr launchOnNccl(Requests requests, bool isTimed, bool isBatch);

  // Adds the collective to the control group's, as the next one in NCCL's order.
  void watchCollective(Requests requests, const DeviceOperationPtr& operation);
  // A message, or a batch of them, that no group of the engine watches. isRecorded: in the black
  // box.
  void watchMessages(const DeviceOperationPtr& operation, Requests requests, bool isOfPair,
                     bool isRecorded);
  // A graph that is captured on this stream contains an operation of this group. It may be replayed
  // at any time, so failures are checked for from now on.
  void watchCaptured(const c10::Stream& stream);

  std::string describe(const WatchedMessages& messages) const;
  void failLate();
  void checkForFailures();
  // Fails the watched operations, and raises the cause if the program relies on one of them.
  void failWatched(const Status& cause);
  // Shuts NCCL down cleanly: waits, at most until the deadline, for the other ranks of the host;
  // only for a short time if the group has failed.
  void endNccl(Deadline deadline);

  const DevicePlace place_;
  PathChoice choice_;
  Channels channels_;
  HostPath host_;
  NcclMemory memory_;
  WatchList watched_;
  CapturedStreams captured_;
  // Held by the thread that connects with another rank. Not a Mutex, as waiting for it has a
  // timeout.
  std::timed_mutex pairMutex_;

  std::atomic<uint64_t> collectives_{0};  // launched so far; a batch is one
  std::atomic<State> state_{State::kOpen};
  std::atomic<bool> isAbortedHere_{false};     // by the program
  std::atomic<bool> isNcclStopped_{false};     // after a failure
  std::atomic<bool> hasLost_{false};           // results on which the program relies
  mutable std::atomic<bool> isRaised_{false};  // a call has thrown the failure in the main thread
  // [watchdog]
  std::chrono::steady_clock::time_point ncclErrorSince_;
  std::chrono::steady_clock::time_point checkedAt_;
};

}  // namespace mycoll
