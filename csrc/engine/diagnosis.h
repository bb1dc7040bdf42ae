// Diagnosis: looks after a group while somebody waits in it. It ends operations whose time is over
// or whose ranks have left, warns of late ones, asks late ranks why (questions.h), and puts into
// words which ranks are missing and what they do.
//
// Thread contract: all [any thread]. Checks of the head of the queue run under its run lock.
// Lifetime: owned by its communicator, as are the parts that it refers to.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "engine/op.h"

namespace mycoll {

class Agreement;
class Engine;
class Mailbox;
class Membership;
class Questions;
class Queue;
class Runner;
struct GroupOptions;

class Diagnosis {
 public:
  Diagnosis(const GroupOptions& options, Engine& engine, Mailbox& mailbox, Membership& membership,
            Agreement& agreement, Runner& runner, Queue& queue, Questions& questions,
            GroupRecord& record);

  // ---- for whoever has waited a while
  // The collective that runs: its deadline, its missing ranks.
  void checkHealth();
  void checkMessage(MessageOp& op);
  // Messages that futures tell of, whose deadline nobody looks at in a wait.
  void checkFutures();

  // ---- words
  // The failure as the caller of this collective sees it.
  Status inContext(const Status& cause, const CollectiveOp& op) const;
  // ... as the caller of something that came after it sees it.
  Status calledLate(OpKind kind) const;

 private:
  void check(CollectiveOp& op, std::vector<int> missing);
  bool isLate(const CollectiveOp& op) const;
  Status timeoutStatus(const CollectiveOp& op, const std::vector<int>& missing,
                       const std::vector<int>& behind) const;
  Status hasLeft(const CollectiveOp& op, const std::vector<int>& gone) const;
  std::string listRanks(const std::vector<int>& ranks) const;
  std::string listArrived(const std::vector<int>& missing, const std::vector<int>& behind) const;

  const GroupOptions& options_;
  Engine& engine_;
  Mailbox& mailbox_;
  Membership& membership_;
  Agreement& agreement_;
  Runner& runner_;
  Queue& queue_;
  Questions& questions_;
  GroupRecord& record_;

  std::chrono::steady_clock::time_point leftSince_;  // guarded by the queue's run lock
};

}  // namespace mycoll
