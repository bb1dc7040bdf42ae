#include "backend/errors.h"

#include <c10/util/Exception.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "backend/callback_pool.h"
#include "base/log.h"

namespace mycoll {
namespace {

PythonHooks python;
std::atomic<pthread_t> exiting{};

using Clock = std::chrono::steady_clock;
// One cause reaches the groups of a process within this.
constexpr auto kSpreading = std::chrono::seconds(1);
thread_local int untold = 0;  // Untolds that live

// The failures of groups that Python's main thread has been thrown within kSpreading.
class Told {
 public:
  void add(const Status& status) {
    const std::lock_guard<std::mutex> lock(mutex_);
    forget();
    latest_.push_back({status, Clock::now()});
  }
  bool has(const Status& status) {
    const std::lock_guard<std::mutex> lock(mutex_);
    forget();
    return std::any_of(latest_.begin(), latest_.end(),
                       [&](const Entry& entry) { return isSame(entry.status, status); });
  }

 private:
  struct Entry {
    Status status;
    Clock::time_point when;
  };

  void forget() {
    const auto now = Clock::now();
    std::erase_if(latest_, [now](const Entry& entry) { return now - entry.when > kSpreading; });
  }

  // A group fails once; a process that is lost fails all groups that it is in; and a circle of
  // waits has one text for all of its groups.
  static bool isSame(const Status& a, const Status& b) {
    const std::string group = between(a, "group '", '\'');
    if (!group.empty() && group == between(b, "group '", '\'')) return true;
    if (a.code() == Code::kPeerLost && b.code() == Code::kPeerLost) {
      return between(a, "': rank ", ')') == between(b, "': rank ", ')');  // rank 1 (vm:4712)
    }
    return between(a, "", '\n') == between(b, "", '\n');
  }
  static std::string between(const Status& status, const std::string& before, char after) {
    const std::string& text = status.message();
    const size_t begin = text.find(before);
    if (begin == text.npos) return "";
    return text.substr(begin, text.find(after, begin + before.size()) - begin);
  }

  std::mutex mutex_;
  std::vector<Entry> latest_;  // guarded by mutex_
};

Told& told() {
  static Told* const kTold = new Told;
  return *kTold;
}

}  // namespace

void setPythonHooks(PythonHooks hooks) { python = hooks; }

bool isInterruptPending() {
  return python.isInterruptPending != nullptr && python.isInterruptPending();
}

bool isMainThread() { return syscall(SYS_gettid) == getpid(); }

bool isCalledByPython() { return python.holdsGil != nullptr && python.holdsGil(); }

bool mayHaveOtherThreads() {
  return python.mayHaveOtherThreads != nullptr && python.mayHaveOtherThreads();
}

void beginExit() { exiting.store(pthread_self(), std::memory_order_release); }

void stayIfExiting() {
  const pthread_t last = exiting.load(std::memory_order_acquire);
  if (last == pthread_t{} || pthread_equal(last, pthread_self()) || CallbackPool::isHere() ||
      isCalledByPython()) [[likely]] {
    return;
  }
  for (;;) pause();
}

namespace {

[[noreturn]] void throwAs(const Status& status) {
  const std::string& message = status.message();
  switch (status.code()) {
    case Code::kInvalidArgument: C10_THROW_ERROR(ValueError, message);
    case Code::kUnsupported: C10_THROW_ERROR(NotImplementedError, message);
    case Code::kNetwork: C10_THROW_ERROR(DistNetworkError, message);
    case Code::kStore: C10_THROW_ERROR(DistStoreError, message);
    case Code::kInterrupted:
      if (python.raiseInterrupt != nullptr) python.raiseInterrupt();
      break;
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

}  // namespace

void throwStatus(const Status& status) {
  switch (status.code()) {
    case Code::kInvalidArgument:
    case Code::kUnsupported:
    case Code::kInterrupted:
    case Code::kStore: break;
    default:
      if (untold == 0 && isMainThread()) told().add(status);
  }
  throwAs(status);
}

Untold::Untold() { ++untold; }
Untold::~Untold() { --untold; }

void raiseInMainThread(const Status& status, std::function<bool()> isWanted) {
  if (python.callInMainThread == nullptr) return;
  if (told().has(status)) return;
  const bool isCalled = python.callInMainThread([status, isWanted = std::move(isWanted)] {
    const bool isExiting = exiting.load(std::memory_order_acquire) != pthread_t{};
    if (isExiting || told().has(status) || !isWanted()) return;
    throwStatus(status);
  });
  if (!isCalled) MYCOLL_LOG_ERROR("%s", status.message().c_str());
}

std::exception_ptr toException(const Status& status) {
  if (status.ok()) return nullptr;
  try {
    throwAs(status.code() == Code::kInterrupted ? Status(Code::kAborted, status.message())
                                                : status);
  } catch (...) {
    return std::current_exception();
  }
}

c10d::WorkResult toWorkResult(const Status& status) {
  switch (status.code()) {
    case Code::kOk: return c10d::WorkResult::SUCCESS;
    case Code::kTimeout: return c10d::WorkResult::TIMEOUT;
    default: return c10d::WorkResult::COMM_ERROR;
  }
}

}  // namespace mycoll
