#include "observe/trace_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <memory>
#include <utility>
#include <vector>

#include "base/env.h"
#include "base/fd.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/os.h"
#include "base/topology.h"
#include "observe/black_box.h"

namespace mycoll {
namespace {

// How many jobs' folders are kept whatever their age, and how many at most.
constexpr size_t kKeptJobs = 10;
constexpr size_t kMaxJobs = 100;
// How long the others are kept, in seconds.
constexpr int64_t kKeptSeconds = 24 * 3600;

// How long the background leaves the file to the failing calls, in ns: their entries have the place
// in the program.
constexpr int64_t kLeftToCallers = 200'000'000;

enum class Progress { kNothing, kWanted, kMeanwhile, kWritten };
struct Wish {
  std::atomic<Progress> progress{Progress::kNothing};
  std::atomic<int64_t> since{0};
  Mutex writing;
};
Wish& wish() { return perProcess<Wish>(); }

Status failed(const std::string& what, const std::string& path) {
  return Status(Code::kInvalidArgument,
                "the trace could not be written: " + what + " " + path + ": " + strerror(errno));
}

// Most of the box is zeros, and stays a hole in the file.
bool writeBytes(int fd, const std::string& bytes) {
  constexpr size_t kHole = 4096;
  static const char kZeros[kHole] = {};
  for (size_t at = 0; at < bytes.size();) {
    const size_t part = std::min(kHole, bytes.size() - at);
    ssize_t n = static_cast<ssize_t>(part);
    if (std::memcmp(bytes.data() + at, kZeros, part) != 0) {
      n = pwrite(fd, bytes.data() + at, part, static_cast<off_t>(at));
    }
    if (n == 0 || (n < 0 && errno != EINTR)) return false;
    if (n > 0) at += static_cast<size_t>(n);
  }
  return ftruncate(fd, static_cast<off_t>(bytes.size())) == 0;
}

Status writeWhole(const std::string& path, const std::string& bytes) {
  static std::atomic<unsigned> count{0};
  const std::string unfinished = path + "." + std::to_string(processId()) + "-" +
                                 std::to_string(count.fetch_add(1)) + ".unfinished";
  unlink(unfinished.c_str());  // left by an earlier process with this pid, or placed by an attacker
  const Fd fd(open(unfinished.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!fd.isOpen()) return failed("open", unfinished);
  Status problem;
  if (!writeBytes(fd.get(), bytes)) {
    problem = failed("write", unfinished);
  } else if (rename(unfinished.c_str(), path.c_str()) != 0) {
    problem = failed("rename", path);
  }
  if (!problem.ok()) unlink(unfinished.c_str());
  return problem;
}

// Makes a directory that only this user can write to, in a parent that others may write to.
Status makePrivate(const std::string& path) {
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) return failed("mkdir", path);
  struct stat info;
  if (lstat(path.c_str(), &info) != 0) return failed("lstat", path);
  if (!S_ISDIR(info.st_mode) || info.st_uid != geteuid() || (info.st_mode & 022) != 0) {
    errno = EPERM;
    return failed("not a directory of this user's alone:", path);
  }
  return Status();
}

std::vector<std::string> namesIn(const std::string& path) {
  std::vector<std::string> names;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir(path.c_str()), closedir);
  while (const dirent* entry = folder ? readdir(folder.get()) : nullptr) {
    names.emplace_back(entry->d_name);
  }
  return names;
}

void removeFolder(const std::string& path) {
  for (const std::string& name : namesIn(path)) {
    if (name.starts_with("rank_")) unlink((path + "/" + name).c_str());
  }
  rmdir(path.c_str());  // remains if it contains files that are not ours
}

// Keeps recent folders: other jobs may fail within minutes after the one whose error names a
// folder.
void removeOldJobs(const std::string& parent) {
  std::vector<std::pair<int64_t, std::string>> jobs;
  for (const std::string& name : namesIn(parent)) {
    const std::string path = parent + "/" + name;
    struct stat info;
    if (name.size() == 16 && name.find_first_not_of("0123456789abcdef") == name.npos &&
        lstat(path.c_str(), &info) == 0) {
      jobs.emplace_back(info.st_mtime, path);
    }
  }
  std::sort(jobs.rbegin(), jobs.rend());
  const int64_t oldest = time(nullptr) - kKeptSeconds;
  for (size_t i = kKeptJobs; i < jobs.size(); ++i) {
    if (i >= kMaxJobs || jobs[i].first < oldest) removeFolder(jobs[i].second);
  }
}

std::string parentFolder() { return "/tmp/mycoll-" + std::to_string(geteuid()); }
std::string jobFolder() { return parentFolder() + "/" + BlackBox::process().job(); }

bool isInJobFolder() {
  return Env::process().traceFile.empty() || Env::process().traceFile == "off";
}

std::string chosenPath() {
  const int rank = BlackBox::process().rank();
  if (!isInJobFolder()) return expandPattern(Env::process().traceFile, rank);
  return jobFolder() + "/rank_" + std::to_string(std::max(0, rank));
}

bool isOff() { return !BlackBox::process().isOn() || Env::process().traceFile == "off"; }

// Quotes a path for a shell.
std::string quoted(const std::string& path) {
  const bool isPlain = std::all_of(path.begin(), path.end(), [](unsigned char letter) {
    return std::isalnum(letter) || std::strchr("/._-+:,@%=", letter) != nullptr;
  });
  if (isPlain) return path;
  std::string text = "'";
  for (const char letter : path) text += letter == '\'' ? "'\\''" : std::string(1, letter);
  return text + "'";
}

// Writes the file unless another thread has made as much progress already.
void writeUnless(Progress done) {
  const auto isDue = [done] {
    const Progress now = wish().progress.load(std::memory_order_acquire);
    return now != Progress::kNothing && now < done;
  };
  if (!isDue()) return;
  MutexLock lock(wish().writing);
  if (!isDue()) return;
  const bool isFirst = wish().progress.exchange(done) == Progress::kWanted;
  if (isOff()) return;
  std::string path;
  const Status status = TraceFile::write("", &path);
  if (!status.ok()) {
    MYCOLL_LOG_ERROR("%s", status.message().c_str());
  } else if (isFirst) {
    MYCOLL_LOG_INFO("what this rank did last is in %s", path.c_str());
  }
}

}  // namespace

void TraceFile::want() {
  wish().since = steadyNanos();
  wish().progress = Progress::kWanted;
}

std::string TraceFile::command() {
  if (wish().progress.load() == Progress::kNothing || isOff()) return "";
  const std::string path = chosenPath();
  const size_t slash = path.rfind('/');
  const std::string folder = slash == path.npos ? "." : path.substr(0, std::max<size_t>(1, slash));
  return "mycoll trace " + quoted(folder);
}

void TraceFile::writeWanted() { writeUnless(Progress::kWritten); }

void TraceFile::writeInBackground(bool isUnseen) {
  const bool isLeftOver = wish().progress.load(std::memory_order_relaxed) == Progress::kWanted &&
                          steadyNanos() - wish().since.load() > kLeftToCallers;
  if (isUnseen || isLeftOver) writeUnless(Progress::kMeanwhile);
}

Status TraceFile::write(const std::string& path, std::string* written) {
  if (path.empty() && isInJobFolder()) {
    MYCOLL_RETURN_IF_ERROR(makePrivate(parentFolder()));
    MYCOLL_RETURN_IF_ERROR(makePrivate(jobFolder()));
    removeOldJobs(parentFolder());
  }
  *written = path.empty() ? chosenPath() : path;
  return writeWhole(*written, BlackBox::process().snapshot());
}

}  // namespace mycoll
