// Connection: everything that this process has with one other process: the frames queued to it, and
// the frames received from it. Two processes share one connection, used in both directions,
// whichever of them makes it (handshake.h). It is made when either process needs it. Until then,
// frames that do not justify a connection wait in the mesh.
//
// Between hosts a connection may have several sockets, as one carries no more than its window and
// the network allow. The side that has made the connection adds them. When one of them ends, so
// does the connection, as it is unknown how much of what was sent on that socket has arrived.
//
// States (moveTo() makes every transition):
//
//   kIdle -> kDialing -> kOpen -> kEnding -> kLost
//   kIdle -> kOpen                the peer has dialled
//   kIdle, kDialing -> kEnding
//   kDialing -> kIdle             the peer has left every group that both were in
//
// kEnding: the connection has failed, or the peer's process has ended. Frames that the peer sent
// before still count, including its goodbye. They are read first, for as long as they may be in
// flight.
//
// Thread contract: the mesh's I/O lock. Nothing here blocks. Reading passes frames to mailboxes,
// which answer on this connection; what the group itself must handle is an event (event.h).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/types.h"
#include "transport/dial.h"
#include "transport/frame.h"
#include "transport/group_table.h"
#include "transport/io_lock.h"
#include "transport/link.h"
#include "transport/local.h"
#include "transport/loss.h"
#include "transport/mailbox.h"
#include "transport/peer.h"
#include "transport/shm/peer_regions.h"

namespace mycoll {

// A queued frame, or a message that is sent in pieces.
struct OutItem {
  FrameHeader header;
  const char* payload = nullptr;
  std::string owned;  // replaces `payload` if it is not empty
  size_t sent = 0;    // bytes of header and payload
  // The request that finishes when the payload has been sent, or null. The item is dropped with its
  // request, so that the receiver is not asked for a message that will not be sent.
  Transfer* request = nullptr;
  // kData, kMore, kPut: the whole message, which is sent in pieces, and how much of it has been cut
  // off. kEager: the same, once this frame, which has no payload, has been sent.
  Span message;
  size_t cut = 0;
  // kRequestToSend: the region of shared tensors in which the payload can be read, or 0.
  uint64_t region = 0;
};

class Connection {
 public:
  enum class State { kIdle, kDialing, kOpen, kEnding, kLost };
  static constexpr size_t kMostSockets = 64;
  // After this many bytes in one direction, the other direction and other connections get their
  // turn. The data in flight between two processes then stays in the caches.
  static constexpr size_t kTurnBytes = 512 * 1024;

  Connection(Local& local, PeerAddress peer) : local_(local), peer_(std::move(peer)) {}
  ~Connection();

  const PeerAddress& peer() const { return peer_; }
  State state() const REQUIRES(ioRole) { return state_; }
  // The reason for kEnding or kLost.
  const Loss& loss() const REQUIRES(ioRole) { return loss_; }
  // Whether it is, or was, open.
  bool wasOpen() const REQUIRES(ioRole) { return wasOpen_; }

  // ---- being made

  // kIdle only.
  void dial() REQUIRES(ioRole);
  void goOnDialing() REQUIRES(ioRole);
  // Starts the next attempt if it is due. If the last attempt found that the peer has left a group,
  // raises RankLeft for that group first.
  void dialAgain() REQUIRES(ioRole);
  // It is, or was, open, and uses shared memory.
  bool isShm() const REQUIRES(ioRole) { return !wires_.empty() && wires_.front().link.isShm; }
  // No group is left that both processes are in.
  bool isToNobody() const REQUIRES(ioRole) {
    return dial_ && dial_->state() == Dial::State::kNobody;
  }
  // kDialing -> kIdle. Raises NotSent for the queued requests.
  void giveUpDialing() REQUIRES(ioRole);
  bool isToBeMade() const REQUIRES(ioRole) {
    return state_ == State::kIdle || state_ == State::kDialing;
  }
  // Requires isToBeMade(): this side or the peer has made the connection.
  void open(Link link) REQUIRES(ioRole);
  // Adds one more socket. Closes it if the connection can no longer use it.
  void join(Link link) REQUIRES(ioRole);
  bool mayBeJoined(uint64_t id) const REQUIRES(ioRole) {
    return state_ == State::kOpen && wires_.front().link.id == id && wires_.size() < kMostSockets;
  }
  // kDialing: whether the peer may have opened it already.
  bool mayBeOpen() const REQUIRES(ioRole) { return dial_ && dial_->hasProved(); }

  // ---- bytes

  // Queues the item, or raises NotSent for its request if the peer is lost. kIdle: the item is sent
  // once either side has dialled.
  void enqueue(OutItem item) REQUIRES(ioRole);
  std::deque<OutItem>& queue() REQUIRES(ioRole) { return queue_; }
  // Whether a message of this size is spread over several sockets.
  bool cuts(size_t bytes) const REQUIRES(ioRole) {
    return wires_.size() > 1 && bytes > kSmallPieceBytes;
  }
  bool hasQueued(uint64_t context, int rank) const REQUIRES(ioRole);
  // Drops the unsent frames of this request. The rest of a frame that is being received into it is
  // discarded.
  void forget(Transfer* request) REQUIRES(ioRole);
  // Discards the rest of a frame that is being received into this message.
  void forget(const Mailbox::Unexpected* message) REQUIRES(ioRole);
  void forget(Mailbox* mailbox) REQUIRES(ioRole);
  void forget(Mailbox* mailbox, uint64_t window) REQUIRES(ioRole);
  // Both return true if anything moved.
  bool flush(size_t turnBytes = kTurnBytes) REQUIRES(ioRole);
  bool drain(size_t turnBytes = kTurnBytes) REQUIRES(ioRole);
  bool maybeReadable() const REQUIRES(ioRole);
  void lookAgain() REQUIRES(ioRole);
  // Returns false if the descriptor belongs to another object.
  bool onEvent(int fd, bool isClosed) REQUIRES(ioRole);
  void setAsleep(bool asleep) REQUIRES(ioRole);
  PeerRegions& regions() REQUIRES(ioRole) { return regions_; }

