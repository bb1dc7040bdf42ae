#include "transport/tcp/link.h"

#include <linux/sockios.h>
#include <linux/tcp.h>  // newer than <netinet/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>

#include "kernels/copy.h"

namespace mycoll {

namespace {

constexpr uint8_t kClosed = 7;  // TCP_CLOSE of <netinet/tcp.h>, which the newer header excludes

// Returns the number of bytes that the kernel has filled in.
size_t infoOf(int fd, tcp_info* info) {
  *info = {};
  socklen_t length = sizeof(*info);
  return getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, &length) == 0 ? length : 0;
}

}  // namespace

std::chrono::microseconds roundTripOf(int fd) {
  tcp_info info;
  const size_t length = infoOf(fd, &info);
  constexpr size_t kEnd = offsetof(tcp_info, tcpi_min_rtt) + sizeof(info.tcpi_min_rtt);
  const bool isKnown = length >= kEnd && info.tcpi_min_rtt != ~uint32_t{0};
  return std::chrono::microseconds(isKnown ? info.tcpi_min_rtt : info.tcpi_rtt);
}

ssize_t TcpSender::write(const Span* parts, int count) {
  constexpr int kMaxParts = 4;
  iovec vectors[kMaxParts];
  msghdr message{};
  message.msg_iov = vectors;
  for (int i = 0; i < count && i < kMaxParts; ++i) {
    vectors[i] = {parts[i].data, parts[i].bytes};
    ++message.msg_iovlen;
  }
  for (;;) {
    ssize_t sent = sendmsg(socket_->get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) return sent;
    if (errno == EINTR) continue;
    return errno == EAGAIN || errno == ENOBUFS || errno == ENOMEM ? 0 : -1;
  }
}

bool TcpSender::hasArrived() const {
  char discarded[16 * 1024];
  // Limited, as the peer may continue to send.
  for (int i = 0; i < 64; ++i) {
    if (recv(fd(), discarded, sizeof(discarded), MSG_DONTWAIT) <= 0) break;
  }
  // A peer that has reset the connection acknowledges nothing any more.
  tcp_info info;
  if (infoOf(fd(), &info) > 0 && info.tcpi_state == kClosed) return true;
  // The FIN counts as one byte. Its receiver may delay the acknowledgement, by 40 ms and more;
  // it is not needed.
  int unacknowledged = 0;
  return ioctl(fd(), SIOCOUTQ, &unacknowledged) != 0 || unacknowledged <= 1;
}

ssize_t TcpReceiver::receive(void* data, size_t bytes) {
  iovec vectors[2] = {{data, bytes}, {buffer_.get(), kBufferBytes}};
  msghdr message{};
  message.msg_iov = bytes > 0 ? vectors : vectors + 1;
  message.msg_iovlen = bytes > 0 ? 2 : 1;
  for (;;) {
    ssize_t got = recvmsg(socket_->get(), &message, MSG_DONTWAIT);
    if (got > 0) {
      // Less arrived than there was room for, so the next byte raises a new event.
      if (static_cast<size_t>(got) < bytes + kBufferBytes && !closed_) readable_ = false;
      begin_ = 0;
      end_ = static_cast<size_t>(got) - std::min(bytes, static_cast<size_t>(got));
      return got;
    }
    if (got < 0 && errno == EINTR) continue;
    if (got == 0) errno = 0;
    if (got == 0 || errno != EAGAIN) return -1;
    readable_ = false;
    return 0;
  }
}

ssize_t TcpReceiver::read(void* data, size_t bytes, bool) {
  if (bytes == 0) return 0;
  if (begin_ == end_) {
    if (!readable_) return 0;
    const size_t direct = bytes >= kBufferBytes ? bytes : 0;
    const ssize_t got = receive(data, direct);
    if (got <= 0) return got;
    if (direct > 0) return std::min(got, static_cast<ssize_t>(direct));
  }
  const size_t taken = std::min(bytes, end_ - begin_);
  copy(data, buffer_.get() + begin_, taken);
  begin_ += taken;
  return static_cast<ssize_t>(taken);
}

}  // namespace mycoll
