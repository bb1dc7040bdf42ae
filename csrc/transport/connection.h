// Connection: all that this process has with one other: what is queued to it, and the frames that
// come from it. There is one for a pair of processes, used both ways, whichever of them makes it
// (handshake.h). Until one of them needs it there is none; what is not worth one waits in the
// mesh.
//
// Between hosts it may have several sockets: one carries no more than its window and the network
// allow it. The side that has made the connection then adds others. All belong to it, and when one
// of them ends so does the connection: what has left by it cannot be told from what has arrived.
//
// States (moveTo() makes every transition):
//
//   kIdle -> kDialing -> kOpen -> kEnding -> kLost
//   kIdle -> kOpen                the peer has dialled
//   kIdle, kDialing -> kEnding
//   kDialing -> kIdle             the peer has left all groups that both were in
//
// kEnding: it has failed, or the peer's process has ended. What the peer had sent before counts,
// also that it was leaving: it is read first, as long as it may still be on its way.
//
// Thread contract: the mesh's I/O lock. Nothing here blocks. Reading hands frames to mailboxes,
// which answer on this connection; what a group has to answer is an event (event.h).
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

// Something on its way out.
struct OutItem {
  FrameHeader header;
  const char* payload = nullptr;
  std::string owned;  // the payload instead, where it is nobody else's
  size_t sent = 0;    // of header and payload together
  // Finished when the payload has left; null: nobody's. It is dropped with its request, so that
  // nobody is asked to take what will not be sent.
  Transfer* request = nullptr;
  // kData, kMore, kPut: the whole message, which leaves in pieces, and how much of it has been cut
  // off. kEager: the same, as soon as this frame, which has no payload, has left.
  Span message;
  size_t cut = 0;
};

class Connection {
 public:
  enum class State { kIdle, kDialing, kOpen, kEnding, kLost };
  static constexpr size_t kMostSockets = 64;
  // After so many bytes in one direction the others get their turn: what is under way between two
  // processes then stays within the caches, and both directions flow at once.
  static constexpr size_t kTurnBytes = 512 * 1024;

  Connection(Local& local, PeerAddress peer) : local_(local), peer_(std::move(peer)) {}
  ~Connection();

  const PeerAddress& peer() const { return peer_; }
  State state() const REQUIRES(ioRole) { return state_; }
  // Why it is ending, or lost.
  const Loss& loss() const REQUIRES(ioRole) { return loss_; }
  // It is, or was, open.
  bool wasOpen() const REQUIRES(ioRole) { return wasOpen_; }

  // ---- being made

  // kIdle only.
  void dial() REQUIRES(ioRole);
  void goOnDialing() REQUIRES(ioRole);
  // The next attempt, if it is due. Raises RankLeft and waits where the last one has found that.
  void dialAgain() REQUIRES(ioRole);
  bool isShm() const REQUIRES(ioRole) { return !wires_.empty() && wires_.front().link.isShm; }
  // There is no group any more that both are in.
  bool isToNobody() const REQUIRES(ioRole) {
    return dial_ && dial_->state() == Dial::State::kNobody;
  }
  // kDialing -> kIdle. Raises NotSent for what was queued.
  void giveUpDialing() REQUIRES(ioRole);
  bool isToBeMade() const REQUIRES(ioRole) {
    return state_ == State::kIdle || state_ == State::kDialing;
  }
  // If it is to be made: it is, by this side or the other.
  void open(Link link) REQUIRES(ioRole);
  // One more socket. Closed at once if it cannot be used any more.
  void join(Link link) REQUIRES(ioRole);
  bool mayBeJoined(uint64_t id) const REQUIRES(ioRole) {
    return state_ == State::kOpen && wires_.front().link.id == id && wires_.size() < kMostSockets;
  }
  // kDialing: the peer may have opened it already.
  bool mayBeOpen() const REQUIRES(ioRole) { return dial_ && dial_->hasProved(); }

  // ---- bytes

