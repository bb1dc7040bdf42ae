// The operations of a group: the caller's handle (Op), and the two kinds that the engine runs.
//
// Thread contract: an Op may be read from any thread. finish() is called once, without locks, by
// the thread that completes it.
// Lifetime: shared by the caller and the group; it may outlive the group.
#pragma once

#include <atomic>
#include <cassert>
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
  // Position among the group's collectives, from 0; messages are counted separately.
  uint64_t sequence() const { return sequence_; }
  OpKind kind() const { return kind_; }
  bool isMessage() const { return mycoll::isMessage(kind_); }
  // The program waits for the op, or asks whether it is done.
  virtual void noteWaiting() {}
  // recv: the rank that sent the message. Only when done.
  int sourceRank() const { return sourceRank_; }
  // Its entry in the group's record.
  const OpRecord& record() const { return record_; }
  // Runs fn once: immediately if the op is done, else on the thread that completes it.
  void onDone(std::function<void()> fn);

  // ---- the engine's

  // Publishes the outcome, runs the callbacks and releases the program's memory. Throws bad_alloc
  // if a callback did, after the others: what the callback was to do may now never be done.
  void finish(Status status);
  void setRecord(const OpRecord& record) { record_ = record; }

  // Holds the program's memory. Dropped by finish(), on the thread that completes the op: often the
  // engine's, on which all groups of the process depend. So its destructor must not wait, and must
  // not take a lock that the program may hold (the GIL). The same applies to objects held by a
  // composite or a callback.
  std::shared_ptr<void> keepAlive;
  const std::chrono::steady_clock::time_point submitted = std::chrono::steady_clock::now();

 protected:
  Op(OpKind kind, uint64_t sequence) : kind_(kind), sequence_(sequence) {}

  const OpKind kind_;
  uint64_t sequence_;
  OpRecord record_;
  int sourceRank_ = -1;

 private:
  std::atomic<bool> done_{false};
  Status status_;
  Mutex mutex_;
  std::vector<std::function<void()>> callbacks_ GUARDED_BY(mutex_);
  std::atomic<bool> hasCallbacks_{false};

 public:
  // When, and how often, this rank asked the ranks that it waits for; guarded by Diagnosis.
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

// A collective that runs elsewhere, on a device. The group does not execute it, but keeps its place
// in the order, checks that all ranks make the same call, and monitors its deadline and the other
// ranks' processes. The thread that detects its end calls finish(), then
// Communicator::watchExternal().
class External {
 public:
  // [any thread], once.
  void finish(Status status) {
    assert(!isOver());
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
  // When it began to wait for the other ranks.
  std::chrono::steady_clock::time_point waitsSince() const { return external ? begun : submitted; }

  Deadline deadline;
  const Signature signature;  // of the call; of a composite only its kind
  Call call;
  Composite composite;
  std::optional<External> external;

  // Guarded by the queue's run lock.
  std::chrono::steady_clock::time_point begun;  // external only: when it reached the queue's head
  Task task;
  std::chrono::steady_clock::time_point announced;  // when it last sent a notice that it waits
  std::chrono::steady_clock::time_point leftSince;  // when ranks that it waits for had first left
  bool hasWarned = false;
};

// A message, which is not queued behind other operations.
class MessageOp final : public Op, public Transfer {
 public:
  using Clock = std::chrono::steady_clock;

  MessageOp(OpKind kind, uint64_t sequence, int ownRank, int rank, uint64_t tag)
      : Op(kind, sequence), Transfer(true), ownRank(ownRank), rank(rank), tag(tag) {}

  using Op::done;
  using Op::status;

  // The timeout counts from the first of these calls.
  void noteWaiting() override;
  void noteWaiting(Clock::time_point since);
  Deadline deadline() const;

  // "recv from rank 1 with tag 0". other: the description of the other rank.
  std::string describe() const;
  std::string describe(const std::string& other) const;

  // Keeps the op alive while the mailbox refers to it.
  std::shared_ptr<MessageOp> self;
  const int ownRank;
  const int rank;  // may be kFromAnyone
  const uint64_t tag;
  std::chrono::milliseconds timeout{0};

 private:
  Status described(const Status& outcome) const;
  void deliver() override;

  std::atomic<Clock::time_point> waitingSince_{Clock::time_point::max()};
};

}  // namespace mycoll
