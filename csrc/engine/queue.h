// Queue: the collectives that a group was asked for, in order, and the threads that run them.
//
//   push -> queue -> run(): the head's task is resumed whenever its condition is ready
//                     |  by a user's thread inside wait(), or by the engine's thread
//                     v
//                    Op::finish(): done, callbacks, next
//
// A thread that waits also works: wait() runs the queue itself instead of sleeping, so a
// synchronous call with nothing ahead of it runs in its caller. The engine's thread runs
// collectives that no other thread waits for.
//
// Thread contract: all [any thread]. Two locks: the run lock, which the thread that runs the queue
// holds, is taken before the queue lock. Neither is held while an op is finished.
// Lifetime: owned by its communicator, as are the parts that it refers to.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/mutex.h"
#include "base/wait.h"
#include "engine/op.h"

namespace mycoll {

class Diagnosis;
class Runner;
struct Group;

class Queue {
 public:
  // localRanks: those of this host, which compete for its cores.
  Queue(Group& group, Runner& runner, Diagnosis& diagnosis, int localRanks);

  // Numbers the op, records it and queues it. *isFirst: nothing is ahead of it. Returns false if
  // the queue is closed.
  bool push(const std::shared_ptr<CollectiveOp>& op, bool* isFirst);
  // From now on nothing is queued. Returns whether the queue is empty.
  bool close();
  // Advances the queue as far as it goes now, but a collective that does not have to wait only by a
  // few steps. spins: how often to look again at a condition that is not ready. True if anything
  // moved.
  bool run(int spins);
  // Waits for a collective of this queue, or a message of its group: see Communicator::wait().
  Status wait(const OpPtr& op, Deadline deadline);

  bool isEmpty() const { return head_.load(std::memory_order_seq_cst) == nullptr; }
  size_t size() const;
  bool hasWaiters() const { return waiters_.load(std::memory_order_seq_cst) > 0; }
  // Collectives are queued and no thread waits for one of them. Never true for an external group.
  bool isUnattended() const;
  // Collectives that this rank was asked for.
  uint64_t submitted() const { return submitted_.load(std::memory_order_relaxed); }

  // The position of this rank in its calls.
  struct Finished {
    OpKind kind = OpKind::kBarrier;
    uint64_t sequence = 0;
    std::chrono::steady_clock::time_point submitted;
  };
  struct Position {
    uint64_t submitted = 0;
    std::optional<Finished> last;  // the collective that ended last
    std::optional<uint64_t> head;  // the number of the one that runs
  };
  Position position() const;

  // Calls fn with the head and the ranks that it waits for, under the run lock: fn must not end an
  // operation (see Membership::failFirst()). Returns false if the queue is empty or another thread
  // holds the run lock.
  using Inspect = std::function<void(CollectiveOp& head, std::vector<int> missing)>;
  bool inspectHead(const Inspect& fn);

  // For a scope, a user's thread waits, and works while it waits.
  class Waiting {
   public:
    // isInQueue: it works on the queue, so that the engine's thread need not.
    Waiting(Queue& queue, bool isInQueue) : queue_(queue), isInQueue_(isInQueue) { begin(); }
    ~Waiting() { end(); }
    void begin();
    void end();

   private:
    Queue& queue_;
    const bool isInQueue_;
    bool isCounted_ = false;
  };

 private:
  // A thread stops working on the queue: the engine's thread continues, if anything is left.
  void handOver() const;
  // Resumes the head once. False: it cannot continue now. *outcome: set if it has ended.
  bool step(CollectiveOp& op, int spins, std::optional<Status>* outcome) REQUIRES(runMutex_);
  // True if a collective advanced.
  bool sleepFor(const Op& op, Deadline deadline);
  void checkState(Op& op);
  Status outcomeOf(const Op& op);
  void noteCallSite(const Op& op);

  Group& group_;
  Runner& runner_;
  Diagnosis& diagnosis_;
  const SpinPolicy spinPolicy_;
  CoreContention contention_;

  Mutex runMutex_;

  mutable Mutex queueMutex_;
  std::deque<std::shared_ptr<CollectiveOp>> ops_ GUARDED_BY(queueMutex_);
  std::optional<Finished> last_ GUARDED_BY(queueMutex_);
  bool isClosed_ GUARDED_BY(queueMutex_) = false;
  // The front of ops_. It changes under the queue lock, and becomes another one under the run lock.
  std::atomic<CollectiveOp*> head_{nullptr};
  std::atomic<int> waiters_{0};
  std::atomic<uint64_t> submitted_{0};
  // A thread wanted to run the queue for the last time before it sleeps, and no thread has looked
  // at the queue since.
  std::atomic<bool> isLookMissed_{false};
};

}  // namespace mycoll
