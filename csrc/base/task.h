// Task: a collective, a handshake or any other piece of work that must wait for peers without
// blocking its thread, written as a coroutine that reads top to bottom.
//
//   Task exchange(Channel& channel) {
//     Transfer request;
//     channel.recv(request, ...);
//     co_await request;              // a Condition: something that becomes true
//     co_return request.status();
//   }
//
// Thread contract: a task is resumed by one thread at a time (its owner holds a lock or is alone),
// but not always by the same one. It never blocks: it waits only by `co_await`.
// Lifetime: destroying a Task that has not finished destroys its frame and all that lives in it,
// so conditions and requests in a frame must clean up in their destructors.
#pragma once

#include <cassert>
#include <coroutine>
#include <cstddef>
#include <exception>
#include <new>
#include <utility>
#include <vector>

#include "base/status.h"

namespace mycoll {

// A condition that a suspended task waits for. The thread that runs the task calls ready() often;
// it must be cheap, and once true stay true until the task has been resumed.
class Condition {
 public:
  virtual bool ready() = 0;
  // The ranks that it still waits for, as far as it knows: for the text of a timeout.
  virtual std::vector<int> missing() const { return {}; }
  // Whether missing() is exact: nothing that a missing rank has done is still on its way here.
  virtual bool isExact() const { return false; }

 protected:
  ~Condition() = default;
};

namespace detail {
// Frames come from a small per-thread cache: a collective of 4 bytes should not pay for malloc.
void* allocateFrame(size_t bytes);
void freeFrame(void* frame, size_t bytes);
// Made at program start, while memory is available.
const Status& outOfMemory();
inline bool isOutOfMemory(const Status& status) {
  return &status.message() == &outOfMemory().message();
}
}  // namespace detail

class [[nodiscard]] Task {
 public:
  struct promise_type;
  using Handle = std::coroutine_handle<promise_type>;

  Task() = default;
  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, {})) {}
  Task& operator=(Task&& other) noexcept {
    if (this != &other) {
      reset();
      handle_ = std::exchange(other.handle_, {});
    }
    return *this;
  }
  ~Task() { reset(); }

  void reset() {
    if (handle_) std::exchange(handle_, {}).destroy();
  }

  bool valid() const { return static_cast<bool>(handle_); }
  bool finished() const;
  // Only when finished.
  const Status& result() const;
  // The condition of the innermost suspended coroutine; null before the first resume and at the
  // end.
  Condition* waitingFor() const;
  // Runs until the next condition that is not ready, or to the end.
  void resume();

  // Awaiting a task from a task runs it as a part of the awaiting one.
  struct Awaiter;
  Awaiter operator co_await() &&;

 private:
  explicit Task(Handle handle) : handle_(handle) {}
  Handle handle_;
};

struct Task::promise_type {
  // The outermost task's promise records where its whole chain is suspended.
  promise_type* root = this;
  std::coroutine_handle<> leaf;      // root only: the coroutine to resume
  Condition* condition = nullptr;    // root only
  std::coroutine_handle<> awaiting;  // continues when this one ends
  Status status;

  Task get_return_object() {
    auto handle = Handle::from_promise(*this);
    leaf = handle;
    return Task(handle);
  }
  std::suspend_always initial_suspend() noexcept { return {}; }
  auto final_suspend() noexcept {
    struct Final {
      bool await_ready() noexcept { return false; }
      std::coroutine_handle<> await_suspend(Handle self) noexcept {
        promise_type& promise = self.promise();
        if (promise.awaiting) return promise.awaiting;
        return std::noop_coroutine();
      }
      void await_resume() noexcept {}
    };
    return Final{};
  }
  void return_value(Status value) { status = std::move(value); }
  // Below backend/ only the allocator throws. The operation ends, not the process.
  void unhandled_exception() {
    try {
      throw;
    } catch (const std::bad_alloc&) {
      status = detail::outOfMemory();
    } catch (...) {
      std::terminate();
    }
  }

  static void* operator new(size_t bytes) { return detail::allocateFrame(bytes); }
  static void operator delete(void* frame, size_t bytes) { detail::freeFrame(frame, bytes); }

  // co_await condition
  auto await_transform(Condition& awaited) {
    struct Waiter {
      Condition& condition;
      promise_type& promise;
      bool await_ready() { return condition.ready(); }
      void await_suspend(std::coroutine_handle<> self) {
        promise.root->leaf = self;
        promise.root->condition = &condition;
      }
      void await_resume() { promise.root->condition = nullptr; }
    };
    return Waiter{awaited, *this};
  }
  // co_await task
  Awaiter await_transform(Task&& task);
};

struct Task::Awaiter {
  Task task;
  promise_type* parent;
  bool await_ready() { return false; }
  std::coroutine_handle<> await_suspend(std::coroutine_handle<> self) {
    promise_type& child = task.handle_.promise();
    child.root = parent->root;
    child.awaiting = self;
    return task.handle_;
  }
  Status await_resume() { return std::move(task.handle_.promise().status); }
};

inline Task::Awaiter Task::promise_type::await_transform(Task&& task) {
  return Awaiter{std::move(task), this};
}

inline bool Task::finished() const { return handle_ && handle_.done(); }
inline const Status& Task::result() const {
  assert(finished());
  return handle_.promise().status;
}
inline Condition* Task::waitingFor() const { return handle_.promise().condition; }
inline void Task::resume() {
  assert(handle_ && !handle_.done());
  handle_.promise().leaf.resume();
}

}  // namespace mycoll

// Inside a Task: awaits another and returns from this one when it failed.
#define MYCOLL_CO_RETURN_IF_ERROR(expression)         \
  do {                                                \
    ::mycoll::Status mycollStatus_ = (expression);    \
    if (!mycollStatus_.ok()) co_return mycollStatus_; \
  } while (false)
