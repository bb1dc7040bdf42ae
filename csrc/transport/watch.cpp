// The endpoint's half that watches the peers' processes, as far as this host's kernel shows them.
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <vector>

#include "base/topology.h"
#include "transport/endpoint.h"

namespace mycoll {
namespace {

constexpr int64_t kLookEveryMs = 50;
// What a process had sent over sockets may arrive after its death; where memory is shared, not. The
// end of its connection usually says that all has come; this is for when that is late.
constexpr int64_t kInFlightMs = 500;

int64_t nowMs() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
}

}  // namespace

// Which transport is used with a peer does not matter here, only whether its pid means something.
void Endpoint::watchProcess(const PeerAddress& peer) {
  if (peer.hostName != address_.hostName || peer.uid == address_.uid) return;
  if (!isLiving(lookAtProcess(peer.pid, peer.startTicks))) return;  // of another pid namespace
  Process& process = processes_[peer.uid];
  process.pid = peer.pid;
  process.startTicks = peer.startTicks;
  process.isLocal = isLocal(peer);
#ifdef SYS_pidfd_open
  process.fd.reset(static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0)));
  if (process.fd.isOpen()) (void)sleeper_.watch(process.fd.get());
#endif
}

bool Endpoint::isEnding(const std::string& uid) const {
  auto found = processes_.find(uid);
  return found != processes_.end() &&
         !isLiving(lookAtProcess(found->second.pid, found->second.startTicks));
}

// [I/O lock]
bool Endpoint::loseIfEnding(const std::string& uid, Process& process, bool hasEnded) {
  if (process.isLost) return false;
  if (!hasEnded && isLiving(lookAtProcess(process.pid, process.startTicks))) return false;
  if (process.endingSince == 0) process.endingSince = nowMs();
  if (!process.isLocal && nowMs() - process.endingSince < kInFlightMs) return false;
  process.isLost = true;
  process.fd.reset();  // who survives many deaths does not collect their descriptors
  peerLost(uid, kHasEnded);
  return true;
}

bool Endpoint::isVisible(const PeerAddress& peer) {
  std::lock_guard<std::mutex> lock(io_);
  return processes_.count(peer.uid) > 0;
}

ProcessLife Endpoint::lookAt(const PeerAddress& peer) {
  return isVisible(peer) ? lookAtProcess(peer.pid, peer.startTicks) : ProcessLife::kGone;
}

bool Endpoint::hasLost(const PeerAddress& peer) {
  std::lock_guard<std::mutex> lock(io_);
  auto process = processes_.find(peer.uid);
  if (process != processes_.end() && process->second.isLost) return true;
  auto link = outLinks_.find(peer.uid);
  return link != outLinks_.end() && link->second->isLost;
}

void Endpoint::checkProcesses() {
  const int64_t now = nowMs();
  int64_t last = processesChecked_.load(std::memory_order_relaxed);
  if (now - last < kLookEveryMs || !processesChecked_.compare_exchange_strong(last, now)) return;
  // Looked at without the lock, as there may be many.
  struct Seen {
    std::string uid;
    pid_t pid;
    uint64_t startTicks;
  };
  std::vector<Seen> seen;
  {
    std::lock_guard<std::mutex> lock(io_);
    for (auto& [uid, process] : processes_) {
      if (!process.isLost) seen.push_back({uid, process.pid, process.startTicks});
    }
  }
  bool isAnyLost = false;
  for (const Seen& each : seen) {
    if (isLiving(lookAtProcess(each.pid, each.startTicks))) continue;
    std::lock_guard<std::mutex> lock(io_);
    auto found = processes_.find(each.uid);
    if (found != processes_.end()) isAnyLost |= loseIfEnding(found->first, found->second);
  }
  if (!isAnyLost) return;
  progress();  // the news leaves at once
  sleeper_.wakeAll();
}

}  // namespace mycoll
