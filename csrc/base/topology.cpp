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

namespace {

// A field of /proc/<pid>/stat by its number, from 3 on; empty when there is no such process.
std::string statField(pid_t pid, int wanted) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  // "pid (name) state ppid ...": the name may hold spaces and parentheses, so count from its end.
  size_t position = text.rfind(')');
  if (position == text.npos) return "";
  ++position;
  for (int field = 3;; ++field) {
    position = text.find_first_not_of(' ', position);
    if (position == text.npos) return "";
    const size_t end = text.find(' ', position);
    if (field == wanted) return text.substr(position, end - position);
    if (end == text.npos) return "";
    position = end;
  }
}

}  // namespace

uint64_t processStartTicks(pid_t pid) {
  return std::strtoull(statField(pid, 22).c_str(), nullptr, 10);
}

char processState(pid_t pid) {
  const std::string state = statField(pid, 3);
  return state.empty() ? 0 : state[0];
}

}  // namespace mycoll
