// TimedStore: another store, whose calls block for as long as its server does not answer: it may be
// stopped or cut off. Here a call ends with an error at the deadline of the group that is made, or
// if a signal arrives. A thread of its own makes the call, and stays behind in it.
//
// Thread contract: as Store, which must allow a call while an abandoned one has not ended.
// Lifetime: a call that was abandoned keeps the other store.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/deadline.h"
#include "base/status.h"
#include "engine/group.h"
#include "engine/store.h"

namespace mycoll {

class TimedStore final : public Store {
 public:
  // The timeout of the options counts from now.
  TimedStore(std::shared_ptr<Store> store, const GroupOptions& options)
      : store_(std::move(store)),
        rank_(options.rank),
        timeout_(options.timeout),
        isSignalled_(options.interrupted) {}

  Status set(const std::string& key, const std::string& value) override;
  Status tryGet(const std::string& key, bool* found, std::string* value) override;
  Status compareSet(const std::string& key, const std::string& expected, const std::string& value,
                    std::string* now) override;
  bool wasInterrupted() const override { return wasInterrupted_; }

 private:
  struct Answer {
    Status status;
    bool isFound = false;
    std::string value;
  };
  // Returns the answer of `request`, which is called on another thread.
  Answer ask(const std::string& key, const std::function<void(Store&, Answer*)>& request);

  const std::shared_ptr<Store> store_;
  const int rank_;
  const std::chrono::milliseconds timeout_;
  const std::function<bool()> isSignalled_;
  const Deadline deadline_ = Deadline::after(timeout_);
  bool wasInterrupted_ = false;
  Status failure_;  // not ok: it does not answer, and is not asked again
};

}  // namespace mycoll
