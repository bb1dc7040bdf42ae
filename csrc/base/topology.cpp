#include "base/topology.h"

#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "base/fd.h"

namespace mycoll {
namespace {

std::string firstLine(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Read at program start: a rank that has no descriptor left must still be able to report where it
// is. Never destroyed.
const std::string& bootId = *new std::string(firstLine("/proc/sys/kernel/random/boot_id"));

std::string linkTarget(const char* path) {
  char target[64];
  const ssize_t length = ::readlink(path, target, sizeof(target));
  return std::string(target, static_cast<size_t>(std::max<ssize_t>(length, 0)));
}

}  // namespace

std::string kernelIdentity() {
  // Sandboxes may hide the boot id.
  return bootId.empty() ? firstLine("/etc/machine-id") + "@" + hostName() : bootId;
}

std::string hostIdentity() {
  const std::string space = linkTarget("/proc/self/ns/net");
  return kernelIdentity() + "/" + (space.empty() ? "net:?" : space);
}

std::string pidSpace() {
  const std::string space = linkTarget("/proc/self/ns/pid");
  return space.empty() ? "" : kernelIdentity() + "/" + space;
}

std::string hostName() {
  char text[HOST_NAME_MAX + 1] = {};
  if (::gethostname(text, HOST_NAME_MAX) != 0 || text[0] == '\0') return "localhost";
  return text;
}

pid_t processId() { return ::getpid(); }

namespace {

constexpr unsigned long kExiting = 0x4;  // PF_EXITING of the kernel

struct ProcessStat {
  char state = 0;  // as ps shows it; 0: no such process
  unsigned long flags = 0;
  uint64_t startTicks = 0;
  bool isUnknown = false;  // the file could not be opened: no descriptor was left
};

ProcessStat readStat(pid_t pid) {
  ProcessStat result;
  char path[48], text[1024];
  // The first thread's file has what is needed, too. For the process's, the kernel adds up the
  // times of all threads.
  std::snprintf(path, sizeof(path), "/proc/%d/task/%d/stat", static_cast<int>(pid),
                static_cast<int>(pid));
  const Fd file(::open(path, O_RDONLY | O_CLOEXEC));
  if (!file.isOpen()) {
    result.isUnknown = errno != ENOENT && errno != ESRCH;
    return result;
  }
  const ssize_t length = ::read(file.get(), text, sizeof(text) - 1);
  if (length <= 0) return result;
  text[length] = '\0';
  // "pid (name) state ppid ...": the name may hold spaces and parentheses, so count from its end.
  const char* end = std::strrchr(text, ')');
  if (end == nullptr) return result;
  unsigned long long start = 0;
  // Fields 3 (state), 9 (flags) and 22 (starttime).
  std::sscanf(end + 1,
              " %c %*d %*d %*d %*d %*d %lu %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
              &result.state, &result.flags, &start);
  result.startTicks = start;
  return result;
}

}  // namespace

uint64_t processStartTicks(pid_t pid) { return readStat(pid).startTicks; }

namespace {

// Checked first, because the kernel needs long to describe a process with many threads.
bool isThisProcess(pid_t pid, uint64_t startTicks) {
  static std::atomic<pid_t> known{0};
  static std::atomic<uint64_t> ticks{0};
  if (pid != ::getpid()) return false;
  if (known.load(std::memory_order_acquire) != pid) {  // not looked up yet, or before a fork
    ticks.store(processStartTicks(pid), std::memory_order_relaxed);
    known.store(pid, std::memory_order_release);
  }
  return startTicks == 0 || startTicks == ticks.load(std::memory_order_relaxed);
}

}  // namespace

ProcessLife lookAtProcess(pid_t pid, uint64_t startTicks) {
  if (isThisProcess(pid, startTicks)) return ProcessLife::kAlive;
  const ProcessStat stat = readStat(pid);
  if (stat.isUnknown) {
    return ::kill(pid, 0) == 0 || errno == EPERM ? ProcessLife::kAlive : ProcessLife::kGone;
  }
  const bool isAnother = startTicks != 0 && stat.startTicks != startTicks;
  if (stat.state == 0 || isAnother) return ProcessLife::kGone;
  if ((stat.flags & kExiting) != 0) return ProcessLife::kEnding;
  switch (stat.state) {
    case 'Z':
    case 'X': return ProcessLife::kEnding;
    case 'T':
    case 't': return ProcessLife::kStopped;
    case 'R': return ProcessLife::kBusy;
    default: return ProcessLife::kAlive;
  }
}

}  // namespace mycoll
