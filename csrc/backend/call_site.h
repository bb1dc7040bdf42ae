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

// Of the call that this thread is in: for operations that wait, or have failed. Only where the GIL
// is asked for anyway: in Python's main thread, which handles signals.
uint32_t callSiteOfWaiter();
// Of every call, where MYCOLL_CALL_SITES=always asks for it; else 0, for the price of a look.
uint32_t callSiteOfCall();

}  // namespace mycoll
