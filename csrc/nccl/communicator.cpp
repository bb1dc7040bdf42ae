#include "nccl/communicator.h"

#include <cassert>
#include <system_error>
#include <thread>

#include "base/log.h"
#include "base/wait.h"
#include "nccl/cudart.h"

namespace mycoll::nccl {
namespace {

using State = Communicator::State;

constexpr std::chrono::milliseconds kCheckInterval{5};

bool isLegal(State from, State to) {
  switch (from) {
    case State::kNew:
      return to == State::kConnecting || to == State::kClosed || to == State::kAborted;
    case State::kConnecting:
      return to == State::kReady || to == State::kFailed || to == State::kAborted;
    case State::kReady:
      return to == State::kClosing || to == State::kFailed || to == State::kAborted;
    case State::kClosing:
      return to == State::kClosed || to == State::kFailed || to == State::kAborted;
    case State::kFailed: return to == State::kAborted;
    case State::kClosed:
    case State::kAborted: break;
  }
  return false;
}

Code codeOf(Result result) {
  switch (result) {
    case Result::kRemoteError: return Code::kPeerLost;
    case Result::kTimeout: return Code::kTimeout;
    case Result::kSystemError: return Code::kNetwork;
    default: return Code::kInternal;
  }
}

// Short at first, as most of what NCCL does in the background is short.
void pauseBefore(int poll) {
  if (poll < 100) {
    cpuRelax();
  } else if (poll < 200) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(poll < 400 ? 50 : 1000));
  }
}

}  // namespace

const char* name(State state) {
  switch (state) {
    case State::kNew: return "new";
    case State::kConnecting: return "connecting";
    case State::kReady: return "ready";
    case State::kClosing: return "closing";
    case State::kClosed: return "closed";
    case State::kFailed: return "failed";
    case State::kAborted: return "aborted";
  }
  return "unknown state";
}

bool isSharedGpuRefused(const Status& status) {
  return status.message().find("Duplicate GPU detected") != std::string::npos;
}

Communicator::Communicator(const Library& library, int rank, int ranks, std::string name,
                           CommunicatorOptions options)
    : library_(library),
      rank_(rank),
      ranks_(ranks),
      name_(std::move(name)),
      options_(std::move(options)) {}

Communicator::~Communicator() {
  if (comm_.load(std::memory_order_acquire) != nullptr) {
    MYCOLL_LOG_WARN("NCCL communicator '%s' was dropped without close() or abort(); %s keeps it",
                    name_.c_str(), library_.describe().c_str());
  }
}

Status Communicator::describe(Result result, const char* function,
                              const std::string& context) const {
  if (result == Result::kSuccess) return {};
  const Functions& functions = library_.functions();
  const char* const error = functions.getErrorString(result);
  const char* const last = functions.getLastError(nullptr);
  std::string text = std::string(function) + " failed on rank " + std::to_string(rank_) + " of " +
                     std::to_string(ranks_) + " in '" + name_ +
                     "': " + (error != nullptr ? error : "unknown error");
  if (last != nullptr && *last != '\0') text += std::string("; last error: ") + last;
  if (!context.empty()) text += " [" + context + "]";
  return Status(codeOf(result), text + "; " + library_.describe());
}

Status Communicator::cause() const {
  std::lock_guard<std::mutex> lock(stateMutex_);
  return cause_;
}

bool Communicator::moveTo(State next, Status cause) {
  std::lock_guard<std::mutex> lock(stateMutex_);
  return moveToLocked(next, std::move(cause));
}

// The one place where the state changes. False: somebody ended the communicator first.
bool Communicator::moveToLocked(State next, Status cause) {
  const State now = state();
  if (!isLegal(now, next)) {
    // Anything but an end by somebody else is a mistake of ours.
    assert(now == next || now == State::kFailed || now == State::kAborted || now == State::kClosed);
    return false;
  }
  if (cause_.ok()) cause_ = std::move(cause);
  state_.store(next, std::memory_order_release);
  MYCOLL_LOG_DEBUG("NCCL communicator '%s': %s -> %s%s%s", name_.c_str(), nccl::name(now),
                   nccl::name(next), cause_.ok() ? "" : ": ", cause_.message().c_str());
  return true;
}

// Returns the first cause, which may be another than this one.
Status Communicator::fail(Status cause) {
  moveTo(State::kFailed, cause);
  const Status first = this->cause();
  return first.ok() ? cause : first;
}

// Why a state other than kReady can enqueue nothing.
Status Communicator::unusable() const {
  std::lock_guard<std::mutex> lock(stateMutex_);
  if (!cause_.ok()) return cause_;
  return Status(Code::kAborted,
                "NCCL communicator '" + name_ + "' cannot be used: it is " + nccl::name(state()));
}

Status Communicator::late(const char* function, Deadline::Clock::time_point since) const {
  const auto elapsed =
      std::chrono::duration_cast<std::chrono::milliseconds>(Deadline::Clock::now() - since);
  return Status(Code::kTimeout, std::string(function) + " TIMED OUT after " +
                                    std::to_string(elapsed.count()) + " ms on rank " +
                                    std::to_string(rank_) + " of " + std::to_string(ranks_) +
                                    " in '" + name_ + "'; " + library_.describe());
}

