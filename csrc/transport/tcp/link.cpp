#include "transport/tcp/link.h"

#include <linux/tcp.h>  // newer than <netinet/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>

#include "kernels/copy.h"

namespace mycoll {

std::chrono::microseconds roundTripOf(int fd) {
  tcp_info info{};
  socklen_t length = sizeof(info);
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return {};
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
