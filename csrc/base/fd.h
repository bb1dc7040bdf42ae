// Owns one file descriptor. Not thread safe, like an int.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <utility>

namespace mycoll {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)), isOurs_(std::exchange(other.isOurs_, false)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this == &other) return *this;
    reset();
    fd_ = std::exchange(other.fd_, -1);
    isOurs_ = std::exchange(other.isOurs_, false);
    return *this;
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd() { reset(); }

  int get() const { return fd_; }
  bool isOpen() const { return fd_ >= 0; }
  explicit operator bool() const { return isOpen(); }

  // The caller closes it from here on.
  [[nodiscard]] int release() {
    share();
    return std::exchange(fd_, -1);
  }

  // A child that is forked finds /dev/null in its place. For sockets: the other side hears of the
  // end of this process only when nobody holds the socket any more.
  void keepFromChildren();

  void reset(int fd = -1) {
    share();
    const int old = std::exchange(fd_, fd);
    // EINTR is not retried: on Linux the descriptor is gone already, and may belong to another
    // thread by now.
    if (old >= 0 && old != fd) ::close(old);
  }

 private:
  void share() {
    if (isOurs_) endKeeping();
  }
  void endKeeping();

  int fd_ = -1;
  bool isOurs_ = false;  // kept from children
};

// Gives so many bytes of a file in memory their pages now: a write to them cannot end in SIGBUS.
// False: errno says why. [any thread]
bool reservePages(int fd, size_t offset, size_t bytes);

// Raises this process's soft limit of descriptors, as far as the hard one allows, where a group of
// so many ranks may need more. Small groups leave it alone. [any thread]
void raiseDescriptorLimit(int ranks);

}  // namespace mycoll
