#include "base/log.h"

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "base/mutex.h"
#include "base/os.h"
#include "base/topology.h"

namespace mycoll {
namespace {

const char* nameOf(LogLevel level) {
  static constexpr const char* kNames[] = {"off", "failure", "error", "warn", "info", "debug"};
  return kNames[static_cast<size_t>(level)];
}

constexpr size_t kMostUnwritten = 256 * 1024;
constexpr int kLastWaitMs = 200;  // at the end of the process

struct Line {
  LogLevel level;
  std::string text;
  timespec when;
};

// As write(2), but returns EAGAIN instead of waiting for a reader. Other processes share the
// descriptor and may need it to block, so a pipe or terminal is opened a second time.
ssize_t writeNow(int fd, const char* data, size_t bytes) {
  struct stat file;
  Fd own;
  if (fstat(fd, &file) == 0 && (S_ISFIFO(file.st_mode) || S_ISCHR(file.st_mode))) {
    const std::string path = "/proc/self/fd/" + std::to_string(fd);
    own.reset(::open(path.c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
    if (own.isOpen()) fd = own.get();
  }
  pollfd ready{fd, POLLOUT, 0};
  const int count = poll(&ready, 1, 0);
  if (count == 0 || (ready.revents & POLLERR) != 0) {  // a write would raise SIGPIPE
    errno = count == 0 ? EAGAIN : EPIPE;
    return -1;
  }
  return ::write(fd, data, bytes);
}

// The lock of this process: another thread may hold the parent's while this one forks.
struct SinkLock : Mutex {};

// The destination of lines. Never destroyed: helper threads may log during static destruction.
class Sink {
 public:
  static Sink& get() {
    static Sink* const kSink = new Sink;
    return *kSink;
  }

  void setPattern(const char* pattern) {
    MutexLock lock(mutex_);
    pattern_ = pattern;
    isResolved_ = false;
  }

  void setRank(int rank) {
    MutexLock lock(mutex_);
    if (rank == rank_) return;
    rank_ = rank;
    if (pattern_.find("%r") != pattern_.npos) isResolved_ = false;
  }

  void write(const Line& line) {
    char stamp[32];
    tm local;
    localtime_r(&line.when.tv_sec, &local);
    std::snprintf(stamp, sizeof(stamp), "%02d:%02d:%02d.%03d", local.tm_hour, local.tm_min,
                  local.tm_sec, static_cast<int>(line.when.tv_nsec / 1000000));

    MutexLock lock(mutex_);
    const pid_t pid = ::getpid();
    // A forked child writes to its own file when the name contains the pid.
    if (!isResolved_ || pid != pid_) open(pid);
    const std::string head = std::string("[mycoll ") + stamp + " ";
    const std::string place = std::string(" rank ") + (rank_ < 0 ? "?" : std::to_string(rank_)) +
                              " pid " + std::to_string(pid) + "] ";
    std::string text = head + nameOf(line.level) + place + line.text + "\n";
    if (dropped_ > 0) {
      text = head + nameOf(LogLevel::kError) + place + std::to_string(dropped_) +
             " lines before this one were dropped, as they were not read\n" + text;
    }
    if (unwritten_.size() + text.size() > kMostUnwritten) {
      ++dropped_;
      return;
    }
    dropped_ = 0;
    unwritten_ += text;
    writeOut();
  }

  void flush(int waitMs) {
    MutexLock lock(mutex_);
    if (::getpid() != pid_) return;
    while (writeOut() && waitMs > 0) {
      pollfd ready{fd(), POLLOUT, 0};
      if (poll(&ready, 1, waitMs) <= 0) return;
      waitMs /= 2;
    }
  }

 private:
  Sink() : pattern_(Env::process().logFile) {
    std::atexit([] { get().flush(kLastWaitMs); });
  }

  int fd() const REQUIRES(mutex_) { return file_.isOpen() ? file_.get() : STDERR_FILENO; }

  // Returns true if lines remain.
  bool writeOut() REQUIRES(mutex_) {
    while (!unwritten_.empty()) {
      // One write per line keeps the lines of several processes intact in one terminal or file.
      const size_t bytes = std::min<size_t>(unwritten_.find('\n') + 1, PIPE_BUF);
      const ssize_t wrote = writeNow(fd(), unwritten_.data(), bytes);
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote < 0 && errno == EAGAIN) break;
      // A failed write drops the line: a log must not make an operation fail.
      unwritten_.erase(0, wrote < 0 ? bytes : static_cast<size_t>(wrote));
    }
    detail::hasUnwrittenLines.store(!unwritten_.empty(), std::memory_order_relaxed);
    return !unwritten_.empty();
  }

  void open(pid_t pid) REQUIRES(mutex_) {
    if (pid != pid_) unwritten_.clear();  // in a forked child: its parent writes these lines
    pid_ = pid;
    isResolved_ = true;
    file_.reset();
    if (pattern_.empty()) return;
    const std::string path = expandPattern(pattern_, rank_);
    file_.reset(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
    if (!file_.isOpen()) {
      std::fprintf(stderr, "[mycoll] cannot open the log file %s: %m; logging to stderr\n",
                   path.c_str());
    }
  }

  Mutex& mutex_ = perProcess<SinkLock>();
  std::string pattern_ GUARDED_BY(mutex_);
  // False: the file has to be opened before the next line.
  bool isResolved_ GUARDED_BY(mutex_) = false;
  Fd file_ GUARDED_BY(mutex_);  // closed: stderr
  pid_t pid_ GUARDED_BY(mutex_) = 0;
  int rank_ GUARDED_BY(mutex_) = -1;
  std::string unwritten_ GUARDED_BY(mutex_);  // complete lines, except the first
  uint64_t dropped_ GUARDED_BY(mutex_) = 0;   // lines
};

thread_local std::vector<std::function<void()>> delayedCalls;

}  // namespace

void setLogLevel(LogLevel level) {
  detail::logLevel.store(static_cast<int>(level), std::memory_order_relaxed);
}

void setLogFile(const char* pattern) { Sink::get().setPattern(pattern); }

void setLogRank(int rank) { Sink::get().setRank(rank); }

void logFailure(const std::string& lines) {
  static std::atomic<bool> wasThereOne{false};
  if (!isLogged(LogLevel::kFailure)) return;
  const bool isFirst = !wasThereOne.exchange(true, std::memory_order_relaxed);
  const auto length = static_cast<int>(std::min(lines.find('\n'), lines.size()));
  detail::logLine(isFirst ? LogLevel::kFailure : LogLevel::kError, "%.*s", length, lines.c_str());
}

void flushLog() {
  if (detail::hasUnwrittenLines.load(std::memory_order_relaxed)) Sink::get().flush(0);
}

void callAfterDelay(std::function<void()> fn) noexcept {
  try {
    if (detail::logDelays == 0) return fn();
    delayedCalls.push_back(std::move(fn));
    detail::hasDelayed = true;
  } catch (const std::bad_alloc&) {
  }
}

void detail::endDelay() noexcept {
  hasDelayed = false;
  try {
    for (const auto& call : std::exchange(delayedCalls, {})) call();
  } catch (const std::bad_alloc&) {
    // The rest is lost.
  }
}

void detail::logLine(LogLevel level, const char* format, ...) {
  int unknown = kLevelUnknown;
  // Replaces only kLevelUnknown: a level that setLogLevel() has stored meanwhile stays.
  logLevel.compare_exchange_strong(unknown, static_cast<int>(Env::process().logLevel),
                                   std::memory_order_relaxed);
  if (!isLogged(level)) return;

  const int savedErrno = errno;  // so that code may log between a call and the use of its errno
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  va_list arguments;
  va_start(arguments, format);
  char* text = nullptr;
  const bool isThere = vasprintf(&text, format, arguments) >= 0;
  va_end(arguments);
  try {
    if (isThere) {
      callAfterDelay([line = Line{level, text, now}] { Sink::get().write(line); });
    }
  } catch (const std::bad_alloc&) {
    // The line is lost.
  }
  if (isThere) std::free(text);
  errno = savedErrno;
}

}  // namespace mycoll
