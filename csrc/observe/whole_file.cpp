#include "observe/whole_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/topology.h"

namespace mycoll {
namespace {

Status failed(const char* what, const std::string& path) {
  return Status(Code::kInvalidArgument,
                path + " could not be written: " + what + ": " + strerror(errno));
}

}  // namespace

Status writeWhole(const std::string& path, const std::string& bytes, mode_t mode) {
  static std::atomic<unsigned> count{0};
  const std::string unfinished = path + "." + std::to_string(processId()) + "-" +
                                 std::to_string(count.fetch_add(1)) + ".unfinished";
  ::unlink(unfinished.c_str());  // of a former process of this number; or somebody laid it there
  const int fd = ::open(unfinished.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
  if (fd < 0) return failed("open", unfinished);
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t n = ::write(fd, bytes.data() + done, bytes.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    done += static_cast<size_t>(n);
  }
  Status problem = done < bytes.size() ? failed("write", unfinished) : Status();
  ::close(fd);
  if (problem.ok() && ::rename(unfinished.c_str(), path.c_str()) != 0) {
    problem = failed("rename", path);
  }
  if (!problem.ok()) ::unlink(unfinished.c_str());
  return problem;
}

}  // namespace mycoll
