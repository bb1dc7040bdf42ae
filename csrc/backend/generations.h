// Generations: the ranks that a MycollBackend stands for, with the engine's group and the
// DeviceSupport that belong to them.
//
// A group that was made with enable_reconfigure has an endpoint, and one generation after another:
// none until the first reconfigure(), and a new one after each. Every other group has one
// generation, which never changes.
//
// A collective runs in the generation that is current when it is called. reconfigure() forms the
// next one, makes it current, and then ends the former one, where operations that are still pending
// fail. If forming fails, the former one remains current, and usable. If the former one had failed
// before, it is ended first, and until the next one is current, collectives throw its first cause.
//
// Thread contract: [any thread], without the GIL. mutex_ guards the current generation and is a
// leaf; calls of a group without an endpoint do not take it. reconfigureMutex_ is held as long as
// reconfigure() runs, and serialises such calls. Abort hooks run on threads of the CallbackPool.
// Lifetime: a part of its MycollBackend. Generations that have ended live on while Works refer to
// them.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/device_support.h"
#include "backend/generation.h"
#include "backend/hook_table.h"
#include "backend/options.h"
#include "base/mutex.h"
#include "engine/communicator.h"
#include "engine/endpoint.h"

namespace mycoll {

class Generations {
 public:
  using Milliseconds = std::chrono::milliseconds;

  // first: the only generation; without a communicator if there is an endpoint. Its DeviceSupport
  // is made here. makeDevice: empty if there is no accelerator.
  Generations(std::string name, c10::intrusive_ptr<MycollOptions> options, DeviceFactory makeDevice,
              Generation first, std::unique_ptr<Endpoint> endpoint);

  Generation current() const EXCLUDES(mutex_);
  // The same, valid until the caller's call returns.
  Generation pinned() const;
  // For what outlives the call: a communicator of pinned(), kept alive.
  std::shared_ptr<Communicator> kept(const std::shared_ptr<Communicator>& communicator) const;

  // The options of the group, with its present timeout: a copy.
  c10::intrusive_ptr<MycollOptions> options() const;
  const DeviceFactory& makeDevice() const { return makeDevice_; }
  Milliseconds timeout() const { return Milliseconds(timeout_.load()); }
  Milliseconds shutdownTimeout() const { return options_->shutdownTimeout; }
  // For the current generation, and for those to come.
  void setTimeout(Milliseconds timeout);

  // Null: the generation never changes.
  const Endpoint* endpoint() const { return endpoint_.get(); }
  // Only with an endpoint: see MycollBackend::reconfigure(). whenFormed: called with the next
  // communicator, before it is current.
  void reconfigure(int64_t number, const std::vector<std::string>& handles, Milliseconds timeout,
                   const std::function<void(const std::shared_ptr<Communicator>&)>& whenFormed)
      EXCLUDES(reconfigureMutex_);

  // For a forked child, before the destructor: closes nothing and frees nothing that is its
  // parent's.
  void abandon();

  // These are called when a generation has failed.
  HookTable<>& abortHooks() { return *abortHooks_; }

 private:
  // Sets the communicator's times, and makes the DeviceSupport.
  Generation make(std::shared_ptr<Communicator> communicator) const;
  void replace(Generation next) EXCLUDES(mutex_);

  const std::string name_;
  const c10::intrusive_ptr<MycollOptions> options_;  // never changed: other threads read it
  const DeviceFactory makeDevice_;
  std::unique_ptr<Endpoint> endpoint_;             // changed by abandon() only
  const std::shared_ptr<HookTable<>> abortHooks_;  // shared with the generations
  std::atomic<Milliseconds::rep> timeout_;
  Mutex reconfigureMutex_;
  mutable Mutex mutex_;
  Generation current_ GUARDED_BY(mutex_);
};

}  // namespace mycoll
