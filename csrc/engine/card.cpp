#include "engine/card.h"

#include <cstdlib>

#include "base/env.h"
#include "base/sha256.h"

namespace mycoll {
namespace {

constexpr char kNotOurs[] = "the store holds something that mycoll did not write";

}  // namespace

Status Card::freshNonce(std::string* nonce) {
  unsigned char random[32];
  MYCOLL_RETURN_IF_ERROR(randomBytes(random, sizeof(random)));
  *nonce = toHex(random, sizeof(random));
  return Status();
}

std::string Card::settingsHere() {
  const Env& env = Env::process();
  return std::string("MYCOLL_PARTIALS=") + (env.partials == Partials::kWide ? "wide" : "rounded") +
         " MYCOLL_SUM_BLOCK=" + std::to_string(env.sumBlock);
}

std::string Card::encode() const {
  return nonce + "\n" + std::to_string(ranks) + " " + std::to_string(why.size()) + " " + settings +
         "\n" + why + address.encode();
}

Status Card::decode(const std::string& text, Card* card) {
  const size_t first = text.find('\n');
  const size_t second = first == std::string::npos ? first : text.find('\n', first + 1);
  if (second == std::string::npos) {
    return Status(Code::kStore, kNotOurs);
  }
  card->nonce = text.substr(0, first);
  char* after = nullptr;
  card->ranks = static_cast<int>(std::strtol(text.c_str() + first + 1, &after, 10));
  const size_t whyBytes = std::strtoull(after, &after, 10);
  const size_t settings = after - text.c_str() + 1;
  if (settings > second || whyBytes > text.size() - second - 1) {
    return Status(Code::kStore, kNotOurs);
  }
  card->settings = text.substr(settings, second - settings);
  card->why = text.substr(second + 1, whyBytes);
  return PeerAddress::decode(text.substr(second + 1 + whyBytes), &card->address);
}

std::string encodeRoster(const std::string& number, const std::vector<std::string>& cards) {
  std::string text = number + "\n";
  for (const std::string& card : cards) text += std::to_string(card.size()) + "\n" + card;
  return text;
}

bool decodeRoster(const std::string& text, size_t ranks, std::string* number,
                  std::vector<std::string>* cards) {
  size_t at = text.find('\n');
  if (at == std::string::npos) return false;
  *number = text.substr(0, at++);
  cards->clear();
  while (at < text.size()) {
    const size_t end = text.find('\n', at);
    if (end == std::string::npos) return false;
    const size_t bytes = std::strtoull(text.c_str() + at, nullptr, 10);
    if (bytes > text.size() - end - 1) return false;
    cards->push_back(text.substr(end + 1, bytes));
    at = end + 1 + bytes;
  }
  return cards->size() == ranks;
}

}  // namespace mycoll
