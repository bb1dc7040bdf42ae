// A link's sending half for taps: passes everything on; what is written is the tap's own matter.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "transport/link.h"

namespace test {

class PassingSender : public mycoll::LinkSender {
 public:
  explicit PassingSender(std::unique_ptr<mycoll::LinkSender> link) : link_(std::move(link)) {}
  void setAsleep(bool asleep) override { link_->setAsleep(asleep); }
  int fd() const override { return link_->fd(); }
  bool sendFd(int fd) override { return link_->sendFd(fd); }
  bool hasArrived() const override { return link_->hasArrived(); }

 protected:
  const std::unique_ptr<mycoll::LinkSender> link_;
};

}  // namespace test
