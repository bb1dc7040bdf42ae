// Diagnosis: monitors a group while a thread waits in it. It ends operations that are past their
// deadline or whose ranks have left, warns of late ones, asks late ranks for the reason
// (questions.h), and describes which ranks are missing and what they do.
//
// Thread contract: all [any thread]. Checks of the head of the queue run under its run lock.
// Lifetime: owned by its communicator, as are the parts that it refers to.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "engine/op.h"

namespace mycoll {

class Questions;
class Queue;
class Runner;
struct Group;

class Diagnosis {
 public:
  Diagnosis(Group& group, Runner& runner, Queue& queue, Questions& questions);

  // ---- for a thread that has waited a while
  // Checks the deadline and the missing ranks of the collective that runs.
  void checkHealth();
  void checkMessage(MessageOp& op);
  // Checks the deadlines of messages that only futures wait for, which no waiting thread checks.
  void checkFutures();

  // ---- descriptions
  // The failure as the caller of this collective sees it.
  Status inContext(const Status& cause, const CollectiveOp& op) const;
  // The failure as the caller of a later operation sees it.
  Status calledLate(OpKind kind) const;

 private:
  void check(CollectiveOp& op, std::vector<int> missing);
  bool isLate(const CollectiveOp& op) const;
  Status timeoutStatus(const CollectiveOp& op, const std::vector<int>& missing,
                       const std::vector<int>& behind) const;
  Status hasLeft(const CollectiveOp& op, const std::vector<int>& gone) const;
  std::string listRanks(const std::vector<int>& ranks) const;
  std::string listArrived(const std::vector<int>& missing, const std::vector<int>& behind) const;

  Group& group_;
  Runner& runner_;
  Queue& queue_;
  Questions& questions_;

  std::chrono::steady_clock::time_point leftSince_;  // guarded by the queue's run lock
};

}  // namespace mycoll
