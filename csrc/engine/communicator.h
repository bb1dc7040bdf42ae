// Communicator: one rank's end of a group. It takes calls, runs them in order, matches them with
// the other ranks' calls, and tells the same story to everybody when one goes wrong.
//
// Thread contract: every public function may be called from any thread; calls that several threads
// make on one group at the same time run in an order that is only theirs to know, so they should
// not. No function holds a lock while it calls back.
// Who works: a call is queued, and the queue is run by whoever waits for one of its operations
// (wait() takes the queue over instead of sleeping) or, for operations that nobody waits for, by
// the process's one progress thread. A call that nobody is ahead of therefore runs in its caller.
// Lifetime: a Communicator may be dropped at any time; it closes itself (see close()). An Op
// outlives its communicator safely. User memory named in a call must live until its Op is done:
// `keepAlive` is held exactly as long.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/call.h"
#include "base/deadline.h"
#include "base/status.h"
#include "base/task.h"
#include "engine/store.h"
#include "observe/recorder.h"

namespace mycoll {

class Op;
using OpPtr = std::shared_ptr<Op>;
class Group;
class Engine;
struct GroupAddress;

constexpr int kAnySource = -1;

struct GroupOptions {
  std::string name;  // the same on all ranks; appears in messages
  int rank = 0;
  int ranks = 1;
  std::chrono::milliseconds timeout{1800'000};
  // Where the rendezvous store is, if that is known: peers are reached on the interface that routes
  // there. A name or an address.
  std::string storeHost;
  // Its operations run elsewhere (see External), except a few for which somebody waits at once: no
  // memory is shared for them, and the engine's thread never works on them.
  bool isExternal = false;
  // The job's rank of each member; empty: the ranks themselves. For records and messages only.
  std::vector<int64_t> globalRanks;
  // Asked now and then while a user's thread waits (about every 50 ms); true ends the wait with
  // kInterrupted and leaves the operation running. May be empty. Called without locks.
  std::function<bool()> interrupted;
  // Where the program called what this thread waits for, as BlackBox::intern() numbers it; 0: not
  // known. Asked of a user's thread that has waited a while, or whose operation has failed. May be
  // empty. Called without locks.
  std::function<uint32_t()> callSite;
  // Whether others than the threads that have called this group may yet call it: threads of the
  // program, callbacks of futures. Then it is not stuck because its callers wait elsewhere. Empty:
  // nobody. Called without locks.
  std::function<bool()> mayBeCalled;
};

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
  // recv: the rank whose message came. Only when done.
  int sourceRank() const { return sourceRank_; }
  // What is remembered of it.
  const OpRecord& record() const { return record_; }
  // Runs fn once, when the op is done: at once if it is, else on the thread that completes it.
  virtual void onDone(std::function<void()> fn) = 0;

 protected:
  std::atomic<bool> done_{false};
  Status status_;
  uint64_t sequence_ = 0;
  OpKind kind_ = OpKind::kBarrier;
  OpRecord record_;
  int sourceRank_ = -1;
};

// Runs collectives as parts of one composite operation (see Communicator::submitComposite).
class CollectiveRunner {
 public:
  virtual ~CollectiveRunner() = default;
  // The spans named in the call must live until the task ends.
  virtual Task run(Call call) = 0;
};
using Composite = std::function<Task(CollectiveRunner&)>;

// A collective that runs elsewhere, on a device: the group keeps its place in the order, holds the
// ranks to the same calls, watches its deadline and the other ranks' lives, and does not carry it
// out. Whoever sees its end calls finish(), then Communicator::watchExternal().
class External {
 public:
  virtual ~External() = default;
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

// A message that runs elsewhere, between this rank and another one.
struct ExternalMessage {
  int peer = 0;
  bool isSend = false;
  uint32_t lane = 0;  // the way it takes, where there are several with an order each
  DType dtype = DType::kOpaque;
  uint8_t opaqueType = 0;
  uint64_t bytes = 0;
  uint64_t tag = 0;
};

// How far two ranks are with one kind of such messages: what each of them has noted, as far as the
// other one has told.
struct MessageCounts {
  uint32_t lane = 0;
  uint64_t mine = 0, theirs = 0;
};

class Communicator {
 public:
  // Meets the other ranks through the store; returns when all have come, or with the names of
  // those who have not at the deadline (options.timeout). Connections are made when first needed.
  static Status create(GroupOptions options, std::shared_ptr<Store> store,
                       std::shared_ptr<Communicator>* result);
  // As create(), on an engine of the caller's: tests give each rank-thread one of its own.
  static Status create(GroupOptions options, std::shared_ptr<Store> store,
                       std::shared_ptr<Engine> engine, std::shared_ptr<Communicator>* result);
  // A second group of the same ranks, which needs no rendezvous: for all ranks to make before they
  // use it, with nothing exchanged. suffix: appended to the name, the same on all ranks.
  static Status derive(const Communicator& parent, const std::string& suffix, bool isExternal,
                       std::shared_ptr<Communicator>* result);
  // A group of those of the parent's ranks that are left, in this order, whatever has become of the
  // parent; needs no rendezvous, as they know each other. Returns when all of them have called it
  // with the same suffix and members, which no earlier group of theirs may have had.
  static Status shrink(const Communicator& parent, const std::string& suffix,
                       const std::vector<int>& members, std::shared_ptr<Communicator>* result);
  ~Communicator();

