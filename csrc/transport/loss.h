// Loss: why a process counts as lost. Programs decide by the reason; the text is for people.
#pragma once

#include <string>

namespace mycoll {

enum class LossReason {
  kNone,
  kEnded,            // its process is no more
  kClosed,           // its connection has ended
  kSilent,           // ... as neither the network nor the process gave a sign of life
  kClosedInMessage,  // ... in the middle of a message
  kNotListening,     // it could not be connected to: nobody listens where it did
  kUnreachable,      // ... for another reason
  kNotAFrame,        // it sent what is no frame
  kChanged,          // ... or what differs from its checksum
  kNotItsName,       // ... or a message in the name of another rank
  kNoMemory,         // this process was out of memory while it read what came
};

struct Loss {
  LossReason reason = LossReason::kNone;
  // kNotListening, kUnreachable: what was tried, and with what result. kClosed, kSilent,
  // kClosedInMessage: the network's error, if it was one.
  std::string detail;

  // There was a connection, and the other side has ended it.
  bool isClosed() const {
    return reason == LossReason::kEnded || reason == LossReason::kClosed ||
           reason == LossReason::kClosedInMessage;
  }
  // After "rank 3 (node1:4712)". mayHaveLeft: for all that is known it may have left in good order,
  // without a connection to say so.
  std::string describe(bool mayHaveLeft = false) const;
};

}  // namespace mycoll