// --- waiting for NCCL

// Waits until NCCL has finished in the background what `function` began.
Status Communicator::settle(const char* function, Comm* comm, Deadline deadline,
                            const Check& check) {
  const auto since = Deadline::Clock::now();
  auto nextCheck = since + kCheckInterval;
  for (int poll = 0;; ++poll) {
    {
      std::lock_guard<std::mutex> lock(inspect_);
      // Past this line nobody frees it until we let go.
      if (handle() != comm || state() == State::kAborted) return unusable();
      Result error = Result::kSuccess;
      const Result asked = library_.functions().commGetAsyncError(comm, &error);
      if (asked != Result::kSuccess) return describe(asked, "ncclCommGetAsyncError", function);
      if (error != Result::kInProgress) return describe(error, function);
    }
    const auto now = Deadline::Clock::now();
    if (!deadline.isNever() && now >= deadline.when()) return late(function, since);
    if (now >= nextCheck) {
      if (check) MYCOLL_RETURN_IF_ERROR(check());
      nextCheck = now + kCheckInterval;
    }
    pauseBefore(poll);
  }
}

struct Communicator::Aside {
  std::mutex mutex;
  std::condition_variable done;
  bool isDone = false;
  bool isLeft = false;  // nobody waits any more
  Result result = Result::kSuccess;
};

// Runs `call` on a thread of its own. Ok when it returned kSuccess or kInProgress in time;
// otherwise the thread is left to itself and does whenLate() once the call has come back.
Status Communicator::aside(const char* function, Call call, Deadline deadline, const Check& check,
                           std::function<void()> whenLate) {
  const auto since = Deadline::Clock::now();
  auto shared = std::make_shared<Aside>();
  try {
    std::thread([self = shared_from_this(), shared, function, call = std::move(call),
                 whenLate = std::move(whenLate)] {
      if (self->options_.bindDevice) self->options_.bindDevice();
      const RelaxedCapture relaxed;  // NCCL allocates and frees
      const Result result = call();
      bool isLeft = false;
      {
        std::lock_guard<std::mutex> lock(shared->mutex);
        shared->result = result;
        shared->isDone = true;
        isLeft = shared->isLeft;
        shared->done.notify_all();
      }
      if (!isLeft) return;
      MYCOLL_LOG_WARN("%s of '%s' has come back after all", function, self->name_.c_str());
      if (whenLate) whenLate();
    }).detach();
  } catch (const std::system_error& error) {
    return Status(Code::kInternal, std::string("no thread for ") + function + ": " + error.what());
  }

  Status why;
  std::unique_lock<std::mutex> lock(shared->mutex);
  while (!shared->isDone) {
    const auto pause = std::min<std::chrono::milliseconds>(kCheckInterval, deadline.remaining());
    if (shared->done.wait_for(lock, pause, [&] { return shared->isDone; })) break;
    lock.unlock();
    if (deadline.expired()) {
      why = late(function, since);
    } else if (state() == State::kAborted) {
      why = unusable();
    } else if (check) {
      why = check();
    }
    lock.lock();
    if (why.ok() || shared->isDone) continue;
    shared->isLeft = true;
    MYCOLL_LOG_WARN("%s of '%s' has not come back; it is left on a thread of its own: %s", function,
                    name_.c_str(), why.message().c_str());
    return why;
  }
  if (shared->result == Result::kInProgress) return {};
  return describe(shared->result, function);
}

// --- watching

Status Communicator::check() {
  if (state() != State::kReady) return cause();
  std::unique_lock<std::mutex> lock(inspect_, std::try_to_lock);
  if (!lock.owns_lock()) return {};  // somebody is asking already
  Comm* const comm = handle();
  if (comm == nullptr || state() != State::kReady) return cause();
  Result error = Result::kSuccess;
  const Result asked = library_.functions().commGetAsyncError(comm, &error);
  lock.unlock();
  if (asked != Result::kSuccess) return fail(describe(asked, "ncclCommGetAsyncError"));
  if (error == Result::kSuccess || error == Result::kInProgress) return {};
  return fail(describe(error, "an operation", "asynchronous error"));
}

// --- issuing

Issue::Issue(Communicator& communicator) : communicator_(communicator) {
  lock_ = std::unique_lock<std::mutex>(communicator_.issue_, std::try_to_lock);
  // Not lock(): whoever holds it may hang in NCCL, and abort() must end our wait.
  for (int poll = 0; !lock_.owns_lock(); ++poll) {
    if (communicator_.state() != State::kReady) break;
    pauseBefore(poll);
    (void)lock_.try_lock();
  }
  if (communicator_.state() == State::kReady) comm_ = communicator_.handle();
  if (comm_ == nullptr) status_ = communicator_.unusable();
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
  Status failed =
      result == Result::kInProgress
          ? communicator_.settle(function, comm_,
                                 Deadline::after(communicator_.options_.issueTimeout), nullptr)
          : communicator_.describe(result, function);
  if (!failed.ok()) status_ = communicator_.fail(std::move(failed));
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
  if (lock_.owns_lock()) lock_.unlock();
  return status_;
}

}  // namespace mycoll::nccl
