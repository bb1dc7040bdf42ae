#include "engine/card.h"

#include <cstdlib>
#include <cstring>

#include "base/env.h"
#include "base/sha256.h"
#include "transport/handshake.h"

namespace mycoll {
namespace {

Status notOurs() {
  return Status(Code::kStore,
                "the store holds something that this version of mycoll did not write");
}

constexpr size_t kNumberLength = 16;
// Before a reason.
constexpr char kLost = 'L', kOther = 'O';

}  // namespace

Status Card::freshNonce(std::string* nonce) {
  unsigned char random[32];
  MYCOLL_RETURN_IF_ERROR(randomBytes(random, sizeof(random)));
  *nonce = toHex(random, sizeof(random));
  return Status();
}

std::string Card::settingsHere() {
  const Env& env = Env::process();
  return "mycoll " + std::string(version()) + "/" + std::to_string(kProtocolVersion) +
         (env.partials == Partials::kWide ? "" : " MYCOLL_PARTIALS=rounded") +
         (env.sumBlock == 1 ? "" : " MYCOLL_SUM_BLOCK=" + std::to_string(env.sumBlock));
}

std::string Card::encode() const {
  // Most cards have no reason, and every rank reads one.
  const std::string reason = why.empty() ? "" : (hasLost ? kLost : kOther) + why;
  return nonce + "\n" + std::to_string(rank) + " " + std::to_string(ranks) + " " +
         std::to_string(reason.size()) + " " + settings + "\n" + reason + address.encode();
}

Status Card::decode(const std::string& text, Card* card) {
  const size_t first = text.find('\n');
  const size_t second = first == std::string::npos ? first : text.find('\n', first + 1);
  if (second == std::string::npos) return notOurs();
  card->nonce = text.substr(0, first);
  char* after = nullptr;
  card->rank = static_cast<int>(std::strtol(text.c_str() + first + 1, &after, 10));
  card->ranks = static_cast<int>(std::strtol(after, &after, 10));
  const size_t whyBytes = std::strtoull(after, &after, 10);
  const size_t settings = after - text.c_str() + 1;
  if (settings > second || whyBytes > text.size() - second - 1) return notOurs();
  card->settings = text.substr(settings, second - settings);
  card->hasLost = whyBytes > 0 && text[second + 1] == kLost;
  card->why = whyBytes > 0 ? text.substr(second + 2, whyBytes - 1) : "";
  return PeerAddress::decode(text.substr(second + 1 + whyBytes), &card->address);
}

std::string encodeRoster(const std::string& number, const std::vector<std::string>& addresses) {
  std::string text = number.substr(0, kNumberLength);
  for (const std::string& address : addresses) {
    const auto bytes = static_cast<uint32_t>(address.size());
    text.append(reinterpret_cast<const char*>(&bytes), sizeof(bytes)).append(address);
  }
  return text;
}

Status decodeRoster(const std::string& text, size_t ranks, std::string* number,
                    std::vector<PeerAddress>* peers) {
  const Status bad(Code::kStore, "rank 0 has sent a list of ranks that mycoll did not write");
  if (text.size() < kNumberLength) return bad;
  *number = text.substr(0, kNumberLength);
  peers->clear();
  peers->reserve(ranks);
  for (size_t at = kNumberLength; at < text.size();) {
    uint32_t bytes;
    if (text.size() - at < sizeof(bytes) || peers->size() == ranks) return bad;
    std::memcpy(&bytes, text.data() + at, sizeof(bytes));
    at += sizeof(bytes);
    if (text.size() - at < bytes) return bad;
    MYCOLL_RETURN_IF_ERROR(
        PeerAddress::decode(std::string_view(text).substr(at, bytes), &peers->emplace_back()));
    at += bytes;
  }
  return peers->size() == ranks ? Status() : bad;
}

}  // namespace mycoll
