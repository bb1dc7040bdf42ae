#include "backend/errors.h"

#include <c10/util/Exception.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "backend/callback_pool.h"
#include "base/env.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/os.h"

namespace mycoll {
namespace {

std::atomic<pthread_t> exiting{};

using Clock = std::chrono::steady_clock;
// One cause reaches all groups of a process within this time.
constexpr auto kSpreading = std::chrono::seconds(1);
thread_local int quietScopes = 0;  // alive on this thread

// The failures of groups that were thrown in Python's main thread within kSpreading. [any thread]
class RaisedFailures {
 public:
  static RaisedFailures& get() { return perProcess<RaisedFailures>(); }
  void add(const Status& status) {
    const MutexLock lock(mutex_);
    forget();
    latest_.push_back({status, Clock::now(), count_.fetch_add(1, std::memory_order_relaxed)});
  }
  bool has(const Status& status, uint64_t since) {
    const MutexLock lock(mutex_);
    forget();
    for (const Entry& entry : latest_) {
      if (entry.number >= since && entry.status.isSameFailure(status)) return true;
    }
    return false;
  }
  uint64_t count() const { return count_.load(std::memory_order_relaxed); }

 private:
  struct Entry {
    Status status;
    Clock::time_point when;
    uint64_t number;
  };

  void forget() REQUIRES(mutex_) {
    const auto now = Clock::now();
    std::erase_if(latest_, [now](const Entry& entry) { return now - entry.when > kSpreading; });
  }

  Mutex mutex_;
  std::vector<Entry> latest_ GUARDED_BY(mutex_);
  std::atomic<uint64_t> count_{0};  // of all failures
};

}  // namespace

void throwArgumentError(const std::string& message) {
  throw ArgumentError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, message);
}

bool isMainThread() { return syscall(SYS_gettid) == getpid(); }

uint32_t callSiteOfWaiter() {
  if (Env::process().callSites == CallSites::kNever) return 0;
  return isMainThread() ? findCallSite() : 0;
}

uint32_t callSiteOfCall() {
  static const bool isWanted = Env::process().callSites == CallSites::kAlways;
  return isWanted ? findCallSite() : 0;
}

void beginExit() { exiting.store(pthread_self(), std::memory_order_release); }

void stayIfExiting() {
  const pthread_t last = exiting.load(std::memory_order_acquire);
  if (last == pthread_t{} || pthread_equal(last, pthread_self()) || CallbackPool::isHere() ||
      isCalledByPython())
    return;
  for (;;) pause();
}

namespace {

constexpr const char kStarting[] = "starting";

// The part of docs/errors.md that explains such errors; null: their text is enough.
const char* familyOf(Code code) {
  switch (code) {
    case Code::kMismatch: return "different-collectives";
    case Code::kDeadlock: return "ranks-wait-for-each-other";
    case Code::kTimeout: return "an-operation-timed-out";
    case Code::kPeerLost: return "a-rank-is-late-or-gone";
    case Code::kNetwork: return "connections-and-resources";
    case Code::kStore: return kStarting;
    case Code::kAborted: return "the-group-was-aborted-or-destroyed";
    default: return nullptr;
  }
}

[[noreturn]] void throwAs(const Status& status, const char* family) {
  std::string message = status.message();
  if (family != nullptr) message += std::string("\n  Help: mycoll explain ") + family;
  switch (status.code()) {
    case Code::kInvalidArgument: throwArgumentError(message);
    case Code::kUnsupported: C10_THROW_ERROR(NotImplementedError, message);
    case Code::kNetwork: C10_THROW_ERROR(DistNetworkError, message);
    case Code::kStore: C10_THROW_ERROR(DistStoreError, message);
    case Code::kInterrupted: raiseInterrupt(); break;
    case Code::kOk:
    case Code::kMismatch:
    case Code::kTimeout:
    case Code::kPeerLost:
    case Code::kAborted:
    case Code::kInternal:
    case Code::kDeadlock: break;
  }
  C10_THROW_ERROR(DistBackendError, message);
}

[[noreturn]] void throwAndNote(const Status& status, const char* family) {
  switch (status.code()) {
    case Code::kInvalidArgument:
    case Code::kUnsupported:
    case Code::kInterrupted:
    case Code::kStore: break;
    default:
      if (quietScopes == 0 && isMainThread()) RaisedFailures::get().add(status);
  }
  throwAs(status, family);
}

}  // namespace

void throwStatus(const Status& status) { throwAndNote(status, familyOf(status.code())); }

void throwIfNotFormed(const Status& status) {
  stayIfExiting();  // it may have begun meanwhile
  if (status.ok()) return;
  throwAndNote(status, status.code() == Code::kTimeout ? kStarting : familyOf(status.code()));
}

QuietScope::QuietScope() { ++quietScopes; }
QuietScope::~QuietScope() { --quietScopes; }

uint64_t raisedSoFar() { return RaisedFailures::get().count(); }

void raiseInMainThread(const Status& status, uint64_t since, std::function<bool()> isWanted) {
  if (RaisedFailures::get().has(status, since)) return;
  const bool isCalled = callInMainThread([status, since, isWanted = std::move(isWanted)] {
    const bool isExiting = exiting.load(std::memory_order_acquire) != pthread_t{};
    if (isExiting || RaisedFailures::get().has(status, since) || !isWanted()) return;
    throwStatus(status);
  });
  if (!isCalled) MYCOLL_LOG_ERROR("%s", status.message().c_str());
}

std::exception_ptr toException(const Status& status) {
  if (status.ok()) return nullptr;
  try {
    const Status thrown =
        status.code() == Code::kInterrupted ? Status(Code::kAborted, status.message()) : status;
    throwAs(thrown, familyOf(thrown.code()));
  } catch (...) {
    return std::current_exception();
  }
}

std::string describeException() {
  std::string text;
  try {
    throw;
  } catch (const c10::Error& error) {
    text = error.what_without_backtrace();
  } catch (const std::exception& error) {
    text = error.what();
  } catch (...) {
    return "an exception of an unknown type";
  }
  // The text of a Python exception has a line for each frame.
  std::string line;
  std::istringstream words(text);
  for (std::string word; words >> word;) line += (line.empty() ? "" : " ") + word;
  return line;
}

c10d::WorkResult toWorkResult(const Status& status) {
  switch (status.code()) {
    case Code::kOk: return c10d::WorkResult::SUCCESS;
    case Code::kTimeout: return c10d::WorkResult::TIMEOUT;
    default: return c10d::WorkResult::COMM_ERROR;
  }
}

}  // namespace mycoll
