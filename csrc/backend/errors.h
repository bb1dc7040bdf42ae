// From Status to the exceptions that torch's users know, and the way in which Ctrl-C gets out.
// [any thread], with or without the GIL.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "base/status.h"

namespace mycoll {

// The caller's mistake. Where bindings/ has not registered a class of its own, Python sees a
// ValueError; with it, one that is a RuntimeError as well, which is what torch's backends raise.
class ArgumentError final : public c10::ValueError {
 public:
  using c10::ValueError::ValueError;
};
[[noreturn]] void throwArgumentError(const std::string& message);

// What a Status is in Python:
//   kInvalidArgument   ArgumentError, which is a ValueError and a RuntimeError
//   kUnsupported       NotImplementedError
//   kNetwork           DistNetworkError
//   kStore             DistStoreError
//   kInterrupted       what the signal handler raised (KeyboardInterrupt)
//   all others         DistBackendError
// The status must not be ok.
[[noreturn]] void throwStatus(const Status& status);

// For results that a program may use without asking whether they are valid: throws the status in
// Python's main thread, between two steps of what it does, as Ctrl-C would. Not where that thread
// has been thrown the same failure (Status::isSameFailure()) within a second and since
// raisedSoFar() was `since`, or is meanwhile: a program that is cleaning up is left alone. isWanted
// is asked at that moment.
void raiseInMainThread(const Status& status, uint64_t since, std::function<bool()> isWanted);
// How many failures of groups that thread has been thrown.
uint64_t raisedSoFar();

inline void throwIfFailed(const Status& status) {
  if (!status.ok()) [[unlikely]] {
    throwStatus(status);
  }
}

c10d::WorkResult toWorkResult(const Status& status);

// The same, to be thrown elsewhere; null when ok. Ignores interrupts: they belong to one wait().
std::exception_ptr toException(const Status& status);

// The exception that is being handled, in one line for the log. For code of the program's that runs
// on a thread of ours.
std::string describeException();

// While it lives, what this thread throws is not the failure of a group, or does not reach the
// program.
class QuietScope {
 public:
  QuietScope();
  ~QuietScope();
  QuietScope(const QuietScope&) = delete;
  QuietScope& operator=(const QuietScope&) = delete;
};

// What backend/, which knows no Python, has to ask it. Set once by bindings/, before the first
// group.
struct PythonHooks {
  // True when this thread's wait should end for a signal; the reason is then kept for this thread
  // until raiseInterrupt().
  bool (*isInterruptPending)() = nullptr;
  // Throws what isInterruptPending() kept; returns when there is nothing.
  void (*raiseInterrupt)() = nullptr;
  // Whether this thread holds the GIL.
  bool (*holdsGil)() = nullptr;
  // Whether Python has, or may have, threads beside the one that waits.
  bool (*mayHaveOtherThreads)() = nullptr;
  // Has fn called in the main thread, which raises what it throws. False: it will not be.
  bool (*callInMainThread)(std::function<void()> fn) = nullptr;
  // The exception that this thread is handling, for others to read; "" without one. Takes the GIL.
  std::string (*reasonToLeave)() = nullptr;
};
void setPythonHooks(PythonHooks hooks);
bool isInterruptPending();
std::string reasonToLeave();
// Whether this is the thread in which Python handles signals.
bool isMainThread();
// Whether Python made the call that this thread is in; false for calls by torch's own C++.
bool isCalledByPython();
bool mayHaveOtherThreads();

// The interpreter is about to end, which it does on this thread. Other threads that are in a call
// of mycoll, or make one, do not come back any more (stayIfExiting): they would want the GIL, and
// Python ends whoever wants it then in a way that C++ answers by ending the process. Daemon
// threads, that is; the others have ended by now. CallbackPool's come back.
void beginExit();
void stayIfExiting();

}  // namespace mycoll
