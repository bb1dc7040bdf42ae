// How the values of environment variables are written: numbers, sizes, choices, lists, patterns.
// Each function says whether it accepts the text, and only then has set its result. [any thread]
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <utility>

#include "base/env.h"

namespace mycoll {

std::optional<int64_t> parseInteger(std::string_view text);
// False, and nothing written: not one from least to most.
bool parseInteger(std::string_view text, int least, int most, int* result);
// "262144", "256K", "1M".
bool parseBytes(std::string_view text, size_t least, size_t most, size_t* bytes);
// An empty text unsets the result.
bool parseOptional(std::string_view text, std::optional<bool>* flag);
bool parseInterfaces(std::string_view text, InterfaceFilter* filter);
// Of a file's name: %h, %p, %r and %% only.
bool isValidPattern(std::string_view text);

template <typename T>
bool parseChoice(std::string_view text, std::initializer_list<std::pair<const char*, T>> choices,
                 T* choice) {
  for (const auto& [word, value] : choices) {
    if (text == word) {
      *choice = value;
      return true;
    }
  }
  return false;
}

}  // namespace mycoll
