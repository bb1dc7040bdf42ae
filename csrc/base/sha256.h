// SHA-256 (FIPS 180-4), HMAC (RFC 2104) and helpers for a handshake. All [any thread].
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace mycoll {

using Digest = std::array<uint8_t, 32>;

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
