// The functions of Python that backend/ and device/ need. These folders do not use Python's API:
// bindings/, which is linked into the same module, defines the functions.
// [any thread], with or without the GIL, which they take if they need it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace mycoll {

// Returns true if a signal should end this thread's wait; the exception is then kept for this
// thread until raiseInterrupt().
bool isInterruptPending();
// Throws the exception that isInterruptPending() kept; returns if there is none.
void raiseInterrupt();
// Whether Python made the call that this thread is in (it holds the GIL); false for calls by
// torch's own C++.
bool isCalledByPython();
// Whether Python has, or may have, threads other than the one that waits: by the last count.
bool mayHaveOtherThreads();
int countPythonThreads();  // with the GIL
// Schedules a call of fn in the main thread, which raises what fn throws. Returns false if fn will
// not be called.
bool callInMainThread(std::function<void()> fn);
// Describes the exception that this thread is handling, for the other ranks; "" if there is none.
std::string reasonToLeave();
// Returns the place in the program that called: that of the innermost frame that is neither torch's
// nor mycoll's, as BlackBox::intern() numbers it. 0 in a thread that Python does not know.
uint32_t findCallSite();

}  // namespace mycoll
