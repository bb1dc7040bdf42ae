#include "transport/shm/single_copy.h"

#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <fstream>

#include "base/env.h"
#include "base/os.h"
#include "base/topology.h"

namespace mycoll {

SingleCopy& SingleCopy::process() { return perProcess<SingleCopy>(); }

SingleCopy::Case SingleCopy::caseOf(OpKind kind, int ranks, size_t bytes) {
  const auto width = std::bit_width(std::min(bytes, kMostBytes));
  return {kind, ranks, static_cast<int>(width) - 1};
}

// The result is kept for the process, and other programs may have disturbed some of the rounds: so
// single copy has to be clearly faster in all of them but one.
SingleCopy::Measured SingleCopy::judge(const float* staged, const float* direct, int rounds) {
  constexpr float kClear = 0.9F;
  const auto median = [rounds](const float* times) {
    std::vector<float> sorted(times, times + rounds);
    std::nth_element(sorted.begin(), sorted.begin() + rounds / 2, sorted.end());
    return static_cast<double>(sorted[rounds / 2]);
  };
  int won = 0;
  for (int round = 0; round < rounds; ++round) won += direct[round] < kClear * staged[round];
  return {median(staged), median(direct), won >= rounds - 1 ? Choice::kDirect : Choice::kStaged};
}

SingleCopy::Choice SingleCopy::choice(const Case& of) const {
  const MutexLock lock(mutex_);
  const auto found = measured_.find(of);
  return found == measured_.end() ? Choice::kUnknown : found->second.choice;
}

void SingleCopy::keep(const Case& of, const Measured& result) {
  const MutexLock lock(mutex_);
  measured_[of] = result;
}

std::map<SingleCopy::Case, SingleCopy::Measured> SingleCopy::measured() const {
  const MutexLock lock(mutex_);
  return measured_;
}

int readProcess(pid_t pid, void* to, uint64_t address, size_t bytes) {
  while (bytes > 0) {
    iovec local{to, bytes};
    iovec remote{reinterpret_cast<void*>(address), bytes};  // NOLINT(performance-no-int-to-ptr)
    const ssize_t count = process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (count <= 0) return count < 0 ? errno : EFAULT;
    to = static_cast<char*>(to) + count;
    address += static_cast<uint64_t>(count);
    bytes -= static_cast<size_t>(count);
  }
  return 0;
}

bool isReadableByOthers(const Span& memory) {
  if (memory.bytes == 0) return true;
  char ends[2];
  iovec local{ends, sizeof(ends)};
  iovec remote[2] = {{memory.data, 1}, {memory.begin() + memory.bytes - 1, 1}};
  return process_vm_readv(processId(), &local, 1, remote, 2, 0) == sizeof(ends);
}

void permitReading() {
#ifdef PR_SET_PTRACER
  static std::atomic<pid_t> permitted{0};  // a forked child has to do it again
  if (permitted.exchange(processId()) == processId()) return;
  int scope = 0;
  std::ifstream("/proc/sys/kernel/yama/ptrace_scope") >> scope;
  if (scope == 1) prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
#endif
}

}  // namespace mycoll
