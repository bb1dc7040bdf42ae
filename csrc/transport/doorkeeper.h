// Doorkeeper: the accepting side of the handshake (handshake.h): the listeners of this process, and
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

class Doorkeeper {
 public:
  // A peer that has authenticated itself.
  struct Entrant {
    PeerAddress peer;
    uint64_t joins = 0;         // the connection that the link joins; 0: it makes one
    bool isInvitation = false;  // no group need contain the peer
    Link link;                  // once it is admitted
  };
  // kAccepted, kAskAgain, kRefused, or kGone: no group contains it any more. It learns that when it
  // asks again.
  using Admit = std::function<Outcome(const Entrant& entrant)>;
  using Enter = std::function<void(Entrant)>;

  Doorkeeper(Local& local, Admit admit, Enter enter);
  ~Doorkeeper();

  // Opens the listeners, and adds their addresses to the process's address. Called once and without
  // the lock, before any other thread uses the mesh.
  Status listen();
  // Returns false if the descriptor belongs to another object.
  bool onEvent(int fd) REQUIRES(ioRole);
  // Whether connections wait to be authenticated.
  bool isBusy() const REQUIRES(ioRole) { return !visitors_.empty(); }
  // Whether connections could not be accepted, and will be later.
  bool isToLookAgain() const REQUIRES(ioRole) { return !acceptAgain_.isNever(); }
  // Events may be lost: the next goOn() looks for new connections, and for news of the others.
  void lookAgain() REQUIRES(ioRole);
  // Continues the handshakes.
  void goOn() REQUIRES(ioRole);

 private:
  struct Visitor;

  void acceptFrom(int listener, bool isUnix) REQUIRES(ioRole);
  void acceptAll() REQUIRES(ioRole);
  bool dropStranger() REQUIRES(ioRole);
  void letIn(Visitor& visitor) REQUIRES(ioRole);
  Task answer(Visitor* visitor) REQUIRES(ioRole);

  Local& local_;
  const Admit admit_;
  const Enter enter_;
  // Constant after listen().
  Fd unixListener_;
  std::vector<Fd> tcpListeners_;
  std::vector<std::unique_ptr<Visitor>> visitors_ GUARDED_BY(ioRole);  // the oldest first
  // When to accept again after descriptors or memory were used up: listeners do not report twice.
  Deadline acceptAgain_ GUARDED_BY(ioRole);
};

}  // namespace mycoll
