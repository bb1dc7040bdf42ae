// A link between hosts: one TCP connection, used in one direction.
#pragma once

#include <memory>

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
  bool maybeReadable() const override { return readable_ || begin_ != end_; }
  void lookAgain() override { readable_ = true; }
  void onEvent(bool isClosed) override {
    readable_ = true;
    closed_ |= isClosed;
  }
  void setAsleep(bool) override {}
  int fd() const override { return socket_.get(); }

 private:
  // Into `data`, and what comes beyond that into the buffer, which is empty. Returns the whole.
  ssize_t receive(void* data, size_t bytes);

  Fd socket_;
  // Set by the edge-triggered poll (or lookAgain), cleared by a read that left nothing behind.
  bool readable_ = true;
  bool closed_ = false;  // what is left to read ends with the end
  // Headers and short payloads come through here: one system call for several of them, and none of
  // its own for the header that follows a long payload. Small, as its content is copied once more.
  static constexpr size_t kBufferBytes = 4 * 1024;
  std::unique_ptr<char[]> buffer_{new char[kBufferBytes]};
  size_t begin_ = 0;
  size_t end_ = 0;
};

}  // namespace mycoll
