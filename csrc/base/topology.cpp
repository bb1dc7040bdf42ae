#include "base/topology.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>

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

constexpr unsigned long kExiting = 0x4 | 0x200;  // PF_EXITING, PF_DUMPCORE of the kernel
constexpr unsigned long kKilled = 1ul << (SIGKILL - 1);

struct ThreadStat {
  char state = 0;  // as ps shows it; 0: no such thread
  unsigned long flags = 0;
  unsigned long pendingSignals = 0;
  uint64_t startTicks = 0;
  bool isUnknown = false;  // the file could not be opened: no descriptor was left

  bool isEnding() const {
    return (flags & kExiting) != 0 || (pendingSignals & kKilled) != 0 || state == 'Z' ||
           state == 'X';
  }
};

// The first thread has the number of its process, and its start is that of the process. Its file is
// read instead of the process's, for which the kernel adds up the times of all threads.
ThreadStat readStat(pid_t pid, pid_t thread) {
  ThreadStat result;
  char path[48], text[1024];
  std::snprintf(path, sizeof(path), "/proc/%d/task/%d/stat", static_cast<int>(pid),
                static_cast<int>(thread));
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
  // Fields 3 (state), 9 (flags), 22 (starttime) and 31 (signal).
  std::sscanf(end + 1,
              " %c %*d %*d %*d %*d %*d %lu %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu"
              " %*u %*d %*u %*u %*u %*u %*u %*u %lu",
              &result.state, &result.flags, &start, &result.pendingSignals);
  result.startTicks = start;
  return result;
}

// Whether a process continues whose first thread has ended: pthread_exit() in main() leaves the
// other threads. True if it cannot be found out.
bool hasOtherThreads(pid_t pid) {
  char path[32];
  std::snprintf(path, sizeof(path), "/proc/%d/task", static_cast<int>(pid));
  const std::unique_ptr<DIR, int (*)(DIR*)> threads(::opendir(path), ::closedir);
  if (!threads) return errno != ENOENT && errno != ESRCH;
  while (const dirent* entry = ::readdir(threads.get())) {
    const pid_t thread = std::atoi(entry->d_name);  // 0: "." or ".."
    if (thread == 0) continue;
    const ThreadStat stat = readStat(pid, thread);
    if (stat.isUnknown || (stat.state != 0 && !stat.isEnding())) return true;
  }
  return false;
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

uint64_t processStartTicks(pid_t pid) { return readStat(pid, pid).startTicks; }

ProcessLife lookAtProcess(pid_t pid, uint64_t startTicks) {
  const ThreadStat stat = readStat(pid, pid);
  if (stat.isUnknown) {
    return ::kill(pid, 0) == 0 || errno == EPERM ? ProcessLife::kAlive : ProcessLife::kGone;
  }
  const bool isAnother = startTicks != 0 && stat.startTicks != startTicks;
  if (stat.state == 0 || isAnother) return ProcessLife::kGone;
  if (stat.isEnding()) return hasOtherThreads(pid) ? ProcessLife::kAlive : ProcessLife::kEnding;
  switch (stat.state) {
    case 'T':
    case 't': return ProcessLife::kStopped;
    case 'R': return ProcessLife::kBusy;
    default: return ProcessLife::kAlive;
  }
}

}  // namespace mycoll
