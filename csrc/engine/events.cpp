#include "engine/events.h"

namespace mycoll {
namespace {

// Combines lambdas into one visitor.
template <typename... Parts>
struct Visitor : Parts... {
  using Parts::operator()...;
};

}  // namespace

bool handleEvent(const Event& event, Mailbox& mailbox, Membership& membership,
                 Agreement& agreement) {
  const auto onControl = [&](const ControlFrame& frame) REQUIRES(ioRole) {
    const int source = frame.header.source;
    switch (frame.header.kind) {
      case FrameKind::kAbort: return membership.onAbort(source, frame.payload), true;
      case FrameKind::kGoodbye: return membership.onGoodbye(source, frame.payload), true;
      case FrameKind::kProbe: return agreement.onProbe(source, frame.payload), true;
      case FrameKind::kArrived: return agreement.onArrived(source, frame.payload), true;
      default: return false;
    }
  };
  return std::visit(Visitor{
                        onControl,
                        [&](const CallsDiffer& difference) REQUIRES(ioRole) {
                          agreement.onDifference(difference);
                          return true;
                        },
                        [&](const PeerLost& lost) REQUIRES(ioRole) {
                          // The group comes first: if it fails, unsent messages end with its cause.
                          membership.onPeerLost(lost.uid, lost.loss, lost.wasLinked);
                          mailbox.endUnsent(lost.uid, lost.loss.describe());
                          return true;
                        },
                        [&](const NotSent& unsent) REQUIRES(ioRole) {
                          mailbox.endUnsent(unsent.uid, unsent.how);
                          return true;
                        },
                        [&](const RankLeft& left) REQUIRES(ioRole) {
                          membership.onLeft(left.rank);
                          return true;
                        },
                        [&](const GroupFails& failing) REQUIRES(ioRole) {
                          membership.failLocked(failing.cause, /*tellsOthers=*/true);
                          return true;
                        },
                    },
                    event);
}

}  // namespace mycoll
