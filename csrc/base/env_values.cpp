#include "base/env_values.h"

#include <charconv>

namespace mycoll {

std::optional<int64_t> parseInteger(std::string_view text) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end) return std::nullopt;
  return value;
}

bool parseInteger(std::string_view text, int least, int most, int* result) {
  const std::optional<int64_t> value = parseInteger(text);
  if (!value || *value < least || *value > most) return false;
  *result = static_cast<int>(*value);
  return true;
}

bool parseBytes(std::string_view text, size_t least, size_t most, size_t* bytes) {
  int shift = 0;
  if (!text.empty()) {
    switch (text.back()) {
      case 'k':
      case 'K': shift = 10; break;
      case 'm':
      case 'M': shift = 20; break;
      case 'g':
      case 'G': shift = 30; break;
      default: break;
    }
    if (shift != 0) text.remove_suffix(1);
  }
  const std::optional<int64_t> value = parseInteger(text);
  if (!value || *value < 0 || *value > (INT64_MAX >> shift)) return false;
  const size_t scaled = static_cast<size_t>(*value) << shift;
  if (scaled < least || scaled > most) return false;
  *bytes = scaled;
  return true;
}

bool parseInterfaces(std::string_view text, InterfaceFilter* filter) {
  InterfaceFilter parsed;
  if (text.empty()) {
    *filter = parsed;
    return true;
  }
  if (text.front() == '^') {
    parsed.isExclusion = true;
    text.remove_prefix(1);
  }
  if (!text.empty() && text.front() == '=') {
    parsed.isExact = true;
    text.remove_prefix(1);
  }
  while (true) {
    const size_t comma = text.find(',');
    const std::string_view word = text.substr(0, comma);
    if (word.empty() || word.find_first_of(" \t^=/:") != word.npos) return false;
    parsed.names.emplace_back(word);
    if (comma == text.npos) break;
    text.remove_prefix(comma + 1);
  }
  *filter = std::move(parsed);
  return true;
}

bool isValidPattern(std::string_view text) {
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') continue;
    ++i;
    if (i == text.size() || std::string_view("hpr%").find(text[i]) == text.npos) return false;
  }
  return true;
}

bool parseOptional(std::string_view text, std::optional<bool>* flag) {
  if (!text.empty() && text != "0" && text != "1") return false;
  *flag = text.empty() ? std::optional<bool>() : text == "1";
  return true;
}

}  // namespace mycoll
