// From Status to the exceptions that torch's users know, and the way in which Ctrl-C gets out.
// [any thread], with or without the GIL.
#pragma once

#include <exception>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "base/status.h"

namespace mycoll {

// What a Status is in Python:
//   kInvalidArgument   ValueError
//   kUnsupported       NotImplementedError
//   kNetwork           DistNetworkError
//   kStore             DistStoreError
//   kInterrupted       what the signal handler raised (KeyboardInterrupt)
//   all others         DistBackendError
// The status must not be ok.
[[noreturn]] void throwStatus(const Status& status);

inline void throwIfFailed(const Status& status) {
  if (!status.ok()) [[unlikely]] {
    throwStatus(status);
  }
}

c10d::WorkResult toWorkResult(const Status& status);

// The same, to be thrown elsewhere; null when ok. Ignores interrupts: they belong to one wait().
std::exception_ptr toException(const Status& status);

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
};
void setPythonHooks(PythonHooks hooks);
bool isInterruptPending();
// Whether Python made the call that this thread is in; false for calls by torch's own C++.
bool isCalledByPython();

}  // namespace mycoll
