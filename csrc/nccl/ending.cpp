// How a communicator ends: close, abort, revoke.
#include <atomic>
#include <memory>
#include <system_error>
#include <thread>

#include "base/log.h"
#include "nccl/communicator.h"
#include "nccl/cudart.h"

namespace mycoll::nccl {
namespace {

// How long an abort waits for whoever is inside NCCL with this communicator. They look at the state
// every millisecond; who does not leave by then hangs in NCCL, and the abort is what frees him.
constexpr std::chrono::milliseconds kGrace{200};

bool lockBy(std::unique_lock<std::mutex>& lock, Deadline deadline) {
  while (!lock.try_lock()) {
    if (deadline.expired()) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace

Status Communicator::abort(Deadline deadline, Status why) {
  if (state() == State::kClosed) return {};
  beginAbort(std::move(why));
  std::unique_lock<std::mutex> lock(stateMutex_);
  if (state() == State::kClosed) return {};
  auto isDone = [this] { return isAbortDone_; };
  const auto since = Deadline::Clock::now();
  if (deadline.isNever()) {
    abortDone_.wait(lock, isDone);
  } else if (!abortDone_.wait_until(lock, deadline.when(), isDone)) {
    lock.unlock();
    MYCOLL_LOG_WARN("ncclCommAbort of '%s' has not come back; it is left on a thread of its own",
                    name_.c_str());
    return late("ncclCommAbort", since);
  }
  return {};
}

void Communicator::beginAbort(Status why) {
  if (!moveTo(State::kAborted, std::move(why))) return;
  auto run = [self = shared_from_this()] { self->runAbort(); };
  try {
    std::thread(run).detach();
  } catch (const std::system_error& error) {
    MYCOLL_LOG_WARN("no thread for ncclCommAbort (%s): it runs in its caller", error.what());
    run();
  }
}

void Communicator::runAbort() {
  if (options_.bindDevice) options_.bindDevice();
  const RelaxedCapture relaxed;  // NCCL frees
  Result result = Result::kSuccess;
  {
    std::unique_lock<std::mutex> issuing(issue_, std::defer_lock);
    std::unique_lock<std::mutex> inspecting(inspect_, std::defer_lock);
    const Deadline grace = Deadline::after(kGrace);
    if (!lockBy(issuing, grace)) {
      MYCOLL_LOG_WARN("a thread hangs in NCCL with communicator '%s'; aborting nevertheless",
                      name_.c_str());
    }
    (void)lockBy(inspecting, grace);
    Comm* comm = nullptr;
    {
      std::lock_guard<std::mutex> lock(stateMutex_);
      comm = comm_.exchange(nullptr, std::memory_order_acq_rel);
    }
    // With both locks let go: the handle is ours alone now, and others must not wait for NCCL.
    inspecting = {};
    issuing = {};
    if (comm != nullptr) result = library_.functions().commAbort(comm);
  }
  // kInProgress: NCCL goes on by itself, and the handle is gone either way.
  if (result != Result::kSuccess && result != Result::kInProgress) {
    MYCOLL_LOG_WARN("%s", describe(result, "ncclCommAbort").message().c_str());
  }
  std::lock_guard<std::mutex> lock(stateMutex_);
  isAbortDone_ = true;
  unfinished_.clear();
  abortDone_.notify_all();
}

Status Communicator::close(Deadline deadline) {
  const auto since = Deadline::Clock::now();
  if (state() == State::kNew) moveTo(State::kClosed);
  if (state() == State::kClosed) return {};
  Status status;
  {
    std::unique_lock<std::mutex> issuing(issue_, std::defer_lock);
    if (!lockBy(issuing, deadline)) {
      status = late("close()", since);
    } else if (state() == State::kReady && moveTo(State::kClosing)) {
      return leave(deadline);
    } else {
      status = unusable();  // failed, aborted, or still connecting in another thread
    }
  }
  // The first reason stays; the deadline may have passed, so nobody waits much longer.
  beginAbort(status);
  (void)abort(earlier(deadline, Deadline::after(std::chrono::seconds(5))), status).ok();
  return status;
}

// All of it on one thread, which has the handle to itself from here on: NCCL frees much of a
// communicator in any of these calls, so that no second one may begin beside it. An abort from
// elsewhere, as past the deadline, only ends our wait.
Status Communicator::leave(Deadline deadline) {
  Comm* comm = nullptr;
  {
    std::lock_guard<std::mutex> inspecting(inspect_);
    std::lock_guard<std::mutex> lock(stateMutex_);
    if (state() == State::kClosing) comm = comm_.exchange(nullptr, std::memory_order_acq_rel);
  }
  if (comm == nullptr) return unusable();  // abort() was quicker
  const auto since = Deadline::Clock::now();
  auto isLate = std::make_shared<std::atomic<bool>>(false);
  auto call = [this, comm, deadline, isLate] {
    const Functions& functions = library_.functions();
    Result result = functions.commFinalize(comm);
    while (result == Result::kInProgress && !deadline.expired()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      const Result asked = functions.commGetAsyncError(comm, &result);
      if (asked != Result::kSuccess) result = asked;
    }
    if (result == Result::kSuccess) return functions.commDestroy(comm);
    isLate->store(result == Result::kInProgress);
    (void)functions.commAbort(comm);
    return result;
  };
  Status status = aside("close()", call, deadline, nullptr);
  if (status.ok() && isLate->load()) status = late("close()", since);
  if (status.ok() && moveTo(State::kClosed)) return {};
  moveTo(State::kAborted, status);
  {
    std::lock_guard<std::mutex> lock(stateMutex_);
    isAbortDone_ = true;
    abortDone_.notify_all();
  }
  return status.ok() ? unusable() : status;
}

Status Communicator::revoke(Deadline deadline) {
  const auto function = library_.functions().commRevoke;
  if (function == nullptr) {
    return Status(Code::kUnsupported, library_.describe() + " has no ncclCommRevoke");
  }
  // Whoever enqueues may hang: that is what one revokes for.
  std::unique_lock<std::mutex> issuing(issue_, std::defer_lock);
  (void)lockBy(issuing, earlier(deadline, Deadline::after(kGrace)));
  Comm* const comm = handle();
  if (comm == nullptr || state() == State::kAborted) return unusable();
  isRevoked_ = true;
  (void)fail(Status(Code::kAborted, "NCCL communicator '" + name_ + "' was revoked")).ok();
  MYCOLL_RETURN_IF_ERROR(
      aside("ncclCommRevoke", [function, comm] { return function(comm, 0); }, deadline, nullptr));
  return settle("ncclCommRevoke", comm, deadline, nullptr);
}

}  // namespace mycoll::nccl
