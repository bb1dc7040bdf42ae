// FNV-1a: a hash for byte strings that no attacker chooses. [any thread]
#pragma once

#include <cstdint>
#include <string_view>

namespace mycoll {

constexpr uint64_t kEmptyHash = 0xcbf29ce484222325ULL;

// hash: that of the preceding bytes.
constexpr uint64_t fnv1a(std::string_view bytes, uint64_t hash = kEmptyHash) {
  for (const char byte : bytes) {
    hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3ULL;
  }
  return hash;
}

}  // namespace mycoll
