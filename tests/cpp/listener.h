// The parts of a group that handle events, without the queue and what runs it: for tests of what
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
#include "engine/events.h"
#include "engine/membership.h"
#include "observe/recorder.h"
#include "transport/mailbox.h"

namespace test {

class Listener final : public mycoll::EventHandler {
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
        : mailbox(&mailbox),
          ranks(mailbox.ranks()),
          record({mailbox.group().name, mailbox.group().context, mailbox.rank(), ranks, {}}),
          shape(mycoll::hostsOf(mailbox.group())),
          tree(shape),
          membership(mailbox, tree, record, false, mycoll::GroupOptions().mostToldDirectly),
          agreement(mailbox, tree, membership) {}
    mycoll::Mailbox* const mailbox;
    const int ranks;
    mycoll::GroupRecord record;
    const mycoll::Shape shape;
    const mycoll::ControlTree tree;
    mycoll::Membership membership;
    mycoll::Agreement agreement;
  };

  void handle(const mycoll::Event& event) override REQUIRES(mycoll::ioRole) {
    if (std::holds_alternative<mycoll::RankLeft>(event) && beforeDeparture) beforeDeparture();
    (void)mycoll::handleEvent(event, *parts_->mailbox, parts_->membership, parts_->agreement);
  }

  std::optional<Parts> parts_;
};

}  // namespace test
