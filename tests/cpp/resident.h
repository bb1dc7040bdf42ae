// How much memory this process has, for tests of what strangers can make it take.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <fstream>

namespace test {

inline size_t residentMiB() {
  size_t total = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * static_cast<size_t>(sysconf(_SC_PAGESIZE)) >> 20;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kKeepsFreedMemory = true;
#else
constexpr bool kKeepsFreedMemory = false;
#endif

}  // namespace test