  int rank() const;
  int ranks() const;
  void setTimeout(std::chrono::milliseconds timeout);

  // Queues a collective. Invalid calls come back as an op that is done and failed, without touching
  // the group. timeout < 0: the group's. willWait: the caller waits at once, so that nobody else
  // needs to be woken for it.
  OpPtr submit(Call call, std::shared_ptr<void> keepAlive, bool willWait,
               std::chrono::milliseconds timeout = std::chrono::milliseconds(-1));
  // Queues a coroutine that may run any number of collectives, as one operation; it is told about
  // as a call of this kind.
  OpPtr submitComposite(OpKind kind, Composite composite, std::shared_ptr<void> keepAlive,
                        bool willWait,
                        std::chrono::milliseconds timeout = std::chrono::milliseconds(-1));

  // External groups, once, on all ranks and before the first external operation: meets the others,
  // and connects the neighbours, so that a death or a leaving is heard of although nothing of these
  // operations travels over the group.
  Status meetNeighbours();
  // Queues a collective that runs elsewhere. Wakes nobody: who submits these calls watchExternal().
  // The op ends with it, or before it when the group dies.
  OpPtr submitExternal(const Signature& signature, std::shared_ptr<External> external,
                       std::chrono::milliseconds timeout = std::chrono::milliseconds(-1));
  // A message that runs elsewhere has been called, at this place of the program: for the black box.
  // Whoever sees its end finishes the record.
  OpRecord recordMessage(const ExternalMessage& message, uint32_t site);
  // The same when it is carried out, in the order of its lane. What both ranks have noted is
  // compared by watchExternal(), and the group fails where they differ.
  void noteMessage(const ExternalMessage& message);
  // A graph that will be replayed, nobody says how often, holds a message: those of its lane are
  // not compared any more.
  void noteReplayed(int peer, uint32_t lane);
  // Of the messages to that rank, or from it. Lanes that are not compared are left out.
  std::vector<MessageCounts> messageCounts(int peer, bool isSend) const;
  // Ends what is over; compares notes with other ranks about what has begun since; looks at
  // deadlines and for ranks that are missing. To be called when an external operation is over, and
  // every 50 ms or so while there are any, or while it returns true: the notes on the last ones are
  // still to be compared.
  bool watchExternal();
  // What the engine's thread is to do about every 250 ms, once a second at least; it must not
  // block.
  void setChore(std::function<void()> chore);
  // Other threads than those that have called it so far may make the call that others wait for.
  void noteOtherCallers();

  // Runs the queue as far as it goes now: for who knows that a condition of a composite's own,
  // which nobody else can see, has become true.
  void advance();

  // Point to point; never queued behind collectives. Messages between two ranks with equal tags
  // arrive in the order sent. tag is any non-negative number. wholeBytes: what the two ranks are
  // compared by, where this is a piece of something larger.
  OpPtr send(Span data, int destination, uint64_t tag, DType dtype, uint8_t opaqueType,
             std::shared_ptr<void> keepAlive, bool willWait,
             std::chrono::milliseconds timeout = std::chrono::milliseconds(-1),
             uint64_t wholeBytes = 0);
  OpPtr recv(Span data, int source, uint64_t tag, DType dtype, uint8_t opaqueType,
             std::shared_ptr<void> keepAlive, bool willWait,
             std::chrono::milliseconds timeout = std::chrono::milliseconds(-1),
             uint64_t wholeBytes = 0);

  // Waits until the op is done and returns its status; or kTimeout at the deadline, or
  // kInterrupted, with the op still running. Works on the queue instead of sleeping.
  Status wait(const OpPtr& op, Deadline deadline);

  // By which Cause::group names it: the same number on all ranks.
  uint64_t context() const;
  // Number of collectives submitted so far.
  uint64_t sequence() const;
  // Not ok once the group is dead: the first cause.
  Status error() const;
  // Whether that is a failure: costs nothing to ask.
  bool hasFailed() const;
  // Kills the group here and, by telling them, on the other ranks; the first cause stays. Returns
  // at once.
  void fail(const Status& cause);
  // The same, for a reason of the user's.
  void abort(const std::string& reason);
  // Leaves the group: waits up to the deadline for pending operations, then says goodbye. Later
  // calls fail. Idempotent.
  void close(Deadline deadline);
  // Before close(): that will stay until this rank has left as well, or nearly a second.
  void leaveAfter(int rank);
  // "shm", "tcp", "shm+tcp" or "self", once known; for logs and tests.
  std::string transport() const;
  // "rank 0 (node1:4712)": for messages.
  std::string describeRank(int rank) const;
  // What the group has done and is at. The engine records what is submitted here; others may add
  // what they run beside it.
  GroupRecord& record() const;

 private:
  explicit Communicator(std::shared_ptr<Group> group);
  // A group of a known group's ranks, under options.name.
  static void addGroup(const std::shared_ptr<Engine>& engine, GroupOptions options,
                       GroupAddress address, std::shared_ptr<Communicator>* result);
  std::shared_ptr<Group> group_;
};

}  // namespace mycoll
