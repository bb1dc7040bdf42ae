// The place in the user's program that called an operation, for `mycoll status`, traces and errors.
// bindings/, which knows Python, finds it; this file decides when to look for it.
// Thread contract: [any thread], without the GIL.
#pragma once

#include <cstdint>

namespace mycoll {

// Finds the place: returns a number from BlackBox::intern(), or 0 if there is none (a thread that
// Python does not know). Takes the GIL. Set once, before the first group.
using CallSiteHook = uint32_t (*)();
void setCallSiteHook(CallSiteHook hook);

// Returns the place of the call that this thread is in, for operations that wait or have failed.
// Known only in Python's main thread, which takes the GIL anyway to handle signals.
uint32_t callSiteOfWaiter();
// Returns the place of any call if MYCOLL_CALL_SITES=always; otherwise 0, at little cost.
uint32_t callSiteOfCall();

}  // namespace mycoll
