#include "transport/handshake.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "transport/peer.h"
#include "transport/shm/link.h"

namespace mycoll {
namespace {

std::string transcript(const char* role, const Hello& hello, const uint8_t nonce[32]) {
  std::string text = role;
  text.append(reinterpret_cast<const char*>(&hello), sizeof(hello));
  text.append(reinterpret_cast<const char*>(nonce), 32);
  return text;
}

}  // namespace

uint64_t idOf(const Proof& proof) {
  uint64_t id;
  std::memcpy(&id, proof.cookie, sizeof(id));
  return id | 1;
}

Digest acceptorProof(const std::string& secret, const Hello& hello, const uint8_t nonce[32]) {
  return hmacSha256(secret, transcript("mycoll accept", hello, nonce));
}

Digest connectorProof(const std::string& secret, const Hello& hello, const uint8_t nonce[32],
                      const char cookie[32]) {
  return hmacSha256(secret, transcript("mycoll connect", hello, nonce) + std::string(cookie, 32));
}

Status listenUnix(const std::string& uid, Fd* listener) {
  Fd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  sockaddr_un address;
  socklen_t length = unixAddressOf("mycoll-", uid, &address);
  if (!socket.isOpen() || bind(socket.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      listen(socket.get(), SOMAXCONN) != 0) {
    return Status(Code::kNetwork,
                  std::string("cannot listen on a unix socket: ") + strerror(errno));
  }
  socket.keepFromChildren();
  *listener = std::move(socket);
  return Status();
}

Status connectUnix(const std::string& uid, Fd* result, bool* isFull) {
  Fd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  sockaddr_un address;
  socklen_t length = unixAddressOf("mycoll-", uid, &address);
  if (!socket.isOpen() ||
      connect(socket.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
    *isFull = socket.isOpen() && errno == EAGAIN;
    return Status(errno == ECONNREFUSED ? Code::kPeerLost : Code::kNetwork,
                  std::string("cannot connect to a unix socket: ") + strerror(errno));
  }
  socket.keepFromChildren();
  *result = std::move(socket);
  return Status();
}

bool isSameUser(int socket) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) return false;
  return peer.uid == geteuid() || peer.uid == 0 || geteuid() == 0;
}

bool HandshakeSocket::send(const void* data, size_t bytes) {
  const Span part{const_cast<void*>(data), bytes};
  if (tls_ && tls_->shakeHands() != TlsSocket::State::kOpen) {
    return first_.assign(part.begin(), bytes), true;
  }
  const ssize_t sent =
      tls_ ? tls_->write(&part, 1) : ::send(fd_, data, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
  return sent == static_cast<ssize_t>(bytes);
}

ssize_t HandshakeSocket::receive(char* data, size_t bytes, Fd* descriptor) {
  if (descriptor) return receiveDescriptor(fd_, descriptor, data, bytes);
  if (!tls_) return recv(fd_, data, bytes, MSG_DONTWAIT);
  const TlsSocket::State state = tls_->shakeHands();
  if (state == TlsSocket::State::kFailed) return 0;
  if (state == TlsSocket::State::kShakingHands) return errno = EAGAIN, -1;
  const std::string first = std::exchange(first_, "");
  if (!first.empty() && !send(first.data(), first.size())) return 0;
  tls_->onEvent(false);
  const ssize_t got = tls_->read(data, bytes);
  return got != 0 ? got : (errno = EAGAIN, -1);
}

std::string HandshakeSocket::failure() const {
  if (!tls_ || tls_->failure().empty()) return "";
  return "has another secret, or does not encrypt (" + tls_->failure() + ")";
}

bool ReadExactly::ready() {
  while (bytes_ > 0 && !failed_) {
    const ssize_t got = socket_.receive(data_, bytes_, descriptor_);
    if (got > 0) {
      data_ += got;
      bytes_ -= static_cast<size_t>(got);
    } else if (got < 0 && errno == EAGAIN) {
      return late();
    } else if (got == 0 || errno != EINTR) {
      return fail();
    }
  }
  return true;
}

bool Connected::ready() {
  pollfd state{socket_, POLLOUT, 0};
  if (poll(&state, 1, 0) <= 0) return late();
  socklen_t length = sizeof(error_);
  getsockopt(socket_, SOL_SOCKET, SO_ERROR, &error_, &length);
  if (error_ != 0) fail();
  return true;
}

}  // namespace mycoll
