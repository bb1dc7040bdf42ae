// Communicator: one rank's end of a group. It takes calls, runs them in order, matches them with
// the other ranks' calls, and reports the same first cause on all ranks when one fails. Each of its
// parts owns one thing:
//
//   mailbox     messages: posted requests, arrived messages         [I/O lock]
//   group       what the other parts share; in it:
//     tree        along which ranks notices travel
//     membership  which ranks are here, have left or are lost; cause  [I/O lock]
//     agreement   that all ranks make the same calls, by messages     [I/O lock]
//   queue       calls in order, and the threads that run them       [run lock, queue lock]
//   runner      how a collective is executed                        [the queue's run lock]
//   diagnosis   deadlines; missing ranks, and why; deadlocks        [a leaf]
//
// Thread contract: every public function may be called from any thread. Concurrent calls of several
// threads on one group run in an unspecified order, which other ranks cannot match: avoid them. No
// function holds a lock while it runs a callback.
// A call is queued. The queue is run by any thread that waits for one of its operations, or, for
// operations that no thread waits for, by the process's one progress thread (queue.h).
// Lifetime: a Communicator may be dropped at any time; it closes itself (see close()). An Op may
// outlive its communicator. User memory named in a call must live until its Op is done: `keepAlive`
// is held exactly as long.
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
#include "engine/diagnosis.h"
#include "engine/group.h"
#include "engine/op.h"
#include "engine/queue.h"
#include "engine/runner.h"
#include "engine/store.h"
#include "transport/mailbox.h"

namespace mycoll {

class Engine;
class Window;
struct KnownPeers;

constexpr int kAnySource = kFromAnyone;
// Passed as a timeout: use the group's own.
constexpr std::chrono::milliseconds kGroupTimeout(-1);

// A message to or from another rank. tag: any non-negative number; for a put or a signal: the
// window.
struct Message {
  Span data;
  int rank = 0;  // recv: may be kAnySource
  uint64_t tag = 0;
  DType dtype = DType::kOpaque;
  uint8_t opaqueType = 0;
  uint64_t wholeBytes = 0;    // both ranks compare this size, if the message is a piece
  uint64_t offset = 0;        // put: where in the window
  bool isTimedLater = false;  // the timeout counts from Op::noteWaiting(), not from the call
};

class Communicator final : public EventHandler, public std::enable_shared_from_this<Communicator> {
 public:
  using Milliseconds = std::chrono::milliseconds;

  // Forms the group: formation.h. Returns when all ranks have joined, or at the deadline
  // (options.timeout) with an error that names the missing ones. Connections beside those of the
  // control tree are made when first needed.
  // engine: null for the process's; tests give each rank-thread its own.
  static Status create(GroupOptions options, std::shared_ptr<Store> store,
                       std::shared_ptr<Engine> engine, std::shared_ptr<Communicator>* result);
  // Makes a second group of the same ranks, without any exchange: each rank
  // must make it before it uses it. suffix: appended to the name, the same on all ranks.
  static std::shared_ptr<Communicator> derive(const Communicator& parent, const std::string& suffix,
                                              bool isExternal);
  // Makes a group of the parent's ranks that are left, in the order of `members`, whatever the
  // parent's state. It needs no store, as the ranks know each other. Returns when all of them have
  // called it with the same suffix and members.
  static Status shrink(Communicator& parent, const std::string& suffix,
                       const std::vector<int>& members, std::shared_ptr<Communicator>* result);
  // Makes a group of ranks that are known already, or that meet in the store, or both.
  static Status form(GroupOptions options, Store* store, const std::shared_ptr<Engine>& engine,
                     KnownPeers known, std::shared_ptr<Communicator>* result);
  ~Communicator();

