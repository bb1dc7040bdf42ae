#include "transport/peer.h"

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
  std::istringstream lines(text);
  std::string number[2];
  PeerAddress peer;
  bool complete = std::getline(lines, peer.uid) && std::getline(lines, peer.hostIdentity) &&
                  std::getline(lines, peer.pidSpace) && std::getline(lines, peer.hostName) &&
                  std::getline(lines, number[0]) && std::getline(lines, number[1]);
  if (!complete || !isUid(peer.uid)) {
    return Status(Code::kStore, "the store holds an address that mycoll did not write");
  }
  peer.pid = static_cast<pid_t>(strtol(number[0].c_str(), nullptr, 10));
  peer.startTicks = strtoull(number[1].c_str(), nullptr, 10);
  std::string line;
  while (std::getline(lines, line)) {
    std::istringstream fields(line);
    TcpAddress entry;
    if (fields >> entry.address >> entry.port) peer.tcp.push_back(entry);
  }
  *result = std::move(peer);
  return Status();
}

std::string publicName(const std::string& uid) {
  const Digest digest = sha256("mycoll name " + uid);
  return toHex(digest.data(), 16);
}

}  // namespace mycoll
