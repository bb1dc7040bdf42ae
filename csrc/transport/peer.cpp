#include "transport/peer.h"

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstring>

#include "base/sha256.h"

namespace mycoll {
namespace {

bool isUid(const std::string& text) {
  return text.size() == PeerAddress::kUidLength &&
         text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

// The kernel comes before the namespace (base/topology.h).
std::string_view kernelOf(const std::string& pidSpace) {
  return std::string_view(pidSpace).substr(0, pidSpace.rfind('/'));
}

}  // namespace

bool PeerAddress::sharesKernelWith(const PeerAddress& other) const {
  if (pidSpace.empty() || other.pidSpace.empty()) return hostName == other.hostName;
  return kernelOf(pidSpace) == kernelOf(other.pidSpace);
}

// One field a line; the tcp addresses come last.
std::string PeerAddress::encode() const {
  std::string text = hostIdentity + '\n' + pidSpace + '\n' + hostName + '\n' + uid + '\n' +
                     std::to_string(pid) + '\n' + std::to_string(startTicks);
  for (const TcpAddress& entry : tcp) {
    text += '\n' + entry.address + ' ' + std::to_string(entry.port);
  }
  return text;
}

// Must be fast: a rank of a large group decodes very many.
Status PeerAddress::decode(std::string_view text, PeerAddress* result) {
  const auto next = [&text] {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    return line;
  };
  const auto number = [](std::string_view digits, auto* value) {
    return std::from_chars(digits.data(), digits.data() + digits.size(), *value).ec == std::errc();
  };
  PeerAddress peer;
  peer.hostIdentity = next();
  peer.pidSpace = next();
  peer.hostName = next();
  peer.uid = next();
  const bool hasNumbers = number(next(), &peer.pid) & number(next(), &peer.startTicks);
  if (!isUid(peer.uid) || !hasNumbers) {
    return Status(Code::kStore, "the store holds an address that mycoll did not write");
  }
  if (!text.empty()) peer.tcp.reserve(1 + std::count(text.begin(), text.end(), '\n'));
  while (!text.empty()) {
    const std::string_view line = next();
    const size_t space = line.find(' ');
    TcpAddress entry;
    if (space == 0 || space == std::string_view::npos) continue;
    entry.address = line.substr(0, space);
    if (number(line.substr(space + 1), &entry.port)) peer.tcp.push_back(std::move(entry));
  }
  *result = std::move(peer);
  return Status();
}

std::string publicName(const std::string& uid) {
  const Digest digest = sha256("mycoll name " + uid);
  return toHex(digest.data(), 16);
}

socklen_t unixAddressOf(const char* prefix, const std::string& uid, sockaddr_un* address) {
  const std::string name = prefix + publicName(uid);
  std::memset(address, 0, sizeof(*address));
  address->sun_family = AF_UNIX;
  std::memcpy(address->sun_path + 1, name.data(), name.size());  // after a zero byte
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

}  // namespace mycoll