  // Takes it, or raises NotSent for its request if the peer is lost. kIdle: it leaves when somebody
  // has dialled.
  void enqueue(OutItem item) REQUIRES(ioRole);
  std::deque<OutItem>& queue() REQUIRES(ioRole) { return queue_; }
  // Whether a message of so many bytes is spread over several sockets.
  bool cuts(size_t bytes) const REQUIRES(ioRole) {
    return wires_.size() > 1 && bytes > kSmallPieceBytes;
  }
  bool hasQueued(uint64_t context, int rank) const REQUIRES(ioRole);
  // Drops what of this request has not left, and where it is being received.
  void forget(Transfer* request) REQUIRES(ioRole);
  // Discards the rest of what is being read into this message.
  void forget(const Mailbox::Unexpected* message) REQUIRES(ioRole);
  void forget(Mailbox* mailbox) REQUIRES(ioRole);
  void forget(Mailbox* mailbox, uint64_t window) REQUIRES(ioRole);
  // Both: true if anything moved.
  bool flush(size_t turnBytes = kTurnBytes) REQUIRES(ioRole);
  bool drain(size_t turnBytes = kTurnBytes) REQUIRES(ioRole);
  bool maybeReadable() const REQUIRES(ioRole);
  void lookAgain() REQUIRES(ioRole);
  // False: the descriptor is none of its.
  bool onEvent(int fd, bool isClosed) REQUIRES(ioRole);
  void setAsleep(bool asleep) REQUIRES(ioRole);
  bool sendFd(int fd, const std::string& cookie) REQUIRES(ioRole);
  Fd takeFd(const std::string& cookie) REQUIRES(ioRole);
  // Those whose cookies begin so.
  void dropFds(const std::string& prefix) REQUIRES(ioRole);
  // Whether the peer can read this process's region, when it gets the next message.
  bool giveRegion(uint64_t region) REQUIRES(ioRole);
  // The peer could not: it may later.
  void takeRegionBack(uint64_t region) REQUIRES(ioRole) { regions_.takeBack(region); }
  // One that the peer has given. Null: it cannot be read here.
  std::shared_ptr<Segment> regionOf(uint64_t region, size_t bytes) REQUIRES(ioRole);

  // ---- ending

  // The first reason stays.
  void end(Loss loss) REQUIRES(ioRole);
  // The same, and nothing more is read.
  void breakOff(Loss loss) REQUIRES(ioRole);
  // kEnding: its process has ended, which says more than what was seen of it.
  void hasEnded() REQUIRES(ioRole) { loss_ = {LossReason::kEnded, ""}; }
  // kEnding: all has been read that will come. isEnded: its process is no more.
  bool hasSaidAll(bool isEnded) REQUIRES(ioRole);
  // This process ends, and will send nothing more. Here and in hasArrived() without the lock:
  // nobody else has the mesh any more.
  void sayNoMore();
  // ... and what it had sent has arrived. Reads what comes, for nobody (tcp/link.h).
  bool hasArrived();
  // kEnding -> kLost. What was queued ends with PeerLost, which is for the caller to raise.
  void lose() REQUIRES(ioRole);

  // A whole frame that came before its group. False: it is not in its sender's own name.
  static bool deliver(Mailbox& mailbox, const EarlyFrame& frame) REQUIRES(ioRole);

 private:
  // Pieces, where there are several sockets.
  static constexpr size_t kSmallPieceBytes = 128 * 1024;

  // A socket, or rings: what leaves by it just now, and what comes.
  struct Wire {
    Link link;
    OutItem out;  // if isSending
    bool isSending = false;

    // Nothing comes any more, or nothing that can be believed.
    bool isReadOver = false;
    FrameHeader header;
    size_t headerGot = 0;
    size_t payloadGot = 0;
    uint32_t payloadCheck = 0;  // of what was got of a checked frame
    bool isBegun = false;       // the frame: its header is there, and it is its turn
    // Of the frame being read; null: its payload is thrown away.
    Mailbox* mailbox = nullptr;
    Mailbox::Target target;
    bool isEarly = false;  // the frame is kept for a group that is not made yet
    std::string control;   // payload of a control frame, or of an early one
  };

  void moveTo(State next) REQUIRES(ioRole);
  void countStuck() REQUIRES(ioRole);
  bool isFirst(const Wire& wire) const REQUIRES(ioRole) { return &wire == &wires_.front(); }
  // Others get their turn between two pieces of the first message.
  void giveWay() REQUIRES(ioRole);
  void joinMore() REQUIRES(ioRole);
  void leaveJoining(size_t number) REQUIRES(ioRole);
  bool takeNext(Wire& wire) REQUIRES(ioRole);
  void cutPiece(Wire& wire, std::deque<OutItem>::iterator item) REQUIRES(ioRole);
  void hasLeft(Wire& wire) REQUIRES(ioRole);
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
  // kOpen, kEnding. The first carries everything, the others pieces. Grows only, while others read.
  std::deque<Wire> wires_ GUARDED_BY(ioRole);
  // kOpen: of further sockets that are being made.
  std::vector<std::unique_ptr<Dial>> joining_ GUARDED_BY(ioRole);

  PeerRegions regions_ GUARDED_BY(ioRole);
  std::deque<OutItem> queue_ GUARDED_BY(ioRole);  // what no wire has begun to send, or to cut up

  // Messages whose beginning has left, or come; pieces that have left, or come, whole, by another
  // wire than the first.
  uint64_t begunOut_ GUARDED_BY(ioRole) = 0;
  uint64_t begunIn_ GUARDED_BY(ioRole) = 0;
  uint64_t piecesOut_ GUARDED_BY(ioRole) = 0;
  uint64_t piecesIn_ GUARDED_BY(ioRole) = 0;

  // kOpen: something waits for room. It is counted as pending, whatever it is.
  bool isStuck_ GUARDED_BY(ioRole) = false;

  // kEnding: when that began, or the latest bytes came.
  Deadline::Clock::time_point lastByte_ GUARDED_BY(ioRole);
};

const char* name(Connection::State state);

}  // namespace mycoll