  // ---- ending

  // Keeps the first reason, except that kSilent replaces another one during kEnding.
  void end(Loss loss) REQUIRES(ioRole);
  // As end(), and stops reading.
  void breakOff(Loss loss) REQUIRES(ioRole);
  // kEnding: the peer's process has ended, which explains more than the error of the connection.
  void hasEnded() REQUIRES(ioRole) { loss_ = {LossReason::kEnded, ""}; }
  // kEnding: reads what has arrived. Returns true if nothing more will arrive. isEnded: the peer's
  // process has ended.
  bool hasSaidAll(bool isEnded) REQUIRES(ioRole);
  // This process ends and sends nothing more. This and hasArrived() are called without the lock: no
  // other thread uses the mesh any more.
  void sayNoMore();
  // Whether everything sent has arrived. Reads and discards what the peer still sends (tcp/link.h).
  bool hasArrived();
  // kEnding -> kLost. The caller must raise PeerLost, which ends the queued requests.
  void lose() REQUIRES(ioRole);

  // Delivers a whole frame that arrived before its group was made. Returns false if the frame names
  // a rank of another process as its source.
  static bool deliver(Mailbox& mailbox, EarlyFrame& frame) REQUIRES(ioRole);

 private:
  // The size of pieces when there are several sockets.
  static constexpr size_t kSmallPieceBytes = 128 * 1024;

  // A socket or a pair of rings, with the frames that are being sent and received on it.
  struct Wire {
    Link link;
    OutItem out;  // if isSending
    bool isSending = false;

    // Nothing more arrives, or what arrives cannot be trusted.
    bool isReadOver = false;
    FrameHeader header;
    size_t headerGot = 0;
    size_t payloadGot = 0;
    uint32_t payloadCheck = 0;  // of the received part of a checked frame
    bool isBegun = false;       // the header has arrived, and the frame need not wait
    // For the frame being read. Null: its payload is discarded unless isEarly.
    Mailbox* mailbox = nullptr;
    Mailbox::Target target;
    bool isEarly = false;  // the frame is kept for a group that is not made yet
    std::string control;   // payload of a control frame, or of an early one
    Fd descriptor;         // that came with it
  };

  void moveTo(State next) REQUIRES(ioRole);
  void countStuck() REQUIRES(ioRole);
  bool isFirst(const Wire& wire) const REQUIRES(ioRole) { return &wire == &wires_.front(); }
  // Lets other items be sent between two pieces of the first message.
  void giveWay() REQUIRES(ioRole);
  void joinMore() REQUIRES(ioRole);
  void leaveJoining(size_t number) REQUIRES(ioRole);
  bool takeNext(Wire& wire) REQUIRES(ioRole);
  void cutPiece(Wire& wire, std::deque<OutItem>::iterator item) REQUIRES(ioRole);
  void hasLeft(Wire& wire) REQUIRES(ioRole);
  void sendDescriptor(Wire& wire) REQUIRES(ioRole);
  size_t flush(Wire& wire, size_t most) REQUIRES(ioRole);
  bool drain(Wire& wire, size_t turnBytes) REQUIRES(ioRole);
  void readIsOver(Wire& wire, LossReason reason) REQUIRES(ioRole);
  bool isSound(const Wire& wire) const REQUIRES(ioRole);
  bool mustWait(const Wire& wire) const REQUIRES(ioRole);
  bool isHeld(const Wire& wire) const REQUIRES(ioRole);
  void sayGoodbyeAgain(const FrameHeader& came) REQUIRES(ioRole);
  bool beginFrame(Wire& wire) REQUIRES(ioRole);
  void endFrame(Wire& wire) REQUIRES(ioRole);
  void close() REQUIRES(ioRole);
  std::set<Mailbox*> dropUnsent() REQUIRES(ioRole);

  Local& local_;
  const PeerAddress peer_;
  State state_ GUARDED_BY(ioRole) = State::kIdle;
  Loss loss_ GUARDED_BY(ioRole);
  bool wasOpen_ GUARDED_BY(ioRole) = false;
  std::unique_ptr<Dial> dial_ GUARDED_BY(ioRole);  // kDialing
  // kOpen, kEnding. The first wire carries all kinds of frames, the others only pieces. Wires are
  // added even while others are read, but never removed.
  std::deque<Wire> wires_ GUARDED_BY(ioRole);
  // kOpen: one for each further socket that is being made.
  std::vector<std::unique_ptr<Dial>> joining_ GUARDED_BY(ioRole);

  PeerRegions regions_ GUARDED_BY(ioRole);
  std::deque<OutItem> queue_ GUARDED_BY(ioRole);  // items not begun, or messages being cut up

  // The number of messages whose beginning was sent or received, and of whole pieces that were sent
  // or received by other wires than the first.
  uint64_t begunOut_ GUARDED_BY(ioRole) = 0;
  uint64_t begunIn_ GUARDED_BY(ioRole) = 0;
  uint64_t piecesOut_ GUARDED_BY(ioRole) = 0;
  uint64_t piecesIn_ GUARDED_BY(ioRole) = 0;

  // kOpen: something waits for room. Counts once in Local::pending, however much waits.
  bool isStuck_ GUARDED_BY(ioRole) = false;

  // kEnding: when that state began, or when the latest bytes arrived.
  Deadline::Clock::time_point lastByte_ GUARDED_BY(ioRole);
};

const char* name(Connection::State state);

}  // namespace mycoll
