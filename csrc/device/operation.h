// One operation on a device, from its call to its end: what its Work, the path that carries it and
// the watchdog know of it.
//
//   kQueued -> kEnqueued -> (the device passes `ended`) over
//      \__________\________> kFailed
//
// A device that answers with an error makes it fail, too, with that error.
//
// kQueued: a part of it still has to happen on the CPU before its last work is on a stream; only
// the host path knows this state for longer than a call.
//
// Under graph capture it is over as soon as it is enqueued: what is recorded runs when the graph is
// replayed, and nobody may ask for an event that belongs to a graph.
//
// Thread contract: [any thread], with or without the GIL.
// Lifetimes: held by shared_ptr. The memory that it keeps is dropped by whoever calls release():
// never by the watchdog, since that calls the allocator. A
// failure stops nothing that is on a stream, nor who is putting it there: what uses the tensors is
// followed to its end by Putting.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

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
  // caller: the stream that was current when the operation was called; the kept memory is from it.
  DeviceOperation(const char* what, const c10::Stream& caller) : what_(what), caller_(caller) {}

  const char* what() const { return what_; }  // "all_reduce"
  c10::Device device() const { return caller_.device(); }
  const c10::Stream& caller() const { return caller_; }

  // --- for whoever carries it out

  // Lives while somebody puts work on a stream that uses what the operation keeps.
  class Putting {
   public:
    explicit Putting(DeviceOperation& operation);
    ~Putting();
    Putting(const Putting&) = delete;
    Putting& operator=(const Putting&) = delete;
    // False: the operation has failed, and nothing may be put any more.
    bool isAllowed() const { return isAllowed_; }
    // What was put is before this event. Without one nothing was.
    void setEnd(const c10::Stream& stream, EventPtr end);

   private:
    DeviceOperation& operation_;
    const bool isAllowed_;
    std::optional<std::pair<c10::Stream, EventPtr>> end_;
  };

  // Before anything is put on a stream.
  void keep(Kept memory);
  // Somebody wants to know its duration: events are timed.
  void setTimed(bool isTimed) { isTimed_ = isTimed; }
  bool isTimed() const { return isTimed_; }
  void setCaptured(bool isCaptured) { isCaptured_ = isCaptured; }
  // Its first work is behind this event, if it is timed.
  void setStarted(EventPtr started) { started_ = std::move(started); }
  // Its last work is on `stream`, and `ended` behind it.
  void setEnqueued(const c10::Stream& stream, EventPtr ended);
  // The first cause stays, and an end that the device has passed.
  void fail(const Status& cause);
  // With what the device said when it was asked.
  void failByDevice(const Status& error);
  // What waitEnqueued() works on while the operation is queued; null: others do all of it.
  void setEngineOp(std::shared_ptr<Communicator> communicator, OpPtr op);

  // --- for everybody

  // Waits until it is enqueued; its failure, or why the wait ended before.
  Status waitEnqueued(Deadline deadline);
  // Waits until the device has passed it.
  Status waitOver(Deadline deadline);
  bool isEnqueued() const { return state_ != State::kQueued; }  // or over
  bool isOver();                                                // passed, or failed
  bool hasPassed() { return isOver() && isPassed_.load(std::memory_order_relaxed); }
  // Both are enqueued, on one stream, and have not failed.
  bool sharesStream(const DeviceOperation& other) const;
  // What is behind it on its stream has passed.
  void setPassed() { isPassed_.store(true, std::memory_order_relaxed); }
  Status status() const;
  // It failed by what its device said, which nobody else knows yet.
  bool isDeviceError() const { return isDeviceError_.load(std::memory_order_acquire); }
  // Runs fn once, without locks: when it is enqueued or has failed, or at once.
  void onEnqueued(std::function<void()> fn);

  // The rank that a message came from; -1 where it is not known.
  int source() const { return source_.load(std::memory_order_acquire); }
  void setSource(int rank) { source_.store(rank, std::memory_order_release); }

  // Only when enqueued: makes the stream wait for it.
  void block(const c10::Stream& stream) const;
  const c10::Stream& stream() const { return *stream_; }
  const EventPtr& ended() const { return ended_; }
  float milliseconds() const;  // from started to ended, both timed; only when over, 0: it failed

  // The program goes on as if it were over: what it puts on a stream from here on comes behind it.
  // The caller must look at the status afterwards.
  void setTaken() { taken_.store(1 + raisedSoFar(), std::memory_order_seq_cst); }
  bool isTaken() const { return taken_.load(std::memory_order_seq_cst) != 0; }
  // raisedSoFar() when that was last.
  uint64_t takenAt() const { return taken_.load(std::memory_order_seq_cst) - 1; }

  // Takes what it kept, for the caller to drop.
  Kept release();
  // The same, unless the device may still use it: then false. After a failure that may be so beyond
  // the end, as what NCCL has started may still be writing.
  bool releaseUnused(Kept* released);

 private:
  enum class State { kQueued, kEnqueued, kFailed };

  Status askDevice(bool* isPassed) const;  // when enqueued
  void end(const Status& failure, bool isDeviceError);

  const char* const what_;
  const c10::Stream caller_;
  std::atomic<int> source_{-1};
  std::atomic<uint64_t> taken_{0};  // 0: it is not; else 1 + takenAt()
  bool isTimed_ = false;
  bool isCaptured_ = false;
  std::atomic<bool> isPassed_{false};  // somebody has asked, and it was
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
  int putting_ GUARDED_BY(mutex_) = 0;  // Puttings that live
  // What was put is before these: the last event of each stream.
  c10::SmallVector<std::pair<c10::Stream, EventPtr>, 2> put_ GUARDED_BY(mutex_);
  std::vector<std::function<void()>> callbacks_ GUARDED_BY(mutex_);
  std::shared_ptr<Communicator> communicator_ GUARDED_BY(mutex_);
  OpPtr engineOp_ GUARDED_BY(mutex_);
};

using DeviceOperationPtr = std::shared_ptr<DeviceOperation>;

}  // namespace mycoll
