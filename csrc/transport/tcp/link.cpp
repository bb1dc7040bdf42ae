#include "transport/tcp/link.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>

namespace mycoll {

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
    ssize_t sent = sendmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) return sent;
    if (errno == EINTR) continue;
    return errno == EAGAIN || errno == ENOBUFS ? 0 : -1;
  }
}

ssize_t TcpReceiver::read(void* data, size_t bytes, bool) {
  if (bytes == 0) return 0;
  for (;;) {
    ssize_t got = recv(socket_.get(), data, bytes, MSG_DONTWAIT);
    if (got > 0) return got;
    if (got == 0) return -1;
    if (errno == EINTR) continue;
    if (errno != EAGAIN) return -1;
    readable_ = false;
    return 0;
  }
}

}  // namespace mycoll
