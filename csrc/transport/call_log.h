// CallLog: the signatures of a group's latest collectives, by number. A message or a note of
// another rank (engine/agreement.h) is compared with them.
// Thread contract: the mesh's I/O lock.
#pragma once

#include <cstdint>
#include <vector>

#include "base/call.h"
#include "transport/io_lock.h"

namespace mycoll {

class CallLog {
 public:
  static constexpr uint64_t kRemembered = 256;

  void begin(uint64_t number, const Signature& signature) REQUIRES(ioRole) {
    current_ = number;
    hasBegun_ = true;
    signatures_[number % kRemembered] = signature;
  }
  bool hasBegun() const REQUIRES(ioRole) { return hasBegun_; }
  // The number of the latest collective.
  uint64_t current() const REQUIRES(ioRole) { return current_; }
  uint64_t oldest() const REQUIRES(ioRole) {
    return current_ < kRemembered ? 0 : current_ - kRemembered + 1;
  }
  // Null if it has not begun here, or is no longer remembered.
  const Signature* find(uint64_t number) const REQUIRES(ioRole) {
    const bool isKnown = hasBegun_ && number <= current_ && number >= oldest();
    return isKnown ? &signatures_[number % kRemembered] : nullptr;
  }

 private:
  uint64_t current_ GUARDED_BY(ioRole) = 0;
  bool hasBegun_ GUARDED_BY(ioRole) = false;
  std::vector<Signature> signatures_ GUARDED_BY(ioRole) = std::vector<Signature>(kRemembered);
};

}  // namespace mycoll
