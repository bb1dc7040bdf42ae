// Communicator: one rank's end of a group. It takes calls, runs them in order, matches them with
// the other ranks' calls, and tells the same story to everybody when one goes wrong. Its parts each
// own one thing:
//
//   mailbox     messages: what was posted, what has come            [I/O lock]
//   tree        along which ranks news travels
//   membership  who is here, has left or is lost; the first cause   [I/O lock]
//   agreement   that ranks were called alike, by messages           [I/O lock]
//   queue       calls in order, and who runs them                   [run lock, queue lock]
//   runner      how a collective is carried out                     [the queue's run lock]
//   diagnosis   deadlines, missing ranks, words about them
//   questions   why a rank does not come; deadlocks                 [a leaf]
//
// Thread contract: every public function may be called from any thread; calls that several threads
// make on one group at the same time run in an order that is only theirs to know, so they should
// not. No function holds a lock while it calls back.
// A call is queued. The queue is run by any thread that waits for one of its operations, or, for
// operations that nobody waits for, by the process's one progress thread (queue.h).
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

#include "base/deadline.h"
#include "base/mutex.h"
#include "base/status.h"
#include "collectives/plan/shape.h"
#include "engine/agreement.h"
#include "engine/control_tree.h"
#include "engine/diagnosis.h"
#include "engine/membership.h"
#include "engine/op.h"
#include "engine/questions.h"
#include "engine/queue.h"
#include "engine/runner.h"
#include "engine/store.h"
#include "transport/mailbox.h"

namespace mycoll {

class Engine;
class Window;

constexpr int kAnySource = kFromAnyone;
// As a timeout: the group's own.
constexpr std::chrono::milliseconds kGroupTimeout(-1);

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
  // In a group of more ranks the news of a failure goes along the control tree, not to each rank.
  int mostToldDirectly = 64;
  // The job's rank of each member; empty: the ranks themselves. For records and messages only.
  std::vector<int64_t> globalRanks;
  // Its ranks are ranks of the job that this process was started as a part of. False: somebody has
  // numbered them for this group alone, so what becomes of them says nothing about other groups.
  bool isOfJob = true;
  // Held while the group lives; may be empty. See Engine::process().
  std::shared_ptr<const void> seat;
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

// The job's rank of each member.
std::vector<int64_t> jobRanks(const GroupOptions& options);

// A message to or from another rank. tag: any non-negative number; of a put or a signal: the
// window.
struct Message {
  Span data;
  int rank = 0;  // recv: may be kAnySource
  uint64_t tag = 0;
  DType dtype = DType::kOpaque;
  uint8_t opaqueType = 0;
  uint64_t wholeBytes = 0;  // what the two ranks are compared by, where this is a piece of more
  uint64_t offset = 0;      // put: where in the window
};

class Communicator final : public EventHandler, public std::enable_shared_from_this<Communicator> {
 public:
  using Milliseconds = std::chrono::milliseconds;

  // Meets the other ranks through the store; returns when all have come, or with the names of
  // those that have not at the deadline (options.timeout). Connections are made when first needed.
  static Status create(GroupOptions options, std::shared_ptr<Store> store,
                       std::shared_ptr<Communicator>* result);
  // As create(), on an engine of the caller's: tests give each rank-thread one of its own.
  static Status create(GroupOptions options, std::shared_ptr<Store> store,
                       std::shared_ptr<Engine> engine, std::shared_ptr<Communicator>* result);
  // A second group of the same ranks, which needs no rendezvous: for all ranks to make before they
  // use it, with nothing exchanged. suffix: appended to the name, the same on all ranks.
  static std::shared_ptr<Communicator> derive(const Communicator& parent, const std::string& suffix,
                                              bool isExternal);
  // A group of those of the parent's ranks that are left, in this order, whatever has become of the
  // parent; needs no rendezvous, as they know each other. Returns when all of them have called it
  // with the same suffix and members, which no earlier group of theirs may have had.
  static Status shrink(const Communicator& parent, const std::string& suffix,
                       const std::vector<int>& members, std::shared_ptr<Communicator>* result);
  ~Communicator();

