// What the program has registered for the ends of operations.
//
// CompletionHook: the function for all operations of a group, and the number of those that have yet
// to call it.
//
// Thread contract: [any thread]; never called with the GIL held. Lifetime: held by its group and by
// the operations that will call it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "base/mutex.h"

namespace mycoll {

// Calls fn once on the CallbackPool when the work is over, with its result. Keeps the work until
// then. An exception of fn is logged.
void callWhenOver(const c10::intrusive_ptr<c10d::Work>& work,
                  std::function<void(c10d::WorkResult)> fn);

class CompletionHook : public std::enable_shared_from_this<CompletionHook> {
 public:
  using Call = std::function<void(std::shared_ptr<c10d::WorkInfo>)>;

  explicit CompletionHook(std::string group) : group_(std::move(group)) {}

  // Returns false if there is a hook already.
  bool set(Call&& hook);
  bool isSet() const { return isSet_.load(std::memory_order_acquire); }

  // The hook is code of the program: an exception is logged, and does not end the calling thread or
  // the group. By default only the first exception of each hook is logged: it may throw at every
  // operation.
  void run(std::shared_ptr<c10d::WorkInfo> info);
  // Calls run() when the work is over, which counts as pending until then. isSet() must hold; the
  // work must measure its duration.
  void runAfter(const c10::intrusive_ptr<c10d::Work>& work);

  // Waits until no operation is pending. Throws if a signal must be handled.
  void awaitAll();

 private:
  std::shared_ptr<void> addPending();

  const std::string group_;
  Call call_;  // set before isSet_, and read after it
  std::atomic<bool> isSet_{false};
  std::atomic<bool> hasThrown_{false};
  Mutex mutex_;
  std::condition_variable changed_;
  size_t pending_ GUARDED_BY(mutex_) = 0;
};

}  // namespace mycoll
