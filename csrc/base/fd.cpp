#include "base/fd.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstdint>

namespace mycoll {
namespace {

// A bit for each number, without a lock: when a child reads it, threads of the parent may hold any
// lock. Larger descriptors are not kept.
constexpr int kMaxKept = 1 << 16;
std::atomic<uint64_t> kept[kMaxKept / 64];

uint64_t bitOf(int fd) { return uint64_t{1} << (fd % 64); }

// Replaced, not closed: when the child destroys an Fd of its parent, that closes the same number,
// and must not close a descriptor that the child has opened since.
void replaceInChild() {
  const int nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (int word = 0; word < kMaxKept / 64; ++word) {
    for (uint64_t bits = kept[word].exchange(0); bits != 0; bits &= bits - 1) {
      const int fd = word * 64 + std::countr_zero(bits);
      if (nothing < 0 || ::dup3(nothing, fd, O_CLOEXEC) < 0) ::close(fd);
    }
  }
  if (nothing >= 0) ::close(nothing);
}

}  // namespace

void Fd::keepFromChildren() {
  static const int forked [[maybe_unused]] = pthread_atfork(nullptr, nullptr, replaceInChild);
  if (fd_ < 0 || fd_ >= kMaxKept) return;
  kept[fd_ / 64].fetch_or(bitOf(fd_), std::memory_order_relaxed);
}

// EINTR is not retried: on Linux the descriptor is closed already, and its number may belong to
// another thread by now.
void Fd::close(int fd) {
  if (fd < kMaxKept) kept[fd / 64].fetch_and(~bitOf(fd), std::memory_order_relaxed);
  ::close(fd);
}

// In pieces: a signal undoes the reservation of the call that it interrupts, and may repeat.
bool reservePages(int fd, size_t offset, size_t bytes) {
  constexpr size_t kPieceBytes = 8 * 1024 * 1024;
  while (bytes > 0) {
    const size_t piece = std::min(bytes, kPieceBytes);
    if (::fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(piece)) != 0) {
      if (errno == EINTR) continue;
      return false;
    }
    offset += piece;
    bytes -= piece;
  }
  return true;
}

void raiseDescriptorLimit(int ranks) {
  constexpr rlim_t kForTheProgram = 512, kForEachRank = 4;
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const rlim_t needed =
      std::min(limit.rlim_max, kForTheProgram + kForEachRank * static_cast<rlim_t>(ranks));
  if (limit.rlim_cur >= needed) return;
  limit.rlim_cur = needed;
  (void)::setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace mycoll
