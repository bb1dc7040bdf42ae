// DeviceGroup: carries a group's tensors on devices. Requests arrive checked and translated, as for
// the engine, with spans of device memory; they leave on one of two paths:
//
//   NCCL   (nccl_path.h)  where every rank has it
//   host   (host_path.h)  through pinned memory and the CPU engine, where one
//   has not
//
// path_choice.h says how the ranks agree on one. Order, agreement, deadlines and deaths are the
// engine's: NCCL's operations are external ones of a group of their own, `control`; the host path
// has another, so that neither shares an order with the group's CPU tensors. What kills one of the
// three kills all.
//
//   kOpen -> kClosing (waits for what is pending) -> kLeaving -> kLeft
//
// kLeaving: the other ranks know that this one leaves, and NCCL ends, which waits for them.
// Failures are still heard of; that another rank misses this one is none.
//
// Threads: every function [any thread] unless marked, without the GIL. Between addToBatch() and
// endBatch() the calls come from one thread, as in MycollBackend. Lifetimes: held by the backend,
// by works and, while it is busy, by the watchdog.
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
#include "device/nccl_path.h"
#include "device/operation.h"
#include "device/path_choice.h"
#include "device/place.h"
#include "device/watch_list.h"

namespace mycoll {

class DeviceGroup final : public DeviceSupport, public std::enable_shared_from_this<DeviceGroup> {
 public:
  // With nothing exchanged, on all ranks that have an accelerator.
  static std::shared_ptr<DeviceSupport> create(std::string name,
                                               std::shared_ptr<Communicator> communicator,
                                               c10::intrusive_ptr<MycollOptions> options);
  explicit DeviceGroup(DevicePlace place);
  ~DeviceGroup() override;

  int rank() const { return place_.rank; }
  const std::string& name() const { return place_.name; }

  WorkPtr launch(Request& request, at::TensorList outputs, Extras extras) override;
  void addToBatch(Request request, at::TensorList outputs) override;
  bool hasBatch() const override { return !batch_.empty(); }
  WorkPtr endBatch(Extras extras) override;
  void dropBatch() override { batch_.clear(); }
  std::shared_ptr<Condition> fence() override;
  Status waitFor(Condition& fence) const override;
  // These four do nothing on the host path, which needs nothing of the kind.
  void connect(c10::Device device) override;
  void split(DeviceSupport* child, int color, bool isWilling) override;
  void registerMemory(c10::Device device, void* address, size_t bytes, bool isSymmetric) override;
  void deregisterMemory(void* address) override;
  void* ncclComm() const override;
  uint64_t sequence() const override {
    return place_.control->sequence() + place_.host->sequence();
  }
  std::string path() const override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  Status error() const override;
  void whenFailed(const std::function<void()>& fn) override;
  void abort(const std::string& reason) override;
  Status drain(Deadline deadline) const override;
  void close(Deadline deadline) override;

  // Runs fn once on the watchdog (it must not block) when the operation is over.
  void onOver(const DeviceOperationPtr& operation, std::function<void(const Status&)> fn);

  // --- for the paths: from here on the watchdog watches

  void watch(Watched watched);
  // A message, or a batch of them, that no group of the engine watches over. isRecorded: in the
  // black box.
  void watchMessages(const DeviceOperationPtr& operation, Requests requests, bool isOfPair,
                     bool isRecorded);
  // A graph that is captured on this stream holds an operation of this group. Nobody says when it
  // is replayed, so failures are listened for from here on.
  void watchCaptured(const c10::Stream& stream);

  // --- for the watchdog

  struct Seen {
    bool isBusy = false;     // there is more to come
    bool hasMoved = false;   // something ended
    bool wantsSoon = false;  // the CPU waits for a device
  };
  Seen look();  // [watchdog]
  bool needsWatch() const;

 private:
  enum class State : uint8_t { kOpen, kClosing, kLeaving, kLeft };
  class Waiting;
  struct Batched {
    Request request;
    std::vector<at::Tensor> outputs;
  };

  bool isOpen() const { return state_.load() == State::kOpen; }
  bool hasLeft() const { return state_.load() == State::kLeft; }
  bool isDead() const;
  // As error(), but this rank's own end is no failure.
  Status failure() const;
  void throwIfDead() const;
  void fail(const Status& cause);
  Status inContext(const Status& error) const;

  // isBatch: also where it is a batch of one: the others' may have more, and all take one path.
  WorkPtr carry(Requests requests, at::TensorList outputs, Extras extras, bool isBatch);
  // The same; the requests' device is current.
  WorkPtr carryHere(Requests requests, at::TensorList outputs, Extras extras, bool isBatch);
  DeviceOperationPtr carryBy(DevicePath path, Requests requests, bool isTimed, bool isBatch);
  // The path of a message between two ranks, which are connected then.
  DevicePath connectWith(Request& request);

  std::string describe(const WatchedMessages& messages) const;
  void failLate();
  void hearOfFailures();
  // Fails what is watched, and raises it where the program has gone on from that.
  void failWatched(const Status& cause);
  // In good order, which waits for the other ranks of the host: by the deadline, and not for long
  // once the group has failed.
  void endNccl(Deadline deadline);
  // since: see raiseInMainThread().
  void raise(const Status& cause, uint64_t since, const std::string& what);

  const DevicePlace place_;
  PathChoice choice_;
  Channels channels_;
  NcclPath nccl_;
  HostPath host_;
  NcclMemory memory_;
  WatchList watched_;
  CapturedStreams captured_;
  // One connects with another rank at a time. Not a Mutex, which nobody can wait for with a
  // timeout.
  std::timed_mutex pairMutex_;

  std::vector<Batched> batch_;  // of the thread that is coalescing

  std::atomic<State> state_{State::kOpen};
  std::atomic<bool> isAbortedHere_{false};     // by the program, which knows
  std::atomic<bool> isNcclStopped_{false};     // after a failure
  std::atomic<bool> hasLost_{false};           // something that the program went on from
  mutable std::atomic<bool> isRaised_{false};  // a call has thrown the failure in the main thread
  // The watchdog's own.
  std::chrono::steady_clock::time_point ncclErrorSince_;
  std::chrono::steady_clock::time_point askedAt_;
};

}  // namespace mycoll
