// The parts of a group that a mailbox asks, without the queue and what runs it: for tests of what
// happens between processes below collectives.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/agreement.h"
#include "engine/communicator.h"
#include "engine/membership.h"
#include "observe/recorder.h"
#include "transport/mailbox.h"

namespace test {

class Listener final : public mycoll::MailboxOwner {
 public:
  // The mailbox of this group, open. The listener outlives it.
  std::unique_ptr<mycoll::Mailbox> join(std::shared_ptr<mycoll::Mesh> mesh,
                                        const mycoll::GroupAddress& group) {
    auto mailbox = std::make_unique<mycoll::Mailbox>(std::move(mesh), group, this);
    parts_.reset();
    parts_.emplace(*mailbox);
    mailbox->open();
    return mailbox;
  }

  mycoll::Membership& membership() { return parts_->membership; }
  mycoll::Agreement& agreement() { return parts_->agreement; }
  mycoll::Status failure() const { return parts_ ? parts_->membership.error() : mycoll::Status(); }
  // Called under the I/O lock before the membership hears that a rank has left.
  std::function<void()> beforeDeparture;
  // The ranks that are known to have left.
  std::vector<int> gone() const {
    std::vector<int> ranks;
    for (int rank = 0; parts_ && rank < parts_->ranks; ++rank) {
      if (parts_->membership.hasLeft(rank)) ranks.push_back(rank);
    }
    return ranks;
  }

 private:
  struct Parts {
    explicit Parts(mycoll::Mailbox& mailbox)
        : ranks(mailbox.ranks()),
          record({mailbox.group().name, mailbox.group().context, mailbox.rank(), ranks, {}}),
          shape(mycoll::hostsOf(mailbox.group())),
          tree(shape),
          membership(mailbox, tree, record, false, mycoll::GroupOptions().mostToldDirectly),
          agreement(mailbox, tree, membership) {}
    const int ranks;
    mycoll::GroupRecord record;
    const mycoll::Shape shape;
    const mycoll::ControlTree tree;
    mycoll::Membership membership;
    mycoll::Agreement agreement;
  };

  mycoll::Status failureOf(mycoll::MessageClass messageClass, uint64_t tag) override
      REQUIRES(mycoll::ioRole) {
    return parts_->membership.failureOf(messageClass, tag);
  }
  mycoll::Status absenceOf(int rank) override REQUIRES(mycoll::ioRole) {
    return parts_->membership.absenceOf(rank);
  }
  bool isPresent(int rank) const override REQUIRES(mycoll::ioRole) {
    return !parts_->membership.hasLeft(rank);
  }
  bool agrees(const mycoll::Transfer& request, const mycoll::FrameHeader& came) override
      REQUIRES(mycoll::ioRole) {
    return parts_->agreement.agrees(request, came);
  }
  bool expects(const mycoll::FrameHeader& came) override REQUIRES(mycoll::ioRole) {
    return parts_->agreement.expects(came);
  }
  void onControl(const mycoll::FrameHeader& came, const std::string& payload) override
      REQUIRES(mycoll::ioRole) {
    switch (came.kind) {
      case mycoll::FrameKind::kAbort: return parts_->membership.onAbort(came.source, payload);
      case mycoll::FrameKind::kGoodbye: return parts_->membership.onGoodbye(came.source, payload);
      case mycoll::FrameKind::kProbe: return parts_->agreement.onProbe(came.source, payload);
      case mycoll::FrameKind::kArrived: return parts_->agreement.onArrived(came.source, payload);
      default: return;
    }
  }
  void onPeerLost(const std::string& uid, const mycoll::Loss& loss, bool wasLinked) override
      REQUIRES(mycoll::ioRole) {
    parts_->membership.onPeerLost(uid, loss, wasLinked);
  }
  void onLeft(int rank) override REQUIRES(mycoll::ioRole) {
    if (beforeDeparture) beforeDeparture();
    parts_->membership.onLeft(rank);
  }
  void onBroken(const mycoll::Status& cause) override REQUIRES(mycoll::ioRole) {
    parts_->membership.failLocked(cause, /*tellsOthers=*/true);
  }

  std::optional<Parts> parts_;
};

}  // namespace test
