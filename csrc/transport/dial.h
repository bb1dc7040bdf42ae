// Dial: how this process gets a connection to one peer: the calling side of the handshake
// (handshake.h), by shared memory, then by each of the peer's addresses; attempt after attempt
// while the peer has not made the group that is to vouch, or has left it.
//
// States (moveTo() makes every transition):
//
//   kTrying -> kMade | kFailed | kWaiting -> kTrying ...      kWaiting -> kNobody
//
// Thread contract: the mesh's I/O lock. Nothing here blocks.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

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
    kNobody,   // there is no group any more that both are in
  };

  // Begins the first attempt. The peer's address outlives this.
  Dial(Local& local, const PeerAddress& peer);
  State state() const { return state_; }
  // The peer may have made the connection already: it knows that this side wants it.
  bool hasProved() const { return state_ == State::kTrying && hasProved_; }

  // Goes on with an attempt if what it waits for has come.
  void goOn();
  // Whether the next attempt is due; begins it.
  bool isDue() const { return state_ == State::kWaiting && nextAttempt_.expired(); }
  void again() REQUIRES(ioRole);

  // kMade.
  Link takeLink() { return std::move(link_); }
  // kFailed.
  const Loss& loss() const { return loss_; }

 private:
  void moveTo(State next);
  bool begin() REQUIRES(ioRole);
  void finish();
  Status hungUp(bool isShm);
  Task attempt();
  Task shakeHands(Fd socket, bool isShm);

  Local& local_;
  const PeerAddress& peer_;
  State state_ = State::kWaiting;
  Task task_;               // of the attempt that is under way
  HandshakeGroup voucher_;  // of the latest attempt
  // What that group is to the other side. Not kMember: another attempt follows.
  Standing standing_ = Standing::kGone;
  Deadline nextAttempt_;
  bool hasProved_ = false;  // in this attempt
  bool isCrossed_ = false;  // the other side has, or makes, a connection of its own
  size_t notYet_ = 0;       // how many times it had not made the group
  int hangUps_ = 0;         // how many times it said nothing
  Link link_;
  Loss loss_;
};

}  // namespace mycoll
