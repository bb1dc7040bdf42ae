// DeviceSupport: the interface through which a group handles tensors on devices. csrc/device
// implements it, bindings/ passes it in, and backend/ knows only this.
//
// Thread contract: [any thread], without the GIL. Lifetimes: held by the backend, by works and,
// while it is busy, by a thread of its own.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "backend/options.h"
#include "backend/request.h"
#include "base/deadline.h"
#include "base/status.h"
#include "base/task.h"

namespace mycoll {

class CallbackOrder;
class Communicator;

class DeviceSupport {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  struct Extras {
    // The requests are those of a block of coalesced calls. True for a block of one, too: the other
    // ranks' blocks may be larger, and all must use one communicator.
    bool isBatch = false;
    bool isTimed = false;
    bool wantsWork = false;  // a Work is needed even if the request is synchronous
    // Orders the callbacks of futures that are not complete immediately; null: they run when they
    // can.
    std::shared_ptr<CallbackOrder> order;
  };

  virtual ~DeviceSupport() = default;

  // Launches the requests, of which there is at least one, together. Returns a Work; or null, if
  // none is wanted and the first request is synchronous: then there is nothing left to wait for on
  // the caller's stream.
  virtual WorkPtr launch(Requests requests, at::TensorList outputs, Extras extras) = 0;

  // For a barrier: becomes ready when everything is over that was enqueued on this thread's current
  // streams, or by this group. Null: there is nothing to wait for.
  virtual std::shared_ptr<Condition> fence() = 0;
  // Waits on the host until the fence is ready, the group has failed, or a signal must be handled.
  virtual Status waitFor(Condition& fence) const = 0;

  // Called on all ranks: makes the connections that the first collective would make.
  virtual void connect(c10::Device device) = 0;
  // Called on all ranks of the group, after some of them have made `child` (null: this rank has
  // none): gives the child a part of this group's connections, if there are any. Ranks with the
  // same color belong to the same child. isWilling: false if this rank has no child although it
  // should.
  virtual void split(DeviceSupport* child, int color, bool isWilling) = 0;
  // Registers memory that can then be used without copies, if the loaded library supports that.
  virtual void registerMemory(c10::Device device, void* address, size_t bytes,
                              bool isSymmetric) = 0;
  virtual void deregisterMemory(void* address) = 0;
  // Returns NCCL's handle of the communicator of all ranks on the current device, or null if there
  // is none. The group owns it; it is valid until the group ends or fails.
  virtual void* ncclComm() const = 0;

  // Number of collectives that were launched on devices.
  virtual uint64_t sequence() const = 0;
  // "nccl", "host", or "" while it is not known; for logs and tests.
  virtual std::string path() const = 0;
  virtual void setTimeout(std::chrono::milliseconds timeout) = 0;

  // The first cause if the group has failed, here or on the CPU; otherwise ok.
  virtual Status error() const = 0;
  // As Communicator::whenFailed(), for what fails on devices.
  virtual void whenFailed(const std::function<void()>& fn) = 0;
  virtual void abort(const std::string& reason) = 0;
  // Waits until devices have finished all collectives, and all messages for which a stream waits:
  // the program considers these done. They have deadlines of their own; `deadline` limits the wait
  // for everything else. Fails only if a signal ends the wait; other failures are raised elsewhere.
  virtual Status drain(Deadline deadline) const = 0;
  // Waits for pending operations, at most until the deadline, and leaves the group. Idempotent.
  virtual void close(Deadline deadline) = 0;
  // Only when closed: its groups of the engine no longer hear from other ranks.
  virtual void detach() = 0;
};

// The reason why groups of this process have no DeviceSupport, as the end of an error message. Set
// before the first group, if the reason is not that there is no accelerator.
void setWhyNoDevices(std::string why);
const std::string& whyNoDevices();

// Makes the DeviceSupport of a group whose ranks have met; exchanges nothing. Empty in a process
// that has no accelerator.
using DeviceFactory = std::function<std::shared_ptr<DeviceSupport>(
    std::string name, std::shared_ptr<Communicator> communicator,
    c10::intrusive_ptr<MycollOptions> options)>;

}  // namespace mycoll
