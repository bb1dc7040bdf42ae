// The memory of this process, for tests that bound what other processes can make it use.
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
