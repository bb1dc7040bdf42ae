#include "engine/timed_store.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

#include "base/mutex.h"
#include "base/os.h"
#include "base/task.h"
#include "base/wait.h"

namespace mycoll {
namespace {

// After the deadline this rank still writes why it gives up.
constexpr auto kLastCalls = std::chrono::milliseconds(500);

}  // namespace

TimedStore::Answer TimedStore::ask(const std::string& key,
                                   const std::function<void(Store&, Answer*)>& request) {
  if (!failure_.ok()) return {failure_, false, ""};
  struct Asked {
    Answer answer;
    std::atomic<bool> isAnswered{false};
    Wakeup wakeup;
  };
  const auto asked = std::make_shared<Asked>();
  const auto call = [asked, store = store_, request] {
    try {
      request(*store, &asked->answer);
    } catch (const std::bad_alloc&) {
      asked->answer.status = detail::outOfMemory();
    }
    asked->isAnswered.store(true, std::memory_order_release);
    asked->wakeup.notify();
  };
  try {
    const SignalsBlocked blocked;
    std::thread(call).detach();
  } catch (const std::system_error&) {  // there can be no more threads
    call();
  }
  const Deadline last = Deadline::after(kLastCalls);
  const Deadline end = deadline_ < last ? last : deadline_;
  while (!asked->isAnswered.load(std::memory_order_acquire)) {
    asked->wakeup.wait(std::min(kWaitTick, end.remaining()));
    if (asked->isAnswered.load(std::memory_order_acquire)) break;
    wasInterrupted_ |= isSignalled_ && isSignalled_();
    if (wasInterrupted_) return {interrupted(), false, ""};
    if (!end.expired()) continue;
    failure_ = Status(Code::kTimeout, "timeout after " + std::to_string(timeout_.count()) +
                                          "ms: rank " + std::to_string(rank_) +
                                          " waited for the rendezvous store, which does not "
                                          "answer ('" +
                                          key + "'). Its server is stopped or cannot be reached");
    return {failure_, false, ""};
  }
  return std::move(asked->answer);
}

Status TimedStore::set(const std::string& key, const std::string& value) {
  const auto request = [key, value](Store& store, Answer* got) {
    got->status = store.set(key, value);
  };
  return ask(key, request).status;
}

Status TimedStore::tryGet(const std::string& key, bool* found, std::string* value) {
  Answer answer = ask(key, [key](Store& store, Answer* got) {
    got->status = store.tryGet(key, &got->isFound, &got->value);
  });
  *found = answer.isFound;
  *value = std::move(answer.value);
  return answer.status;
}

Status TimedStore::compareSet(const std::string& key, const std::string& expected,
                              const std::string& value, std::string* now) {
  Answer answer = ask(key, [key, expected, value](Store& store, Answer* got) {
    got->status = store.compareSet(key, expected, value, &got->value);
  });
  *now = std::move(answer.value);
  return answer.status;
}

}  // namespace mycoll
