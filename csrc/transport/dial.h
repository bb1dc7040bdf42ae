// Dial: how this process makes a connection to one peer. It is the connecting side of the handshake
// (handshake.h). It tries shared memory, then each of the peer's addresses, and repeats that while
// the peer has not made the group that authenticates the connection, or has left it. It also adds
// one more socket to an existing connection.
//
// States (moveTo() makes every transition):
//
//   kTrying -> kMade | kFailed | kWaiting -> kTrying ...      kWaiting -> kNobody
//
// Thread contract: the mesh's I/O lock. Nothing here blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "base/task.h"
#include "transport/handshake.h"
#include "transport/io_lock.h"
#include "transport/link.h"
#include "transport/local.h"
#include "transport/loss.h"
#include "transport/peer.h"

namespace mycoll {

class Dial {
 public:
  enum class State {
    kTrying,
    kWaiting,  // for the next attempt
    kMade,     // the rest is in the fields below
    kFailed,   // loss() says why
    kNobody,   // no group is left that both are in
  };

  // Describes a further socket of a connection.
  struct Joining {
    uint64_t connection = 0;  // 0: no existing one, a connection is made
    size_t number = 0;        // of the socket: selects among several addresses
  };
  // Begins the first attempt. The peer's address outlives this.
  Dial(Local& local, const PeerAddress& peer, Joining joining) REQUIRES(ioRole);
  ~Dial();
  Dial(const Dial&) = delete;
  Dial& operator=(const Dial&) = delete;
  State state() const REQUIRES(ioRole) { return state_; }
  // Whether the peer may have made the connection already, as it knows that this side wants it.
  bool hasProved() const REQUIRES(ioRole) { return state_ == State::kTrying && hasProved_; }

  // Continues an attempt if what it waits for has happened, or begins the next one if it is due. If
  // the latest attempt found that the peer has left a group, raises RankLeft for that group first:
  // to be called after reading what other ranks report of that.
  void advance() REQUIRES(ioRole);

  // kMade.
  Link takeLink() REQUIRES(ioRole) { return std::move(link_); }
  // kFailed.
  const Loss& loss() const REQUIRES(ioRole) { return loss_; }

 private:
  void moveTo(State next) REQUIRES(ioRole);
  bool begin() REQUIRES(ioRole);
  bool raisesLeft() REQUIRES(ioRole);
  void finish() REQUIRES(ioRole);
  Status hungUp(bool isShm) REQUIRES(ioRole);
  bool isToTryAgain() const REQUIRES(ioRole) { return outcome_ != Outcome::kAccepted; }
  Status notNow(Outcome outcome) REQUIRES(ioRole);
  Task attempt() REQUIRES(ioRole);
  Task shakeHands(Fd socket, bool isShm) REQUIRES(ioRole);
  std::vector<const TcpAddress*> addresses() const REQUIRES(ioRole);
  const InterfaceAddress* ownFor(const TcpAddress& entry) const REQUIRES(ioRole);
  void setAside(const TcpAddress& entry, const Status& failure) REQUIRES(ioRole);

  Local& local_;
  const PeerAddress& peer_;
  const Joining joining_;
  State state_ GUARDED_BY(ioRole) = State::kWaiting;
  Task task_ GUARDED_BY(ioRole);  // of the attempt that is under way
  // The latest attempt: the group that authenticates it, and why another one may succeed.
  Hello hello_ GUARDED_BY(ioRole);
  std::string secret_ GUARDED_BY(ioRole);
  bool hasProved_ GUARDED_BY(ioRole) = false;
  Outcome outcome_ GUARDED_BY(ioRole) = Outcome::kAccepted;
  Deadline nextAttempt_ GUARDED_BY(ioRole);
  // Set once nothing listened, or the peer had lost an earlier connection.
  Deadline givesUp_ GUARDED_BY(ioRole) = Deadline::never();
  bool isUnauthenticated_ GUARDED_BY(ioRole) = false;  // the peer's proof was wrong
  size_t notYet_ GUARDED_BY(ioRole) = 0;               // how many times it had not made the group
  int hangUps_ GUARDED_BY(ioRole) = 0;                 // how many times it closed without an answer
  Link link_ GUARDED_BY(ioRole);
  Loss loss_ GUARDED_BY(ioRole);
};

}  // namespace mycoll
