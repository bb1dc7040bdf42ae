// The parts of a group that handle events, without the queue and the collectives, for tests of what
// happens between processes.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "engine/group.h"

namespace test {

class Listener final : public mycoll::EventHandler {
 public:
  // Returns an open mailbox of this group. The listener must outlive it.
  std::unique_ptr<mycoll::Mailbox> join(std::shared_ptr<mycoll::Mesh> mesh,
                                        const mycoll::GroupAddress& group) {
    auto mailbox = std::make_unique<mycoll::Mailbox>(std::move(mesh), group, this);
    group_.reset();
    mycoll::GroupOptions options;
    options.name = group.name;
    options.rank = group.rank;
    options.ranks = mailbox->ranks();
    group_.emplace(std::move(options), /*engine=*/nullptr, *mailbox);
    mailbox->open();
    return mailbox;
  }

  mycoll::Membership& membership() { return group_->membership; }
  mycoll::Agreement& agreement() { return group_->agreement; }
  mycoll::Status failure() const { return group_ ? group_->membership.error() : mycoll::Status(); }
  // Called under the I/O lock before the membership is notified that a rank has left.
  std::function<void()> beforeDeparture;
  // The ranks that are known to have left.
  std::vector<int> gone() const {
    std::vector<int> ranks;
    for (int rank = 0; group_ && rank < group_->options.ranks; ++rank) {
      if (group_->membership.hasLeft(rank)) ranks.push_back(rank);
    }
    return ranks;
  }

 private:
  void handle(const mycoll::Event& event) override REQUIRES(mycoll::ioRole) {
    if (std::holds_alternative<mycoll::RankLeft>(event) && beforeDeparture) beforeDeparture();
    (void)group_->handle(event);
  }

  std::optional<mycoll::Group> group_;
};

}  // namespace test
