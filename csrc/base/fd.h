// Owns one file descriptor. Not thread safe, like an int.
#pragma once

#include <cstddef>
#include <utility>

namespace mycoll {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) reset(std::exchange(other.fd_, -1));
    return *this;
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd() { reset(); }

  int get() const { return fd_; }
  bool isOpen() const { return fd_ >= 0; }
  explicit operator bool() const { return isOpen(); }

  // In a forked child the number refers to /dev/null. For sockets: the peer detects the end of this
  // process only when no process holds the socket.
  void keepFromChildren();

  void reset(int fd = -1) {
    const int old = std::exchange(fd_, fd);
    if (old >= 0 && old != fd) close(old);
  }

 private:
  static void close(int fd);

  int fd_ = -1;
};

// Allocates the pages of this part of a file in memory now: a write to them cannot raise SIGBUS.
// Returns false with errno set on failure. [any thread]
bool reservePages(int fd, size_t offset, size_t bytes);

// Raises the soft limit of descriptors of this process, at most to the hard limit, where a group of
// so many ranks may need more. Small groups leave it unchanged. [any thread]
void raiseDescriptorLimit(int ranks);

}  // namespace mycoll
