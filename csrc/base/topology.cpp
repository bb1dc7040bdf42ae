#include "base/topology.h"

#include <limits.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iterator>

namespace mycoll {
namespace {

std::string firstLine(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

}  // namespace

std::string hostIdentity() {
  std::string boot = firstLine("/proc/sys/kernel/random/boot_id");
  // Sandboxes may hide it.
  if (boot.empty()) boot = firstLine("/etc/machine-id") + "@" + hostName();

  char space[64];
  const ssize_t length = ::readlink("/proc/self/ns/net", space, sizeof(space));
  return boot + "/" + (length > 0 ? std::string(space, static_cast<size_t>(length)) : "net:?");
}

std::string hostName() {
  char text[HOST_NAME_MAX + 1] = {};
  if (::gethostname(text, HOST_NAME_MAX) != 0 || text[0] == '\0') return "localhost";
  return text;
}

pid_t processId() { return ::getpid(); }

uint64_t processStartTicks(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  // "pid (name) state ppid ...": the name may hold spaces and parentheses, so count from its end.
  // starttime is field 22, state is field 3.
  size_t position = text.rfind(')');
  if (position == text.npos) return 0;
  ++position;
  for (int field = 3; field <= 22; ++field) {
    position = text.find_first_not_of(' ', position);
    if (position == text.npos) return 0;
    if (field == 22) return std::strtoull(text.c_str() + position, nullptr, 10);
    position = text.find(' ', position);
    if (position == text.npos) return 0;
  }
  return 0;
}

}  // namespace mycoll
