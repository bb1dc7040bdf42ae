// Batch: messages of one collective that are in flight together.
// Thread contract: as Task; a Batch lives in the frame of one.
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "base/task.h"
#include "transport/mailbox.h"

namespace mycoll {

// The collective that a task carries out.
struct CallContext {
  Mailbox& mailbox;            // for names and messages
  uint64_t sequence;           // its number: the upper part of its messages' tags
  const Signature& signature;  // of the call
};

// Add messages, co_await it, then check status(). Ready when all are done, or one has failed.
class Batch final : public Condition {
 public:
  explicit Batch(const CallContext& call)
      : mailbox_(call.mailbox),
        messageClass_(MessageClass::kCollective),
        base_(call.sequence << kStepBits),
        signature_(call.signature) {}
  // For the group's own messages, which belong to no collective.
  Batch(Mailbox& mailbox, const Signature& signature)
      : mailbox_(mailbox), messageClass_(MessageClass::kControl), base_(0), signature_(signature) {}

  // step: distinguishes the messages that two ranks exchange in one collective. attached: see
  // Mailbox::send().
  void send(int rank, Span data, uint64_t step = 0,
            std::shared_ptr<const Segment> attached = nullptr) {
    mailbox_.send(entries_.emplace_back(rank).transfer, rank, messageClass_, base_ + step,
                  signature_, data, std::move(attached));
  }
  Transfer& receive(int rank, Span data, uint64_t step = 0) {
    Transfer& transfer = entries_.emplace_back(rank).transfer;
    mailbox_.receive(transfer, rank, messageClass_, base_ + step, signature_, data);
    return transfer;
  }

  bool ready() override {
    while (next_ < entries_.size() && entries_[next_].transfer.ready()) {
      if (!entries_[next_].transfer.status().ok()) return true;
      ++next_;
    }
    return next_ == entries_.size();
  }
  Status status() const {
    return next_ < entries_.size() ? entries_[next_].transfer.status() : Status();
  }
  std::vector<int> missing() const override {
    std::vector<int> result;
    for (const Entry& entry : entries_) {
      if (entry.transfer.isDone()) continue;
      // Several messages to and from one rank may be open.
      if (std::ranges::find(result, entry.rank) == result.end()) result.push_back(entry.rank);
    }
    return result;
  }

 private:
  struct Entry {
    explicit Entry(int peer) : rank(peer) {}
    const int rank;
    Transfer transfer;
  };

  Mailbox& mailbox_;
  const MessageClass messageClass_;
  const uint64_t base_;
  const Signature& signature_;
  std::deque<Entry> entries_;  // a deque does not move posted transfers
  size_t next_ = 0;
};

}  // namespace mycoll
