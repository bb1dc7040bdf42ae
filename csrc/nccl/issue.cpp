#include "nccl/issue.h"

#include <chrono>
#include <thread>

#include "base/wait.h"

namespace mycoll::nccl {

void pauseBefore(int poll) {
  if (poll < 100) {
    cpuRelax();
  } else if (poll < 200) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(poll < 400 ? 50 : 1000));
  }
}

Issue::Issue(Comm& comm) : comm_(comm) {
  lock_ = std::unique_lock<std::mutex>(comm_.issue_, std::try_to_lock);
  // Not lock(): the thread that holds it may hang in NCCL, and abort() must end our wait.
  for (int poll = 0; !lock_.owns_lock(); ++poll) {
    if (comm_.state() != Comm::State::kReady) break;
    pauseBefore(poll);
    (void)lock_.try_lock();
  }
  if (comm_.state() == Comm::State::kReady) handle_ = comm_.handle();
  if (handle_ == nullptr) status_ = comm_.unusable();
}

Issue::~Issue() {
  if (!isEnded_) (void)end().ok();
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
  if (isEnded_) return status_;
  isEnded_ = true;
  if (isGrouped_) {
    isGrouped_ = false;
    // Also after an error: the group's depth belongs to the thread.
    const Result result = functions().groupEnd();
    (void)take(result, "ncclGroupEnd").ok();
  }
  return status_;
}

}  // namespace mycoll::nccl
