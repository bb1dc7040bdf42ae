// Events: what the transport learns about a group, and the group acts on. The mesh collects events
// while it moves bytes, and hands them to the groups after that, in order (Mesh::handleEvents()).
// So no group is called while the mesh iterates over its connections or a mailbox over its
// requests: whatever a group does in answer (send, fail, end requests) finds no iteration half way.
//
// Thread contract: the mesh's I/O lock. A handler must not block or call a user's code.
// Lifetime: events of a mailbox are dropped when it is detached.
#pragma once

#include <cstdint>
#include <string>
#include <variant>

#include "base/status.h"
#include "transport/frame.h"
#include "transport/io_lock.h"
#include "transport/loss.h"

namespace mycoll {

// A frame of the group itself: neither a message nor flow control.
struct ControlFrame {
  FrameHeader header;
  std::string payload;
};

// A message differs from this rank's own call. If it has met a request, that one stays open until
// the group fails.
struct CallsDiffer {
  Signature mine;
  uint64_t bytes = 0;  // that this rank expects
  FrameHeader came;
};

// The process of some ranks is lost.
struct PeerLost {
  std::string uid;
  Loss loss;
  bool wasLinked = false;  // there was a connection with it
};

// What was queued for that process will not be sent.
struct NotSent {
  std::string uid;
  std::string how;  // after "rank 3 (node1:4712) "
};

// A handshake says that this rank has left the group.
struct RankLeft {
  int rank = -1;
};

// The group fails: a peer broke the protocol, this side cannot go on, or a request needs a rank
// that ended without a word.
struct GroupFails {
  Status cause;
};

using Event = std::variant<ControlFrame, CallsDiffer, PeerLost, NotSent, RankLeft, GroupFails>;

class EventHandler {
 public:
  virtual void handle(const Event& event) REQUIRES(ioRole) = 0;

 protected:
  ~EventHandler() = default;
};

}  // namespace mycoll
