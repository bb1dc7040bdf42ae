// SHA-256 (FIPS 180-4), HMAC (RFC 2104) and helpers for a handshake. A Sha256 is used by one
// thread; the functions are [any thread].
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace mycoll {

using Digest = std::array<uint8_t, 32>;

class Sha256 {
 public:
  void update(const void* data, size_t bytes);
  void update(std::string_view text) { update(text.data(), text.size()); }
  // Ends the message: the object must not be used afterwards.
  Digest finish();

 private:
  void processBlock(const uint8_t* block);

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  uint64_t totalBytes_ = 0;
  size_t pendingBytes_ = 0;
  uint8_t pending_[64];
};

Digest sha256(std::string_view message);
Digest hmacSha256(std::string_view key, std::string_view message);

// Takes the same time wherever the first difference is.
bool constantTimeEqual(const void* a, const void* b, size_t bytes);
inline bool constantTimeEqual(const Digest& a, const Digest& b) {
  return constantTimeEqual(a.data(), b.data(), a.size());
}

// Random bytes from the kernel; fit for keys and challenges.
Status randomBytes(void* data, size_t bytes);

std::string toHex(const void* data, size_t bytes);
inline std::string asText(const Digest& digest) {
  return std::string(reinterpret_cast<const char*>(digest.data()), digest.size());
}
inline std::string toHex(const Digest& digest) { return toHex(digest.data(), digest.size()); }

}  // namespace mycoll
