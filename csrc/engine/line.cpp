#include "engine/line.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

namespace mycoll {
namespace {

struct Head {
  uint32_t kind;
  int32_t rank;
  uint64_t bytes;
};

// A roster of so many bytes has a quarter of a million ranks.
constexpr uint64_t kLongest = 64 * 1024 * 1024;

}  // namespace

void Line::send(const Note& note) {
  const Head head{note.kind, note.rank, note.contents.size()};
  out_.append(reinterpret_cast<const char*>(&head), sizeof(head)).append(note.contents);
  flush();
}

void Line::flush() {
  while (!isFlushed()) {
    const ssize_t sent = ::send(socket_.get(), out_.data() + written_, out_.size() - written_,
                                MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent > 0) {
      written_ += static_cast<size_t>(sent);
    } else if (errno != EINTR) {
      if (errno == EAGAIN) return;
      break;  // reading tells of the end, after what has still come
    }
  }
  out_.clear();
  written_ = 0;
}

void Line::read() {
  char chunk[16 * 1024];
  while (!hasEnded_) {
    const ssize_t got = recv(socket_.get(), chunk, sizeof(chunk), MSG_DONTWAIT);
    if (got > 0) {
      in_.append(chunk, static_cast<size_t>(got));
    } else if (got < 0 && errno == EAGAIN) {
      return;
    } else if (got == 0 || errno != EINTR) {
      hasEnded_ = true;
    }
  }
}

bool Line::take(Note* note) {
  Head head;
  if (in_.size() - taken_ < sizeof(head)) return false;
  std::memcpy(&head, in_.data() + taken_, sizeof(head));
  if (head.bytes > kLongest) {
    in_.clear();
    taken_ = 0;
    hasEnded_ = true;
    return false;
  }
  if (in_.size() - taken_ - sizeof(head) < head.bytes) return false;
  *note = {head.kind, head.rank, in_.substr(taken_ + sizeof(head), head.bytes)};
  taken_ += sizeof(head) + head.bytes;
  if (taken_ == in_.size()) {
    in_.clear();
    taken_ = 0;
  }
  return true;
}

void Line::sayNoMore() { (void)shutdown(socket_.get(), SHUT_WR); }

}  // namespace mycoll
