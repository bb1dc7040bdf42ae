// The rendezvous store as the engine needs it: a few small values that all ranks of a group can
// see. Implemented over torch's Store in backend/ and in memory in the engine's tests. Thread
// contract: called only while a group is made or destroyed, by the thread that does it.
#pragma once

#include <string>

#include "base/status.h"

namespace mycoll {

class Store {
 public:
  virtual ~Store() = default;

  virtual Status set(const std::string& key, const std::string& value) = 0;
  // Does not wait: *found tells whether the key is there.
  virtual Status tryGet(const std::string& key, bool* found, std::string* value) = 0;
};

}  // namespace mycoll
