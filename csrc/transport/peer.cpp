#include "transport/peer.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "base/sha256.h"

namespace mycoll {
namespace {

bool isUid(const std::string& text) {
  return text.size() == PeerAddress::kUidLength &&
         text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

}  // namespace

// One field a line; the tcp addresses come last.
std::string PeerAddress::encode() const {
  std::ostringstream text;
  text << uid << '\n' << hostIdentity << '\n' << pidSpace << '\n' << hostName << '\n';
  text << pid << '\n' << startTicks;
  for (const TcpAddress& entry : tcp) text << '\n' << entry.address << ' ' << entry.port;
  return text.str();
}

Status PeerAddress::decode(const std::string& text, PeerAddress* result) {
  std::vector<std::string> lines;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    lines.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  constexpr size_t kFixed = 6;
  if (lines.size() < kFixed || !isUid(lines[0])) {
    return Status(Code::kStore, "the store holds an address that mycoll did not write");
  }
  PeerAddress peer;
  peer.uid = lines[0];
  peer.hostIdentity = lines[1];
  peer.pidSpace = lines[2];
  peer.hostName = lines[3];
  peer.pid = static_cast<pid_t>(strtol(lines[4].c_str(), nullptr, 10));
  peer.startTicks = strtoull(lines[5].c_str(), nullptr, 10);
  for (size_t i = kFixed; i < lines.size(); ++i) {
    const size_t space = lines[i].find(' ');
    if (space == 0 || space == std::string::npos) continue;
    const int port = static_cast<int>(strtol(lines[i].c_str() + space, nullptr, 10));
    peer.tcp.push_back({lines[i].substr(0, space), port});
  }
  *result = std::move(peer);
  return Status();
}

std::string publicName(const std::string& uid) {
  const Digest digest = sha256("mycoll name " + uid);
  return toHex(digest.data(), 16);
}

}  // namespace mycoll
