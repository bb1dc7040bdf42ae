// The link of a process to itself: two ranks of one group may be in one process. Bytes wait in
// ordinary memory until the same process reads them.
// Thread contract: the I/O lock, as for every link.
#pragma once

#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "transport/link.h"

namespace mycoll {

class Loopback {
 public:
  static Link make() {
    const auto shared = std::make_shared<Loopback>();
    Link link;
    link.sender = std::make_unique<Sender>(shared);
    link.receiver = std::make_unique<Receiver>(shared);
    link.isShm = true;  // descriptors can be handed over
    return link;
  }

 private:
  static constexpr size_t kRoom = 1024 * 1024;

  class Sender final : public LinkSender {
   public:
    explicit Sender(std::shared_ptr<Loopback> shared) : shared_(std::move(shared)) {}
    ssize_t write(const Span* parts, int count) override {
      size_t taken = 0;
      for (int i = 0; i < count; ++i) {
        const size_t bytes =
            std::min(parts[i].bytes, kRoom - (shared_->bytes_.size() - shared_->read_));
        shared_->bytes_.append(static_cast<const char*>(parts[i].data), bytes);
        taken += bytes;
        if (bytes < parts[i].bytes) break;
      }
      return static_cast<ssize_t>(taken);
    }
    void setAsleep(bool) override {}
    int fd() const override { return -1; }
    bool sendFd(int fd, const std::string& cookie) override {
      Fd copy(fcntl(fd, F_DUPFD_CLOEXEC, 0));
      if (!copy.isOpen()) return false;
      shared_->fds_[cookie] = std::move(copy);
      return true;
    }

   private:
    const std::shared_ptr<Loopback> shared_;
  };

  class Receiver final : public LinkReceiver {
   public:
    explicit Receiver(std::shared_ptr<Loopback> shared) : shared_(std::move(shared)) {}
    ssize_t read(void* data, size_t bytes, bool) override {
      const size_t got = std::min(bytes, shared_->bytes_.size() - shared_->read_);
      std::memcpy(data, shared_->bytes_.data() + shared_->read_, got);
      shared_->read_ += got;
      if (shared_->read_ == shared_->bytes_.size()) {
        shared_->bytes_.clear();
        shared_->read_ = 0;
      } else if (shared_->read_ > kRoom / 2) {
        shared_->bytes_.erase(0, std::exchange(shared_->read_, 0));
      }
      return static_cast<ssize_t>(got);
    }
    bool maybeReadable() const override { return shared_->read_ < shared_->bytes_.size(); }
    void onEvent(bool) override {}
    void setAsleep(bool) override {}
    int fd() const override { return -1; }
    Fd takeFd(const std::string& cookie) override {
      auto found = shared_->fds_.extract(cookie);
      return found.empty() ? Fd() : std::move(found.mapped());
    }
    void dropFds(const std::string& prefix) override {
      std::erase_if(shared_->fds_,
                    [&](const auto& entry) { return entry.first.starts_with(prefix); });
    }

   private:
    const std::shared_ptr<Loopback> shared_;
  };

  std::string bytes_;
  size_t read_ = 0;  // bytes_ before this have been read
  std::map<std::string, Fd> fds_;
};

}  // namespace mycoll
