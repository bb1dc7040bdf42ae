// The rendezvous store as the engine needs it: a few small values that all ranks of a group can
// see. Implemented over torch's Store in backend/ and in memory in the engine's tests. Thread
// contract: called only while a group is made, by the thread that does it.
#pragma once

#include <chrono>
#include <string>
#include <thread>

#include "base/status.h"

namespace mycoll {

class Store {
 public:
  virtual ~Store() = default;

  virtual Status set(const std::string& key, const std::string& value) = 0;
  // Does not wait: *found tells whether the key is there.
  virtual Status tryGet(const std::string& key, bool* found, std::string* value) = 0;
  // Returns when the key is there, or after so long. By itself a store is asked again and again.
  virtual Status wait(const std::string& key, std::chrono::milliseconds atMost, bool* found) {
    constexpr auto kPause = std::chrono::milliseconds(20);
    std::string value;
    for (auto left = atMost;; left -= kPause) {
      const Status asked = tryGet(key, found, &value);
      if (!asked.ok() || *found || left <= std::chrono::milliseconds(0)) return asked;
      std::this_thread::sleep_for(kPause);
    }
  }
};

}  // namespace mycoll
