// FrameReceiver: the receiving half of a connection. It reads frames from one ring, or from one or
// more sockets, checks them, and passes them to the mailboxes of their groups. Frames for a group
// that is not made yet are kept in the GroupTable.
//
// Thread contract: the mesh's I/O lock. Nothing here blocks. Mailboxes answer on the connection
// while a frame is passed to them. An invalid frame or a broken socket ends the connection.
// Lifetime: the connection owns it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/fd.h"
#include "transport/frame.h"
#include "transport/group_table.h"
#include "transport/io_lock.h"
#include "transport/link.h"
#include "transport/local.h"
#include "transport/loss.h"
#include "transport/transfer.h"

namespace mycoll {

class Connection;

class FrameReceiver {
 public:
  FrameReceiver(Local& local, Connection& connection) : local_(local), connection_(connection) {}

  // Adds the ring, or a socket.
  void add(std::unique_ptr<LinkReceiver> link) REQUIRES(ioRole);
  // Reads up to about this many bytes from each socket. Returns true if anything was read.
  bool drain(size_t turnBytes) REQUIRES(ioRole);
  // Stops reading: what arrives cannot be trusted.
  void stop() REQUIRES(ioRole) {
    for (Lane& lane : lanes_) lane.isOver = true;
  }
  // Whether nothing more can be read.
  bool isOver() const REQUIRES(ioRole);
  // Discards the rest of the frames that are being received into such targets.
  void discard(const std::function<bool(const FrameTarget&)>& isMeant) REQUIRES(ioRole);

  // See LinkReceiver.
  bool maybeReadable() const REQUIRES(ioRole);
  void lookAgain() REQUIRES(ioRole) {
    for (Lane& lane : lanes_) lane.link->lookAgain();
  }
  // Returns false if the descriptor belongs to another object.
  bool onEvent(int fd, bool isClosed) REQUIRES(ioRole);
  void setAsleep(bool asleep) REQUIRES(ioRole) {
    for (Lane& lane : lanes_) lane.link->setAsleep(asleep);
  }
  void close() REQUIRES(ioRole) { lanes_.clear(); }

  // Passes on a frame that was kept. Returns false if its process may not send it: see mayCome().
  static bool deliver(Mailbox& mailbox, WholeFrame& frame) REQUIRES(ioRole);

 private:
  // A socket or a ring, with the frame that is being received on it.
  struct Lane {
    std::unique_ptr<LinkReceiver> link;
    bool isOver = false;
    FrameHeader header;
    size_t headerGot = 0;
    size_t payloadGot = 0;
    bool isBegun = false;  // the header has arrived, and the frame need not wait
    // The target of the frame that is begun. Without a mailbox the payload is discarded unless
    // isEarly.
    FrameTarget target;
    bool isEarly = false;  // the frame is kept for a group that is not made yet
    std::string payload;   // of a frame that is delivered whole
    Fd descriptor;         // that came with it
  };

  bool isFirst(const Lane& lane) const REQUIRES(ioRole) { return &lane == &lanes_.front(); }
  bool drain(Lane& lane, size_t turnBytes) REQUIRES(ioRole);
  bool readHeader(Lane& lane, bool* moved) REQUIRES(ioRole);
  void end(Lane& lane, LossReason reason) REQUIRES(ioRole);
  bool isSound(const Lane& lane) const REQUIRES(ioRole);
  bool mustWait(const FrameHeader& header) const REQUIRES(ioRole);
  bool isWaiting(const Lane& lane) const REQUIRES(ioRole);
  bool beginFrame(Lane& lane) REQUIRES(ioRole);
  void beginWithoutGroup(Lane& lane) REQUIRES(ioRole);
  void endFrame(Lane& lane) REQUIRES(ioRole);

  Local& local_;
  Connection& connection_;
  std::vector<Lane> lanes_ GUARDED_BY(ioRole);
  // The number of messages whose beginning was received, and of whole pieces that were received on
  // other sockets than the first.
  uint64_t begun_ GUARDED_BY(ioRole) = 0;
  uint64_t pieces_ GUARDED_BY(ioRole) = 0;
};

}  // namespace mycoll
