// DeviceSupport: what a group needs to carry tensors on devices. csrc/device implements it,
// bindings/ hands it in, and backend/ knows only this.
//
// Thread contract: [any thread], without the GIL. Between addToBatch() and endBatch() the calls
// come from one thread, as in MycollBackend. Lifetimes: held by the backend, by works and, while it
// is busy, by a thread of its own.
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
  // Called once on the callback pool, with how long it took, when an operation is over.
  using WhenOver = std::function<void(std::chrono::nanoseconds took)>;
  struct Extras {
    bool isTimed = false;
    WhenOver whenOver;  // may be empty; timed then
    // Of the callbacks of futures that are not complete at once; null: they run when they can.
    std::shared_ptr<CallbackOrder> order;
  };

  virtual ~DeviceSupport() = default;

  // Carries the request out: a Work, or null when there is nothing left to wait for on the caller's
  // stream.
  virtual WorkPtr launch(Request& request, at::TensorList outputs, Extras extras) = 0;
  // The requests of a batch leave together with endBatch().
  virtual void addToBatch(Request request, at::TensorList outputs) = 0;
  virtual bool hasBatch() const = 0;
  virtual WorkPtr endBatch(Extras extras) = 0;  // where there is one
  virtual void dropBatch() = 0;

  // For a barrier: passes when everything has that was enqueued on this thread's current streams,
  // or by this group. Null: there is nothing to wait for.
  virtual std::shared_ptr<Condition> fence() = 0;
  // Waits on the host until it has passed, or for the group's end.
  virtual Status waitFor(Condition& fence) const = 0;

  // All ranks: makes the connections that the first collective would make.
  virtual void connect(c10::Device device) = 0;
  // On all ranks of the group, after some of them have made `child` (null: this rank has none):
  // gives it a part of this group's connections, as far as there are any. Ranks with one color are
  // one child's. isWilling: false where this rank has no child although it should.
  virtual void split(DeviceSupport* child, int color, bool isWilling) = 0;
  // Memory that can then be used without copies, where the library at hand knows such.
  virtual void registerMemory(c10::Device device, void* address, size_t bytes,
                              bool isSymmetric) = 0;
  virtual void deregisterMemory(void* address) = 0;
  // NCCL's handle of the communicator of all ranks on the current device, which stays ours; null
  // where there is none. It lives until the group ends or fails.
  virtual void* ncclComm() const = 0;

  // How many collectives went to devices so far.
  virtual uint64_t sequence() const = 0;
  // "nccl", "host", or "" while it is not known; for logs and tests.
  virtual std::string path() const = 0;
  virtual void setTimeout(std::chrono::milliseconds timeout) = 0;

  // Not ok once the group is dead, here or on the CPU: the first cause.
  virtual Status error() const = 0;
  virtual void abort(const std::string& reason) = 0;
  // Waits until devices have passed all collectives, and all messages that were waited for on a
  // stream: to the program they are done. They have deadlines of their own; everything else is
  // waited for up to this one. Fails where a signal ends the wait; other failures raise elsewhere.
  virtual Status drain(Deadline deadline) const = 0;
  // Waits for what is pending, up to the deadline, and leaves. Idempotent.
  virtual void close(Deadline deadline) = 0;
};

// Why groups of this process have no DeviceSupport, for errors: the rest of a sentence. Set before
// the first group, if it is not for want of an accelerator.
void setWhyNoDevices(std::string why);
const std::string& whyNoDevices();

// Makes the support of a group whose ranks have met; nothing is exchanged. Empty in a process that
// has no accelerator.
using DeviceFactory = std::function<std::shared_ptr<DeviceSupport>(
    std::string name, std::shared_ptr<Communicator> communicator,
    c10::intrusive_ptr<MycollOptions> options)>;

}  // namespace mycoll
