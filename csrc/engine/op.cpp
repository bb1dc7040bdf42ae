#include "engine/op.h"

#include <cassert>
#include <new>

#include "base/text.h"

namespace mycoll {

void Op::onDone(std::function<void()> fn) {
  {
    MutexLock lock(mutex_);
    hasCallbacks_.store(true, std::memory_order_seq_cst);
    if (!done_.load(std::memory_order_seq_cst)) {
      callbacks_.push_back(std::move(fn));
      return;
    }
  }
  fn();
}

void Op::finish(Status status) {
  assert(!done());
  record_.finish(status.ok(), steadyNanos());
  const std::shared_ptr<void> kept = std::move(keepAlive);
  status_ = std::move(status);
  // This thread finds a callback, or onDone() finds that the op is done.
  done_.store(true, std::memory_order_seq_cst);
  if (!hasCallbacks_.load(std::memory_order_seq_cst)) return;
  std::vector<std::function<void()>> callbacks;
  {
    MutexLock lock(mutex_);
    callbacks.swap(callbacks_);
  }
  bool hasRunOut = false;
  for (auto& fn : callbacks) {
    try {
      fn();
    } catch (const std::bad_alloc&) {
      hasRunOut = true;
    }
  }
  if (hasRunOut) throw std::bad_alloc();
}

Operation CollectiveOp::description() const {
  Operation operation;
  operation.signature = signature;
  operation.flags = external ? kIsOnDevice : composite ? kIsComposite : 0;
  operation.sequence = sequence();
  operation.inBytes = external ? signature.bytes : totalBytes(call.in);
  operation.outBytes = external ? signature.bytes : totalBytes(call.out);
  return operation;
}

void MessageOp::noteWaiting() {
  if (waitingSince_.load(std::memory_order_relaxed) == Clock::time_point::max()) {
    noteWaiting(Clock::now());
  }
}

void MessageOp::noteWaiting(Clock::time_point since) {
  Clock::time_point never = Clock::time_point::max();
  waitingSince_.compare_exchange_strong(never, since, std::memory_order_relaxed);
}

Deadline MessageOp::deadline() const {
  const auto since = waitingSince_.load(std::memory_order_relaxed);
  return since == Clock::time_point::max() ? Deadline::never() : Deadline::after(timeout, since);
}

std::string MessageOp::describe() const {
  return describe(rank == kFromAnyone ? "any rank" : "rank " + std::to_string(rank));
}

std::string MessageOp::describe(const std::string& other) const {
  const bool isOneSided = kind() != OpKind::kSend && kind() != OpKind::kRecv;
  const bool isIncoming = kind() == OpKind::kRecv || kind() == OpKind::kWaitSignal;
  return std::string(name(kind())) + (isIncoming ? " from " : " to ") + other +
         (isOneSided ? " in window #" : " with tag ") + std::to_string(tag);
}

// Returns a shorter status if memory runs out: an operation must end in any case.
Status MessageOp::described(const Status& outcome) const {
  try {
    return outcome.withMessage(outcome.message() + onThisRank(ownRank) + describe());
  } catch (const std::bad_alloc&) {
    return outcome;
  }
}

void MessageOp::deliver() {
  std::shared_ptr<MessageOp> last = std::move(self);
  sourceRank_ = peer();
  if (rank == kFromAnyone) record_.setPeer(sourceRank_);
  markDone();
  Status outcome = Transfer::status();
  if (!outcome.ok()) outcome = described(outcome);
  finish(std::move(outcome));
}

}  // namespace mycoll
