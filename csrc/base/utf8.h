// The beginning or the end of a text, in at most so many bytes: no character is cut in two, as
// readers refuse what is not UTF-8.
#pragma once

#include <cstddef>
#include <string_view>

namespace mycoll {

inline bool isInsideCharacter(char byte) {
  return (static_cast<unsigned char>(byte) & 0xC0) == 0x80;
}

inline std::string_view beginning(std::string_view text, size_t bytes) {
  if (text.size() <= bytes) return text;
  while (bytes > 0 && isInsideCharacter(text[bytes])) --bytes;
  return text.substr(0, bytes);
}

inline std::string_view ending(std::string_view text, size_t bytes) {
  if (text.size() <= bytes) return text;
  text.remove_prefix(text.size() - bytes);
  while (!text.empty() && isInsideCharacter(text.front())) text.remove_prefix(1);
  return text;
}

}  // namespace mycoll
