#include "nccl/issue.h"

#include <utility>

#include "base/wait.h"

namespace mycoll::nccl {

Issue::Issue(Comm& comm) : comm_(comm) {
  lock_ = std::unique_lock<std::mutex>(comm_.issue_, std::try_to_lock);
  // Not lock(): the thread that holds it may hang in NCCL, and abort() must end our wait.
  for (DevicePause pause; !lock_.owns_lock(); (void)lock_.try_lock()) {
    if (comm_.state() != Comm::State::kReady) break;
    pause.rest();
  }
  if (comm_.state() == Comm::State::kReady) handle_ = comm_.handle();
  if (handle_ == nullptr) status_ = comm_.unusable();
}

Status Issue::group() {
  if (!status_.ok() || isGrouped_) return status_;
  const Result result = functions().groupStart();
  isGrouped_ = result == Result::kSuccess;
  return take(result, "ncclGroupStart");
}

Status Issue::take(Result result, const char* function) {
  if (!status_.ok()) return status_;
  if (result == Result::kSuccess || (result == Result::kInProgress && isGrouped_)) return {};
  Status failed = result == Result::kInProgress
                      ? comm_.settle(function, handle_, comm_.issueDeadline(), nullptr)
                      : comm_.describe(result, function);
  if (!failed.ok()) status_ = comm_.fail(std::move(failed));
  return status_;
}

Status Issue::end() {
  // Also after an error: the group's depth belongs to the thread.
  if (std::exchange(isGrouped_, false)) (void)take(functions().groupEnd(), "ncclGroupEnd");
  return status_;
}

}  // namespace mycoll::nccl
