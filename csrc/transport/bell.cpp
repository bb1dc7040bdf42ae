#include "transport/bell.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "transport/peer.h"

namespace mycoll {
namespace {

// Limits one drain(), as any process of the host may ring, at any rate.
constexpr int kMostAtOnce = 64;
constexpr char kBellName[] = "mycoll-bell-";

}  // namespace

Bell::Bell(int socket, const std::string& uid) : socket_(socket) {
  length_ = unixAddressOf(kBellName, uid, &address_);
}

void Bell::ring() const {
  if (socket_ < 0) return;
  (void)sendto(socket_, "", 0, MSG_DONTWAIT | MSG_NOSIGNAL,
               reinterpret_cast<const sockaddr*>(&address_), length_);
}

Status BellSocket::open(const std::string& uid) {
  Fd socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  sockaddr_un address;
  const socklen_t length = unixAddressOf(kBellName, uid, &address);
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
