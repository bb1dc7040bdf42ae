// Lobby: where processes come together that are in no group yet. A process that opens one is found
// there by whoever knows its address, the lobby's number and its secret, and proves that by the
// handshake of a group (handshake.h; the rank is kNobody on both sides). What the two say then is
// theirs: each gets the socket.
//
// Thread contract: the owner's thread, but for enter() [I/O lock]. knock() blocks its caller.
// Lifetime: it outlives its stay in the mesh: Mesh::openLobby(), closeLobby().
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
  // Readable while somebody is in it.
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
  kNobody,       // that process is no more, or has no such lobby (any more)
  kHungUp,       // it may be too busy
  kUnreachable,  // no connection could be made
  kDistrusted,   // the two have different secrets
};

// Connects to that process's lobby. look: asked every 50 ms; when it is not ok, that is returned.
// *why: of an answer that is not kIn, in words. waits: it may not be open yet: that process holds
// the door for about a second, and then hangs up.
Status knock(const Mesh& mesh, const PeerAddress& peer, const Lobby& like, Deadline deadline,
             const std::function<Status()>& look, Answer* answer, Fd* socket, std::string* why,
             bool waits = false);

}  // namespace mycoll
