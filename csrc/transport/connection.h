// Connection: everything that this process has with one other process. Two processes share one
// connection, used in both directions, whichever of them makes it (handshake.h). It is made when
// either process needs it. Until then, frames that do not justify a connection wait in the mesh.
//
// This class makes, opens and ends the connection. FrameSender and FrameReceiver move the frames.
//
// Between hosts a connection may have several sockets, as one carries no more than its window and
// the network allow. The side that has made the connection adds them. When one of them ends, so
// does the connection, as it is unknown how much of what was sent on that socket has arrived.
//
// States (moveTo() makes every transition):
//
//   kMaking -> kOpen -> kEnding -> kLost       kMaking -> kEnding
//
// kMaking: this process dials, unless the peer does. If the peer has left every group that both
// were in, the mesh forgets the connection. kEnding: the connection has failed, or the peer's
// process has ended. Frames that the peer sent before still count, including its goodbye. They are
// read first, for as long as they may be in flight.
//
// Thread contract: the mesh's I/O lock. Nothing here blocks. Reading passes frames to mailboxes,
// which answer on this connection; what the group itself must handle is an event (event.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "transport/dial.h"
#include "transport/frame.h"
#include "transport/frame_receiver.h"
#include "transport/frame_sender.h"
#include "transport/io_lock.h"
#include "transport/link.h"
#include "transport/local.h"
#include "transport/loss.h"
#include "transport/peer.h"
#include "transport/shm/peer_regions.h"
#include "transport/transfer.h"

namespace mycoll {

class Connection {
 public:
  enum class State { kMaking, kOpen, kEnding, kLost };
  static constexpr size_t kMostSockets = 64;
  // After this many bytes in one direction, the other direction and other connections follow. The
  // data in flight between two processes then stays in the caches.
  static constexpr size_t kTurnBytes = 512 * 1024;

  Connection(Local& local, PeerAddress peer)
      : local_(local), peer_(std::move(peer)), sender_(local, peer_), receiver_(local, *this) {}
  ~Connection();

  const PeerAddress& peer() const { return peer_; }
  State state() const REQUIRES(ioRole) { return state_; }
  // The reason for kEnding or kLost.
  const Loss& loss() const REQUIRES(ioRole) { return loss_; }
  // Whether it is, or was, open.
  bool wasOpen() const REQUIRES(ioRole) { return wasOpen_; }

  // ---- being made

  // Makes the connection, unless it is there or is being made.
  void dial() REQUIRES(ioRole);
  void advanceDialing() REQUIRES(ioRole);
  // It is, or was, open, and uses shared memory.
  bool isShm() const REQUIRES(ioRole) { return sender_.isShm(); }
  // No group is left that both processes are in.
  bool hasNoGroup() const REQUIRES(ioRole) {
    return dial_ && dial_->state() == Dial::State::kNobody;
  }
  // Before it is forgotten: raises NotSent for the queued requests.
  void giveUpDialing() REQUIRES(ioRole);
  // kMaking: this side or the peer has made the connection.
  void open(Link link) REQUIRES(ioRole);
  // Adds one more socket. Closes it if the connection can no longer use it.
  void join(Link link) REQUIRES(ioRole);
  bool mayBeJoined(uint64_t id) const REQUIRES(ioRole) {
    return state_ == State::kOpen && id_ == id && sender_.sockets() < kMostSockets;
  }
  // kMaking: whether the peer may have opened it already.
  bool mayBeOpen() const REQUIRES(ioRole) { return dial_ && dial_->hasProved(); }

  // ---- bytes

  // Queues the item, or raises NotSent for its request if the peer is lost. kMaking: the item is
  // sent once the connection is open.
  void enqueue(OutItem item) REQUIRES(ioRole);
  // Answers a frame for a group that this process has left. The peer may not know that: for a peer
  // without a connection, only the goodbyes of the latest groups are kept.
  void repeatGoodbye(const FrameHeader& came) REQUIRES(ioRole);
  // Both return true if anything moved.
  bool flush(size_t turnBytes = kTurnBytes) REQUIRES(ioRole);
  bool drain(size_t turnBytes = kTurnBytes) REQUIRES(ioRole) { return receiver_.drain(turnBytes); }
  void setAsleep(bool asleep) REQUIRES(ioRole);
  FrameSender& sender() REQUIRES(ioRole) { return sender_; }
  FrameReceiver& receiver() REQUIRES(ioRole) { return receiver_; }
  PeerRegions& regions() REQUIRES(ioRole) { return regions_; }

  // ---- ending

  // Keeps the first reason, except that kSilent replaces another one during kEnding.
  void end(Loss loss) REQUIRES(ioRole);
  // As end(), and stops reading.
  void breakOff(Loss loss) REQUIRES(ioRole);
  // kEnding: the peer's process has ended, which explains more than the error of the connection.
  void processEnded() REQUIRES(ioRole) { loss_ = {LossReason::kEnded, ""}; }
  // kEnding: reads what has arrived. Returns true if nothing more will arrive. isEnded: the peer's
  // process has ended.
  bool isDrained(bool isEnded) REQUIRES(ioRole);
  // This process ends and sends nothing more. This and hasArrived() are called without the lock: no
  // other thread uses the mesh any more.
  void finishSending();
  // Whether everything that was sent has arrived.
  bool hasArrived();
  // kEnding -> kLost. The caller must raise PeerLost, which ends the queued requests.
  void lose() REQUIRES(ioRole);

 private:
  void moveTo(State next) REQUIRES(ioRole);
  void countStuck() REQUIRES(ioRole);
  void add(Link link) REQUIRES(ioRole);
  void advanceJoining() REQUIRES(ioRole);
  void joinMore() REQUIRES(ioRole);

  Local& local_;
  const PeerAddress peer_;
  State state_ GUARDED_BY(ioRole) = State::kMaking;
  Loss loss_ GUARDED_BY(ioRole);
  bool wasOpen_ GUARDED_BY(ioRole) = false;
  uint64_t id_ GUARDED_BY(ioRole) = 0;             // of the first link (link.h)
  std::unique_ptr<Dial> dial_ GUARDED_BY(ioRole);  // kMaking
  // kOpen: one for each further socket that is being made.
  std::vector<std::unique_ptr<Dial>> joining_ GUARDED_BY(ioRole);

  PeerRegions regions_ GUARDED_BY(ioRole);
  // They have links in kOpen and kEnding.
  FrameSender sender_ GUARDED_BY(ioRole);
  FrameReceiver receiver_ GUARDED_BY(ioRole);

  // kOpen: something waits for room. Counts once in Local::pending, however much waits.
  bool isStuck_ GUARDED_BY(ioRole) = false;

  // kEnding: when that state began, or when the latest bytes arrived.
  Deadline::Clock::time_point lastByte_ GUARDED_BY(ioRole);
};

}  // namespace mycoll
