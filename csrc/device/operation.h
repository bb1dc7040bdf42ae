// DeviceOperation: one operation on a device, from its call to its end, as its Work, the path that
// executes it and the watchdog know it.
//
//   kQueued -> kEnqueued -> (the device passes `ended`) over
//      \__________\________> kFailed
//
// kQueued: part of the operation must still run on the CPU before its last work is on a stream. On
// NCCL's path this state ends before the call returns. An error that the device reports fails the
// operation, too.
//
// Under graph capture, an operation is over as soon as it is enqueued: the recorded work runs when
// the graph is replayed, and events that belong to a graph must not be queried.
//
// Thread contract: [any thread], with or without the GIL.
// Lifetimes: held by shared_ptr. The caller of release() drops the memory that the operation keeps;
// for the watchdog, a thread of the CallbackPool does, as that calls the allocator. A failure does
// not stop work that is on a stream or that a thread is enqueueing: StreamUse tracks the use of the
// memory to its end.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backend/errors.h"
#include "backend/request.h"
#include "base/deadline.h"
#include "base/mutex.h"
#include "base/status.h"
#include "device/streams.h"
#include "engine/communicator.h"

namespace mycoll {

class DeviceOperation {
 public:
  // caller: the stream that was current at the call; the kept memory belongs to it.
  DeviceOperation(const char* what, const c10::Stream& caller) : what_(what), caller_(caller) {}

  const char* what() const { return what_; }  // "all_reduce"
  c10::Device device() const { return caller_.device(); }
  const c10::Stream& caller() const { return caller_; }

  // --- for the path that executes it

  // Lives while a thread enqueues work that uses what the operation keeps.
  class StreamUse {
   public:
    explicit StreamUse(DeviceOperation& operation);
    ~StreamUse();
    StreamUse(const StreamUse&) = delete;
    StreamUse& operator=(const StreamUse&) = delete;
    // False: the operation has failed, and nothing may be enqueued any more.
    bool isAllowed() const { return isAllowed_; }
    // The event follows what was enqueued, on the stream of all uses. Without a call, nothing was
    // enqueued.
    void setEnd(EventPtr end) { end_ = std::move(end); }

   private:
    DeviceOperation& operation_;
    const bool isAllowed_;
    EventPtr end_;
  };

  // Call these three before anything is enqueued.
  void keep(Kept memory);
  void setCaptured(bool isCaptured) { isCaptured_ = isCaptured; }
  // Its duration is measured: its events are timed, and its first work follows this one.
  void setStarted(EventPtr started) { started_ = std::move(started); }
  bool isTimed() const { return started_ != nullptr; }
  // Its last work is on `stream`, followed by `ended`.
  void setEnqueued(const c10::Stream& stream, EventPtr ended);
  // The first cause is kept. Does nothing if the operation is over.
  void fail(const Status& cause);
  // Fails it with an error that its device has reported.
  void failByDevice(const Status& error);
  // waitEnqueued() works on this engine operation while the device operation is queued.
  void setEngineOp(std::shared_ptr<Communicator> communicator, OpPtr op);

  // --- for all

  // Waits until it is enqueued. Returns its failure, or why the wait has ended earlier.
  Status waitEnqueued(Deadline deadline);
  // Waits until the device has passed it.
  Status waitOver(Deadline deadline);
  bool isEnqueued() const { return state_ != State::kQueued; }  // or over
  bool isOver();                                                // passed, or failed
  Status status() const;
  // Its device has reported an error, which no other part knows yet.
  bool isDeviceError() const { return isDeviceError_.load(std::memory_order_acquire); }
  // Runs fn once, without locks, when it is enqueued or has failed; immediately if it is.
  void onEnqueued(std::function<void()> fn);

  // The rank that sent the message; -1 if unknown.
  int source() const { return source_.load(std::memory_order_acquire); }
  void setSource(int rank) { source_.store(rank, std::memory_order_release); }

  // Makes the stream wait for the operation, which must be enqueued.
  void block(const c10::Stream& stream) const;
  const c10::Stream& stream() const { return *stream_; }
  const EventPtr& ended() const { return ended_; }
  // The time between started and ended, which must be timed. 0 if it has failed. Only when over.
  float milliseconds() const;

  // The program relies on its results from now on: what it enqueues on a stream next follows the
  // operation. The caller must check the status afterwards.
  void setReliedOn() { reliedOn_.store(1 + raisedSoFar(), std::memory_order_seq_cst); }
  bool isReliedOn() const { return reliedOn_.load(std::memory_order_seq_cst) != 0; }
  // raisedSoFar() at the last setReliedOn().
  uint64_t reliedOnSince() const { return reliedOn_.load(std::memory_order_seq_cst) - 1; }

  // Takes what it kept, for the caller to drop.
  Kept release();
  // As release(), but returns false if the device may still use the memory. After a failure this
  // may last beyond the operation's end, as NCCL may still be writing.
  bool releaseUnused(Kept* released);

 private:
  enum class State { kQueued, kEnqueued, kFailed };

  void end(const Status& failure, bool isDeviceError);
  // After a transition: releases the lock, wakes the waiting threads and runs the callbacks.
  void announce(MutexLock& lock) REQUIRES(mutex_);

  const char* const what_;
  const c10::Stream caller_;
  std::atomic<int> source_{-1};
  std::atomic<uint64_t> reliedOn_{0};  // 0, or 1 + reliedOnSince()
  bool isCaptured_ = false;
  std::atomic<bool> isPassed_{false};  // a query has returned that the device has passed it
  std::atomic<bool> isDeviceError_{false};
  EventPtr started_;

  mutable Mutex mutex_;
  std::condition_variable changed_;
  std::atomic<State> state_{State::kQueued};  // changes under mutex_
  // Set once, before kEnqueued, and before kFailed; read without mutex_ after that.
  std::optional<c10::Stream> stream_;
  EventPtr ended_;
  Status status_;
  Kept kept_ GUARDED_BY(mutex_);
  int uses_ GUARDED_BY(mutex_) = 0;      // StreamUses that live
  EventPtr lastUse_ GUARDED_BY(mutex_);  // the end of the last StreamUse
  std::vector<std::function<void()>> callbacks_ GUARDED_BY(mutex_);
  std::shared_ptr<Communicator> communicator_ GUARDED_BY(mutex_);
  OpPtr engineOp_ GUARDED_BY(mutex_);
};

using DeviceOperationPtr = std::shared_ptr<DeviceOperation>;

}  // namespace mycoll
