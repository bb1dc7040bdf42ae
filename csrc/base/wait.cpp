#include "base/wait.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>
#include <thread>

#include "base/env.h"

namespace mycoll {
namespace {

using std::chrono::milliseconds;

// A yield that takes longer is a long one. A row of long yields ends after this time without one.
constexpr milliseconds kLongYield(1);
constexpr milliseconds kRowEnds(50);
constexpr milliseconds kContentionStays(200);
// A large message takes long over a network, and the kernel receives packets by itself: a thread
// that polls for each packet gains nothing.
constexpr auto kTricklePatience = std::chrono::microseconds(100);

std::string contents(const std::string& path) {
  std::ifstream file(path);
  return std::string((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
}

int affinityCores() {
  // The kernel refuses masks smaller than its own: try larger ones.
  for (int bits = 1024; bits <= 1 << 20; bits *= 2) {
    const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> set(
        CPU_ALLOC(bits), [](cpu_set_t* mask) { CPU_FREE(mask); });
    if (set == nullptr) break;
    const size_t bytes = CPU_ALLOC_SIZE(bits);
    if (sched_getaffinity(0, bytes, set.get()) == 0) return CPU_COUNT_S(bytes, set.get());
  }
  return static_cast<int>(std::thread::hardware_concurrency());
}

// The whole cores that the quota of this folder allows; 0: it has none.
int quotaOf(const std::string& folder) {
  // Version 2: "max 100000" or "150000 100000", in microseconds. Version 1 has two files.
  std::istringstream text(contents(folder + "/cpu.max") + contents(folder + "/cpu.cfs_quota_us") +
                          " " + contents(folder + "/cpu.cfs_period_us"));
  int64_t quota = 0, period = 0;
  if (!(text >> quota >> period) || quota <= 0 || period <= 0) return 0;
  return static_cast<int>(std::clamp<int64_t>(quota / period, 1, 1 << 20));
}

int tighter(int a, int b) {
  if (a == 0 || b == 0) return std::max(a, b);
  return std::min(a, b);
}

// Any ancestor may hold the tightest quota. In a container the path in /proc may be the host's and
// not exist below the mount; the walk then still ends at the mount itself, the container's own.
int tightestQuota(const std::string& mount, std::string path) {
  int cores = 0;
  while (true) {
    while (!path.empty() && path.back() == '/') path.pop_back();
    cores = tighter(cores, quotaOf(mount + path));
    if (path.empty()) return cores;
    const size_t slash = path.rfind('/');
    path.resize(slash == path.npos ? 0 : slash);
  }
}

}  // namespace

int detail::cgroupCores(const std::string& procCgroup, const std::string& mountRoot) {
  int cores = 0;
  std::istringstream lines(procCgroup);
  for (std::string line; std::getline(lines, line);) {  // "hierarchy:controllers:path"
    const size_t first = line.find(':');
    if (first == line.npos) continue;
    const size_t second = line.find(':', first + 1);
    if (second == line.npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) {
      cores = tighter(cores, tightestQuota(mountRoot, path));
      cores = tighter(cores, tightestQuota(mountRoot + "/unified", path));
    } else if (("," + controllers + ",").find(",cpu,") != line.npos) {
      cores = tighter(cores, tightestQuota(mountRoot + "/" + controllers, path));
      if (controllers != "cpu") {
        cores = tighter(cores, tightestQuota(mountRoot + "/cpu", path));
      }
    }
  }
  return cores;
}

int usableCores() {
  static const int kCores =
      std::max(1, tighter(affinityCores(),
                          detail::cgroupCores(contents("/proc/self/cgroup"), "/sys/fs/cgroup")));
  return kCores;
}

SpinPolicy detail::choosePolicy(int localRanks, int cores, int spinMicrosOverride) {
  SpinPolicy policy = localRanks > cores
                          ? SpinPolicy{.pauses = 20, .yieldMicros = 2000, .longYields = 4}
                          : SpinPolicy{.pauses = 20, .spinMicros = 30, .yieldMicros = 1000};
  if (spinMicrosOverride >= 0) policy.spinMicros = spinMicrosOverride;
  return policy;
}

void CoreContention::yielded(Clock::time_point from, Clock::time_point back) {
  if (back - from <= kLongYield) return;
  // A row continues across the time that we slept: if the contention persists, one yield detects
  // it.
  const Clock::time_point last = std::max(last_.load(kRelaxed), until_.load(kRelaxed));
  const int inRow = last + kRowEnds > from ? inRow_.load(kRelaxed) + 1 : 1;
  inRow_.store(inRow, kRelaxed);
  last_.store(back, kRelaxed);
  if (inRow >= enough_) until_.store(back + kContentionStays, kRelaxed);
}

void Backoff::moved() {
  if (idleSince_ == Clock::time_point::min()) return;
  trickles_ |= Clock::now() - idleSince_ > kTricklePatience;
}

// A yield is shorter than the latency of a network, on which a rank also depends when its neighbour
// waits for the network.
Backoff::Pause Backoff::next(Clock::time_point now, bool isFast) {
  using Microseconds = std::chrono::microseconds;
  if (idleSince_ == Clock::time_point::min()) idleSince_ = now;
  const auto idle = now - idleSince_;
  const bool isContended = contention_.isHere(now);
  if (!isContended && isFast && idle < Microseconds(policy_.spinMicros)) return Pause::kSpin;
  const auto patience = trickles_ ? kTricklePatience : Microseconds(policy_.yieldMicros);
  if (!isContended && idle < patience) return Pause::kYield;
  trickles_ |= !isFast;
  return Pause::kSleep;
}

void Backoff::yield(Clock::time_point now) {
  sched_yield();
  contention_.yielded(now, Clock::now());
}

SpinPolicy choose(int localRanks) {
  return detail::choosePolicy(localRanks, usableCores(), Env::process().spinMicros);
}

}  // namespace mycoll
