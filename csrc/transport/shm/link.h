// A link inside a host: a byte ring for each direction, both in one segment that the connecting
// side has created and the other has mapped. The unix socket over which the segment was sent stays
// open: it reports when the peer is gone, and carries descriptors. Wake-ups go to the peer's bell
// (bell.h).
//
//   head  bytes ever published by the sender     (one writer each, on cache lines of their own)
//   tail  bytes ever consumed by the receiver
//
// How the ring is used depends on the distance between the two processes (distance.h), which the
// receiver measures at the beginning of each lap, and publishes:
//   far   stores past the caches, laps of kShortLap;
//   near  stores through them. From the first large message on, a lap is kLongLap: then what the
//         receiver reads has left the first caches of its sender, from which it is slow to fetch.
// A lap grows once, at the end of a short one, and never shrinks: grownAt is the byte after which
// it grew, so that both sides find every byte at the same place. Memory that was never reached is
// not allocated.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <string>

#include "base/env.h"
#include "base/fd.h"
#include "base/os.h"
#include "base/types.h"
#include "transport/bell.h"
#include "transport/link.h"
#include "transport/shm/distance.h"
#include "transport/shm/segment.h"

namespace mycoll {

constexpr size_t kCookieBytes = 32;

struct RingHeader {
  alignas(128) std::atomic<uint64_t> head;
  alignas(128) std::atomic<uint64_t> tail;
  // Set by a side that is about to sleep and must be rung.
  alignas(128) std::atomic<uint32_t> senderAsleep;
  alignas(128) std::atomic<uint32_t> receiverAsleep;
  alignas(128) std::atomic<uint32_t> areNear;  // by the receiver
  alignas(128) std::atomic<uint64_t> grownAt;  // by the sender; 0: laps are short
  char cookie[kCookieBytes];                   // in the first ring: proof that both map it
  Distance::Marks marks;                       // by the sender, at the beginning of each lap
};

constexpr size_t kShortLap = 512 * 1024;
constexpr size_t kLongLap = 1792 * 1024;
// Whole pages, so that the rings share none.
inline size_t ringBytes() { return roundUp(sizeof(RingHeader) + kLongLap, pageBytes()); }
inline size_t ringSegmentBytes() { return 2 * ringBytes(); }

// A side of the connection. The maker of the segment writes to its first ring.
enum class RingSide { kMaker, kTaker };

// Pass a descriptor over a connected unix socket, together with `data`. receive: returns the bytes
// read (0: the peer is gone), or -1 with errno.
bool sendDescriptor(int socket, int fd, const char* data, size_t bytes);
ssize_t receiveDescriptor(int socket, Fd* fd, char* data, size_t bytes);

class ShmSender final : public LinkSender {
 public:
  // bell: wakes the receiver.
  ShmSender(std::shared_ptr<Segment> segment, RingSide side, Socket socket, Bell bell);
  ssize_t write(const Span* parts, int count) override;
  void setAsleep(bool asleep) override;
  int fd() const override { return socket_->get(); }
  bool sendFd(int fd) override;
  bool hasArrived() const override { return true; }

 private:
  bool hasRoom();
  void beginLap(size_t bytesToCome);
  void publish();

  std::shared_ptr<Segment> segment_;
  RingHeader* ring_;
  char* data_;
  uint64_t head_ = 0;
  size_t offset_ = 0;  // of head_ in the ring
  size_t lap_ = kShortLap;
  uint64_t tailSeen_ = 0;
  Socket socket_;
  Bell bell_;
};

class ShmReceiver final : public LinkReceiver {
 public:
  // bell: wakes the sender.
  ShmReceiver(std::shared_ptr<Segment> segment, RingSide side, Socket socket, Bell bell,
              DistanceChoice distance);
  ssize_t read(void* data, size_t bytes, bool streaming) override;
  bool maybeReadable() const override;
  void lookAgain() override {}  // maybeReadable() looks at the ring
  void onEvent(bool isClosed) override;
  void setAsleep(bool asleep) override;
  int fd() const override { return socket_->get(); }
  bool takeFd(Fd* fd) override;

 private:
  void beginLap();

  std::shared_ptr<Segment> segment_;
  RingHeader* ring_;
  char* data_;
  uint64_t tail_ = 0;
  size_t offset_ = 0;  // of tail_ in the ring
  size_t lap_ = kShortLap;
  Distance distance_;
  bool hungUp_ = false;
  std::deque<Fd> received_;
  Socket socket_;
  Bell bell_;
};

}  // namespace mycoll