  int rank() const { return options_.rank; }
  int ranks() const { return options_.ranks; }
  // The group's number: the same on all ranks, and no other group's. Failures name it.
  uint64_t context() const { return mailbox_.group().context; }
  Milliseconds timeout() const { return Milliseconds(timeout_.load()); }
  void setTimeout(Milliseconds timeout) { timeout_.store(timeout.count()); }
  // "shm", "tcp", "shm+tcp" or "self", once known; for logs and tests.
  std::string transport() const { return runner_.transport(); }
  Arena* arena() const { return runner_.arena(); }  // see Runner
  // "rank 0 (node1:4712)": for messages.
  std::string describeRank(int rank) const { return mailbox_.describeRank(rank); }
  // What the group has done and is at. The engine records what is submitted here; others may add
  // what they run beside it.
  GroupRecord& record() { return record_; }
  // Number of collectives submitted so far.
  uint64_t sequence() const { return queue_.submitted(); }

  // ---- collectives
  // Queues a collective. The caller has checked that the call is well formed. timeout < 0: the
  // group's. willWait: the caller waits at once, so that nobody else needs to be woken for it.
  OpPtr submit(Call call, std::shared_ptr<void> keepAlive, bool willWait,
               Milliseconds timeout = kGroupTimeout);
  // Queues a coroutine that may run any number of collectives, as one operation; it is told about
  // as a call of this kind.
  OpPtr submitComposite(OpKind kind, Composite composite, std::shared_ptr<void> keepAlive,
                        bool willWait, Milliseconds timeout = kGroupTimeout);
  // Runs the queue as far as it goes now: for who knows that a condition of a composite's own,
  // which nobody else can see, has become true.
  void advance() { queue_.run(0); }

  // ---- messages
  // Never queued behind collectives. Messages between two ranks with equal tags arrive in the order
  // sent.
  OpPtr send(const Message& message, std::shared_ptr<void> keepAlive, bool willWait,
             Milliseconds timeout = kGroupTimeout);
  OpPtr recv(const Message& message, std::shared_ptr<void> keepAlive, bool willWait,
             Milliseconds timeout = kGroupTimeout);

  // ---- windows (window.h, which checks what it is asked for)
  // Windows are numbered as their opening begins to run, which is in the same order on all ranks.
  uint64_t nextWindow() { return windows_.fetch_add(1, std::memory_order_relaxed) + 1; }
  void noteWindow(const std::shared_ptr<Window>& window) EXCLUDES(openWindowsMutex_);
  // Done when the message has left.
  OpPtr put(const Message& message, std::shared_ptr<void> keepAlive, bool willWait,
            Milliseconds timeout = kGroupTimeout);
  // The same into memory that is mapped here: done when it returns.
  OpPtr putInto(char* place, const Message& message);
  OpPtr signal(const Message& message, bool willWait, Milliseconds timeout = kGroupTimeout);
  OpPtr waitSignal(const Message& message, bool willWait, Milliseconds timeout = kGroupTimeout);
  // The group is dead: its windows let go of the other ranks' memory. For the engine, now and then.
  void releaseWindows() EXCLUDES(openWindowsMutex_);

  // ---- waiting
  // Waits until the op is done and returns its status; or kTimeout at the deadline, or
  // kInterrupted, with the op still running. Works on the queue instead of sleeping.
  Status wait(const OpPtr& op, Deadline deadline) { return queue_.wait(op, deadline); }

  // ---- what runs elsewhere (External)
  // Once, on all ranks and before the first external operation: meets the others, and connects the
  // neighbours, so that a death or a leaving is heard of although nothing of these operations
  // travels over the group.
  Status meetNeighbours();
  // Queues a collective that runs elsewhere. Wakes nobody: who submits these calls watchExternal().
  // The op ends with it, or before it when the group dies.
  std::shared_ptr<CollectiveOp> submitExternal(const Signature& signature,
                                               Milliseconds timeout = kGroupTimeout);
  // Ends what is over; compares notes with another rank about what has begun since; looks at
  // deadlines and for ranks that are missing. To be called when an external operation is over, and
  // every 50 ms or so while there are any, or while it returns true: there is more to compare.
  bool watchExternal();
  // A message that runs elsewhere has been called, at this place of the program: for the record.
  // The caller finishes the record when it sees the end.
  OpRecord recordMessage(Operation message, uint32_t site);
  // Other threads than those that have called it so far may make the call that others wait for.
  void noteOtherCallers() { questions_.noteOtherCallers(); }

