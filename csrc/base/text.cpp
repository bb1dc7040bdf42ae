#include "base/text.h"

#include <cstddef>
#include <cstdint>

#include "base/bytes.h"

namespace mycoll {
namespace {

bool isInsideCharacter(char byte) { return (static_cast<unsigned char>(byte) & 0xc0) == 0x80; }

// The number of bytes of the character at the beginning; 0: it is not valid.
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
    if (!isInsideCharacter(text[at])) return 0;
  }
  // Overlong forms, surrogates, and numbers beyond the last character.
  const bool isWrong = (first == 0xe0 && byte(1) < 0xa0) || (first == 0xed && byte(1) >= 0xa0) ||
                       (first == 0xf0 && byte(1) < 0x90) || (first == 0xf4 && byte(1) >= 0x90);
  return isWrong ? 0 : bytes;
}

}  // namespace

std::string sanitized(std::string_view text) {
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

Status statusFromPeer(int code, std::string_view text, const Cause& cause) {
  const bool isKnown =
      code > static_cast<int>(Code::kOk) && code <= static_cast<int>(Code::kDeadlock);
  return Status(isKnown ? static_cast<Code>(code) : Code::kInternal, sanitized(text), cause);
}

std::string encode(const Status& failure, size_t most) {
  std::string bytes;
  append(&bytes, static_cast<int32_t>(failure.code()));
  append(&bytes, failure.cause());
  return bytes + failure.message().substr(0, most - bytes.size());
}

bool decodeFailure(std::string_view bytes, Status* failure) {
  Reader reader(bytes);
  const auto code = reader.value<int32_t>();
  const auto cause = reader.value<Cause>();
  if (reader.hasFailed()) return false;
  *failure = statusFromPeer(code, reader.rest(), cause);
  return true;
}

std::string_view beginning(std::string_view text, size_t bytes) {
  if (text.size() <= bytes) return text;
  while (bytes > 0 && isInsideCharacter(text[bytes])) --bytes;
  return text.substr(0, bytes);
}

std::string_view ending(std::string_view text, size_t bytes) {
  if (text.size() <= bytes) return text;
  text.remove_prefix(text.size() - bytes);
  while (!text.empty() && isInsideCharacter(text.front())) text.remove_prefix(1);
  return text;
}

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
