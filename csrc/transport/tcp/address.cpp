#include "transport/tcp/address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <memory>

namespace mycoll {
namespace {

std::string numericHost(const sockaddr* address, socklen_t length) {
  char host[NI_MAXHOST];
  if (getnameinfo(address, length, host, sizeof(host), nullptr, 0, NI_NUMERICHOST) != 0) return "";
  return host;
}

// The local address from which packets to `host` would be sent; "" if it cannot be determined. No
// packet is sent: connecting a datagram socket only looks up the route.
std::string routeSource(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (host.empty() || getaddrinfo(host.c_str(), "9", &hints, &found) != 0) return "";
  std::unique_ptr<addrinfo, void (*)(addrinfo*)> guard(found, freeaddrinfo);
  for (addrinfo* entry = found; entry; entry = entry->ai_next) {
    Fd socket(::socket(entry->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (!socket.isOpen() || connect(socket.get(), entry->ai_addr, entry->ai_addrlen) != 0) continue;
    sockaddr_storage local{};
    socklen_t length = sizeof(local);
    if (getsockname(socket.get(), reinterpret_cast<sockaddr*>(&local), &length) != 0) continue;
    return numericHost(reinterpret_cast<sockaddr*>(&local), length);
  }
  return "";
}

int prefixOf(const sockaddr* mask) {
  if (!mask) return 0;
  const void* bytes =
      mask->sa_family == AF_INET6
          ? static_cast<const void*>(&reinterpret_cast<const sockaddr_in6*>(mask)->sin6_addr)
          : &reinterpret_cast<const sockaddr_in*>(mask)->sin_addr;
  const size_t count = mask->sa_family == AF_INET6 ? sizeof(in6_addr) : sizeof(in_addr);
  int bits = 0;
  for (size_t i = 0; i < count; ++i) bits += std::popcount(static_cast<const uint8_t*>(bytes)[i]);
  return bits;
}

bool isContainerBridge(const std::string& name) {
  for (const char* prefix : {"docker", "veth", "br-", "virbr", "cni", "flannel", "cali"}) {
    if (name.rfind(prefix, 0) == 0) return true;
  }
  return false;
}

// Link-local IPv6 needs a scope that means nothing on another host.
bool isUsable(const InterfaceAddress& entry) {
  return !(entry.isIpv6 && entry.address.rfind("fe80", 0) == 0);
}

}  // namespace

std::vector<InterfaceAddress> interfaceAddresses() {
  std::vector<InterfaceAddress> result;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return result;
  std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> guard(list, freeifaddrs);
  for (ifaddrs* entry = list; entry; entry = entry->ifa_next) {
    if (!entry->ifa_addr || !(entry->ifa_flags & IFF_UP)) continue;
    int family = entry->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    InterfaceAddress found;
    found.interfaceName = entry->ifa_name;
    found.isIpv6 = family == AF_INET6;
    found.isLoopback = entry->ifa_flags & IFF_LOOPBACK;
    found.prefixBits = prefixOf(entry->ifa_netmask);
    found.address =
        numericHost(entry->ifa_addr, found.isIpv6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in));
    if (!found.address.empty() && isUsable(found)) result.push_back(found);
  }
  // IPv4 first: if both work, it is more often configured correctly.
  std::stable_sort(result.begin(), result.end(),
                   [](const auto& a, const auto& b) { return a.isIpv6 < b.isIpv6; });
  return result;
}

bool isInSubnetOf(const InterfaceAddress& own, const std::string& address) {
  unsigned char mine[sizeof(in6_addr)], theirs[sizeof(in6_addr)];
  const int family = own.isIpv6 ? AF_INET6 : AF_INET;
  if (own.prefixBits <= 0 || inet_pton(family, own.address.c_str(), mine) != 1 ||
      inet_pton(family, address.c_str(), theirs) != 1) {
    return false;
  }
  const int whole = own.prefixBits / 8, rest = own.prefixBits % 8;
  if (std::memcmp(mine, theirs, static_cast<size_t>(whole)) != 0) return false;
  return rest == 0 || (mine[whole] ^ theirs[whole]) >> (8 - rest) == 0;
}

Status chooseInterface(const InterfaceFilter& filter, const std::string& storeHost,
                       std::vector<InterfaceAddress>* chosen) {
  const std::vector<InterfaceAddress> all = interfaceAddresses();
  std::string name;
  const auto useFirst = [&](auto&& isMeant) {
    const auto found = std::find_if(all.begin(), all.end(), isMeant);
    if (name.empty() && found != all.end()) name = found->interfaceName;
  };
  if (filter.isSet()) {
    // An inclusion may name a loopback interface. An exclusion never selects one, and selects a
    // container's bridge only if there is nothing else.
    for (const bool areBridgesAdmitted : {false, true}) {
      useFirst([&](const InterfaceAddress& entry) {
        return filter.matches(entry.interfaceName) && !(filter.isExclusion && entry.isLoopback) &&
               (areBridgesAdmitted || !filter.isExclusion ||
                !isContainerBridge(entry.interfaceName));
      });
    }
    if (name.empty()) {
      std::string there;
      for (const auto& entry : all) {
        if (there.find(entry.interfaceName) == std::string::npos) {
          there += (there.empty() ? "" : ", ") + entry.interfaceName;
        }
      }
      return Status(Code::kNetwork,
                    "MYCOLL_SOCKET_IFNAME admits none of this host's interfaces (" + there + ")");
    }
  }
  const std::string source = name.empty() ? routeSource(storeHost) : "";
  useFirst([&](const auto& entry) { return !source.empty() && entry.address == source; });
  useFirst([](const auto& entry) {
    return !entry.isLoopback && !isContainerBridge(entry.interfaceName);
  });
  useFirst([](const auto& entry) { return entry.isLoopback; });
  chosen->clear();
  for (const auto& entry : all) {
    // All that the filter names, as a user that names several wants them to be used.
    const bool isNamed =
        filter.isSet() && !filter.isExclusion && filter.matches(entry.interfaceName);
    if (isNamed || entry.interfaceName == name) chosen->push_back(entry);
  }
  if (chosen->empty()) {
    return Status(Code::kNetwork, "this host has no network interface that is up, not even lo");
  }
  return Status();
}

namespace {

Status resolveNumeric(const std::string& address, int port, sockaddr_storage* result,
                      socklen_t* length) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  int error = getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) {
    return Status(Code::kNetwork, "not an address: '" + address + "': " + gai_strerror(error));
  }
  std::memcpy(result, found->ai_addr, found->ai_addrlen);
  *length = found->ai_addrlen;
  freeaddrinfo(found);
  return Status();
}

Status failed(const std::string& what) {
  return Status(Code::kNetwork, what + ": " + strerror(errno));
}

// port 0: any free one. *isTaken: the port is in use.
Status listenOnPort(const InterfaceAddress& address, int port, Fd* listener, int* chosen,
                    bool* isTaken) {
  sockaddr_storage where{};
  socklen_t length = 0;
  MYCOLL_RETURN_IF_ERROR(resolveNumeric(address.address, port, &where, &length));
  Fd socket(::socket(where.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  std::string what = "cannot listen on " + address.address + " (" + address.interfaceName + ")";
  if (!socket.isOpen()) return failed(what);
  // Connections that an earlier process on this port left behind must not prevent listening.
  const int reuse = port != 0;
  setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof(reuse));
  if (bind(socket.get(), reinterpret_cast<sockaddr*>(&where), length) != 0 ||
      listen(socket.get(), SOMAXCONN) != 0) {
    *isTaken = errno == EADDRINUSE && port != 0;
    return failed(what);
  }
  if (getsockname(socket.get(), reinterpret_cast<sockaddr*>(&where), &length) != 0) {
    return failed(what);
  }
  *chosen = ntohs(where.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&where)->sin6_port
                                              : reinterpret_cast<sockaddr_in*>(&where)->sin_port);
  socket.keepFromChildren();
  *listener = std::move(socket);
  return Status();
}

}  // namespace