  int rank() const { return group_.options.rank; }
  int ranks() const { return group_.options.ranks; }
  // The group's number: the same on all ranks, and no other group's. Failures name it.
  uint64_t context() const { return mailbox_.group().context; }
  Milliseconds timeout() const { return Milliseconds(timeout_.load()); }
  void setTimeout(Milliseconds timeout) { timeout_.store(timeout.count()); }
  // See Diagnosis::warnAfter().
  void setWarnAfter(Milliseconds time) { diagnosis_.setWarnAfter(time); }
  // "shm", "tcp", "shm+tcp" or "self", once known; for logs and tests.
  std::string transport() const { return runner_.transport(); }
  // "TLS 1.3 PSK, AES-128-GCM"; empty if nothing is encrypted.
  std::string encryption() const { return runner_.encryption(); }
  Arena* arena() const { return runner_.arena(); }  // see Runner
  // "rank 0 (node1:4712)": for messages.
  std::string describeRank(int rank) const { return mailbox_.describeRank(rank); }
  // The record of what the group has done and is doing. The engine records submitted operations;
  // callers may add those that they run themselves.
  GroupRecord& record() { return group_.record; }
  // Number of collectives submitted so far.
  uint64_t sequence() const { return queue_.submitted(); }

  // ---- collectives
  // Queues a collective. The caller has checked that the call is well formed. timeout <= 0: the
  // group's. willWait: the caller waits next, so that no other thread needs to be woken for it.
  OpPtr submit(Call call, std::shared_ptr<void> keepAlive, bool willWait,
               Milliseconds timeout = kGroupTimeout);
  // Queues a coroutine that may run any number of collectives, as one operation; records and
  // messages describe it as a call of this kind.
  OpPtr submitComposite(OpKind kind, Composite composite, std::shared_ptr<void> keepAlive,
                        bool willWait, Milliseconds timeout = kGroupTimeout);
  // Runs the queue as far as it goes now. For a caller that knows that a composite's private
  // condition, which no other thread can detect, has become true.
  void advance() {
    while (queue_.run(0)) {
    }
  }

  // ---- messages
  // A send, recv, put, signal or wait_signal. Never queued behind collectives. Messages between two
  // ranks with equal tags arrive in the order sent. A put is done when it has left.
  OpPtr post(OpKind kind, const Message& message, std::shared_ptr<void> keepAlive, bool willWait,
             Milliseconds timeout = kGroupTimeout);
  OpPtr send(const Message& message, std::shared_ptr<void> keepAlive, bool willWait,
             Milliseconds timeout = kGroupTimeout) {
    return post(OpKind::kSend, message, std::move(keepAlive), willWait, timeout);
  }
  OpPtr recv(const Message& message, std::shared_ptr<void> keepAlive, bool willWait,
             Milliseconds timeout = kGroupTimeout) {
    return post(OpKind::kRecv, message, std::move(keepAlive), willWait, timeout);
  }

  // ---- windows (window.h, which checks the arguments)
  // Returns the number of a window, which gets it when its opening begins to run: in the same order
  // on all ranks.
  uint64_t addWindow(const std::shared_ptr<Window>& window) EXCLUDES(openWindowsMutex_);
  // Puts a message into memory that is mapped here: done when it returns. place: may be null if the
  // message is empty.
  OpPtr putInto(char* place, const Message& message);
  // The group is dead: its windows release the other ranks' memory. Called by the engine.
  void releaseWindows() EXCLUDES(openWindowsMutex_);

  // ---- waiting
  // Waits until the op is done and returns its status; or kTimeout at the deadline, or
  // kInterrupted, with the op still running. Works on the queue instead of sleeping.
  Status wait(const OpPtr& op, Deadline deadline) { return queue_.wait(op, deadline); }

  // ---- what runs elsewhere (External)
  // To be called once, on all ranks, before the first external operation. Meets the other ranks and
  // connects the neighbours, so that a death or a departure is detected although external
  // operations send nothing over this group.
  Status meetNeighbours();
  // Queues a collective that runs elsewhere. Wakes no thread: its caller calls watchExternal(). The
  // op ends with the external operation, or earlier if the group dies.
  std::shared_ptr<CollectiveOp> submitExternal(const Signature& signature,
                                               Milliseconds timeout = kGroupTimeout);
  // Ends external operations that are over, sends the collectives begun since the last time to the
  // next rank for comparison, and checks deadlines and missing ranks. To be called when an external
  // operation is over, and about every 50 ms while there are any, or while it returns true: there
  // is more to compare.
  bool watchExternal();
  // Records a message that runs elsewhere and was called at this place of the program. The caller
  // finishes the record when it detects the end of the message.
  OpRecord recordMessage(Operation message, uint32_t site);

