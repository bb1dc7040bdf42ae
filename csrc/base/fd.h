// Owns one file descriptor. Not thread safe, like an int.
#pragma once

#include <unistd.h>

#include <utility>

namespace mycoll {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) reset(other.release());
    return *this;
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd() { reset(); }

  int get() const { return fd_; }
  bool isOpen() const { return fd_ >= 0; }
  explicit operator bool() const { return isOpen(); }

  // The caller closes it from here on.
  [[nodiscard]] int release() { return std::exchange(fd_, -1); }

  void reset(int fd = -1) {
    const int old = std::exchange(fd_, fd);
    // EINTR is not retried: on Linux the descriptor is gone already, and may belong to another
    // thread by now.
    if (old >= 0 && old != fd) ::close(old);
  }

 private:
  int fd_ = -1;
};

}  // namespace mycoll
