#include "observe/trace_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "base/env.h"
#include "base/log.h"
#include "base/os.h"
#include "base/topology.h"
#include "observe/flight_record.h"
#include "observe/whole_file.h"

namespace mycoll {
namespace {

constexpr size_t kKeptJobs = 10;

// How long the background leaves it to those who were in a call when the group failed: they know
// where in the program that was.
constexpr int64_t kLeftToCallers = 200'000'000;

enum class Progress { kNothing, kWanted, kMeanwhile, kWritten };
struct Wish {
  std::atomic<Progress> progress{Progress::kNothing};
  std::atomic<int64_t> since{0};
  std::mutex writing;
};
Wish& wish() { return perProcess<Wish>(); }

Status failed(const std::string& what, const std::string& path) {
  return Status(Code::kInvalidArgument,
                "the trace could not be written: " + what + " " + path + ": " + strerror(errno));
}

// A directory that is this user's alone, whoever else may write beside it.
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

void removeFolder(const std::string& path) {
  if (DIR* folder = opendir(path.c_str())) {
    while (const dirent* entry = readdir(folder)) {
      if (std::strncmp(entry->d_name, "rank_", 5) == 0) {
        unlinkat(dirfd(folder), entry->d_name, 0);
      }
    }
    closedir(folder);
  }
  rmdir(path.c_str());  // stays if it holds anything that is not ours
}

// Traces are for the day after, not for ever.
void removeOldJobs(const std::string& parent) {
  std::vector<std::pair<int64_t, std::string>> jobs;
  if (DIR* folder = opendir(parent.c_str())) {
    while (const dirent* entry = readdir(folder)) {
      const std::string name = entry->d_name;
      struct stat info;
      if (name.size() == 16 && name.find_first_not_of("0123456789abcdef") == name.npos &&
          fstatat(dirfd(folder), entry->d_name, &info, AT_SYMLINK_NOFOLLOW) == 0) {
        jobs.emplace_back(info.st_mtime, parent + "/" + name);
      }
    }
    closedir(folder);
  }
  if (jobs.size() <= kKeptJobs) return;
  std::sort(jobs.begin(), jobs.end());
  for (size_t i = 0; i + kKeptJobs < jobs.size(); ++i) removeFolder(jobs[i].second);
}

Status defaultPath(std::string* path) {
  const std::string parent = "/tmp/mycoll-" + std::to_string(geteuid());
  MYCOLL_RETURN_IF_ERROR(makePrivate(parent));
  const std::string folder = parent + "/" + BlackBox::process().job();
  MYCOLL_RETURN_IF_ERROR(makePrivate(folder));
  removeOldJobs(parent);
  *path = folder + "/rank_" + std::to_string(std::max(0, BlackBox::process().rank()));
  return Status();
}

Status choosePath(std::string* path) {
  const std::string& wanted = Env::process().traceFile;
  if (wanted.empty() || wanted == "off") return defaultPath(path);
  *path = expandPattern(wanted, BlackBox::process().rank());
  return Status();
}

// Unless somebody has come as far, who has then done so.
void writeUnless(Progress done) {
  const auto isDue = [done] {
    const Progress now = wish().progress.load(std::memory_order_acquire);
    return now != Progress::kNothing && now < done;
  };
  if (!isDue()) return;
  std::lock_guard<std::mutex> lock(wish().writing);
  if (!isDue()) return;
  const bool isFirst = wish().progress.exchange(done) == Progress::kWanted;
  if (!BlackBox::process().isOn() || Env::process().traceFile == "off") return;
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

std::string TraceFile::wantedPath() {
  if (wish().progress.load() == Progress::kNothing) return "";
  if (!BlackBox::process().isOn() || Env::process().traceFile == "off") return "";
  std::string path;
  const Status status = choosePath(&path);
  return status.ok() ? path : "";
}

bool TraceFile::isLeftOver() {
  if (wish().progress.load(std::memory_order_relaxed) != Progress::kWanted) return false;
  return steadyNanos() - wish().since.load() > kLeftToCallers;
}

void TraceFile::writeWanted() { writeUnless(Progress::kWritten); }

void TraceFile::writeMeanwhile() { writeUnless(Progress::kMeanwhile); }

Status TraceFile::write(const std::string& path, std::string* written) {
  std::string target = path;
  if (target.empty()) MYCOLL_RETURN_IF_ERROR(choosePath(&target));
  const bool asJson = target.size() > 5 && target.compare(target.size() - 5, 5, ".json") == 0;
  MYCOLL_RETURN_IF_ERROR(writeWhole(target, contents(asJson), 0600));
  *written = std::move(target);
  return Status();
}

std::string TraceFile::contents(bool asJson) {
  const std::unique_ptr<Document> document = asJson ? Document::json() : Document::pickle();
  writeFlightRecord(*document);
  return document->finish();
}

}  // namespace mycoll
