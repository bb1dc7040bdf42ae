#include "transport/shm/link.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "kernels/copy.h"

namespace mycoll {
namespace {

// Bytes are published in pieces, so that the receiver reads one while the sender writes the next.
constexpr size_t kPieceBytes = 64 * 1024;
// Shorter messages do not make a lap grow.
constexpr size_t kLargeBytes = 64 * 1024;
// The most descriptors that wait for their frames.
constexpr size_t kMostReceived = 4096;
// Sent with each.
constexpr char kMark = 'd';

RingHeader* ringOf(const Segment& segment, bool isSecond) {
  return reinterpret_cast<RingHeader*>(segment.data() + (isSecond ? ringBytes() : 0));
}

}  // namespace

bool sendDescriptor(int socket, int fd, const char* data, size_t bytes) {
  iovec part{const_cast<char*>(data), bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* rights = CMSG_FIRSTHDR(&message);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(rights), &fd, sizeof(int));
  return sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
}

ssize_t receiveDescriptor(int socket, Fd* fd, char* data, size_t bytes) {
  iovec part{data, bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t got = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got < 0) return got;
  for (cmsghdr* entry = CMSG_FIRSTHDR(&message); entry; entry = CMSG_NXTHDR(&message, entry)) {
    if (entry->cmsg_level != SOL_SOCKET || entry->cmsg_type != SCM_RIGHTS) continue;
    size_t count = (entry->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int received;
      std::memcpy(&received, CMSG_DATA(entry) + i * sizeof(int), sizeof(int));
      fd->reset(received);  // only one is ever expected; others are closed
    }
  }
  return got;
}

ShmSender::ShmSender(std::shared_ptr<Segment> segment, RingSide side, Socket socket, Bell bell)
    : segment_(std::move(segment)),
      ring_(ringOf(*segment_, side == RingSide::kTaker)),
      data_(reinterpret_cast<char*>(ring_ + 1)),
      socket_(std::move(socket)),
      bell_(bell) {}

bool ShmSender::hasRoom() {
  if (head_ - tailSeen_ < lap_) return true;
  tailSeen_ = ring_->tail.load(std::memory_order_acquire);
  return head_ - tailSeen_ < lap_;
}

// There is room, so the receiver has begun the lap that ends here.
void ShmSender::beginLap(size_t bytesToCome) {
  const bool isNear = ring_->areNear.load(std::memory_order_relaxed);  // a hint
  if (isNear && lap_ == kShortLap && bytesToCome >= kLargeBytes) {
    lap_ = kLongLap;
    ring_->grownAt.store(head_, std::memory_order_relaxed);  // released by publish()
  } else {
    offset_ = 0;
  }
  Distance::mark(&ring_->marks, head_);
}

ssize_t ShmSender::write(const Span* parts, int count) {
  const bool isStreaming = !ring_->areNear.load(std::memory_order_relaxed);
  ssize_t total = 0;
  size_t unpublished = 0;
  for (int i = 0; i < count; ++i) {
    const char* source = parts[i].begin();
    size_t left = parts[i].bytes;
    while (left > 0) {
      if (!hasRoom()) {
        if (unpublished) publish();
        return total;
      }
      if (offset_ == lap_) beginLap(left);
      const size_t room = lap_ - (head_ - tailSeen_);
      const size_t piece = std::min({left, room, lap_ - offset_, kPieceBytes - unpublished});
      copy(data_ + offset_, source, piece, isStreaming);
      head_ += piece;
      offset_ += piece;
      source += piece;
      left -= piece;
      total += static_cast<ssize_t>(piece);
      unpublished += piece;
      if (unpublished == kPieceBytes) {
        publish();
        unpublished = 0;
      }
    }
  }
  if (unpublished) publish();
  return total;
}

void ShmSender::publish() {
  // Releases the bytes, grownAt and the marks. Sequentially consistent, as is the receiver, which
  // sets receiverAsleep and then checks head: one of the two sees the other's store.
  ring_->head.store(head_, std::memory_order_seq_cst);
  if (ring_->receiverAsleep.load(std::memory_order_seq_cst)) bell_.ring();
}

bool ShmSender::sendFd(int fd) { return sendDescriptor(socket_->get(), fd, &kMark, sizeof(kMark)); }

void ShmSender::setAsleep(bool asleep) {
  ring_->senderAsleep.store(asleep, std::memory_order_seq_cst);
  if (!asleep) return;
  tailSeen_ = ring_->tail.load(std::memory_order_seq_cst);
  // A receiver whose program waits for nothing has not asked to be rung, and checks once a second.
  if (head_ - tailSeen_ >= lap_) bell_.ring();
}

ShmReceiver::ShmReceiver(std::shared_ptr<Segment> segment, RingSide side, Socket socket, Bell bell,
                         DistanceChoice distance)
    : segment_(std::move(segment)),
      ring_(ringOf(*segment_, side == RingSide::kMaker)),
      data_(reinterpret_cast<char*>(ring_ + 1)),
      distance_(1, distance),
      socket_(std::move(socket)),
      bell_(bell) {
  ring_->areNear.store(distance_.areNear(), std::memory_order_relaxed);
}

// Relaxed: read() acquires what it takes, and setAsleep() orders the last check before a sleep.
bool ShmReceiver::maybeReadable() const {
  return hungUp_ || ring_->head.load(std::memory_order_relaxed) != tail_;
}

// Called when read() has acquired some bytes of the lap, and so grownAt.
void ShmReceiver::beginLap() {
  if (lap_ == kShortLap && ring_->grownAt.load(std::memory_order_relaxed) == tail_) {
    lap_ = kLongLap;
  } else {
    offset_ = 0;
  }
  distance_.look(0, ring_->marks, tail_);
  const uint32_t areNear = distance_.areNear();
  if (ring_->areNear.load(std::memory_order_relaxed) != areNear) {
    ring_->areNear.store(areNear, std::memory_order_relaxed);
  }
}

ssize_t ShmReceiver::read(void* data, size_t bytes, bool streaming) {
  auto* target = static_cast<char*>(data);
  ssize_t total = 0;
  // The peer can write any value to the ring's header: never accept more than fits.
  size_t available =
      std::min<uint64_t>(ring_->head.load(std::memory_order_seq_cst) - tail_, kLongLap);
  while (bytes > 0 && available > 0) {
    if (offset_ == lap_) beginLap();
    const size_t piece = std::min({bytes, available, lap_ - offset_, kPieceBytes});
    copy(target, data_ + offset_, piece, streaming);
    tail_ += piece;
    offset_ += piece;
    target += piece;
    bytes -= piece;
    available -= piece;
    total += static_cast<ssize_t>(piece);
    // Releases the reads, before the sender writes there again; sequentially consistent as in
    // publish(), against the sender's setAsleep().
    ring_->tail.store(tail_, std::memory_order_seq_cst);
    if (ring_->senderAsleep.load(std::memory_order_seq_cst)) bell_.ring();
  }
  if (total > 0 || !hungUp_ || bytes == 0) return total;
  errno = 0;
  return -1;
}

// The socket carries descriptors and, at the end, reports that the peer is gone.
void ShmReceiver::onEvent(bool) {
  while (!hungUp_) {
    Fd fd;  // stays closed if this process has no descriptor left
    char mark = 0;
    const ssize_t got = receiveDescriptor(socket_->get(), &fd, &mark, sizeof(mark));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return;
    hungUp_ |= got <= 0 || mark != kMark || received_.size() == kMostReceived;
    if (hungUp_) return;
    received_.push_back(std::move(fd));
  }
}

bool ShmReceiver::takeFd(Fd* fd) {
  if (received_.empty()) onEvent(false);
  if (received_.empty()) return false;
  *fd = std::move(received_.front());
  received_.pop_front();
  return true;
}

void ShmReceiver::setAsleep(bool asleep) {
  ring_->receiverAsleep.store(asleep, std::memory_order_seq_cst);
  // The next look at head (maybeReadable) is relaxed.
  if (asleep) std::atomic_thread_fence(std::memory_order_seq_cst);
}

}  // namespace mycoll
