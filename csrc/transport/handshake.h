// How two processes come to believe each other before a byte of either is acted on. Both prove that
// they know the secret of a group that both are in; the proofs cover what both have said, so that
// neither can be replayed or reflected.
//
//   connector                                 acceptor
//   Hello: group, ranks, uids, nonce    ->
//                                       <-    Challenge: standing, nonce,
//                                             HMAC(secret, "accept" Hello nonce)
//   Proof: HMAC(secret, "connect" Hello nonce cookie)
//          [shm: with the rings' memory] ->
//                                       <-    Verdict
//
// An acceptor that does not know the group says so by its standing, and that is the end: the
// connector asks again, or lets another group vouch. This needs no proof. Who could say it falsely
// could as well be silent.
//
// Two processes may connect to each other at once, and one connection is enough. Neither opens two:
// the process with the smaller uid lets the other one ask again from its own Proof on, as that may
// have opened a connection already; else whoever proves itself is accepted, and the acceptor's own
// attempt ends.
//
// A connection over TCP may have more sockets than one. The process that has made it makes those,
// by the same handshake, whose Hello names the connection that the socket joins.
//
// All sizes are fixed: nothing is allocated for a stranger but a socket and a coroutine, whose
// number and time are bounded (doorkeeper.h).
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

namespace mycoll {

class Segment;

constexpr uint64_t kHandshakeMagic = 0x314c4c4f4359534dULL;
// Of all that travels between processes: the handshake, what ranks say when they meet, frames.
constexpr uint32_t kProtocolVersion = 6;

// The rank of a process that is in no group yet: see lobby.h.
constexpr int kNobody = -1;

// Which group vouches for a connection.
struct HandshakeGroup {
  uint64_t context = 0;
  std::string secret;
  int source = 0;
  int destination = 0;
};

// What the group of a Hello is to the acceptor.
enum class Standing : uint32_t {
  kMember,  // it will prove that it is one
  kNotYet,  // it has not made the group, in all the time that it could wait
  kGone,    // it has left the group
};

struct Hello {
  uint64_t magic = kHandshakeMagic;
  uint32_t version = kProtocolVersion;
  uint32_t isShm = 0;
  uint64_t context = 0;
  int32_t source = 0;
  int32_t destination = 0;
  // The connection (idOf() its cookie) that this is one more socket of; 0: none.
  uint64_t joins = 0;
  uint64_t waits = 0;  // 1: for a lobby that may not be open yet
  char sourceUid[32];
  char destinationUid[32];
  uint8_t nonce[32];
};
struct Challenge {
  Standing standing = Standing::kMember;
  uint32_t reserved = 0;
  uint8_t nonce[32];
  Digest mac;
};
struct Proof {
  char cookie[32];  // also stands in the rings' memory, if there is one
  Digest mac;
};
struct Verdict {
  uint32_t isAccepted = 0;
  uint32_t isToAskAgain = 0;  // not accepted, as there is a connection, or one is being made
};

// What both sides call the connection that was made with this Proof.
uint64_t idOf(const Proof& proof);

Digest acceptorProof(const std::string& secret, const Hello& hello, const uint8_t nonce[32]);
Digest connectorProof(const std::string& secret, const Hello& hello, const uint8_t nonce[32],
                      const char cookie[32]);

// The connecting side. A value that outlives the task.
struct Handshake {
  enum class End {
    kHungUp,  // or did not answer in time
    kNotYet,  // both as the acceptor's standing
    kGone,
    kDistrusted,  // it could not prove that it knows the secret
    kRefused,
    kAskAgain,
    kAccepted,
  };

  int socket = -1;
  Hello hello;  // without the nonce
  std::string secret;
  Deadline deadline;
  bool makesRings = false;  // hands over memory for them

  End end = End::kHungUp;
  bool hasProved = false;  // the acceptor may have accepted
  Proof proof;
  std::shared_ptr<Segment> rings;
};
// Fails only for want of something on this side.
Task shakeHands(Handshake& handshake);

Status listenUnix(const std::string& uid, Fd* listener);
// *isFull: too many wait to be accepted there, which is no reason to go another way.
Status connectUnix(const std::string& uid, Fd* socket, bool* isFull);
// The connected process runs as this user, or as root.
bool isSameUser(int socket);

// ---- conditions: moving bytes over a socket without blocking ------------------------------------

class SocketCondition : public Condition {
 public:
  bool hasFailed() const { return failed_; }

 protected:
  SocketCondition(int socket, Deadline deadline) : socket_(socket), deadline_(deadline) {}
  // True ends the wait.
  bool fail() { return failed_ = true; }
  bool late() { return deadline_.expired() ? fail() : false; }

  const int socket_;
  const Deadline deadline_;
  bool failed_ = false;
};

// Exactly so many bytes, and at most one descriptor with them.
class ReadExactly final : public SocketCondition {
 public:
  ReadExactly(int socket, void* data, size_t bytes, Deadline deadline, Fd* descriptor = nullptr)
      : SocketCondition(socket, deadline),
        data_(static_cast<char*>(data)),
        bytes_(bytes),
        descriptor_(descriptor) {}
  bool ready() override;

 private:
  char* data_;
  size_t bytes_;
  Fd* descriptor_;
};

class WriteExactly final : public SocketCondition {
 public:
  WriteExactly(int socket, const void* data, size_t bytes, Deadline deadline)
      : SocketCondition(socket, deadline), data_(static_cast<const char*>(data)), bytes_(bytes) {}
  bool ready() override;

 private:
  const char* data_;
  size_t bytes_;
};

// A connection that was started is there, or has failed.
class Connected final : public SocketCondition {
 public:
  Connected(int socket, Deadline deadline) : SocketCondition(socket, deadline) {}
  bool ready() override;
  int error() const { return error_; }  // why it has failed: an errno

 private:
  int error_ = ETIMEDOUT;
};

}  // namespace mycoll
