#include "transport/bell.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

#include "transport/peer.h"

namespace mycoll {
namespace {

// Limits one drain(), as any process of the host may ring, at any rate.
constexpr int kMostAtOnce = 64;

unsigned fillAddress(const std::string& uid, sockaddr_un* address) {
  std::string name = "mycoll-bell-" + publicName(uid);
  std::memset(address, 0, sizeof(*address));
  address->sun_family = AF_UNIX;
  // A leading zero byte selects the abstract namespace, which leaves nothing in a file system.
  std::memcpy(address->sun_path + 1, name.data(), name.size());
  return static_cast<unsigned>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

}  // namespace

Bell::Bell(int socket, const std::string& uid) : socket_(socket) {
  length_ = fillAddress(uid, &address_);
}

void Bell::ring() const {
  if (socket_ < 0) return;
  (void)sendto(socket_, "", 0, MSG_DONTWAIT | MSG_NOSIGNAL,
               reinterpret_cast<const sockaddr*>(&address_), length_);
}

Status BellSocket::open(const std::string& uid) {
  Fd socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  sockaddr_un address;
  unsigned length = fillAddress(uid, &address);
  if (!socket.isOpen() ||
      bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    return Status(Code::kNetwork, std::string("cannot open a unix socket: ") + strerror(errno));
  }
  socket_ = std::move(socket);
  socket_.keepFromChildren();
  return Status();
}

bool BellSocket::drain() {
  char byte;
  for (int i = 0; i < kMostAtOnce; ++i) {
    if (recv(socket_.get(), &byte, 1, MSG_DONTWAIT) < 0) return true;
  }
  return false;
}

}  // namespace mycoll
