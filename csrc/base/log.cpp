#include "base/log.h"

#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <string>

#include "base/fd.h"
#include "base/mutex.h"
#include "base/topology.h"

namespace mycoll {
namespace {

const char* nameOf(LogLevel level) {
  static constexpr const char* kNames[] = {"off", "failure", "error", "warn", "info", "debug"};
  return kNames[static_cast<size_t>(level)];
}

// Where lines go. Never destroyed: helper threads may log during static destruction.
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

  void write(LogLevel level, const char* text) {
    char stamp[32];
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    tm local;
    localtime_r(&now.tv_sec, &local);
    std::snprintf(stamp, sizeof(stamp), "%02d:%02d:%02d.%03d", local.tm_hour, local.tm_min,
                  local.tm_sec, static_cast<int>(now.tv_nsec / 1000000));

    MutexLock lock(mutex_);
    const pid_t pid = ::getpid();
    // A forked child goes to its own file when the name holds the pid.
    if (!isResolved_ || pid != pid_) open(pid);
    std::string line = std::string("[mycoll ") + stamp + " " + nameOf(level) + " rank " +
                       (rank_ < 0 ? "?" : std::to_string(rank_)) + " pid " + std::to_string(pid) +
                       "] " + text + "\n";
    const int fd = file_.isOpen() ? file_.get() : STDERR_FILENO;
    // One write a line keeps the lines of many processes whole in one terminal or file.
    size_t done = 0;
    while (done < line.size()) {
      const ssize_t n = ::write(fd, line.data() + done, line.size() - done);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) break;  // a log that cannot be written is no reason to fail
      done += static_cast<size_t>(n);
    }
  }

 private:
  Sink() : pattern_(Env::process().logFile) {}

  void open(pid_t pid) REQUIRES(mutex_) {
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

  Mutex mutex_;
  std::string pattern_ GUARDED_BY(mutex_);
  // False: the file has to be opened before the next line.
  bool isResolved_ GUARDED_BY(mutex_) = false;
  Fd file_ GUARDED_BY(mutex_);  // closed: stderr
  pid_t pid_ GUARDED_BY(mutex_) = 0;
  int rank_ GUARDED_BY(mutex_) = -1;
};

}  // namespace

void setLogLevel(LogLevel level) {
  detail::logLevel.store(static_cast<int>(level), std::memory_order_relaxed);
}

void setLogFile(const char* pattern) { Sink::get().setPattern(pattern); }

void setLogRank(int rank) { Sink::get().setRank(rank); }

void logFailure(const std::string& story) {
  static std::atomic<bool> wasThereOne{false};
  if (!isLogged(LogLevel::kFailure)) return;
  const bool isFirst = !wasThereOne.exchange(true, std::memory_order_relaxed);
  detail::logLine(isFirst ? LogLevel::kFailure : LogLevel::kError, "%s",
                  story.substr(0, story.find('\n')).c_str());
}

void detail::logLine(LogLevel level, const char* format, ...) {
  int unknown = kLevelUnknown;
  // Only replaces "unknown": a level that setLogLevel() put there meanwhile stays.
  logLevel.compare_exchange_strong(unknown, static_cast<int>(Env::process().logLevel),
                                   std::memory_order_relaxed);
  if (!isLogged(level)) return;

  const int savedErrno = errno;  // so that logging between a call and its errno is harmless
  va_list arguments;
  va_start(arguments, format);
  va_list again;
  va_copy(again, arguments);
  char shortText[512];
  const int length = std::vsnprintf(shortText, sizeof(shortText), format, arguments);
  va_end(arguments);
  if (length < static_cast<int>(sizeof(shortText))) {
    Sink::get().write(level, length < 0 ? format : shortText);
  } else {
    std::string longText(static_cast<size_t>(length) + 1, '\0');
    std::vsnprintf(longText.data(), longText.size(), format, again);
    Sink::get().write(level, longText.c_str());
  }
  va_end(again);
  errno = savedErrno;
}

}  // namespace mycoll
