// Questions: finds out why a rank is missing. A rank that has waited long asks the ranks that it
// waits for, process to process. Each answers with what it is doing. If it is itself blocked,
// because the thread that should make the call waits in another one, it forwards the question to
// the ranks that it waits for in turn. A question that returns to its sender has followed a
// deadlock:
//
//   rank 0, in a call of A  -> asks rank 1 -> whose thread is in a call of B, waits for rank 0
//   rank 0, for B           <- is asked        ^ the same wait that asked: a cycle
//
// Each rank waits for all of the ranks that it asks, and no rank of the cycle can make its call
// before its own wait ends. So there is no false alarm if "the thread that should make the call" is
// right. That thread is known for a group that only one thread has ever called, in a process that
// has no other thread that could call it (GroupOptions::mayBeCalled); no cycle is reported for
// other groups. A cycle is reported when it is found twice in the same shape, half a second apart.
//
// The first question is sent when a wait has lasted for a second, or shortly before its deadline.
//
// Thread contract: all [any thread]. One lock, a leaf: it may be taken under the I/O lock.
// onMessage() stores what another rank sends; handleMessages() handles it without that lock.
// Lifetime: owned by its communicator, as are the parts that it refers to.
#pragma once

#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "engine/op.h"
#include "engine/waits.h"
#include "transport/frame.h"

namespace mycoll {

class Communicator;
class Queue;
struct Group;

class Questions {
 public:
  Questions(Group& group, Communicator& self, Queue& queue);

  // ---- from which thread the group is called
  void noteCaller();
  // Threads that have not called the group so far may make the call that others wait for.
  void noteOtherCallers() { caller_.noteMany(); }
  // Registers a wait that only its op can end.
  void enter(std::optional<WaitBoard::Entry>* entry, const OpPtr& op,
             std::chrono::steady_clock::time_point since);

  // ---- asking
  // True if the ranks that the op waits for should be asked now; counts the rounds.
  bool isTimeToAsk(Op& op, std::chrono::steady_clock::time_point since);
  // Returns what blocks an op; nullopt if it waits for no particular ranks, or can continue.
  std::optional<Block> blockOf(const CollectiveOp& op, std::vector<int> missing);
  std::optional<Block> blockOf(MessageOp& op);
  void ask(const Block& block, uint32_t round);
  // " (0.4 s ago it answered: ...)"; empty if it has not answered.
  std::string lastAnswer(int rank) const;

  // ---- receiving
  // [I/O lock]
  void onMessage(int source, FrameKind kind, const std::string& payload);
  void handleMessages();

 private:
  struct Question;
  struct Incoming {
    int source;
    FrameKind kind;
    std::string payload;
  };
  struct Answer {
    std::string text;
    std::chrono::steady_clock::time_point when;
  };
  struct Cycle {
    std::string way;
    uint32_t round = 0;
  };

  uint64_t identityOf(bool isMessage, uint64_t number) const;
  std::optional<Block> blockedHead();
  std::string explain(const Question& question, std::optional<Block>* block);
  std::string explainMissingCall(std::optional<Block>* block);
  uint64_t callingThread() const;
  void passOn(Question question, const Block& block);
  void onQuestion(int source, const std::string& text);
  void onCycle(const Question& question, const Block& block);
  bool wasSeenBefore(const Question& question);
  void onDeadlock(const std::string& payload);
  bool isWaitingIn(uint64_t identity);
  std::string listNames(const std::vector<int>& ranks) const;

  Group& group_;
  Communicator& self_;
  Queue& queue_;

  const uint64_t creator_ = threadNumber();
  Caller caller_;

  mutable Mutex mutex_;
  std::vector<Incoming> incoming_ GUARDED_BY(mutex_);
  std::map<int, Answer> answers_ GUARDED_BY(mutex_);     // by rank: the latest
  std::deque<std::string> passedOn_ GUARDED_BY(mutex_);  // questions
  Cycle cycle_ GUARDED_BY(mutex_);                       // the last one found
};

}  // namespace mycoll
