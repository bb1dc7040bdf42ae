// The secrets of a job, derived from MYCOLL_SECRET_FILE if it is set. [any thread]
#pragma once

#include <string>

#include "base/status.h"

namespace mycoll {

// The secret that every rank of a job can derive from this text: with MYCOLL_SECRET_FILE, only the
// ranks that have the file can. Fails if that file cannot be used.
Status secretOf(const std::string& text, std::string* secret);

}  // namespace mycoll
