#include "base/text.h"

namespace mycoll {

std::string listNumbers(const std::vector<int>& numbers) {
  constexpr size_t kInterval = 4;
  std::string text;
  for (size_t i = 0; i < numbers.size();) {
    size_t end = i + 1;
    while (end < numbers.size() && numbers[end] == numbers[end - 1] + 1) ++end;
    if (end - i < kInterval) end = i + 1;
    if (!text.empty()) text += ", ";
    text += std::to_string(numbers[i]);
    if (end - i > 1) text.append("-").append(std::to_string(numbers[end - 1]));
    i = end;
  }
  return text;
}

std::string onThisRank(int rank) { return "\n  On this rank (" + std::to_string(rank) + "): "; }

}  // namespace mycoll
