// The operations of a group: what a caller holds of one (Op), and the two kinds that the engine
// runs.
//
// Thread contract: an Op may be looked at from any thread. finish() is called once, by whoever
// completes it, without locks.
// Lifetime: shared by the caller and the group; it outlives the group safely.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/call.h"
#include "base/deadline.h"
#include "base/mutex.h"
#include "base/status.h"
#include "base/task.h"
#include "observe/recorder.h"
#include "transport/mailbox.h"

namespace mycoll {

// One call, in flight or done.
class Op {
 public:
  virtual ~Op() = default;

  bool done() const { return done_.load(std::memory_order_acquire); }
  // Only when done.
  const Status& status() const { return status_; }
  // Position among the collectives of the group, from 0; send and recv count by themselves.
  uint64_t sequence() const { return sequence_; }
  OpKind kind() const { return kind_; }
  bool isMessage() const { return mycoll::isMessage(kind_); }
  // recv: the rank whose message came. Only when done.
  int sourceRank() const { return sourceRank_; }
  // What is remembered of it.
  const OpRecord& record() const { return record_; }
  // Runs fn once, when the op is done: at once if it is, else on the thread that completes it.
  void onDone(std::function<void()> fn) {
    isAwaited_.store(true, std::memory_order_relaxed);
    atEnd(std::move(fn));
  }

  // ---- the engine's

  // As onDone(), for the engine itself, which awaits nothing.
  void atEnd(std::function<void()> fn);
  // Publishes the outcome, lets go of the program's memory, tells those who asked.
  void finish(Status status);
  // Somebody wants to be told of its end, instead of waiting for it.
  bool isAwaited() const { return isAwaited_.load(std::memory_order_relaxed); }
  void setRecord(const OpRecord& record) { record_ = record; }

  // Holds the program's memory. Dropped by finish(), on the thread that completes the op: often the
  // engine's, on which all groups of the process depend. So what drops it must not wait, nor take a
  // lock that the program may hold (the GIL). The same goes for what a composite or a callback
  // holds.
  std::shared_ptr<void> keepAlive;
  Deadline deadline;
  const std::chrono::steady_clock::time_point submitted = std::chrono::steady_clock::now();

 protected:
  Op(OpKind kind, uint64_t sequence) : kind_(kind), sequence_(sequence) {}

  const OpKind kind_;
  uint64_t sequence_;
  OpRecord record_;
  int sourceRank_ = -1;

 private:
  std::atomic<bool> done_{false};
  std::atomic<bool> isAwaited_{false};
  Status status_;
  Mutex mutex_;
  std::vector<std::function<void()>> callbacks_ GUARDED_BY(mutex_);

 public:
  // When, and how often, the ranks that it waits for were asked why; guarded by Questions.
  std::chrono::steady_clock::time_point asked;
  uint32_t rounds = 0;
};

using OpPtr = std::shared_ptr<Op>;

// Runs collectives as parts of one composite operation (see Communicator::submitComposite).
class CollectiveRunner {
 public:
  // The spans named in the call must live until the task ends.
  virtual Task run(Call call) = 0;

 protected:
  ~CollectiveRunner() = default;
};
using Composite = std::function<Task(CollectiveRunner&)>;

// A collective that runs elsewhere, on a device: the group keeps its place in the order, holds the
// ranks to the same calls, watches its deadline and the other ranks' lives, and does not carry it
// out. Whoever sees its end calls finish(), then Communicator::watchExternal().
class External {
 public:
  // [any thread], once.
  void finish(Status status) {
    status_ = std::move(status);
    isOver_.store(true, std::memory_order_release);
  }
  bool isOver() const { return isOver_.load(std::memory_order_acquire); }
  // Only when over.
  const Status& status() const { return status_; }

 private:
  Status status_;
  std::atomic<bool> isOver_{false};
};

// Queued in its group. Has a call, or a composite, or an external: one of the three.
class CollectiveOp final : public Op {
 public:
  explicit CollectiveOp(const Signature& called) : Op(called.kind, 0), signature(called) {}
  void setSequence(uint64_t sequence) { sequence_ = sequence; }

  // "all_reduce SUM float32 numel=8"
  std::string describe() const { return composite ? name(kind()) : signature.describe(); }
  // For the record.
  Operation description() const;
  // Since when the other ranks' part of it is waited for.
  std::chrono::steady_clock::time_point waitsSince() const { return external ? begun : submitted; }

  const Signature signature;  // of the call; of a composite only its kind
  Call call;
  Composite composite;
  std::optional<External> external;

  // Guarded by the queue's run lock.
  std::chrono::steady_clock::time_point begun;  // external only: when it came to the queue's head
  Task task;
  std::chrono::steady_clock::time_point announced;  // when the others last heard that it waits
  bool hasWarned = false;
};

// On its way by itself.
class MessageOp final : public Op, public Transfer {
 public:
  MessageOp(OpKind kind, uint64_t sequence, int ownRank, int rank, uint64_t tag)
      : Op(kind, sequence), Transfer(true), ownRank(ownRank), rank(rank), tag(tag) {}

  using Op::done;
  using Op::status;

  // "recv from rank 1 with tag 0". other: how the other rank is called.
  std::string describe() const;
  std::string describe(const std::string& other) const;

  // Holds itself while the mailbox knows it.
  std::shared_ptr<MessageOp> self;
  const int ownRank;
  const int rank;  // as asked for
  const uint64_t tag;

 private:
  Status described(const Status& outcome) const;
  void deliver() override;
};

}  // namespace mycoll
