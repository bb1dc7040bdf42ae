// The log. By default it contains the process's first failure, exceptions thrown by callbacks of
// the program, and nothing else; MYCOLL_LOG changes that. All [any thread].
//
//   MYCOLL_LOG_INFO("connected to rank %d in %d ms", rank, elapsed);
//   [mycoll 12:34:56.789 info rank 3 pid 4711] connected to rank 5 in 12 ms
//
// Costs one relaxed load when its level is off; arguments are then not evaluated.
//
// Writing never blocks: lines that the reader of stderr or of the file does not accept are kept, up
// to a limit, and written with a later line, by flushLog(), or when the process ends. Lines beyond
// the limit are dropped, and the next line reports how many. A line for which there is no memory is
// lost: a log must not make an operation fail.
#pragma once

#include <atomic>
#include <functional>
#include <string>

#include "base/env.h"

namespace mycoll {
namespace detail {

// Above every level: until the environment has been read, the first line calls logLine(), which
// reads it.
inline constexpr int kLevelUnknown = 100;
inline std::atomic<int> logLevel{kLevelUnknown};
// The number of live LogDelays of this thread, and whether it has delayed lines or calls.
constinit inline thread_local int logDelays = 0;
constinit inline thread_local bool hasDelayed = false;
inline std::atomic<bool> hasUnwrittenLines{false};

void endDelay() noexcept;

void logLine(LogLevel level, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace detail

inline bool isLogged(LogLevel level) {
  return static_cast<int>(level) <= detail::logLevel.load(std::memory_order_relaxed);
}

// Logs the failure of a group: the first line of the text, as every rank logs one and the exception
// has all of it. At the level kFailure only the process's first failure is logged.
void logFailure(const std::string& lines);

// While one exists, the lines of its thread are kept; the end of the outermost one writes them. For
// a thread that holds a lock which others need, or that must notify others first.
class LogDelay {
 public:
  LogDelay() { ++detail::logDelays; }
  ~LogDelay() {
    if (--detail::logDelays == 0 && detail::hasDelayed) detail::endDelay();
  }
  LogDelay(const LogDelay&) = delete;
  LogDelay& operator=(const LogDelay&) = delete;
};

// Calls fn when the outermost LogDelay of this thread ends, so without the locks that it is for;
// immediately if there is none. The call is lost if there is no memory for it.
void callAfterDelay(std::function<void()> fn) noexcept;

// Tries again to write the lines that could not be written.
void flushLog();

// Overrides MYCOLL_LOG from here on.
void setLogLevel(LogLevel level);

// Overrides MYCOLL_LOG_FILE from here on; empty: stderr. The file is opened by the next line.
void setLogFile(const char* pattern);

// The rank that lines carry (the process's rank in the default group); -1: not known yet.
void setLogRank(int rank);

}  // namespace mycoll

#define MYCOLL_LOG_AT(level, ...)                                                 \
  do {                                                                            \
    if (::mycoll::isLogged(level)) ::mycoll::detail::logLine(level, __VA_ARGS__); \
  } while (false)
#define MYCOLL_LOG_ERROR(...) MYCOLL_LOG_AT(::mycoll::LogLevel::kError, __VA_ARGS__)
#define MYCOLL_LOG_WARN(...) MYCOLL_LOG_AT(::mycoll::LogLevel::kWarn, __VA_ARGS__)
#define MYCOLL_LOG_INFO(...) MYCOLL_LOG_AT(::mycoll::LogLevel::kInfo, __VA_ARGS__)
#define MYCOLL_LOG_DEBUG(...) MYCOLL_LOG_AT(::mycoll::LogLevel::kDebug, __VA_ARGS__)