  // ---- the end
  // Not ok once the group is dead: the first cause.
  Status error() const { return membership_.error(); }
  // Whether that is a failure: costs nothing to ask.
  bool hasFailed() const { return membership_.hasFailed(); }
  // Kills the group here and, by telling them, on the other ranks; the first cause stays. Returns
  // at once.
  void fail(const Status& cause) { membership_.fail(cause); }
  // The same, for a reason of the user's.
  void abort(const std::string& reason);
  // Leaves the group: waits up to the deadline for pending operations, then says goodbye. Later
  // calls fail. Idempotent. The reason is for the other ranks: see Membership::sayGoodbye().
  // isInterrupted: not null where a signal should end the wait, and is then set.
  void close(Deadline deadline, const std::string& reason = {}, bool* isInterrupted = nullptr);
  // The same in two parts, for one thread: between them the other ranks know that this one leaves,
  // and it still hears of failures. False: the group is being left already.
  bool leave(Deadline deadline, const std::string& reason = {}, bool* isInterrupted = nullptr);
  void endLeaving();
  // Before close(): that will stay until this rank has left as well, or nearly a second.
  void leaveAfter(int rank) { leavesAfter_.store(rank); }

  // ---- for the engine and its parts
  const GroupOptions& options() const { return options_; }
  Mailbox& mailbox() { return mailbox_; }
  const GroupAddress& address() const { return mailbox_.group(); }
  Membership& membership() { return membership_; }
  const Membership& membership() const { return membership_; }
  Queue& queue() { return queue_; }
  Diagnosis& diagnosis() { return diagnosis_; }
  Questions& questions() { return questions_; }

 private:
  Communicator(GroupOptions options, std::shared_ptr<Engine> engine, GroupAddress address);
  static std::shared_ptr<Communicator> add(const std::shared_ptr<Engine>& engine,
                                           GroupOptions options, GroupAddress address);

  void handle(const Event& event) override REQUIRES(ioRole);

  OpPtr enqueue(std::shared_ptr<CollectiveOp> op, std::shared_ptr<void> keepAlive, bool willWait,
                Milliseconds timeout);
  OpPtr post(OpKind kind, const Message& message, std::shared_ptr<void> keepAlive, bool willWait,
             Milliseconds timeout);
  // Refused if it has failed: then the op is done.
  std::shared_ptr<MessageOp> makeMessage(OpKind kind, const Message& message,
                                         const Signature& signature);
  // The group had failed before this was called: that this rank has come, too, is worth noting.
  OpPtr endAtOnce(std::shared_ptr<Op> op, const Operation& operation);
  Deadline deadlineOf(const Op& op, Milliseconds timeout) const;
  // Something that other ranks may still need is under way.
  bool isBusy(Deadline unsent);
  // What calls end with that come after the end.
  Status destroyed() const;

  const GroupOptions options_;
  const std::shared_ptr<Engine> engine_;
  std::atomic<int64_t> timeout_;  // milliseconds
  GroupRecord record_;
  Mailbox mailbox_;
  const Shape shape_;
  const ControlTree tree_;
  Membership membership_;
  Agreement agreement_;
  Runner runner_;
  Queue queue_;
  Diagnosis diagnosis_;
  Questions questions_;

  std::atomic<uint64_t> messages_{0};
  // Sends that are not done; shared with them, as they may outlive the group.
  const std::shared_ptr<std::atomic<int>> sending_ = std::make_shared<std::atomic<int>>(0);
  std::atomic<int> leavesAfter_{-1};

  std::atomic<uint64_t> windows_{0};
  Mutex openWindowsMutex_;
  std::vector<std::weak_ptr<Window>> openWindows_ GUARDED_BY(openWindowsMutex_);
};

}  // namespace mycoll
