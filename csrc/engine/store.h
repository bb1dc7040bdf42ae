// The rendezvous store as the engine needs it: a few small values that all ranks of a group can
// see. Implemented over torch's Store in backend/ and in memory in the engine's tests.
// Thread contract: called only while a group is made, by the thread that makes it; ranks that are
// threads of one process may share a store.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "base/status.h"

namespace mycoll {

class Store {
 public:
  virtual ~Store() = default;

  virtual Status set(const std::string& key, const std::string& value) = 0;
  // Does not wait. *found: whether the key exists.
  virtual Status tryGet(const std::string& key, bool* found, std::string* value) = 0;
  // Whether wait() is notified of a new key, and does not poll.
  virtual bool waitsItself() const { return false; }
  // Returns when the key exists, or after about atMost. The default implementation polls.
  virtual Status wait(const std::string& key, std::chrono::milliseconds atMost, bool* found) {
    std::string value;
    for (auto left = atMost; left > std::chrono::milliseconds(0);) {
      const Status asked = tryGet(key, found, &value);
      if (!asked.ok() || *found) return asked;
      const std::chrono::milliseconds next = pause_;
      const auto pause = std::min(next, left);
      std::this_thread::sleep_for(pause);
      left -= pause;
      pause_ = std::min(2 * next, std::chrono::milliseconds(100));
    }
    return Status();
  }

 private:
  std::atomic<std::chrono::milliseconds> pause_{std::chrono::milliseconds(1)};
};

}  // namespace mycoll
