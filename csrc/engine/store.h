// The rendezvous store as the engine needs it: a few small values that all ranks of a group can
// see. Callers poll it. Implemented over torch's Store in backend/ and in memory in the engine's
// tests.
// Thread contract: called only while a group is made, by the thread that makes it; ranks that are
// threads of one process may share a store.
#pragma once

#include <string>

#include "base/status.h"

namespace mycoll {

class Store {
 public:
  virtual ~Store() = default;

  virtual Status set(const std::string& key, const std::string& value) = 0;
  // Does not wait. *found: whether the key exists.
  virtual Status tryGet(const std::string& key, bool* found, std::string* value) = 0;
  // Sets the value if the present one is as expected; empty: there is none. *now: the value
  // afterwards. The default implementation is not atomic.
  virtual Status compareSet(const std::string& key, const std::string& expected,
                            const std::string& value, std::string* now) {
    bool found = false;
    MYCOLL_RETURN_IF_ERROR(tryGet(key, &found, now));
    if (!found) now->clear();
    if (*now != expected) return Status();
    *now = value;
    return set(key, value);
  }
  // Whether a signal has ended a call. The signal was taken from the interpreter, which will not
  // raise it again.
  virtual bool wasInterrupted() const { return false; }
};

}  // namespace mycoll