  // ---- the end
  // Not ok once the group is dead: the first cause.
  Status error() const { return group_.membership.error(); }
  // Whether error() is not ok; takes no lock.
  bool hasFailed() const { return group_.membership.hasFailed(); }
  // Fails the group here and, by notifying them, on the other ranks; the first cause is kept. Does
  // not wait for them.
  void fail(const Status& cause) { group_.membership.fail(cause); }
  void whenFailed(std::function<void()> fn) { group_.membership.whenFailed(std::move(fn)); }
  // As fail(), for a reason given by the user.
  void abort(const std::string& reason);
  // Leaves the group: waits up to the deadline for pending operations, then sends a goodbye. Later
  // calls fail. Idempotent. reason: for the other ranks, see Membership::sendGoodbye().
  // isInterrupted: if not null, a signal ends the wait and sets it.
  void close(Deadline deadline, const std::string& reason = {}, bool* isInterrupted = nullptr);
  // close() in two parts, for one thread: between them the other ranks know that this one leaves,
  // and it still detects failures. leave() returns false if the group is being left already.
  bool leave(Deadline deadline, const std::string& reason = {}, bool* isInterrupted = nullptr);
  void endLeaving();
  // To be called before close(), which then waits until `rank` has left as well, for nearly a
  // second at most.
  void leaveAfter(int rank) { leavesAfter_.store(rank); }

  // ---- for the engine and its parts
  const GroupOptions& options() const { return group_.options; }
  Mailbox& mailbox() { return mailbox_; }
  const GroupAddress& address() const { return mailbox_.group(); }
  const std::vector<int>& hostRanks() const { return group_.hostRanks(); }
  Membership& membership() { return group_.membership; }
  const Membership& membership() const { return group_.membership; }
  Queue& queue() { return queue_; }
  Diagnosis& diagnosis() { return diagnosis_; }

 private:
  Communicator(GroupOptions options, std::shared_ptr<Engine> engine, GroupAddress address);
  static std::shared_ptr<Communicator> add(const std::shared_ptr<Engine>& engine,
                                           GroupOptions options, GroupAddress address);

  void handle(const Event& event) override REQUIRES(ioRole);

  OpPtr enqueue(std::shared_ptr<CollectiveOp> op, std::shared_ptr<void> keepAlive, bool willWait,
                Milliseconds timeout);
  // The op is done already if the group has failed.
  std::shared_ptr<MessageOp> makeMessage(const Message& message, const Signature& signature);
  // Ends and records an operation that was called after the group had failed: the record shows that
  // this rank made the call, too.
  OpPtr endAtOnce(std::shared_ptr<Op> op, const Operation& operation);
  Deadline deadlineOf(const Op& op, Milliseconds timeout) const;
  // The number of messages to other ranks that are not done.
  int sending();
  // An operation that other ranks may still need is in progress.
  bool isBusy(Deadline unsent);
  // The status of calls that are made after the group was closed.
  Status destroyed() const;

  Mailbox mailbox_;
  Group group_;
  std::atomic<int64_t> timeout_;  // milliseconds
  Runner runner_;
  Queue queue_;
  Diagnosis diagnosis_;

  std::atomic<uint64_t> messages_{0};
  std::atomic<int> leavesAfter_{-1};

  Mutex openWindowsMutex_;
  uint64_t windows_ GUARDED_BY(openWindowsMutex_) = 0;  // opened so far
  std::vector<std::weak_ptr<Window>> openWindows_ GUARDED_BY(openWindowsMutex_);
};

}  // namespace mycoll
