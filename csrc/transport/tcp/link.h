// A link between hosts: one TCP connection, used in one direction.
#pragma once

#include "base/fd.h"
#include "transport/link.h"

namespace mycoll {

class TcpSender final : public LinkSender {
 public:
  explicit TcpSender(Fd socket) : socket_(std::move(socket)) {}
  ssize_t write(const Span* parts, int count) override;
  void setAsleep(bool) override {}  // the kernel wakes the peer
  int fd() const override { return socket_.get(); }

 private:
  Fd socket_;
};

class TcpReceiver final : public LinkReceiver {
 public:
  explicit TcpReceiver(Fd socket) : socket_(std::move(socket)) {}
  ssize_t read(void* data, size_t bytes, bool streaming) override;
  bool maybeReadable() const override { return readable_; }
  void onEvent() override { readable_ = true; }
  void setAsleep(bool) override {}
  int fd() const override { return socket_.get(); }

 private:
  Fd socket_;
  // Set by the edge-triggered poll, cleared by a read that found nothing.
  bool readable_ = true;
};

}  // namespace mycoll
