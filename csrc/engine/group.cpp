#include "engine/group.h"

#include <numeric>
#include <utility>

#include "engine/engine.h"
#include "kernels/reduce.h"

namespace mycoll {

std::vector<int64_t> jobRanks(const GroupOptions& options) {
  if (!options.globalRanks.empty()) return options.globalRanks;
  std::vector<int64_t> ranks(options.ranks);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

Group::Group(GroupOptions theOptions, std::shared_ptr<Engine> theEngine, Mailbox& theMailbox)
    : options(std::move(theOptions)),
      engine(std::move(theEngine)),
      mailbox(theMailbox),
      record(options.name, mailbox.group().context, options.rank, options.ranks,
             options.globalRanks),
      shape(hostsOf(mailbox.group()), sumTree()),
      tree(shape),
      membership(*this),
      agreement(*this) {}

bool Group::handle(const Event& event) {
  if (const auto* const frame = std::get_if<ControlFrame>(&event)) {
    const int source = frame->header.source;
    switch (frame->header.kind) {
      case FrameKind::kAbort: membership.onAbort(source, frame->payload); break;
      case FrameKind::kGoodbye: membership.onGoodbye(source, frame->payload); break;
      case FrameKind::kProbe: agreement.onProbe(source, frame->payload); break;
      case FrameKind::kArrived: agreement.onArrived(source, frame->payload); break;
      default: return false;
    }
  }
  if (const auto* const difference = std::get_if<CallsDiffer>(&event)) {
    agreement.onDifference(*difference);
  } else if (const auto* const lost = std::get_if<PeerLost>(&event)) {
    // The group comes first: if it fails, unsent messages end with its cause.
    membership.onPeerLost(lost->uid, lost->loss, lost->wasLinked);
    mailbox.endUnsent(lost->uid, lost->loss.describe());
  } else if (const auto* const unsent = std::get_if<NotSent>(&event)) {
    mailbox.endUnsent(unsent->uid, unsent->how);
  } else if (const auto* const left = std::get_if<RankLeft>(&event)) {
    membership.onLeft(left->rank);
  } else if (const auto* const failing = std::get_if<GroupFails>(&event)) {
    membership.failLocked(failing->cause, /*notifiesOthers=*/true);
  }
  return true;
}

}  // namespace mycoll
