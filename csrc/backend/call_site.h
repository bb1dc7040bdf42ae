// Where in the user's program an operation was called: for `mycoll status`, traces and errors.
// bindings/, which knows Python, finds it; here is only who asks, and when.
// Thread contract: [any thread], without the GIL.
#pragma once

#include <cstdint>

namespace mycoll {

// How the place is found: a number from BlackBox::intern(), 0 when there is none (a thread that
// Python does not know). Takes the GIL. Set once, before the first group.
using CallSiteHook = uint32_t (*)();
void setCallSiteHook(CallSiteHook hook);

// The place of the call that this thread is in, for operations that wait or have failed. Known only
// in Python's main thread, which takes the GIL anyway to handle signals.
uint32_t callSiteOfWaiter();
// The place of any call if MYCOLL_CALL_SITES=always asks for it; otherwise 0, at little cost.
uint32_t callSiteOfCall();

}  // namespace mycoll
