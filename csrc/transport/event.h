// Events: what the transport learns about a group and the group must act on. The mesh collects
// events while it moves bytes, and then passes them to the groups, in order (Mesh::handleEvents()).
// So no group is called while the mesh iterates over its connections or a mailbox over its
// requests: a group may send, fail or end requests in its handler without invalidating an
// iteration.
//
// Thread contract: the mesh's I/O lock. A handler must not block or call user code.
// Lifetime: the events of a mailbox are dropped when it is detached.
#pragma once

#include <cstdint>
#include <string>
#include <variant>

#include "base/status.h"
#include "transport/frame.h"
#include "transport/io_lock.h"
#include "transport/loss.h"

namespace mycoll {

// A frame for the group itself, as opposed to a message or flow control.
struct ControlFrame {
  FrameHeader header;
  std::string payload;
};

// A message does not match this rank's own call. If a request was matched with it, that request
// stays open until the group fails.
struct CallsDiffer {
  Signature mine;
  uint64_t bytes = 0;  // that this rank expects
  FrameHeader came;
};

// A peer process is lost. Raised for all groups.
struct PeerLost {
  std::string uid;
  Loss loss;
  bool wasLinked = false;  // there was a connection to it
};

// Requests queued for that process will not be sent.
struct NotSent {
  std::string uid;
  std::string how;  // after "rank 3 (node1:4712) "
};

// A handshake reported that this rank has left the group.
struct RankLeft {
  int rank = -1;
};

// The group fails: a peer broke the protocol, this process cannot continue, or a request needs a
// rank that ended without a goodbye.
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
