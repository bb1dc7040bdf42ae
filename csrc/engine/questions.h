// Questions: finds out why a rank does not come. A rank that has waited long asks those that it
// waits for, process to process. Each answers what it is at; and when it is itself stuck, because
// the thread that should make the call waits in another one, it passes the question on to those
// that it waits for in turn. A question that comes back to its asker has gone round a deadlock:
//
//   rank 0, in a call of A  -> asks rank 1 -> whose thread is in a call of B, waits for rank 0
//   rank 0, for B           <- is asked        ^ the same wait that asked: a cycle
//
// Every rank of the cycle waits for all of the next ones to come, and none can come before it has
// been served; so no false alarm is possible as long as "the thread that should make the call" is
// right. It is known for a group that has only ever been called from one thread, in a process that
// has no other that could (GroupOptions::mayBeCalled); others are never accused. A cycle is
// believed when it is found twice in the same shape, half a second apart.
//
// Nothing of this happens before a wait has lasted for a second.
//
// Thread contract: all [any thread]. One lock, a leaf: it may be taken under the I/O lock. What
// another rank says is kept by onMessage() and looked at by handleMessages(), outside of that lock.
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
class Engine;
class Mailbox;
class Membership;
class Queue;
struct GroupOptions;

class Questions {
 public:
  Questions(const GroupOptions& options, Communicator& self, Engine& engine, Mailbox& mailbox,
            Membership& membership, Queue& queue);

  // ---- from which thread the group is called
  void noteCaller();
  // Other threads than those that have called it so far may make the call that others wait for.
  void noteOtherCallers() { caller_.noteMany(); }
  // Enters a wait that nothing but its op ends.
  void enter(std::optional<WaitBoard::Entry>* entry, const OpPtr& op,
             std::chrono::steady_clock::time_point since);

  // ---- asking
  // True if the ranks that the op waits for should be asked now; counts the rounds.
  bool isTimeToAsk(Op& op, std::chrono::steady_clock::time_point since);
  // What blocks an op. None: it does not wait for certain ranks, or could go on.
  std::optional<Block> blockOf(const CollectiveOp& op, std::vector<int> missing);
  std::optional<Block> blockOf(MessageOp& op);
  void ask(const Block& block, uint32_t round);
  // " (0.4 s ago it answered: ...)"; empty where it has not answered.
  std::string lastAnswer(int rank) const;

  // ---- hearing
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

  const GroupOptions& options_;
  Communicator& self_;
  Engine& engine_;
  Mailbox& mailbox_;
  Membership& membership_;
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
