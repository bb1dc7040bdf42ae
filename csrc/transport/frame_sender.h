// FrameSender: the sending half of a connection. It holds the queue of frames, and sends them on
// one ring, or on one or more sockets: a piece of a message goes to whichever socket has room.
//
// Thread contract: the mesh's I/O lock. Nothing here blocks.
// Lifetime: the connection owns it. Requests of queued items must be alive: forget().
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "base/types.h"
#include "transport/frame.h"
#include "transport/io_lock.h"
#include "transport/link.h"
#include "transport/local.h"
#include "transport/loss.h"
#include "transport/peer.h"
#include "transport/transfer.h"

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
};

class FrameSender {
 public:
  FrameSender(Local& local, const PeerAddress& peer) : local_(local), peer_(peer) {}
  ~FrameSender() { close(); }

  // Whether it has, or had, a ring.
  bool isShm() const REQUIRES(ioRole) { return isShm_; }
  // Adds the ring, or a socket.
  void add(std::unique_ptr<LinkSender> link, bool isShm) REQUIRES(ioRole);
  size_t sockets() const REQUIRES(ioRole) { return lanes_.size(); }
  // The descriptor of the first one.
  int fd() const REQUIRES(ioRole) { return lanes_.front().link->fd(); }

  // Returns true if the item should be sent now: nothing before it waits for room.
  bool enqueue(OutItem&& item) REQUIRES(ioRole) {
    const bool isNext = queue_.empty() && !(!lanes_.empty() && lanes_.front().isSending);
    queue_.push_back(std::move(item));
    return isNext || lanes_.size() > 1;
  }
  // Items of which nothing has been sent, or that are being cut into pieces.
  std::deque<OutItem>& queue() REQUIRES(ioRole) { return queue_; }
  bool isIdle() const REQUIRES(ioRole);
  bool hasQueued(uint64_t context, int rank) const REQUIRES(ioRole);
  // Whether a message of this size is spread over several sockets.
  bool cuts(size_t bytes) const REQUIRES(ioRole) {
    return lanes_.size() > 1 && bytes > kSmallPieceBytes;
  }
  // Drops frames of this request that have not begun to be sent. A frame that has begun is
  // completed with its original content, since the receiver may use it before it learns of a
  // failure. Returns false if there is no memory to keep that: then nothing more may be sent.
  [[nodiscard]] bool forget(Transfer* request) REQUIRES(ioRole);

  // Sends up to about this many bytes on each socket. Returns true if any were sent. *hasFailed: a
  // socket is broken, and errno holds the error.
  bool flush(size_t turnBytes, bool* hasFailed) REQUIRES(ioRole);
  void setAsleep(bool asleep) REQUIRES(ioRole) {
    for (Lane& lane : lanes_) lane.link->setAsleep(asleep);
  }
  // Sockets: nothing more is sent, which the peer detects.
  void shutDown() const REQUIRES(ioRole);
  // Whether everything that was sent has arrived.
  bool hasArrived() const REQUIRES(ioRole);
  // Drops all items, and returns the mailboxes of their requests.
  std::set<Mailbox*> dropAll() REQUIRES(ioRole);
  void close() REQUIRES(ioRole);

 private:
  // The size of pieces when there are several sockets.
  static constexpr size_t kSmallPieceBytes = 128 * 1024;

  // A socket or a ring, with the frame that is being sent on it.
  struct Lane {
    std::unique_ptr<LinkSender> link;
    bool isSending = false;
    OutItem item;  // if isSending
  };

  bool isFirst(const Lane& lane) const REQUIRES(ioRole) { return &lane == &lanes_.front(); }
  size_t flush(Lane& lane, size_t most, bool* hasFailed) REQUIRES(ioRole);
  bool takeNext(Lane& lane) REQUIRES(ioRole);
  void cutPiece(Lane& lane, std::deque<OutItem>::iterator item) REQUIRES(ioRole);
  // Lets other items be sent between two pieces of the first message.
  void giveWay() REQUIRES(ioRole);
  void sendDescriptor(Lane& lane) REQUIRES(ioRole);
  void onSent(Lane& lane) REQUIRES(ioRole);

  Local& local_;
  const PeerAddress& peer_;
  bool isShm_ GUARDED_BY(ioRole) = false;
  std::deque<Lane> lanes_ GUARDED_BY(ioRole);
  std::deque<OutItem> queue_ GUARDED_BY(ioRole);
  // The number of messages whose beginning was sent, and of whole pieces that were sent on other
  // sockets than the first.
  uint64_t begun_ GUARDED_BY(ioRole) = 0;
  uint64_t pieces_ GUARDED_BY(ioRole) = 0;
};

// The loss that a link's -1 reports: errno holds the error, or 0 for a clean close.
Loss lossOf(LossReason reason);

}  // namespace mycoll
