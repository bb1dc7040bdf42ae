// Diagnosis: monitors a group while a thread waits in it. It ends operations that are past their
// deadline or whose ranks have left, warns of late ones, finds out why a rank is missing, and
// detects deadlocks.
//
// A rank that has waited long asks the ranks that it waits for, process to process. Each answers
// with what it is doing. If it is itself blocked, because the thread that should make the call
// waits in another one, it forwards the question to the ranks that it waits for in turn. A question
// that returns to its sender has followed a deadlock:
//
//   rank 0, in a call of A  -> asks rank 1 -> whose thread is in a call of B, waits for rank 0
//   rank 0, for B           <- is asked        ^ the same wait that asked: a cycle
//
// Each rank waits for all of the ranks that it asks, and no rank of the cycle can make its call
// before its own wait ends. So there is no false alarm if "the thread that should make the call" is
// right. That thread is known for a group that only one thread has ever called, in a process that
// has no other thread that could call it (GroupOptions::mayBeCalled); no cycle is reported for
// other groups. A cycle is reported when it is found twice in the same shape, half of warnAfter()
// apart.
//
// The first question is sent when a wait has lasted for warnAfter(), which is also when the wait is
// logged, or shortly before its deadline.
//
// Thread contract: all [any thread]. Checks of the head of the queue run under its run lock. One
// lock, a leaf: it may be taken under the I/O lock.
// Lifetime: owned by its communicator, as are the parts that it refers to.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "engine/op.h"
#include "engine/waits.h"
#include "transport/frame.h"

namespace mycoll {

class Communicator;
class Queue;
class Runner;
struct Group;

constexpr std::chrono::milliseconds kDefaultWarnAfter{1000};

class Diagnosis {
 public:
  Diagnosis(Communicator& self, Group& group, Runner& runner, Queue& queue);

  // ---- for a thread that calls the group, or waits in it
  // Records the calling thread as one that calls the group.
  void noteCaller();
  // Threads that have not called the group so far may make the call that others wait for.
  void noteOtherCallers() { caller_.noteMany(); }
  // Registers a wait that only its op can end.
  void enter(std::optional<WaitBoard::Entry>* entry, const OpPtr& op);
  // To be called every 50 ms. Checks the deadline and the missing ranks of the collective that
  // runs.
  void checkHealth();
  void checkMessage(MessageOp& op);
  // Checks the deadlines of messages: perhaps no thread waits for them.
  void checkMessages();

  // How long an operation waits before it is logged and the first question is sent.
  std::chrono::milliseconds warnAfter() const { return warnAfter_.load(); }
  void setWarnAfter(std::chrono::milliseconds time) {
    warnAfter_.store(std::min<std::chrono::milliseconds>(time, std::chrono::hours(24 * 365)));
  }

  // ---- descriptions
  // The failure as the caller of this collective sees it.
  Status inContext(const Status& cause, const CollectiveOp& op) const;
  // The failure as the caller of a later operation sees it.
  Status calledLate(OpKind kind) const;

  // ---- questions and answers of other ranks
  // [I/O lock] Stores the message for handleMessages(), which is called without that lock.
  void onMessage(int source, FrameKind kind, const std::string& payload);
  void handleMessages();

 private:
  using Clock = std::chrono::steady_clock;
  // A wait that cannot end before other ranks make a call.
  struct Block {
    std::shared_ptr<Communicator> group;
    std::string identity;  // of the awaited operation; different for any other
    std::string text;      // "all_reduce ... (call #3) of group 'x', for 2.1 s, waits for rank 1"
    bool isMessage = false;
    uint64_t number = 0;
    std::vector<int> ranks;  // of the group: all of them must make the call
  };
  struct Question;
  struct Incoming {
    int source;
    FrameKind kind;
    std::string payload;
  };
  // An answer about `call`. waitsFor: the ranks that the answering rank waits for in it.
  struct Answer {
    std::string text;
    Clock::time_point when;
    uint64_t call = 0;
    std::vector<int> waitsFor{};
  };

  void check(CollectiveOp& op, std::vector<int> missing);
  bool isLate(const CollectiveOp& op) const;
  Status timeoutStatus(const CollectiveOp& op, const std::vector<int>& missing,
                       const std::vector<int>& behind) const;
  Status hasLeft(const CollectiveOp& op, const std::vector<int>& gone) const;
  std::string rankPrefix() const;
  std::string listRanks(const std::vector<int>& ranks, bool withStates = true) const;
  std::string stateOf(int rank) const;
  std::string lastAnswer(int rank) const;
  std::string listArrived(const std::vector<int>& missing, const std::vector<int>& behind) const;

  // Returns the number of the next question if it is time to ask it.
  std::optional<uint32_t> nextRound(Op& op, Clock::time_point since, Deadline deadline);
  void forward(Question question, const Block& block);
  std::string identityOf(const Op& op) const;
  std::optional<Block> blockBy(const Op& op, const std::string& call, Clock::time_point since,
                               std::vector<int> ranks);
  // Returns the reason why an op is blocked; nullopt if it waits for no particular ranks, or can
  // continue, or the group is being destroyed.
  std::optional<Block> blockOf(const CollectiveOp& op, std::vector<int> missing);
  std::optional<Block> blockOf(MessageOp& op);
  std::optional<Block> blockedHead();
  uint64_t callingThread() const;
  std::string explain(const Question& question, std::optional<Block>* block,
                      std::vector<int>* waitsFor);
  void onAnswer(int source, const std::string& payload);
  // Replaces the ranks that wait for others in this call themselves, as they have answered.
  std::vector<int> blamedFor(const CollectiveOp& op, const std::vector<int>& missing) const;
  void askOthers(const MessageOp& op);
  std::string explainMissingCall(std::optional<Block>* block);
  void onQuestion(int source, const std::string& payload);
  void onCycle(const Question& question, const Block& block);
  bool wasSeenBefore(const Question& question);
  void onDeadlock(const std::string& payload);
  bool isWaitingIn(const std::string& identity);

  Communicator& self_;
  Group& group_;
  Runner& runner_;
  Queue& queue_;

  std::atomic<std::chrono::milliseconds> warnAfter_{kDefaultWarnAfter};
  const uint64_t creator_ = threadNumber();
  Caller caller_;

  mutable Mutex mutex_;
  std::vector<Incoming> incoming_ GUARDED_BY(mutex_);
  std::map<int, Answer> answers_ GUARDED_BY(mutex_);     // by rank: the latest
  std::deque<std::string> passedOn_ GUARDED_BY(mutex_);  // questions
  // The cycle found last: the way of the question, and its round.
  std::pair<std::string, uint32_t> cycle_ GUARDED_BY(mutex_);
};

}  // namespace mycoll