Status listenOn(const InterfaceAddress& address, const PortRange& ports, Fd* listener, int* port) {
  for (int tried = ports.first; tried <= ports.last; ++tried) {
    bool isTaken = false;
    const Status status = listenOnPort(address, tried, listener, port, &isTaken);
    if (!isTaken) return status;
  }
  return Status(Code::kNetwork, "all ports of MYCOLL_PORTS=" + std::to_string(ports.first) + "-" +
                                    std::to_string(ports.last) + " are taken on " +
                                    address.address + ": each process of a host needs one");
}

Status startConnect(const std::string& address, int port, const InterfaceAddress* from,
                    Fd* result) {
  sockaddr_storage where{};
  socklen_t length = 0;
  MYCOLL_RETURN_IF_ERROR(resolveNumeric(address, port, &where, &length));
  Fd socket(::socket(where.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket.isOpen()) return connectFailure(address, port, errno);
  sockaddr_storage own{};
  socklen_t ownLength = 0;
  if (from && resolveNumeric(from->address, 0, &own, &ownLength).ok() &&
      bind(socket.get(), reinterpret_cast<sockaddr*>(&own), ownLength) != 0) {
    return connectFailure(address, port, errno);
  }
  if (connect(socket.get(), reinterpret_cast<sockaddr*>(&where), length) != 0 &&
      errno != EINPROGRESS) {
    return connectFailure(address, port, errno);
  }
  socket.keepFromChildren();
  *result = std::move(socket);
  return Status();
}

Status connectFailure(const std::string& address, int port, int error) {
  return Status(
      error == ECONNREFUSED ? Code::kPeerLost : Code::kNetwork,
      "cannot connect to " + address + " port " + std::to_string(port) + ": " + strerror(error));
}

void tuneSocket(int fd, int deadAfterSeconds) {
  int one = 1;
  (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof(one));
  // A dead peer is detected on an idle connection by probes, on a busy one by unacknowledged data.
  int probes = 3, intervalSeconds = std::max(1, deadAfterSeconds / 5);
  int idleSeconds = std::max(1, deadAfterSeconds - probes * intervalSeconds);
  (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idleSeconds, sizeof(idleSeconds));
  (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &intervalSeconds, sizeof(intervalSeconds));
  (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
  unsigned unackedMilliseconds = static_cast<unsigned>(deadAfterSeconds) * 1000;
  (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unackedMilliseconds,
                   sizeof(unackedMilliseconds));
}

void shareLoad(int fd) {
  unsigned unsent = 256 * 1024;
  (void)setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent, sizeof(unsent));
}

}  // namespace mycoll
