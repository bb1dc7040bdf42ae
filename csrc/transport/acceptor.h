// Acceptor: the accepting side of the handshake (handshake.h): the listeners of this process, and
// the connections that are not authenticated yet. These are limited in number and time. A peer that
// authenticates itself is admitted.
//
// Thread contract: the mesh's I/O lock. Nothing here blocks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "base/task.h"
#include "transport/handshake.h"
#include "transport/io_lock.h"
#include "transport/link.h"
#include "transport/local.h"

namespace mycoll {

class Acceptor {
 public:
  // A peer that has authenticated itself.
  struct AcceptedPeer {
    PeerAddress peer;
    uint64_t joins = 0;         // the connection that the link joins; 0: it makes one
    bool isInvitation = false;  // no group need contain the peer
    Link link;                  // once it is admitted
  };
  // kAccepted, kAskAgain, kLost, kRefused, or kGone: no group contains it any more. It learns that
  // when it asks again.
  using Admit = std::function<Outcome(const AcceptedPeer& accepted)>;
  using OnAccepted = std::function<void(AcceptedPeer)>;

  Acceptor(Local& local, Admit admit, OnAccepted onAccepted);
  ~Acceptor();

  // Opens the listeners, and adds their addresses to the process's address. Called once and without
  // the lock, before any other thread uses the mesh.
  Status listen();
  // Returns false if the descriptor belongs to another object.
  bool onEvent(int fd) REQUIRES(ioRole);
  // Whether connections wait to be authenticated.
  bool isBusy() const REQUIRES(ioRole) { return !handshakes_.empty(); }
  // Whether connections could not be accepted, and will be later.
  bool isToLookAgain() const REQUIRES(ioRole) { return !acceptAgain_.isNever(); }
  // Events may be lost: the next advance() looks for new connections, and for news of the others.
  void lookAgain() REQUIRES(ioRole);
  // Continues the handshakes.
  void advance() REQUIRES(ioRole);

 private:
  struct Incoming;

  void acceptFrom(int listener, bool isUnix) REQUIRES(ioRole);
  void acceptAll() REQUIRES(ioRole);
  bool dropUnauthenticated() REQUIRES(ioRole);
  void accept(Incoming& incoming) REQUIRES(ioRole);
  Task answer(Incoming* incoming) REQUIRES(ioRole);

  Local& local_;
  const Admit admit_;
  const OnAccepted onAccepted_;
  // Constant after listen().
  Fd unixListener_;
  std::vector<Fd> tcpListeners_;
  std::vector<std::unique_ptr<Incoming>> handshakes_ GUARDED_BY(ioRole);  // the oldest first
  // When to accept again after descriptors or memory were used up: listeners do not report twice.
  Deadline acceptAgain_ GUARDED_BY(ioRole);
};

}  // namespace mycoll
