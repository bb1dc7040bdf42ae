#include "engine/roster.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "base/bytes.h"
#include "base/env.h"
#include "base/sha256.h"
#include "transport/handshake.h"

namespace mycoll {
namespace {

// The first character of a reason.
constexpr char kLost = 'L', kOther = 'O';
constexpr size_t kNumberLength = 32;

}  // namespace

Status Handle::freshNonce(std::string* nonce) {
  unsigned char random[kNumberLength / 2];
  MYCOLL_RETURN_IF_ERROR(randomBytes(random, sizeof(random)));
  *nonce = toHex(random, sizeof(random));
  return Status();
}

std::string Handle::settingsHere() {
  const Env& env = Env::process();
  return "mycoll " + std::string(version()) + "/" + std::to_string(kProtocolVersion) +
         (env.partials == Partials::kWide ? "" : " MYCOLL_PARTIALS=rounded") +
         (env.sumBlock == 1 ? "" : " MYCOLL_SUM_BLOCK=" + std::to_string(env.sumBlock)) +
         (env.tlsFiles.isWanted ? " GLOO_DEVICE_TRANSPORT=TCP_TLS"
          : env.encrypt         ? " MYCOLL_ENCRYPT=1"
                                : "");
}

std::string Handle::encode() const {
  const std::string reason = why.empty() ? "" : (hasLost ? kLost : kOther) + why;
  return nonce + "\n" + std::to_string(rank) + " " + std::to_string(ranks) + " " +
         std::to_string(reason.size()) + " " + settings + "\n" + reason + address.encode();
}

Status Handle::decode(const std::string& text, Handle* handle) {
  const Status bad(Code::kStore,
                   "the store holds something that this version of mycoll did not write");
  const size_t first = text.find('\n');
  const size_t second = first == std::string::npos ? first : text.find('\n', first + 1);
  if (first != kNumberLength || second == std::string::npos) return bad;
  handle->nonce = text.substr(0, first);
  char* after = nullptr;
  handle->rank = static_cast<int>(std::strtol(text.c_str() + first + 1, &after, 10));
  handle->ranks = static_cast<int>(std::strtol(after, &after, 10));
  const size_t whyBytes = std::strtoull(after, &after, 10);
  const size_t settings = after - text.c_str() + 1;
  if (settings > second || whyBytes > text.size() - second - 1) return bad;
  handle->settings = text.substr(settings, second - settings);
  handle->hasLost = whyBytes > 0 && text[second + 1] == kLost;
  handle->why = whyBytes > 0 ? text.substr(second + 2, whyBytes - 1) : "";
  return PeerAddress::decode(text.substr(second + 1 + whyBytes), &handle->address);
}

bool Roster::isComplete() const {
  return std::none_of(members.begin(), members.end(),
                      [](const Member& member) { return member.isAbsent(); });
}

// The round, the number, the count; then for each member a byte, which is 0 if it is absent, its
// nonce, and its address without what it has in common with the beginning of the one before.
std::string Roster::encode() const {
  std::string text, before;
  append(&text, round);
  text.append(number);
  append(&text, static_cast<uint32_t>(members.size()));
  for (size_t rank = 0; rank < members.size(); ++rank) {
    const Member& member = members[rank];
    const auto isPresent = static_cast<char>(!member.isAbsent());
    append(&text, static_cast<char>(isPresent | member.isSlow << 1 | member.isPublished << 2));
    if (member.isAbsent()) continue;
    std::string address = peers[rank].encode();
    size_t common = 0;
    while (common < std::min(before.size(), address.size()) && before[common] == address[common]) {
      ++common;
    }
    text.append(member.nonce);
    append(&text, static_cast<uint32_t>(common));
    append(&text, static_cast<uint32_t>(address.size() - common));
    text.append(address, common);
    before = std::move(address);
  }
  return text;
}

Status Roster::decode(const std::string& text, Roster* roster) {
  const Status bad(Code::kStore, "rank 0 has sent a list of ranks that mycoll did not write");
  Reader reader(text);
  roster->round = reader.value<uint64_t>();
  roster->number = reader.take(kNumberLength);
  const auto count = reader.value<uint32_t>();
  if (reader.hasFailed() || count > text.size()) return bad;
  roster->members.assign(count, {});
  std::vector<PeerAddress> peers(count);
  std::string address;
  for (size_t rank = 0; rank < count; ++rank) {
    Member& member = roster->members[rank];
    const char flags = reader.value<char>();
    if (flags == 0) continue;
    member.isSlow = (flags & 2) != 0;
    member.isPublished = (flags & 4) != 0;
    member.nonce = reader.take(kNumberLength);
    const auto common = reader.value<uint32_t>();
    const std::string_view rest = reader.take(reader.value<uint32_t>());
    if (reader.hasFailed() || common > address.size()) return bad;
    address.replace(common, std::string::npos, rest);
    MYCOLL_RETURN_IF_ERROR(PeerAddress::decode(address, &peers[rank]));
  }
  roster->peers = std::move(peers);
  return reader.hasFailed() || reader.hasMore() ? bad : Status();
}

}  // namespace mycoll
