// Finds the user's line of Python that a call came from.
#pragma once

#include <cstdint>

namespace mycoll {

// The innermost frame that is neither torch's nor mycoll's, as BlackBox::intern() numbers it; 0 in
// threads that Python does not know. Takes the GIL.
uint32_t findCallSite();

}  // namespace mycoll
