#include "engine/op.h"

#include "base/text.h"

namespace mycoll {

void Op::atEnd(std::function<void()> fn) {
  {
    MutexLock lock(mutex_);
    if (!done()) {
      callbacks_.push_back(std::move(fn));
      return;
    }
  }
  fn();
}

void Op::finish(Status status) {
  record_.finish(status.ok(), steadyNanos());
  std::vector<std::function<void()>> callbacks;
  std::shared_ptr<void> kept = std::move(keepAlive);
  {
    MutexLock lock(mutex_);
    status_ = std::move(status);
    callbacks.swap(callbacks_);
    done_.store(true, std::memory_order_release);
  }
  for (auto& fn : callbacks) fn();
}

Operation CollectiveOp::description() const {
  const uint8_t flags = external ? kIsOnDevice : composite ? kIsComposite : 0;
  Operation operation = Operation::of(signature, sequence(), flags);
  if (!external) {
    operation.inBytes = totalBytes(call.in);
    operation.outBytes = totalBytes(call.out);
  }
  return operation;
}

std::string MessageOp::describe() const {
  return std::string(name(kind())) + (kind() == OpKind::kSend ? " to " : " from ") +
         (rank == kFromAnyone ? "any rank" : "rank " + std::to_string(rank)) + " with tag " +
         std::to_string(tag);
}

void MessageOp::deliver() {
  std::shared_ptr<MessageOp> last = std::move(self);
  sourceRank_ = peer();
  if (rank == kFromAnyone) record_.setPeer(sourceRank_);
  markDone();
  Status outcome = Transfer::status();
  if (!outcome.ok()) {
    outcome = outcome.withMessage(outcome.message() + onThisRank(ownRank) + describe());
  }
  finish(std::move(outcome));
}

}  // namespace mycoll
