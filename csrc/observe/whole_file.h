// Writes a file so that readers see all of it or nothing.
// Thread contract: [any thread], one at a time for each path.
#pragma once

#include <sys/types.h>

#include <string>

#include "base/status.h"

namespace mycoll {

Status writeWhole(const std::string& path, const std::string& bytes, mode_t mode);

}  // namespace mycoll
