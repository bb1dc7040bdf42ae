// A link inside a host: a byte ring in a segment that the sender made and the receiver mapped.
// The connected unix socket on which the segment was handed over stays open to tell when the peer
// has gone; wake-ups travel through the peer's bell (bell.h).
//
//   head  bytes ever published by the sender     (one writer each, on cache lines of their own)
//   tail  bytes ever consumed by the receiver
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>

#include "base/fd.h"
#include "transport/bell.h"
#include "transport/link.h"
#include "transport/shm/segment.h"

namespace mycoll {

struct RingHeader {
  alignas(128) std::atomic<uint64_t> head;
  alignas(128) std::atomic<uint64_t> tail;
  // Set by a side that is going to sleep and wants to be rung.
  alignas(128) std::atomic<uint32_t> senderAsleep;
  alignas(128) std::atomic<uint32_t> receiverAsleep;
  alignas(128) char cookie[32];  // proof that both map the same memory
};
constexpr size_t kCookieBytes = 32;

constexpr size_t kRingBytes = 512 * 1024;  // a power of two
constexpr size_t kRingSegmentBytes = sizeof(RingHeader) + kRingBytes;

// Passing descriptors over a connected unix socket, with kCookieBytes of data. receive: the bytes
// read (0: the peer has gone), or -1 with errno.
bool sendDescriptor(int socket, int fd, const char* data, size_t bytes);
ssize_t receiveDescriptor(int socket, Fd* fd, char* data, size_t bytes);

class ShmSender final : public LinkSender {
 public:
  // bell: where the receiver sleeps.
  ShmSender(std::shared_ptr<Segment> segment, Fd socket, Bell bell);
  ssize_t write(const Span* parts, int count) override;
  void setAsleep(bool asleep) override;
  int fd() const override { return socket_.get(); }
  bool sendFd(int fd, const std::string& cookie) override;

 private:
  void publish(uint64_t head);

  std::shared_ptr<Segment> segment_;
  RingHeader* ring_;
  char* data_;
  uint64_t head_ = 0;
  uint64_t tailSeen_ = 0;
  Fd socket_;
  Bell bell_;
};

class ShmReceiver final : public LinkReceiver {
 public:
  ShmReceiver(std::shared_ptr<Segment> segment, Fd socket, Bell bell);
  ssize_t read(void* data, size_t bytes, bool streaming) override;
  bool maybeReadable() const override;
  void onEvent(bool isClosed) override;
  void setAsleep(bool asleep) override;
  int fd() const override { return socket_.get(); }
  Fd takeFd(const std::string& cookie) override;

 private:
  std::shared_ptr<Segment> segment_;
  RingHeader* ring_;
  char* data_;
  uint64_t tail_ = 0;
  bool hungUp_ = false;
  std::map<std::string, Fd> received_;
  Fd socket_;
  Bell bell_;
};

}  // namespace mycoll
