// How two processes authenticate each other before either acts on a byte from the other. Both prove
// that they know the secret of a group that both are in. The proofs cover what both have sent, so
// that neither can be replayed or reflected.
//
//   connector                                 acceptor
//   Hello: group, ranks, uids, nonce    ->
//                                       <-    Challenge: outcome, nonce,
//                                             HMAC(secret, "accept" Hello nonce)
//   Proof: HMAC(secret, "connect" Hello nonce cookie)
//          [shm: with the rings' memory] ->
//                                       <-    Verdict
//
// An acceptor that does not know the group reports that in its Challenge, which ends the handshake.
// The connector asks again later, or uses another group. The report needs no proof: an attacker
// that can forge it could also send nothing.
//
// Two processes may connect to each other at the same time; one connection is enough, and they
// never open two. Once the process with the smaller uid has sent its Proof, its attempt may have
// opened a connection, so it answers the other process with kAskAgain. In all other cases a peer
// that proves itself is accepted, and the acceptor's own attempt ends.
//
// A connection over TCP may have several sockets. The process that has made it adds them by the
// same handshake; the Hello then names the connection that the socket joins.
//
// With encryption (tcp/tls.h), TLS's handshake comes first. It proves that the peer knows the key
// of the job. The handshake above then shows that the connection leads to the process that was
// meant.
//
// All sizes are fixed. For an unauthenticated peer, only a socket and a coroutine are allocated;
// their number and lifetime are limited (acceptor.h).
#pragma once

#include <array>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <string>

#include "base/deadline.h"
#include "base/fd.h"
#include "base/sha256.h"
#include "base/status.h"
#include "base/task.h"
#include "transport/tcp/tls.h"

namespace mycoll {

constexpr uint64_t kHandshakeMagic = 0x314c4c4f4359534dULL;
// The version of all data sent between processes: handshakes, the exchange that makes a group,
// frames.
constexpr uint32_t kProtocolVersion = 12;

// How a handshake, or an attempt to connect, ends.
enum class Outcome : uint32_t {
  kAccepted = 1,  // in a Challenge: the acceptor is a member of the group, and proves it
  kNotYet,        // the acceptor did not make the group within the time it could wait
  kGone,          // ... has left the group
  kAskAgain,      // ... has, or makes, a connection of its own
  kRefused,       // there is no such connection to join, or no memory
  kLost,          // ... has lost a connection with the connector, and makes no other one
  kBusy,          // not sent: the acceptor has too many connections that wait
};

struct Hello {
  uint64_t magic = kHandshakeMagic;
  uint32_t version = kProtocolVersion;
  uint32_t isShm = 0;
  uint64_t context = 0;
  int32_t source = 0;
  int32_t destination = 0;
  // The connection (idOf() its Proof) that this socket joins; 0: none.
  uint64_t joins = 0;
  uint32_t isInvitation = 0;
  // 0: the acceptor has opened the invitation before any process could name it: it knows it, or has
  // left it.
  uint32_t opensLater = 0;
  char sourceUid[32];
  char destinationUid[32];
  uint8_t nonce[32];
};
struct Challenge {
  Outcome outcome = Outcome::kAccepted;  // or kNotYet, kGone
  uint32_t reserved = 0;
  uint8_t nonce[32];
  Digest mac;
};
struct Proof {
  char cookie[32];  // also stored in the rings' memory, if there is one
  Digest mac;
};
struct Verdict {
  Outcome outcome = Outcome::kRefused;  // or kAccepted, kAskAgain, kLost
  uint32_t reserved = 0;
};

// The identifier that both sides use for the connection made with this Proof.
uint64_t idOf(const Proof& proof);

Digest acceptorProof(const std::string& secret, const Hello& hello, const uint8_t nonce[32]);
Digest connectorProof(const std::string& secret, const Hello& hello, const uint8_t nonce[32],
                      const char cookie[32]);

Status listenUnix(const std::string& uid, Fd* listener);
// *isFull: too many connections wait to be accepted there, which is no reason to use another
// transport.
Status connectUnix(const std::string& uid, Fd* socket, bool* isFull);
// Whether the connected process runs as this user, or one of the two as root.
bool isSameUser(int socket);

// The socket of a handshake. receive() also continues TLS's own handshake, if there is one.
class HandshakeSocket {
 public:
  // The descriptor outlives this. tls: null if the socket is not to be encrypted.
  HandshakeSocket(int fd, const std::shared_ptr<const Tls>& tls, bool isConnector)
      : fd_(fd), tls_(tls ? std::make_shared<TlsSocket>(tls, fd, isConnector) : nullptr) {}

  // Sends all of a message; the connector's first one when TLS's handshake is done. Returns false
  // if the socket is broken: a fresh one has room for so few bytes.
  bool send(const void* data, size_t bytes);
  // As recv() without waiting. descriptor: null, or receives the one that comes with the bytes.
  ssize_t receive(char* data, size_t bytes, Fd* descriptor);
  // Why TLS's handshake has failed, as a predicate of the peer; else empty.
  std::string failure() const;
  const std::shared_ptr<TlsSocket>& tls() const { return tls_; }

 private:
  const int fd_;
  const std::shared_ptr<TlsSocket> tls_;
  std::string first_;  // waits for TLS's handshake
};

// ---- conditions: waiting for a socket without blocking -----------------------------------------

class SocketCondition : public Condition {
 public:
  bool hasFailed() const { return failed_; }

 protected:
  explicit SocketCondition(Deadline deadline) : deadline_(deadline) {}
  // A result of true ends the wait.
  bool fail() { return failed_ = true; }
  bool late() { return deadline_.expired() ? fail() : false; }

  const Deadline deadline_;
  bool failed_ = false;
};

// Reads exactly this many bytes, and at most one descriptor with them.
class ReadExactly final : public SocketCondition {
 public:
  ReadExactly(HandshakeSocket& socket, void* data, size_t bytes, Deadline deadline,
              Fd* descriptor = nullptr)
      : SocketCondition(deadline),
        socket_(socket),
        data_(static_cast<char*>(data)),
        bytes_(bytes),
        descriptor_(descriptor) {}
  bool ready() override;

 private:
  HandshakeSocket& socket_;
  char* data_;
  size_t bytes_;
  Fd* descriptor_;
};

// Waits until a connection attempt has succeeded or failed.
class Connected final : public SocketCondition {
 public:
  Connected(int socket, Deadline deadline) : SocketCondition(deadline), socket_(socket) {}
  bool ready() override;
  int error() const { return error_; }  // the errno of the failure

 private:
  const int socket_;
  int error_ = ETIMEDOUT;
};

}  // namespace mycoll
