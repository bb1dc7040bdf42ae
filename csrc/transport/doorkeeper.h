// Doorkeeper: where peers connect to this process: its listeners, and the connections that have not
// proved anything yet (the answering side of the handshake, handshake.h). These are bounded in
// number and time; the peers that prove themselves are let in.
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
  // A connection whose other end has proved who it is.
  struct Entrant {
    PeerAddress peer;
    Link link;
    uint64_t joins = 0;  // 0: no connection, but makes one
  };
  enum class Admission {
    kEnter,
    kAskAgain,  // there is a connection with it, or one is being made
    kRefused,   // it counts as lost
    kGone,      // no group has it any more: when it asks again, it hears that
  };
  // What becomes of a peer that has proved who it is.
  using Admit = std::function<Admission(const std::string& uid, uint64_t joins)>;
  using Enter = std::function<void(Entrant)>;

  Doorkeeper(Local& local, Admit admit, Enter enter);
  ~Doorkeeper();

  // Opens the listeners, and adds to the process's address where they are. Once, before anybody
  // else has the mesh: without the lock.
  Status listen();
  // False: the descriptor is none of its.
  bool onEvent(int fd) REQUIRES(ioRole);
  // Whether somebody is at the door.
  bool isBusy() const REQUIRES(ioRole) { return !visitors_.empty(); }
  // ... or had to be left outside for a moment.
  bool isToLookAgain() const REQUIRES(ioRole) { return !acceptAgain_.isNever(); }
  // Goes on with the handshakes.
  void goOn() REQUIRES(ioRole);

 private:
  struct Visitor;

  void acceptFrom(int listener, bool isUnix) REQUIRES(ioRole);
  void acceptAll() REQUIRES(ioRole);
  bool dropStranger() REQUIRES(ioRole);
  void letIn(Visitor& visitor) REQUIRES(ioRole);
  Task answer(Visitor* visitor) REQUIRES(ioRole);
  Task answerInLobby(Visitor* visitor, Hello hello) REQUIRES(ioRole);

  Local& local_;
  const Admit admit_;
  const Enter enter_;
  // As listen() has made them.
  Fd unixListener_;
  std::vector<Fd> tcpListeners_;
  std::vector<std::unique_ptr<Visitor>> visitors_ GUARDED_BY(ioRole);  // the oldest first
  // Descriptors were used up; listeners do not report twice.
  Deadline acceptAgain_ GUARDED_BY(ioRole);
};

}  // namespace mycoll
