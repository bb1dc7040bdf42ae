// What other processes say, made fit to be repeated. [any thread]
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace mycoll {

// Lines of UTF-8, whatever it was: what is neither becomes '?'.
std::string readable(std::string_view text);

// A failure as another process tells it; a code that means nothing becomes kInternal.
Status toldStatus(int code, std::string_view text);

}  // namespace mycoll
