// Lobby: connects processes that are in no group yet. Another process enters it if it knows the
// address of the process that opened it, the lobby's number and its secret, and proves that by the
// handshake of a group (handshake.h; the rank is kNobody on both sides). Afterwards each of the two
// owns its end of the socket, and the protocol on it is theirs.
//
// Thread contract: the owner's thread, except enter() [I/O lock]. knock() blocks its caller.
// Lifetime: it must live from Mesh::openLobby() to closeLobby().
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "base/mutex.h"
#include "base/status.h"
#include "transport/peer.h"

namespace mycoll {

class Mesh;

class Lobby {
 public:
  Lobby(uint64_t number, std::string secret) : number_(number), secret_(std::move(secret)) {}

  Status open();
  uint64_t number() const { return number_; }
  const std::string& secret() const { return secret_; }
  // Readable while it holds sockets.
  int fd() const { return news_.get(); }
  std::vector<Fd> takeAll();
  void enter(Fd socket);

 private:
  const uint64_t number_;
  const std::string secret_;
  Fd news_;  // an eventfd
  Mutex mutex_;
  std::vector<Fd> sockets_ GUARDED_BY(mutex_);
};

enum class Answer {
  kIn,
  kNobody,       // that process is gone, or has no such lobby (any more)
  kHungUp,       // it may be too busy
  kUnreachable,  // no connection could be made
  kDistrusted,   // the two have different secrets
};

// Connects to that process's lobby. look: called every 50 ms; a status that is not ok is returned.
// *why: the reason in words if the answer is not kIn. waits: the lobby may not be open yet; that
// process then delays the handshake for about a second before it closes the socket.
Status knock(const Mesh& mesh, const PeerAddress& peer, const Lobby& like, Deadline deadline,
             const std::function<Status()>& look, Answer* answer, Fd* socket, std::string* why,
             bool waits = false);

}  // namespace mycoll
