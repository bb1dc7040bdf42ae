// A link between hosts: one TCP connection.
//
// What the kernel has taken arrives though its sender ends, unless bytes for the sender lie unread
// in its socket when that is closed: then TCP resets the connection, and drops what the other side
// has not acknowledged yet. So a process that ends in good order says first that it sends no more,
// reads what still comes, and waits a moment for the acknowledgement (Connection::sayNoMore()). One
// that is killed does not: its last bytes may be lost, as they may be lost with its host.
#pragma once

#include <chrono>
#include <memory>

#include "base/fd.h"
#include "transport/link.h"

namespace mycoll {

// The least time that anything has taken to the other end and back; 0: unknown.
std::chrono::microseconds roundTripOf(int fd);

class TcpSender final : public LinkSender {
 public:
  explicit TcpSender(Socket socket) : socket_(std::move(socket)) {}
  ssize_t write(const Span* parts, int count) override;
  void setAsleep(bool) override {}  // the kernel wakes the peer
  int fd() const override { return socket_->get(); }

 private:
  Socket socket_;
};

class TcpReceiver final : public LinkReceiver {
 public:
  explicit TcpReceiver(Socket socket) : socket_(std::move(socket)) {}
  ssize_t read(void* data, size_t bytes, bool streaming) override;
  bool maybeReadable() const override { return readable_ || begin_ != end_; }
  void lookAgain() override { readable_ = true; }
  void onEvent(bool isClosed) override {
    readable_ = true;
    closed_ |= isClosed;
  }
  void setAsleep(bool) override {}
  int fd() const override { return socket_->get(); }

 private:
  // Into `data`, and what comes beyond that into the buffer, which is empty. Returns the whole.
  ssize_t receive(void* data, size_t bytes);

  Socket socket_;
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
