// The two kinds of Op.
//
// Thread contract: finish() once, by whoever completes the op, without locks; the rest as Op.
#pragma once

#include <chrono>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "engine/communicator.h"
#include "observe/recorder.h"
#include "transport/mailbox.h"

namespace mycoll {

class Group;

class BasicOp : public Op {
 public:
  void onDone(std::function<void()> fn) final {
    isAwaited_.store(true, std::memory_order_relaxed);
    atEnd(std::move(fn));
  }
  // The same for the engine itself, which awaits nothing.
  void atEnd(std::function<void()> fn) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!done()) {
        callbacks_.push_back(std::move(fn));
        return;
      }
    }
    fn();
  }

  // Publishes the outcome, lets go of the user's memory, tells those who asked.
  void finish(Status status) {
    record_.finish(status.ok(), steadyNanos());
    std::vector<std::function<void()>> callbacks;
    std::shared_ptr<void> kept = std::move(keepAlive);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      status_ = std::move(status);
      callbacks.swap(callbacks_);
      done_.store(true, std::memory_order_release);
    }
    for (auto& fn : callbacks) fn();
  }

  // Somebody wants to be told of its end, instead of waiting for it.
  bool isAwaited() const { return isAwaited_.load(std::memory_order_relaxed); }

  void setRecord(const OpRecord& record) { record_ = record; }

  // Holds the user's memory; dropped when the op is done.
  std::shared_ptr<void> keepAlive;
  Deadline deadline;
  std::chrono::steady_clock::time_point submitted = std::chrono::steady_clock::now();
  // When, and how often, the ranks that it waits for were asked why; guarded by the group.
  std::chrono::steady_clock::time_point asked;
  uint32_t rounds = 0;

 private:
  std::atomic<bool> isAwaited_{false};
  std::mutex mutex_;
  std::vector<std::function<void()>> callbacks_;  // guarded by mutex_
};

// Queued in its group.
class CollectiveOp final : public BasicOp {
 public:
  CollectiveOp(OpKind kind, uint64_t sequence) {
    kind_ = kind;
    sequence_ = sequence;
  }
  void setSequence(uint64_t sequence) { sequence_ = sequence; }

  Call call;
  Composite composite;  // empty: `call` is all
  // Instead of both: something that runs elsewhere, with the signature of its call.
  std::shared_ptr<External> external;
  Signature signature;
  std::chrono::steady_clock::time_point begun;   // external only: when it came to the queue's head
  Task task;                                     // running, by whoever holds the group's run lock
  std::chrono::steady_clock::time_point probed;  // when the others were last asked
  bool hasWarned = false;
};

// On its way by itself.
class MessageOp final : public BasicOp, public Transfer {
 public:
  MessageOp(OpKind kind, uint64_t sequence) : Transfer(true) {
    kind_ = kind;
    sequence_ = sequence;
  }

  using Op::done;
  using Op::status;

  // Holds itself while the mailbox knows it.
  std::shared_ptr<MessageOp> self;
  // "rank 3, recv from rank 1 with tag 0"
  std::string what() const {
    return "rank " + std::to_string(ownRank) + ", " + name(kind_) +
           (kind_ == OpKind::kSend ? " to " : " from ") +
           (rank == kAnySource ? "any rank" : "rank " + std::to_string(rank)) + " with tag " +
           std::to_string(tag);
  }

  int ownRank = 0;
  uint64_t tag = 0;
  int rank = kAnySource;  // as asked for

 private:
  void deliver() override {
    std::shared_ptr<MessageOp> last = std::move(self);
    sourceRank_ = peer();
    if (rank == kAnySource) record_.setPeer(sourceRank_);
    markDone();
    Status outcome = Transfer::status();
    if (!outcome.ok()) outcome = Status(outcome.code(), outcome.message() + "\n  Here: " + what());
    finish(std::move(outcome));
  }
};

}  // namespace mycoll
