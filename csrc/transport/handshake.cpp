#include "transport/handshake.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

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

socklen_t unixAddress(const std::string& uid, sockaddr_un* address) {
  std::string name = "mycoll-" + publicName(uid);
  std::memset(address, 0, sizeof(*address));
  address->sun_family = AF_UNIX;
  std::memcpy(address->sun_path + 1, name.data(), name.size());  // abstract: no file
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
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

Task shakeHands(Handshake& handshake) {
  const int fd = handshake.socket;
  Hello& hello = handshake.hello;
  MYCOLL_CO_RETURN_IF_ERROR(randomBytes(hello.nonce, sizeof(hello.nonce)));
  WriteExactly sendHello(fd, &hello, sizeof(hello), handshake.deadline);
  co_await sendHello;
  Challenge challenge;
  ReadExactly readChallenge(fd, &challenge, sizeof(challenge), handshake.deadline);
  co_await readChallenge;
  if (sendHello.hasFailed() || readChallenge.hasFailed()) co_return Status();
  if (challenge.outcome == Outcome::kNotYet || challenge.outcome == Outcome::kGone) {
    handshake.outcome = challenge.outcome;
    co_return Status();
  }
  const Digest expected = acceptorProof(handshake.secret, hello, challenge.nonce);
  if (!constantTimeEqual(expected, challenge.mac)) {
    handshake.outcome = Outcome::kDistrusted;
    co_return Status();
  }
  Proof& proof = handshake.proof;
  MYCOLL_CO_RETURN_IF_ERROR(randomBytes(proof.cookie, sizeof(proof.cookie)));
  proof.mac = connectorProof(handshake.secret, hello, challenge.nonce, proof.cookie);
  handshake.hasProved = true;
  if (handshake.makesRings) {
    MYCOLL_CO_RETURN_IF_ERROR(Segment::create(ringSegmentBytes(), &handshake.rings));
    auto* ring = reinterpret_cast<RingHeader*>(handshake.rings->data());
    std::memcpy(ring->cookie, proof.cookie, sizeof(ring->cookie));
    // A fresh socket has room for so few bytes, so this never fails for lack of it.
    if (!sendDescriptor(fd, handshake.rings->fd(), reinterpret_cast<const char*>(&proof),
                        sizeof(proof))) {
      if (errno == EPIPE || errno == ECONNRESET) co_return Status();
      co_return Status(Code::kNetwork, "the ring's memory could not be handed over");
    }
    handshake.rings->closeFd();
  } else {
    WriteExactly sendProof(fd, &proof, sizeof(proof), handshake.deadline);
    co_await sendProof;
  }
  Verdict verdict;
  ReadExactly readVerdict(fd, &verdict, sizeof(verdict), handshake.deadline);
  co_await readVerdict;
  if (readVerdict.hasFailed()) co_return Status();
  const bool isKnown =
      verdict.outcome == Outcome::kAccepted || verdict.outcome == Outcome::kAskAgain;
  handshake.outcome = isKnown ? verdict.outcome : Outcome::kRefused;
  co_return Status();
}

Status listenUnix(const std::string& uid, Fd* listener) {
  Fd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  sockaddr_un address;
  socklen_t length = unixAddress(uid, &address);
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
  socklen_t length = unixAddress(uid, &address);
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

bool ReadExactly::ready() {
  while (bytes_ > 0 && !failed_) {
    ssize_t got = descriptor_ ? receiveDescriptor(socket_, descriptor_, data_, bytes_)
                              : recv(socket_, data_, bytes_, MSG_DONTWAIT);
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

bool WriteExactly::ready() {
  while (bytes_ > 0 && !failed_) {
    ssize_t sent = ::send(socket_, data_, bytes_, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent > 0) {
      data_ += sent;
      bytes_ -= static_cast<size_t>(sent);
    } else if (sent < 0 && errno == EAGAIN) {
      return late();
    } else if (errno != EINTR) {
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
