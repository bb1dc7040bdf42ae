// Texts of messages. What comes from other processes, or is cut to fit, is always valid UTF-8, as
// readers reject anything else. [any thread]
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace mycoll {

// Lines of valid UTF-8 without control characters; every byte that is neither becomes '?'.
std::string sanitized(std::string_view text);

// A failure as another process describes it. A code that does not exist becomes kInternal.
Status statusFromPeer(int code, std::string_view text, const Cause& cause = {});

// A failure on its way to another process: its code, cause and text, in at most so many bytes.
std::string encode(const Status& failure, size_t most = std::string::npos);
// Returns false if a process that runs this version did not write it.
bool decodeFailure(std::string_view bytes, Status* failure);

// The beginning or the end of a text, in at most so many bytes; no character is cut in two.
std::string_view beginning(std::string_view text, size_t bytes);
std::string_view ending(std::string_view text, size_t bytes);

// "0, 2, 8-15": ascending numbers, four and more in a row as an interval.
std::string listNumbers(const std::vector<int>& numbers);

// "\n  On this rank (0): ", which begins the line below a failure's cause.
std::string onThisRank(int rank);

}  // namespace mycoll
