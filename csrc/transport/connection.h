// Connection: all that this process has with one other: what is queued to it, and the frames that
// come from it. Each direction is a link of its own, made by its sender when it first has something
// to send; the peer's may be there before there is one of ours.
//
// States (moveTo() makes every transition):
//
//   kIdle -> kDialing -> kOpen -> kEnding -> kLost      kIdle, kDialing -> kEnding
//                     -> kIdle
//
// kEnding: it has failed, or the peer's process has ended. What the peer had sent before counts,
// also that it was leaving: it is read first, as long as it may still be on its way.
//
// Thread contract: the mesh's I/O lock. Nothing here blocks. Reading hands frames to mailboxes,
// which may answer on this connection and on others, and ask for new ones.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/types.h"
#include "transport/dial.h"
#include "transport/frame.h"
#include "transport/group_table.h"
#include "transport/link.h"
#include "transport/local.h"
#include "transport/loss.h"
#include "transport/mailbox.h"
#include "transport/peer.h"

namespace mycoll {

// Something on its way out.
struct OutItem {
  FrameHeader header;
  const char* payload = nullptr;
  std::string owned;            // the payload instead, where it is nobody else's
  size_t sent = 0;              // of header and payload together
  Transfer* request = nullptr;  // finished when the payload has left; null: nobody's
  // kData: the whole message; the item sends piece after piece, others in between.
  Span message;
  size_t messageSent = 0;
};

// The only thing that travels against a link's direction: its receiver leaves a group, and has no
// link to the sender to say so.
struct Farewell {
  uint64_t context = 0;
  int32_t source = 0;  // the rank that leaves
  int32_t destination = 0;
};

class Connection {
 public:
  enum class State { kIdle, kDialing, kOpen, kEnding, kLost };
  // After so many bytes in one direction the others get their turn: what is under way between two
  // processes then stays within the caches, and both directions flow at once.
  static constexpr size_t kTurnBytes = 512 * 1024;

  Connection(Local& local, PeerAddress peer) : local_(local), peer_(std::move(peer)) {}
  ~Connection();

  const PeerAddress& peer() const { return peer_; }
  State state() const { return state_; }
  // Why it is ending, or lost.
  const Loss& loss() const { return loss_; }
  // There is, or was, a link in one direction or the other.
  bool wasLinked() const { return wasLinked_; }
  bool hasReceiver() const { return receiver_ != nullptr; }

  // ---- being made

  // kIdle only.
  void dial();
  void goOnDialing();
  // The next attempt, if it is due.
  void dialAgain();
  // There is no group any more that both are in.
  bool isToNobody() const { return dial_ && dial_->state() == Dial::State::kNobody; }
  // kDialing -> kIdle. Returns what was not sent.
  std::vector<Transfer*> giveUpDialing();
  // The peer's link to this process.
  void enter(std::unique_ptr<LinkReceiver> receiver, bool isShm);

  // ---- bytes

  // Takes it, or ends its request if the peer is lost.
  void enqueue(OutItem item);
  std::deque<OutItem>& queue() { return queue_; }
  bool hasQueued(uint64_t context, int rank) const;
  // Drops what of this request has not left, and where it is being received.
  void forget(Transfer* request);
  void forget(Mailbox* mailbox);
  // Both: true if anything moved.
  bool flush(size_t turnBytes = kTurnBytes);
  bool drain(size_t turnBytes = kTurnBytes);
  bool maybeReadable() const { return receiver_ && receiver_->maybeReadable(); }
  void lookAgain() {
    if (receiver_) receiver_->lookAgain();
  }
  // False: the descriptor is none of its.
  bool onEvent(int fd, bool isClosed);
  void setAsleep(bool asleep);
  bool sendFd(int fd, const std::string& cookie);
  Fd takeFd(const std::string& cookie);

  // ---- leaving

  void sendFarewell(const Farewell& farewell);
  void dropFarewells() { farewells_.clear(); }
  // What came with the peer's consent to the connection raises no event.
  void readFirstFarewells() {
    if (std::exchange(isNew_, false)) readFarewells();
  }

  // ---- ending

  // The first reason stays.
  void end(Loss loss);
  // The same, and nothing more is read.
  void breakOff(LossReason reason);
  // kEnding: its process has ended, which says more than what was seen of it.
  void hasEnded() { loss_ = {LossReason::kEnded, ""}; }
  // kEnding: all has been read that will come. isEnded: its process is no more.
  bool hasSaidAll(bool isEnded);
  // kEnding -> kLost. Returns what was not sent.
  std::vector<Transfer*> lose();

  // A whole frame that came before its group. False: it is not in its sender's own name.
  static bool deliver(Mailbox& mailbox, const EarlyFrame& frame);

 private:
  void moveTo(State next);
  bool beginFrame();
  void endFrame();
  void readFarewells();
  void sayFarewells();
  void closeReceiver();
  std::vector<Transfer*> takeUnsent();

  Local& local_;
  const PeerAddress peer_;
  State state_ = State::kIdle;
  Loss loss_;
  bool wasLinked_ = false;

  // Out.
  std::unique_ptr<Dial> dial_;          // kDialing
  std::unique_ptr<LinkSender> sender_;  // from kOpen on, until it is lost
  bool sendsByShm_ = false;
  bool isNew_ = false;  // it has just opened
  std::deque<OutItem> queue_;
  Farewell farewell_;  // that the peer sends back on our link, as far as it has come
  size_t farewellGot_ = 0;

  // In.
  std::unique_ptr<LinkReceiver> receiver_;
  bool receivesByShm_ = false;
  bool isReadOver_ = false;  // nothing comes any more, or nothing that can be believed
  FrameHeader header_;
  size_t headerGot_ = 0;
  size_t payloadGot_ = 0;
  uint32_t payloadCheck_ = 0;   // of what was got of a checked frame
  Mailbox* mailbox_ = nullptr;  // of the frame being read; null: its payload is thrown away
  Mailbox::Target target_;
  bool isEarly_ = false;             // the frame is kept for a group that is not made yet
  std::string control_;              // payload of a control frame, or of an early one
  std::vector<Farewell> farewells_;  // that there is no link to send with

  // kEnding: when that began, or the latest bytes came.
  Deadline::Clock::time_point lastByte_;
};

const char* name(Connection::State state);

}  // namespace mycoll
