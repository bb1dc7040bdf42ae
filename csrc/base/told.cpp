#include "base/told.h"

#include <cstddef>

namespace mycoll {
namespace {

// How many bytes the character at the beginning takes; 0: there is none.
size_t characterBytes(std::string_view text) {
  const auto byte = [&](size_t at) { return static_cast<unsigned char>(text[at]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return first >= 0x20 && first != 0x7f ? 1 : first == '\n' || first == '\t';
  const size_t bytes = first >= 0xc2 && first < 0xe0   ? 2
                       : first >= 0xe0 && first < 0xf0 ? 3
                       : first >= 0xf0 && first < 0xf5 ? 4
                                                       : 0;
  if (bytes == 0 || bytes > text.size()) return 0;
  for (size_t at = 1; at < bytes; ++at) {
    if ((byte(at) & 0xc0) != 0x80) return 0;
  }
  // Longer than needed, surrogates, beyond the last one.
  const bool isWrong = (first == 0xe0 && byte(1) < 0xa0) || (first == 0xed && byte(1) >= 0xa0) ||
                       (first == 0xf0 && byte(1) < 0x90) || (first == 0xf4 && byte(1) >= 0x90);
  return isWrong ? 0 : bytes;
}

}  // namespace

std::string readable(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    const size_t bytes = characterBytes(text);
    if (bytes == 0) {
      result += '?';
    } else {
      result += text.substr(0, bytes);
    }
    text.remove_prefix(bytes == 0 ? 1 : bytes);
  }
  return result;
}

Status toldStatus(int code, std::string_view text) {
  const bool isKnown =
      code > static_cast<int>(Code::kOk) && code <= static_cast<int>(Code::kDeadlock);
  return Status(isKnown ? static_cast<Code>(code) : Code::kInternal, readable(text));
}

}  // namespace mycoll
