// The two ends of a link for taps: each passes every call on to the link that it wraps. A test's
// sender defines write(), and a test's receiver defines read(), and more where it needs to.
#pragma once

#include <atomic>
#include <memory>
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

class PassingReceiver : public mycoll::LinkReceiver {
 public:
  explicit PassingReceiver(std::unique_ptr<mycoll::LinkReceiver> link) : link_(std::move(link)) {}
  bool maybeReadable() const override { return link_->maybeReadable(); }
  void lookAgain() override { link_->lookAgain(); }
  void onEvent(bool isClosed) override { link_->onEvent(isClosed); }
  void setAsleep(bool asleep) override { link_->setAsleep(asleep); }
  int fd() const override { return link_->fd(); }
  bool takeFd(mycoll::Fd* fd) override { return link_->takeFd(fd); }

 protected:
  const std::unique_ptr<mycoll::LinkReceiver> link_;
};

// Counts the links that are made. A connection has one link at each end.
class LinkCounter final : public mycoll::LinkTap {
 public:
  std::unique_ptr<mycoll::LinkSender> tap(std::unique_ptr<mycoll::LinkSender> link) override {
    return link;
  }
  std::unique_ptr<mycoll::LinkReceiver> tap(std::unique_ptr<mycoll::LinkReceiver> link) override {
    ++links;
    return link;
  }

  std::atomic<int> links{0};
};

}  // namespace test
