// Plain values as bytes, in what processes send each other: a process that would read them
// differently is refused before (transport/handshake.h). Plain functions and values: no threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

namespace mycoll {

template <typename T>
void append(std::string* bytes, const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  bytes->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

constexpr uint64_t kEmptyHash = 0xcbf29ce484222325ULL;

// FNV-1a: a hash for bytes that no attacker chooses. hash: that of the preceding bytes.
constexpr uint64_t fnv1a(std::string_view bytes, uint64_t hash = kEmptyHash) {
  for (const char byte : bytes) {
    hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3ULL;
  }
  return hash;
}

// Reads what append() has written. After a failure, everything that it returns is empty or zero.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}

  std::string_view take(size_t bytes) {
    hasFailed_ |= bytes > rest_.size();
    if (hasFailed_) return {};
    const std::string_view taken = rest_.substr(0, bytes);
    rest_.remove_prefix(bytes);
    return taken;
  }
  template <typename T>
  T value() {
    static_assert(std::is_trivially_copyable_v<T>);
    T result{};
    const std::string_view bytes = take(sizeof(T));
    if (!hasFailed_) std::memcpy(&result, bytes.data(), sizeof(T));
    return result;
  }
  std::string_view rest() { return take(rest_.size()); }
  bool hasFailed() const { return hasFailed_; }
  bool hasMore() const { return !hasFailed_ && !rest_.empty(); }

 private:
  std::string_view rest_;
  bool hasFailed_ = false;
};

}  // namespace mycoll
