// Loss: why a process is considered lost. Code decides by the reason; the text is for people.
#pragma once

#include <string>

namespace mycoll {

enum class LossReason {
  kNone,
  kEnded,            // its process has ended
  kClosed,           // its connection has ended
  kLeft,             // ... as its process has left all groups
  kSilent,           // ... because it or the network no longer responds
  kClosedInMessage,  // ... in the middle of a message
  kNotListening,     // connecting to it failed: nothing listens at its address
  kUnreachable,      // ... for another reason
  kUnauthenticated,  // it could not prove that it knows the secret of a group
  kNotAFrame,        // it sent an invalid frame
  kChanged,          // what arrived on an encrypted connection is not what it sent
  kNotItsName,       // ... or a message in the name of another rank
  kNoMemory,         // this process ran out of memory while it received
};

struct Loss {
  LossReason reason = LossReason::kNone;
  // kNotListening, kUnreachable, kUnauthenticated: the attempts and their results. kClosed,
  // kSilent, kClosedInMessage: the network's error, if there was one.
  std::string detail;

  // There was a connection, and the peer has ended it.
  bool isClosed() const {
    return reason == LossReason::kEnded || reason == LossReason::kClosed ||
           reason == LossReason::kLeft || reason == LossReason::kClosedInMessage;
  }
  // The text to follow "rank 3 (node1:4712)". mayHaveLeft: the process may have left cleanly, but
  // had no connection on which to report that.
  std::string describe(bool mayHaveLeft = false) const;
};

}  // namespace mycoll
