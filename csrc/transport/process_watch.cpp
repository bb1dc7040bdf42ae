#include "transport/process_watch.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>

#include "base/topology.h"

namespace mycoll {
namespace {

// Data that a process sent over sockets may arrive after its death; data in shared memory cannot.
// Usually the end of its connection shows that everything has arrived; this is the limit if not.
constexpr int64_t kInFlightMs = grace(500).count();

}  // namespace

int64_t nowMilliseconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
}

// Only the validity of its pid matters here, not the transport or the name of its container.
void ProcessWatch::add(const PeerAddress& peer, bool sharesMemory, const PeerAddress& self) {
  if (latest_.empty()) latest_ = self.uid;
  if (!peer.isVisibleTo(self) || peer.uid == self.uid) return;
  Fd fd;
#ifdef SYS_pidfd_open
  fd.reset(static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0)));
#endif
  // Its connection reports the end of one that is gone. Looked at when the descriptor is open,
  // which therefore is not that of a later process.
  if (!isLiving(lookAtProcess(peer.pid, peer.startTicks))) return;
  Process& process = processes_[peer.uid];
  process.pid = peer.pid;
  process.startTicks = peer.startTicks;
  process.sharesMemory = sharesMemory;
  if (!fd.isOpen()) return;
  (void)sleeper_.watch(fd.get());
  process.fd = std::make_shared<const Fd>(std::move(fd));
}

std::shared_ptr<const Fd> ProcessWatch::descriptorOf(const std::string& uid) const {
  const auto found = processes_.find(uid);
  return found == processes_.end() ? nullptr : found->second.fd;
}

bool ProcessWatch::isRunning(const std::string& uid) const {
  const std::shared_ptr<const Fd> fd = descriptorOf(uid);
  pollfd state{fd ? fd->get() : -1, POLLIN, 0};
  return fd && poll(&state, 1, 0) == 0;
}

bool ProcessWatch::isEnding(const std::string& uid) const {
  const auto found = processes_.find(uid);
  return found != processes_.end() &&
         (found->second.endingSince != 0 ||
          !isLiving(lookAtProcess(found->second.pid, found->second.startTicks)));
}

bool ProcessWatch::isLost(const std::string& uid) const {
  const auto found = processes_.find(uid);
  return found != processes_.end() && found->second.isLost;
}

std::string ProcessWatch::endedBy(int fd) const {
  for (const auto& [uid, process] : processes_) {
    if (!process.fd || process.fd->get() != fd) continue;
    pollfd state{fd, POLLIN, 0};
    return poll(&state, 1, 0) > 0 ? uid : std::string();
  }
  return std::string();
}

bool ProcessWatch::hasEnded(const std::string& uid) {
  const auto found = processes_.find(uid);
  if (found == processes_.end() || found->second.isLost) return false;
  Process& process = found->second;
  if (process.endingSince == 0) process.endingSince = nowMilliseconds();
  if (!process.sharesMemory && nowMilliseconds() - process.endingSince < kInFlightMs) return false;
  process.isLost = true;
  process.fd.reset();  // a process that survives many peers must not accumulate their descriptors
  return true;
}

std::vector<ProcessWatch::Seen> ProcessWatch::next(size_t atMost) {
  std::vector<Seen> seen;
  auto entry = processes_.upper_bound(latest_);
  for (size_t i = 0; i < processes_.size() && seen.size() < atMost; ++i, ++entry) {
    if (entry == processes_.end()) entry = processes_.begin();
    const auto& [uid, process] = *entry;
    latest_ = uid;
    if (!process.isLost) seen.push_back({uid, process.pid, process.startTicks});
  }
  return seen;
}

}  // namespace mycoll
