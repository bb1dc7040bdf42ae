// Group: what a Communicator stands for: the queue of collectives, who runs it, and how it ends.
//
//   submit -> queue -> run(): the head's task is resumed whenever its condition is ready
//                      |  by a user's thread inside wait(), or by the engine's thread
//                      v
//                      finish: Op done, callbacks, next
//
// States: kRunning -> kFailed (first cause, for good) ; kRunning or kFailed -> kClosed.
//
// Thread contract: all [any thread]. Locks: runLock_ (who runs the queue) before queueLock_; none
// is held while an op is finished or the listener's functions (I/O lock) run.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/wait.h"
#include "collectives/shm/arena.h"
#include "engine/communicator.h"
#include "engine/engine.h"
#include "engine/message_notes.h"
#include "engine/op.h"
#include "observe/recorder.h"
#include "transport/mailbox.h"

namespace mycoll {

class Group final : public MailboxListener,
                    public CollectiveRunner,
                    public std::enable_shared_from_this<Group> {
 public:
  using Milliseconds = std::chrono::milliseconds;

  Group(GroupOptions options, std::shared_ptr<Engine> engine, GroupAddress address);
  ~Group();

  int rank() const { return options_.rank; }
  int ranks() const { return options_.ranks; }
  const GroupOptions& options() const { return options_; }
  const GroupAddress& address() const { return mailbox_.group(); }
  const std::shared_ptr<Engine>& engine() const { return engine_; }
  Milliseconds timeout() const { return Milliseconds(timeout_.load()); }

  OpPtr submit(Call call, Composite composite, std::shared_ptr<void> keepAlive, bool willWait,
               std::chrono::milliseconds timeout);
  OpPtr submitExternal(const Signature& signature, std::shared_ptr<External> external,
                       std::chrono::milliseconds timeout);
  OpRecord recordMessage(const ExternalMessage& message, uint32_t site);
  void noteMessage(const ExternalMessage& message);
  void noteReplayed(int peer, uint32_t lane);
  std::vector<MessageCounts> messageCounts(int peer, bool isSend) const {
    return messageNotes_.counts(peer, isSend);
  }
  bool watchExternal();
  void noteOtherCallers() { caller_.noteMany(); }
  Status meetNeighbours();
  OpPtr message(bool isSend, Span data, int rank, uint64_t tag, DType dtype, uint8_t opaqueType,
                std::shared_ptr<void> keepAlive, bool willWait, std::chrono::milliseconds timeout,
                uint64_t wholeBytes = 0);
  Status wait(const OpPtr& op, Deadline deadline);

  // Advances the queue as far as it goes now. spins: how often to look again at a condition that is
  // not ready. True if anything moved.
  bool run(int spins);
  // Collectives are queued and nobody waits for one of them.
  bool isUnattended() const {
    return !options_.isExternal && queued_.load(std::memory_order_seq_cst) > 0 &&
           waiters_.load(std::memory_order_seq_cst) == 0;
  }
  void setAsleep(bool asleep);
  // For a group that nobody is in a call of: has it failed on another rank of the host? True when
  // that is news.
  bool lookForFailure();
  // The deadlines of messages that futures tell of: nobody looks at them in a wait.
  void checkFutures();
  // See Communicator.
  void setChore(std::function<void()> chore);
  void doChore();
  // Deadlines, ranks that have left, calls that hang: for whoever has waited a while.
  void checkHealth();

  // What other ranks have said: questions, answers, verdicts (questions.cpp).
  void hearWords();

  uint64_t sequence() const { return submitted_.load(std::memory_order_relaxed); }
  Status error() const;
  bool hasFailed() const { return failed_.load(std::memory_order_acquire); }
  bool isClosed() const { return isClosed_.load(); }
  void setTimeout(std::chrono::milliseconds timeout) { timeout_.store(timeout.count()); }
  void fail(const Status& cause);
  void abort(const std::string& reason);
  void close(Deadline deadline);
  void leaveAfter(int rank) { leavesAfter_.store(rank); }
  std::string transport() const;
  GroupRecord& record() { return record_; }
  std::string describeRank(int rank) const { return mailbox_.describeRank(rank); }

  // CollectiveRunner: a collective as part of a task of this group's queue.
  Task run(Call call) override;

 private:
  // MailboxListener [I/O lock]
  void onFailure(const Status& cause, uint64_t from) override;
  Status onGoodbye(int rank) override;
  Departure departureOf(int rank) override;
  void onWord(int source, FrameKind kind, const std::string& payload) override;

  // questions.cpp
  struct Question;
  uint64_t identityOf(bool isMessage, uint64_t number) const;
  std::optional<Block> blockedHead();
  std::optional<Block> blockOf(const CollectiveOp& op, std::vector<int> missing);
  std::optional<Block> blockOf(MessageOp& op);
  std::string explain(const Question& question, std::optional<Block>* block);
  bool isTimeToAsk(BasicOp& op, std::chrono::steady_clock::time_point since);
  void ask(const BasicOp& op, const std::optional<Block>& block);
  void passOn(Question question, const Block& block);
  void onQuestion(int source, const std::string& text);
  void onCircle(const Question& question, const Block& block);
  void onVerdict(const std::string& payload);
  bool isWaitingIn(uint64_t identity);
  std::string lastWord(int rank) const;
  std::string listNames(const std::vector<int>& ranks) const;
  static std::string nameOf(const CollectiveOp& op);

  Task start(const Call& call);
  Task startUnprepared(const Call& call);
  Task runComposite(const Composite& composite);
  Task runExternal(CollectiveOp& op);
  bool isConnectedTo(int rank);
  void tellNews();
  void compareMessages();
  Task prepare();
  Task prepareAsLeader(bool* isShared);
  Task prepareAsMember(bool* isShared);
  Task runAlone(const Call& call);
  bool mayShareMemory() const;
  void adopt(std::shared_ptr<Segment> segment, const ArenaShape& shape, DistanceChoice distance);

  // The failure ends the collective of this number, or the next one.
  bool isOver(uint64_t number) const;
  // Under runLock_: one more collective begins.
  uint64_t beginNumber() {
    const uint64_t number = started_.load(std::memory_order_relaxed);
    started_.store(number + 1, std::memory_order_relaxed);
    return number;
  }
  // Under runLock_: of the collective that runs.
  uint64_t currentNumber() const {
    const uint64_t started = started_.load(std::memory_order_relaxed);
    return started > 0 ? started - 1 : 0;
  }
  // The same for the one that runs; also looks for a failure in the arena.
  bool noticeFailure(uint64_t number);
  Status outcomeOf(const Op& op);
  void noteCallSite(const Op& op);
  void sleepFor(const Op& op, bool isMessage, Deadline deadline);
  void checkMessage(const Op& op);
  Status inContext(const Status& cause, const CollectiveOp& op) const;
  Status timeoutStatus(const CollectiveOp& op, const std::vector<int>& missing) const;
  bool isLate(const CollectiveOp& op) const;
  std::string listRanks(const std::vector<int>& ranks) const;
  std::string listArrived(const std::vector<int>& missing) const;
  Status calledLate(OpKind kind) const;
  void recordLate(const Operation& operation);
  OpPtr failedOp(OpKind kind, Status status) const;
  Deadline deadlineFor(Milliseconds timeout) const;
  std::string checkCall(const Call& call) const;
  void noteCaller() {
    if (caller_.note()) engine_->caller().note();
  }
  // True if nothing is ahead of it.
  bool enqueue(std::shared_ptr<CollectiveOp> op);

  const GroupOptions options_;
  const std::shared_ptr<Engine> engine_;
  GroupRecord record_;
  const SpinPolicy spinPolicy_;
  Crowd crowd_;
  std::atomic<int64_t> timeout_;

  std::mutex runLock_;
  // Under runLock_: how the group communicates, once known.
  bool isPrepared_ = false;
  std::atomic<uint64_t> started_{0};  // collectives begun, as all ranks count them; read by all
  Signature current_;
  std::unique_ptr<Arena> arena_;
  std::atomic<Arena*> sharedArena_{nullptr};  // the same, for everybody else

  mutable std::mutex queueLock_;
  std::deque<std::shared_ptr<CollectiveOp>> queue_;  // guarded by queueLock_
  std::atomic<int> queued_{0};
  std::atomic<int> waiters_{0};
  std::atomic<uint64_t> submitted_{0};
  std::atomic<uint64_t> messages_{0};
  // Sends that are not done; shared with them, as they may outlive the group.
  std::shared_ptr<std::atomic<int>> sending_ = std::make_shared<std::atomic<int>>(0);

  // The collective that ended last; guarded by queueLock_.
  struct Finished {
    OpKind kind = OpKind::kBarrier;
    uint64_t sequence = 0;
    std::chrono::steady_clock::time_point submitted;
  };
  std::optional<Finished> finished_;

  const uint64_t creator_ = threadNumber();
  Caller caller_;
  struct Word {
    int source;
    FrameKind kind;
    std::string payload;
  };
  struct Heard {
    std::string text;
    std::chrono::steady_clock::time_point when;
  };
  struct Circle {
    std::string way;
    uint32_t round = 0;
  };
  mutable std::mutex wordLock_;     // a leaf; may be taken under the I/O lock
  std::vector<Word> words_;         // guarded by wordLock_, as are the next ones
  std::map<int, Heard> heard_;      // by rank: its latest answer
  std::deque<std::string> passed_;  // questions that were passed on
  Circle circle_;                   // the last one found

  std::mutex choreLock_;
  std::function<void()> chore_;  // guarded by choreLock_

  mutable std::mutex failureLock_;
  Status failure_;  // guarded by failureLock_
  std::atomic<bool> failed_{false};
  std::atomic<uint64_t> failedFrom_{0};  // the first collective that it ends
  std::atomic<int64_t> failedAt_{0};     // ticks of the steady clock
  std::atomic<bool> isClosed_{false};
  std::vector<std::atomic<bool>> left_;
  std::atomic<int> leavesAfter_{-1};
  std::chrono::steady_clock::time_point leftSince_;  // guarded by runLock_
  // External groups only, guarded by runLock_: what has been compared with the next rank.
  uint64_t compared_ = 0;
  std::chrono::steady_clock::time_point comparedAt_;
  MessageNotes messageNotes_;  // external groups only
  // Last: from its first moment on it may tell of failures, and all of the above must be there.
  Mailbox mailbox_;
};

}  // namespace mycoll
