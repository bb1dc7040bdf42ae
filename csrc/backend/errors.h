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

// How backend/, which knows no Python, sees signals. Set once by bindings/, before the first group.
struct InterruptHook {
  // True when this thread's wait should end; the reason is then kept for this thread until raise().
  bool (*isPending)() = nullptr;
  // Throws what isPending() kept; returns when there is nothing.
  void (*raise)() = nullptr;
};
void setInterruptHook(InterruptHook hook);
bool isInterruptPending();

}  // namespace mycoll
