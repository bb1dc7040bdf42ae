// Converts a Status to the exceptions that torch's users know; lets Ctrl-C end a wait.
// [any thread], with or without the GIL.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "backend/python.h"
#include "base/status.h"

namespace mycoll {

// An error of the caller. Python sees a ValueError; if bindings/ has registered its own class, one
// that is also a RuntimeError, which is what torch's backends raise.
class ArgumentError final : public c10::ValueError {
 public:
  using c10::ValueError::ValueError;
};
[[noreturn]] void throwArgumentError(const std::string& message);

// Throws the status, which must not be ok. Its class in Python:
//   kInvalidArgument   ArgumentError, which is a ValueError and a RuntimeError
//   kUnsupported       NotImplementedError
//   kNetwork           DistNetworkError
//   kStore             DistStoreError
//   kInterrupted       what the signal handler raised (KeyboardInterrupt)
//   all others         DistBackendError
[[noreturn]] void throwStatus(const Status& status);

// For results that a program may use without checking whether they are valid: throws the status in
// Python's main thread, between two steps of the program, as Ctrl-C would. Does nothing if the same
// failure (Status::isSameFailure()) was thrown in that thread within the last second and since
// raisedSoFar() was `since`, or is thrown there in the meantime: a program that is cleaning up is
// not disturbed. isWanted is called right before the throw.
void raiseInMainThread(const Status& status, uint64_t since, std::function<bool()> isWanted);
// Number of group failures that were thrown in that thread.
uint64_t raisedSoFar();

inline void throwIfFailed(const Status& status) {
  if (!status.ok()) throwStatus(status);
}
// For the errors of making a group, which docs/errors.md explains elsewhere.
void throwIfNotFormed(const Status& status);

c10d::WorkResult toWorkResult(const Status& status);

// Returns the exception of the status, to be thrown elsewhere; null if ok. An interrupt becomes a
// DistBackendError: it belongs to one wait().
std::exception_ptr toException(const Status& status);

// Describes the exception that is being handled, in one line for the log. For the program's code
// that runs on our threads.
std::string describeException();

// While it lives, an exception of this thread does not count as the failure of a group: it is none,
// or does not reach the program.
class QuietScope {
 public:
  QuietScope();
  ~QuietScope();
  QuietScope(const QuietScope&) = delete;
  QuietScope& operator=(const QuietScope&) = delete;
};

// Whether this is the thread in which Python handles signals.
bool isMainThread();
// Returns the place of the call that this thread is in, for operations that wait or have failed.
// Known only in Python's main thread, which takes the GIL anyway to handle signals.
uint32_t callSiteOfWaiter();
// Returns the place of any call if MYCOLL_CALL_SITES=always; otherwise 0, at little cost.
uint32_t callSiteOfCall();

// Called on the thread that is about to end the interpreter. From then on, other threads that are
// in a call of mycoll, or make one, do not return (stayIfExiting): they would take the GIL, and
// Python ends a thread that does so in a way that makes C++ terminate the process. This concerns
// daemon threads; all others have ended by then. Threads of the CallbackPool return.
void beginExit();
void stayIfExiting();

}  // namespace mycoll
