// Text for messages. Plain functions.
#pragma once

#include <string>
#include <vector>

namespace mycoll {

// "0, 2, 8-15": ascending numbers, four and more in a row as an interval.
std::string listNumbers(const std::vector<int>& numbers);

// "\n  On this rank (0): ", which begins the line below a failure's cause.
std::string onThisRank(int rank);

}  // namespace mycoll
