// Doorkeeper: where peers connect to this process: its listeners, and the connections that have not
// proved anything yet (the answering side of the handshake, handshake.h). These are bounded in
// number and time; the peers that prove themselves are let in.
//
// Thread contract: the mesh's I/O lock. Nothing here blocks.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "base/task.h"
#include "transport/link.h"
#include "transport/local.h"

namespace mycoll {

class Doorkeeper {
 public:
  // A connection whose other end has proved who it is.
  struct Entrant {
    PeerAddress peer;
    std::unique_ptr<LinkReceiver> receiver;
    bool isShm = false;
  };
  // Whether this process would take a connection with it now.
  using MayEnter = std::function<bool(const std::string& uid)>;
  using Enter = std::function<void(Entrant)>;

  Doorkeeper(Local& local, MayEnter mayEnter, Enter enter);
  ~Doorkeeper();

  // Opens the listeners, and adds to the process's address where they are.
  Status listen();
  // False: the descriptor is none of its.
  bool onEvent(int fd);
  // Whether somebody is at the door.
  bool isBusy() const { return !visitors_.empty(); }
  // ... or had to be left outside for a moment.
  bool isToLookAgain() const { return !acceptAgain_.isNever(); }
  // Goes on with the handshakes.
  void goOn();

 private:
  struct Visitor;

  void acceptFrom(int listener, bool isUnix);
  void acceptAll();
  bool dropStranger();
  Task answer(Visitor* visitor);

  Local& local_;
  const MayEnter mayEnter_;
  const Enter enter_;
  Fd unixListener_;
  std::vector<Fd> tcpListeners_;
  std::vector<std::unique_ptr<Visitor>> visitors_;  // the oldest first
  Deadline acceptAgain_;  // descriptors were used up; listeners do not report twice
};

}  // namespace mycoll
