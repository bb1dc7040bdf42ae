#include "nccl/comm.h"

#include <array>
#include <atomic>
#include <cassert>
#include <exception>
#include <thread>

#include "base/log.h"
#include "base/wait.h"
#include "nccl/cudart.h"
#include "nccl/issue.h"

namespace mycoll::nccl {
namespace {

using State = Comm::State;

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

// where: the communicator, if there is one.
std::string describeError(const Library& library, Result result, const char* function,
                          const std::string& where, const std::string& context) {
  const char* const error = library.functions().getErrorString(result);
  const char* const last = library.functions().getLastError(nullptr);
  std::string text = std::string(function) + " failed" + where + ": " +
                     (error != nullptr ? error : "unknown error");
  if (last != nullptr && *last != '\0') text += std::string("; last error: ") + last;
  if (!context.empty()) text += " [" + context + "]";
  return text + "; " + library.describe();
}

// For calls without a communicator.
Status describeWithout(const Library& library, Result result, const char* function) {
  if (result == Result::kSuccess) return {};
  return Status(Code::kInternal, describeError(library, result, function, "", ""));
}

Status lacks(const Library& library, const char* function) {
  return Status(Code::kUnsupported, library.describe() + " has no " + function);
}

// The number of threads left behind in a clean shutdown of this device, which waits for other
// ranks. No other clean shutdown on the device may begin beside them.
std::atomic<int>& leftInAnEnd(int device) {
  static std::array<std::atomic<int>, 64> counts{};
  return counts[static_cast<unsigned>(device) % counts.size()];
}

// How long an abort waits for a thread that is inside NCCL with this communicator. Our threads
// check the state every millisecond; one that has not returned by then hangs in NCCL.
constexpr std::chrono::milliseconds kGrace{200};

bool lockBy(std::unique_lock<std::mutex>& lock, Deadline deadline) {
  while (!lock.try_lock()) {
    if (deadline.expired()) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace

const char* name(State state) {
  static constexpr const char* kNames[] = {"new",    "connecting", "ready",  "closing",
                                           "closed", "failed",     "aborted"};
  return kNames[static_cast<size_t>(state)];
}

Comm::Comm(const Library& library, int rank, int ranks, std::string name, CommOptions options)
    : library_(library),
      rank_(rank),
      ranks_(ranks),
      name_(std::move(name)),
      options_(std::move(options)) {}

Comm::~Comm() {
  if (comm_.load(std::memory_order_acquire) != nullptr) {
    MYCOLL_LOG_WARN("NCCL communicator '%s' was dropped without close() or abort(); %s keeps it",
                    name_.c_str(), library_.describe().c_str());
  }
}

Status Comm::describe(Result result, const char* function, const std::string& context) const {
  if (result == Result::kSuccess) return {};
  const std::string where =
      " on rank " + std::to_string(rank_) + " of " + std::to_string(ranks_) + " in '" + name_ + "'";
  return Status(codeOf(result), describeError(library_, result, function, where, context));
}

Status Comm::cause() const {
  std::lock_guard<std::mutex> lock(stateMutex_);
  return cause_;
}

// The only function that changes the state. False: another thread ended the communicator first.
bool Comm::moveTo(State next, Status cause) {
  std::lock_guard<std::mutex> lock(stateMutex_);
  const State now = state();
  if (!isLegal(now, next)) {
    // A transition is illegal only if another thread has ended the communicator; else it is a bug.
    assert(now == next || now == State::kFailed || now == State::kAborted || now == State::kClosed);
    return false;
  }
  if (cause_.ok()) cause_ = std::move(cause);
  state_.store(next, std::memory_order_release);
  MYCOLL_LOG_DEBUG("NCCL communicator '%s': %s -> %s%s%s", name_.c_str(), nccl::name(now),
                   nccl::name(next), cause_.ok() ? "" : ": ", cause_.message().c_str());
  return true;
}

// Returns the first cause, which may differ from this one.
Status Comm::fail(Status cause) {
  moveTo(State::kFailed, cause);
  const Status first = this->cause();
  return first.ok() ? cause : first;
}

// Why a communicator that is not kReady cannot enqueue.
Status Comm::unusable() const {
  std::lock_guard<std::mutex> lock(stateMutex_);
  if (!cause_.ok()) return cause_;
  return Status(Code::kAborted,
                "NCCL communicator '" + name_ + "' cannot be used: it is " + nccl::name(state()));
}

Status Comm::late(const char* function, Deadline::Clock::time_point since) const {
  const auto elapsed =
      std::chrono::duration_cast<std::chrono::milliseconds>(Deadline::Clock::now() - since);
  return Status(Code::kTimeout, std::string(function) + " timed out after " +
                                    std::to_string(elapsed.count()) + " ms on rank " +
                                    std::to_string(rank_) + " of " + std::to_string(ranks_) +
                                    " in '" + name_ + "'; " + library_.describe());
}

// --- waiting for NCCL

// Waits until NCCL has finished the background work that `function` began.
Status Comm::settle(const char* function, RawComm* comm, Deadline deadline, const Check& check) {
  const auto since = Deadline::Clock::now();
  auto nextCheck = since + kCheckInterval;
  for (DevicePause pause;; pause.rest()) {
    {
      std::lock_guard<std::mutex> lock(inspect_);
      // Past this check no thread frees the handle while inspect_ is locked.
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
  }
}

struct Comm::Apart {
  std::mutex mutex;
  std::condition_variable done;
  bool isDone = false;
  bool isLeft = false;  // the caller no longer waits
  Result result = Result::kSuccess;
};

// Runs `call` on a thread of its own. Ok when it returned kSuccess or kInProgress in time. A handle
// that is in the slot is aborted if the call has failed, has returned after the caller stopped
// waiting, or could not begin. left: counts the threads whose caller no longer waits.
Status Comm::runApart(const char* function, Call call, Deadline deadline, const Check& check,
                      const Slot& slot, std::atomic<int>* left) {
  const auto since = Deadline::Clock::now();
  const auto undo = [this, slot] {
    if (slot && *slot != nullptr) (void)library_.functions().commAbort(*slot);
  };
  std::shared_ptr<Apart> shared;
  apart_.fetch_add(1);
  try {
    shared = std::make_shared<Apart>();
    std::thread([self = shared_from_this(), shared, function, call = std::move(call), undo, left] {
      if (self->options_.bindDevice) self->options_.bindDevice();
      const RelaxedCapture relaxed;  // NCCL allocates and frees
      const Result result = call();
      self->apart_.fetch_sub(1);
      bool isLeft = false;
      {
        std::lock_guard<std::mutex> lock(shared->mutex);
        shared->result = result;
        shared->isDone = true;
        isLeft = shared->isLeft;
        if (isLeft && left != nullptr) left->fetch_sub(1);
        shared->done.notify_all();
      }
      if (isLeft) {
        MYCOLL_LOG_WARN("%s of '%s' has returned after all", function, self->name_.c_str());
      }
      const bool isGood = result == Result::kSuccess || result == Result::kInProgress;
      if (isLeft || !isGood) undo();
    }).detach();
  } catch (const std::exception& error) {  // there is no thread, or no memory
    apart_.fetch_sub(1);
    if (options_.bindDevice) options_.bindDevice();
    const RelaxedCapture relaxed;
    undo();
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
    if (left != nullptr) left->fetch_add(1);
    MYCOLL_LOG_WARN("%s of '%s' has not come back; it is left on a thread of its own: %s", function,
                    name_.c_str(), why.message().c_str());
    return why;
  }
  if (shared->result == Result::kInProgress) return {};
  return describe(shared->result, function);
}

// --- watching

Status Comm::check() {
  if (state() != State::kReady) return cause();
  std::unique_lock<std::mutex> lock(inspect_, std::try_to_lock);
  if (!lock.owns_lock()) return {};  // another thread is asking already
  RawComm* const comm = handle();
  if (comm == nullptr || state() != State::kReady) return cause();
  Result error = Result::kSuccess;
  const Result asked = library_.functions().commGetAsyncError(comm, &error);
  lock.unlock();
  if (asked != Result::kSuccess) return fail(describe(asked, "ncclCommGetAsyncError"));
  if (error == Result::kSuccess || error == Result::kInProgress) return {};
  return fail(describe(error, "an operation", "asynchronous error"));
}

// --- making

// Its strings point into this communicator.
Config Comm::config() const {
  Config config;
  const NcclOptions& asked = options_.nccl;
  config.blocking = asked.isBlocking.value_or(false) ? 1 : 0;
  config.minCtas = asked.minCtas.value_or(kUndefined);
  config.maxCtas = asked.maxCtas.value_or(kUndefined);
  config.cgaClusterSize = asked.cgaClusterSize.value_or(kUndefined);
  config.nvlsCtas = asked.nvlsCtas.value_or(kUndefined);
  config.ctaPolicy = asked.ctaPolicy.value_or(kUndefined);
  config.trafficClass = asked.trafficClass.value_or(kUndefined);
  // If they shared resources, aborting one communicator would stop the kernels of all.
  config.splitShare = 0;
  if (!asked.netName.empty()) config.netName = asked.netName.c_str();
  if (!name_.empty()) config.commName = name_.c_str();
  return config;
}

Status Comm::createId(const Library& library, UniqueId* id) {
  return describeWithout(library, library.functions().getUniqueId(id), "ncclGetUniqueId");
}

Status Comm::connect(const UniqueId& id, Deadline deadline, const Check& check) {
  if (!moveTo(State::kConnecting)) return unusable();
  constexpr const char* kFunction = "ncclCommInitRankConfig";
  const Slot slot = std::make_shared<RawComm*>(nullptr);
  auto call = [this, slot, id] {
    Config config = this->config();
    return library_.functions().commInitRankConfig(slot.get(), ranks_, id, rank_, &config);
  };
  // NCCL may return a handle even if it fails.
  const Status called = runApart(kFunction, call, deadline, check, slot);
  if (!called.ok()) {
    const Status why = fail(called);
    (void)abort(Deadline::after(std::chrono::seconds(1)), why).ok();
    return why;
  }
  return becomeReady(slot, kFunction, deadline, check);
}

// Called when NCCL has made a handle, which it may still be connecting.
Status Comm::becomeReady(const Slot& slot, const char* function, Deadline deadline,
                         const Check& check) {
  RawComm* const comm = *slot;
  bool isOurs = false;
  {
    std::lock_guard<std::mutex> lock(stateMutex_);
    isOurs = state() == State::kConnecting;
    if (isOurs) comm_.store(comm, std::memory_order_release);
  }
  if (!isOurs) {  // aborted meanwhile, without the handle
    auto free = [this, comm] { return library_.functions().commAbort(comm); };
    (void)runApart("ncclCommAbort", free, Deadline::after(std::chrono::seconds(1)), nullptr).ok();
    return unusable();
  }
  Status settled = comm == nullptr
                       ? Status(Code::kInternal, std::string(function) + " gave no communicator")
                       : settle(function, comm, deadline, check);
  if (settled.ok() && !moveTo(State::kReady)) settled = unusable();
  if (!settled.ok()) {
    settled = fail(settled);
    (void)abort(Deadline::after(std::chrono::seconds(1)), settled).ok();
    return settled;
  }
  MYCOLL_LOG_INFO("NCCL communicator '%s': rank %d of %d is ready, %s", name_.c_str(), rank_,
                  ranks_, library_.describe().c_str());
  return {};
}

Status Comm::split(int color, int key, Comm* child, Deadline deadline, const Check& check) {
  constexpr const char* kFunction = "ncclCommSplit";
  const auto commSplit = library_.functions().commSplit;
  if (commSplit == nullptr) return lacks(library_, kFunction);
  const auto since = Deadline::Clock::now();
  std::unique_lock<std::mutex> lock(issue_, std::defer_lock);
  if (!lockBy(lock, deadline)) return late(kFunction, since);
  RawComm* const comm = handle();
  if (comm == nullptr || state() != State::kReady) return unusable();
  if (child != nullptr && !child->moveTo(State::kConnecting)) return child->unusable();

  const Slot slot = std::make_shared<RawComm*>(nullptr);
  {
    std::lock_guard<std::mutex> guard(stateMutex_);
    unfinished_.push_back(slot);
  }
  auto keepsChild = child != nullptr ? child->shared_from_this() : nullptr;
  const Config config = child != nullptr ? child->config() : this->config();
  auto call = [commSplit, color, key, comm, slot, config, keepsChild] {
    Config copy = config;
    return commSplit(comm, color, key, slot.get(), &copy);
  };
  Status status = runApart(kFunction, call, deadline, check);
  if (status.ok()) status = settle(kFunction, comm, deadline, check);
  if (!status.ok()) {
    status = fail(status);
    lock.unlock();
    if (child != nullptr) {
      (void)child->abort(Deadline::after(std::chrono::seconds(1)), status).ok();
    }
    return status;
  }
  {
    std::lock_guard<std::mutex> guard(stateMutex_);
    std::erase(unfinished_, slot);
  }
  lock.unlock();
  return child != nullptr ? child->becomeReady(slot, kFunction, deadline, check) : Status();
}

Deadline Comm::issueDeadline() const {
  return options_.issueTimeout ? Deadline::after(options_.issueTimeout()) : Deadline::never();
}

// --- memory

// An error here concerns only the call; the communicator stays usable. A timeout is the exception:
// it leaves a thread inside NCCL, beside which no other call may begin.
Status Comm::managed(const char* function, bool isThere,
                     const std::function<Result(RawComm*)>& call) {
  if (!isThere) return lacks(library_, function);
  Issue issue(*this);
  if (!issue.status().ok()) return issue.status();
  RawComm* const comm = issue.handle();
  const Deadline deadline = issueDeadline();
  Status status = runApart(function, [call, comm] { return call(comm); }, deadline, nullptr);
  if (status.ok()) status = settle(function, comm, deadline, nullptr);
  return status.code() == Code::kTimeout ? fail(std::move(status)) : status;
}

Status Comm::registerMemory(void* memory, size_t bytes, bool isSymmetric, Registration* made) {
  const auto kept = std::make_shared<Registration>();  // a late call may still write to it
  const Functions& nccl = library_.functions();
  const Status status =
      isSymmetric
          ? managed("ncclCommWindowRegister", nccl.commWindowRegister != nullptr,
                    [=, &nccl](RawComm* comm) {
                      return nccl.commWindowRegister(comm, memory, bytes, &kept->window,
                                                     kWindowSymmetric);
                    })
          : managed("ncclCommRegister", nccl.commRegister != nullptr, [=, &nccl](RawComm* comm) {
              return nccl.commRegister(comm, memory, bytes, &kept->buffer);
            });
  if (status.ok()) *made = *kept;
  return status;
}

Status Comm::deregister(const Registration& made) {
  const Functions& nccl = library_.functions();
  if (made.buffer != nullptr) {
    return managed("ncclCommDeregister", nccl.commDeregister != nullptr,
                   [=, &nccl](RawComm* comm) { return nccl.commDeregister(comm, made.buffer); });
  }
  if (made.window == nullptr) return {};
  return managed(
      "ncclCommWindowDeregister", nccl.commWindowDeregister != nullptr,
      [=, &nccl](RawComm* comm) { return nccl.commWindowDeregister(comm, made.window); });
}

Status Comm::allocate(const Library& library, size_t bytes, void** memory) {
  *memory = nullptr;
  const auto function = library.functions().memAlloc;
  if (function == nullptr) return lacks(library, "ncclMemAlloc");
  return describeWithout(library, function(memory, bytes), "ncclMemAlloc");
}

Status Comm::free(const Library& library, void* memory) {
  const auto function = library.functions().memFree;
  if (function == nullptr) return lacks(library, "ncclMemFree");
  return describeWithout(library, function(memory), "ncclMemFree");
}

// --- ending

Status Comm::abort(Deadline deadline, Status why) {
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

void Comm::beginAbort(Status why) {
  if (!moveTo(State::kAborted, std::move(why))) return;
  auto run = [self = shared_from_this()] { self->runAbort(); };
  try {
    std::thread(run).detach();
  } catch (const std::exception& error) {
    MYCOLL_LOG_WARN("no thread for ncclCommAbort (%s): it runs in its caller", error.what());
    run();
  }
}

void Comm::runAbort() {
  if (options_.bindDevice) options_.bindDevice();
  const RelaxedCapture relaxed;  // NCCL frees
  Result result = Result::kSuccess;
  std::unique_lock<std::mutex> issuing = evict();
  std::unique_lock<std::mutex> inspecting(inspect_);
  RawComm* comm = nullptr;
  std::vector<Slot> unfinished;
  {
    std::lock_guard<std::mutex> lock(stateMutex_);
    comm = comm_.exchange(nullptr, std::memory_order_acq_rel);
    unfinished.swap(unfinished_);
  }
  // Both locks are released: this thread owns the handle now, and others must not wait for NCCL.
  inspecting = {};
  issuing = {};
  if (comm != nullptr) result = library_.functions().commAbort(comm);
  // kInProgress: NCCL continues in the background, and the handle is gone either way.
  if (result != Result::kSuccess && result != Result::kInProgress) {
    MYCOLL_LOG_WARN("%s", describe(result, "ncclCommAbort").message().c_str());
  }
  // NCCL has finished these splits now. It has made a child in some, after their callers gave up.
  for (const Slot& slot : unfinished) {
    if (result == Result::kSuccess && *slot != nullptr) {
      (void)library_.functions().commAbort(*slot);
    }
  }
  endAbort();
}

void Comm::endAbort() {
  std::lock_guard<std::mutex> lock(stateMutex_);
  isAbortDone_ = true;
  abortDone_.notify_all();
}

// ncclCommAbort frees the communicator even if a thread is inside, so that thread must return
// first. Revoking stops what runs and frees nothing, so the thread returns. Where NCCL cannot
// revoke, communicators do not block unless the user wants it, and no thread stays inside for long.
std::unique_lock<std::mutex> Comm::evict() {
  std::unique_lock<std::mutex> issuing(issue_, std::defer_lock);
  const auto leave = [&](Deadline deadline) {
    if (!issuing.owns_lock() && !lockBy(issuing, deadline)) return false;
    while (handle() != nullptr && apart_.load() > 0) {
      if (deadline.expired()) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  };
  if (leave(Deadline::after(kGrace))) return issuing;
  const auto revoke = library_.functions().commRevoke;
  MYCOLL_LOG_WARN("a thread hangs in NCCL with communicator '%s', which %s", name_.c_str(),
                  revoke != nullptr ? "is revoked, and freed when the thread returns"
                                    : "stays until the thread comes back");
  RawComm* const comm = handle();
  if (revoke != nullptr && comm != nullptr) {
    const Result revoked = revoke(comm, 0);
    if (revoked != Result::kSuccess && revoked != Result::kInProgress) {
      MYCOLL_LOG_WARN("%s", describe(revoked, "ncclCommRevoke").message().c_str());
    }
  }
  (void)leave(Deadline::never());
  return issuing;
}

Status Comm::close(Deadline deadline, const Check& check) {
  const auto since = Deadline::Clock::now();
  if (state() == State::kNew) moveTo(State::kClosed);
  if (state() == State::kClosed) return {};
  Status status;
  {
    std::unique_lock<std::mutex> issuing(issue_, std::defer_lock);
    if (!lockBy(issuing, deadline)) {
      status = late("close()", since);
    } else if (state() == State::kReady && leftInAnEnd(options_.device) > 0) {
      status = Status(Code::kAborted, "NCCL communicator '" + name_ +
                                          "' is stopped, as the end of another one has not come "
                                          "back from NCCL: all ranks of a host have to end their "
                                          "groups in one order");
    } else if (state() == State::kReady && moveTo(State::kClosing)) {
      return leave(deadline, check);
    } else {
      status = unusable();  // failed, aborted, or still connecting in another thread
    }
  }
  // The first cause is kept. Waits at most until the deadline, which may have passed.
  beginAbort(status);
  (void)abort(earlier(deadline, Deadline::after(std::chrono::seconds(5))), status).ok();
  return status;
}

// Runs all steps on one thread, which owns the handle from here on: NCCL frees much of a
// communicator in each of these calls, so that no second one may begin beside it. An abort by
// another thread, as past the deadline, only ends our wait.
Status Comm::leave(Deadline deadline, const Check& check) {
  const auto since = Deadline::Clock::now();
  const Slot slot = std::make_shared<RawComm*>(nullptr);
  auto isLate = std::make_shared<std::atomic<bool>>(false);
  Call end = [this, slot, deadline, isLate] {
    RawComm* const comm = std::exchange(*slot, nullptr);
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
  {
    std::lock_guard<std::mutex> inspecting(inspect_);
    std::lock_guard<std::mutex> lock(stateMutex_);
    if (state() == State::kClosing) *slot = comm_.exchange(nullptr, std::memory_order_acq_rel);
  }
  if (*slot == nullptr) return unusable();  // abort() was first
  Status status =
      runApart("close()", std::move(end), deadline, check, slot, &leftInAnEnd(options_.device));
  if (status.ok() && isLate->load()) status = late("close()", since);
  if (status.ok() && moveTo(State::kClosed)) return {};
  moveTo(State::kAborted, status);
  endAbort();
  return status.ok() ? unusable() : status;
}

}  // namespace mycoll::nccl
