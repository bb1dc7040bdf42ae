// A link between hosts: one TCP connection.
//
// Data that the kernel has accepted arrives even if its sender ends, unless the sender's socket
// still holds unread bytes when it is closed: then TCP resets the connection, and drops what the
// other side has not acknowledged yet. So a process that ends cleanly first reports that it sends
// nothing more, reads what still arrives, and waits a moment for the acknowledgement
// (Connection::finishSending()). A process that is killed does not: its last bytes may be lost, as
// they may be lost with its host.
#pragma once

#include <chrono>
#include <memory>

#include "base/fd.h"
#include "transport/link.h"

namespace mycoll {

// The shortest round-trip time measured on this connection; 0: unknown.
std::chrono::microseconds roundTripOf(int fd);

class TcpSender : public LinkSender {
 public:
  explicit TcpSender(Socket socket) : socket_(std::move(socket)) {}
  ssize_t write(const Span* parts, int count) override;
  void setAsleep(bool) override {}  // the kernel wakes the peer
  int fd() const override { return socket_->get(); }
  // Reads and discards what the peer still sends.
  bool hasArrived() const override;

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
  // Reads into `data`, and what exceeds it into the buffer, which is empty. Returns the total.
  ssize_t receive(void* data, size_t bytes);

  Socket socket_;
  // Set by the edge-triggered poll (or lookAgain), cleared by a read that left nothing behind.
  bool readable_ = true;
  bool closed_ = false;  // unread bytes are followed by the end of the stream
  // Receives headers and short payloads: one system call reads several of them, and the header that
  // follows a long payload needs none of its own. Small, as its content is copied once more.
  static constexpr size_t kBufferBytes = 4 * 1024;
  std::unique_ptr<char[]> buffer_{new char[kBufferBytes]};
  size_t begin_ = 0;
  size_t end_ = 0;
};

}  // namespace mycoll
