// Transfer: one message to send or receive, or one put into a window. A coroutine keeps it in its
// frame and awaits it; a subclass may override deliver() to be notified instead.
//
// Thread contract: what is guarded by the I/O lock belongs to the transport. The owner may call the
// public functions from any one thread at a time.
// Lifetime: a transfer must not outlive the mailbox that it was posted to. The memory that it names
// must live until the transfer is done or destroyed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "base/call.h"
#include "base/fd.h"
#include "base/status.h"
#include "base/task.h"
#include "base/types.h"
#include "transport/frame.h"
#include "transport/io_lock.h"

namespace mycoll {

class Mailbox;
class Segment;
struct UnexpectedMessage;

// Payloads from this size on are written past the cache, as they are larger than it anyway.
constexpr size_t kStreamingBytes = 1024 * 1024;

class Transfer : public Condition {
 public:
  Transfer() = default;
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
  virtual ~Transfer();  // cancels an unfinished request

  bool ready() final { return isDone(); }
  bool isDone() const { return done_.load(std::memory_order_acquire); }
  // Only when ready.
  const Status& status() const { return status_; }
  // The rank that sends the message (for a receive, valid when ready) or receives it.
  int peer() const { return peer_; }

  // The call that this request belongs to, as it was posted.
  const Signature& signature() const { return signature_; }
  size_t bytes() const { return data_.bytes; }
  // Receives, when ready: the descriptor of the memory that the sender has attached to the message.
  // A closed one if there is none, it could not be sent, or this process had none left.
  Fd takeDescriptor() { return std::move(descriptor_); }

 protected:
  explicit Transfer(bool isDelivered) : isDelivered_(isDelivered) {}
  // For requests that are delivered: called once, without locks, instead of becoming ready under
  // the I/O lock. The implementation calls markDone(), and may drop its last reference here.
  virtual void deliver() {}
  void markDone() { done_.store(true, std::memory_order_release); }

 private:
  friend class Connection;
  friend class FrameSender;
  friend class Mailbox;
  friend class Mesh;
  friend class SharedReads;
  friend class Windows;

  const bool isDelivered_ = false;
  bool isPosted_ GUARDED_BY(ioRole) = false;  // known to the mailbox: queued, matched or waiting
  bool isReceive_ = false;
  int peer_ = -1;
  MessageClass messageClass_ = MessageClass::kCollective;
  uint64_t tag_ = 0;
  Signature signature_;
  Span data_;
  size_t transferred_ GUARDED_BY(ioRole) = 0;  // bytes received or sent
  size_t begun_ GUARDED_BY(ioRole) = 0;        // ... and those being received now
  uint64_t id_ GUARDED_BY(ioRole) = 0;
  Mailbox* mailbox_ = nullptr;
  Transfer* previous_ GUARDED_BY(ioRole) = nullptr;  // in the mailbox's list of open requests
  Transfer* next_ GUARDED_BY(ioRole) = nullptr;
  Status status_;
  std::shared_ptr<const Segment> attached_;  // sends
  Fd descriptor_;                            // receives
  // Sends: the receiver may read it in place, until it is ready. Receives: it is read in place.
  bool isShared_ GUARDED_BY(ioRole) = false;
  bool isTimed_ GUARDED_BY(ioRole) = false;   // see CopyTrials
  bool isUnsent_ GUARDED_BY(ioRole) = false;  // NotSent, or PeerLost, was raised for it
  std::atomic<bool> done_{false};
};

// Where the payload of a frame goes. Without `data` it is discarded.
struct FrameTarget {
  Mailbox* mailbox = nullptr;
  char* data = nullptr;
  Transfer* request = nullptr;
  UnexpectedMessage* message = nullptr;
  uint64_t window = 0;  // 0: none
  bool isStreaming = false;
};

}  // namespace mycoll
