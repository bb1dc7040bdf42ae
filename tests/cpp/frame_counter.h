// Counts the frames that the ranks of a world write to their connections.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "passing_link.h"
#include "transport/frame.h"

namespace test {

// All ranks of a world share one counter.
class FrameCounter final : public mycoll::LinkTap {
 public:
  explicit FrameCounter(std::vector<int> hostOf) : hostOf_(std::move(hostOf)) {}

  struct Count {
    int requests = 0;           // kRequestToSend
    int insideHosts = 0;        // frames of collectives between ranks of one host
    uint64_t betweenHosts = 0;  // bytes of payload
    uint64_t messages = 0;      // of collectives between hosts; a message of several pieces is one
    int failures = 0;           // notices of a failure between hosts
    int connections = 0;        // both ends of each connection
  };
  Count count() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return count_;
  }

  void reset() {
    std::lock_guard<std::mutex> lock(mutex_);
    count_ = {};
  }

  std::unique_ptr<mycoll::LinkSender> tap(std::unique_ptr<mycoll::LinkSender> link) override {
    std::lock_guard<std::mutex> lock(mutex_);
    count_.connections += 1;
    return std::make_unique<Sender>(*this, std::move(link));
  }
  std::unique_ptr<mycoll::LinkReceiver> tap(std::unique_ptr<mycoll::LinkReceiver> link) override {
    return link;
  }

 private:
  class Sender final : public PassingSender {
   public:
    Sender(FrameCounter& counter, std::unique_ptr<mycoll::LinkSender> link)
        : PassingSender(std::move(link)), counter_(counter) {}
    ssize_t write(const mycoll::Span* parts, int count) override {
      const ssize_t written = link_->write(parts, count);
      auto left = static_cast<size_t>(std::max<ssize_t>(written, 0));
      for (int i = 0; i < count && left > 0; ++i) {
        const size_t bytes = std::min(left, parts[i].bytes);
        follow(parts[i].begin(), bytes);
        left -= bytes;
      }
      return written;
    }

   private:
    void follow(const char* data, size_t bytes) {
      while (bytes > 0) {
        const size_t step =
            std::min<uint64_t>(bytes, payload_ > 0 ? payload_ : sizeof(header_) - known_);
        if (payload_ > 0) {
          payload_ -= step;
        } else {
          std::memcpy(reinterpret_cast<char*>(&header_) + known_, data, step);
          known_ += step;
          if (known_ == sizeof(header_)) {
            counter_.add(header_);
            payload_ = header_.payloadBytes;
            known_ = 0;
          }
        }
        data += step;
        bytes -= step;
      }
    }

    FrameCounter& counter_;
    mycoll::FrameHeader header_;
    size_t known_ = 0;
    uint64_t payload_ = 0;
  };

  void add(const mycoll::FrameHeader& header) {
    std::lock_guard<std::mutex> lock(mutex_);
    const bool isInside = hostOf_[header.source] == hostOf_[header.destination];
    const bool isOfCollective = header.messageClass == mycoll::MessageClass::kCollective &&
                                header.kind <= mycoll::FrameKind::kData;
    count_.requests += header.kind == mycoll::FrameKind::kRequestToSend;
    count_.insideHosts += isInside && isOfCollective;
    count_.failures += !isInside && header.kind == mycoll::FrameKind::kAbort;
    if (!isInside) count_.betweenHosts += header.payloadBytes;
    count_.messages += !isInside && isOfCollective &&
                       (header.kind != mycoll::FrameKind::kData || header.offset == 0);
  }

  const std::vector<int> hostOf_;
  mutable std::mutex mutex_;
  Count count_;
};

}  // namespace test
