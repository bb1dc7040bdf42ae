// FNV-1a: tells byte strings apart where nobody means harm. [any thread]
#pragma once

#include <cstdint>
#include <string_view>

namespace mycoll {

constexpr uint64_t kEmptyHash = 0xcbf29ce484222325ULL;

// hash: of what stands before.
constexpr uint64_t fnv1a(std::string_view bytes, uint64_t hash = kEmptyHash) {
  for (const char byte : bytes) {
    hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3ULL;
  }
  return hash;
}

}  // namespace mycoll
