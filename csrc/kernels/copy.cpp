#include "kernels/copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels/fold.h"

#define MYCOLL_KERNEL_FILE "kernels/fold_copy.inc"
#include "kernels/foreach_isa.h"

namespace mycoll {
namespace {

constexpr size_t kLineBytes = 64;
constexpr size_t kStepBytes = 256;
// Smaller copies gain less than the partial lines at both ends cost.
constexpr size_t kLeastBytes = 2048;
// A piece that is read twice in a row comes from the first-level caches the second time.
constexpr size_t kCachedBytes = 32 * 1024;

}  // namespace

void copy(void* to, const void* from, size_t bytes) {
  if (bytes == 0 || to == from) return;
  char* const target = static_cast<char*>(to);
  const char* const source = static_cast<const char*>(from);
#if defined(__x86_64__)
  // From about 2 KiB on memcpy is one instruction, "rep movsb", which AMD's Zen 3 does at a
  // tenth of the speed when the target lies less than a line behind the source, seen within a page.
  const size_t behind =
      (reinterpret_cast<uintptr_t>(to) - reinterpret_cast<uintptr_t>(from)) % 4096;
  if (bytes >= kLeastBytes && behind > 0 && behind < kLineBytes) {
    const size_t whole = bytes - bytes % kStepBytes;
    MYCOLL_CALL_ISA(activeIsa(), copyVectors, target, source, whole);
    std::memcpy(target + whole, source + whole, bytes - whole);
    return;
  }
#endif
  std::memcpy(target, source, bytes);
}

void copyStreamingUnfenced(void* to, const void* from, size_t bytes) {
#if defined(__x86_64__)
  if (bytes >= kLeastBytes && to != from) {
    char* target = static_cast<char*>(to);
    const char* source = static_cast<const char*>(from);
    const size_t head = -reinterpret_cast<uintptr_t>(target) % kLineBytes;
    std::memcpy(target, source, head);
    target += head;
    source += head;
    bytes -= head;
    const size_t whole = bytes - bytes % kStepBytes;
    MYCOLL_CALL_ISA(activeIsa(), copyLines, target, source, whole);
    std::memcpy(target + whole, source + whole, bytes - whole);
    return;
  }
#endif
  copy(to, from, bytes);
}

void copyStreaming(void* to, const void* from, size_t bytes) {
  copyStreamingUnfenced(to, from, bytes);
  streamingFence();
}

void copy(void* to, const void* from, size_t bytes, bool isStreaming) {
  if (isStreaming) {
    copyStreaming(to, from, bytes);
  } else {
    copy(to, from, bytes);
  }
}

void copyToBoth(void* to, bool isStreaming, void* also, bool isAlsoStreaming, const void* from,
                size_t bytes) {
  for (size_t at = 0; at < bytes; at += kCachedBytes) {
    const char* piece = static_cast<const char*>(from) + at;
    const size_t pieceBytes = std::min(kCachedBytes, bytes - at);
    copy(static_cast<char*>(to) + at, piece, pieceBytes, isStreaming);
    copy(static_cast<char*>(also) + at, piece, pieceBytes, isAlsoStreaming);
  }
}

void streamingFence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace mycoll
