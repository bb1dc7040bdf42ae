#include "transport/mailbox.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/log.h"
#include "transport/endpoint.h"

namespace mycoll {
namespace {

// Received payloads beyond this size are written past the cache: they are larger than it anyway.
constexpr size_t kStreamingBytes = 1024 * 1024;

bool pointToPointAgrees(const Signature& a, const Signature& b) {
  return a.dtype == b.dtype && a.opaqueType == b.opaqueType && a.bytes == b.bytes;
}

}  // namespace

Transfer::~Transfer() {
  if (isPosted_) mailbox_->cancel(*this);
}

Mailbox::Mailbox(std::shared_ptr<Endpoint> endpoint, GroupAddress group, MailboxListener* listener)
    : endpoint_(std::move(endpoint)),
      group_(std::move(group)),
      listener_(listener),
      left_(group_.peers.size()),
      remembered_(kRemembered) {
  std::lock_guard<std::mutex> lock(endpoint_->ioMutex());
  endpoint_->addMailbox(this);
}

Mailbox::~Mailbox() { detach(); }

void Mailbox::detach() {
  std::lock_guard<std::mutex> lock(endpoint_->ioMutex());
  if (!std::exchange(isDetached_, true)) endpoint_->removeMailbox(this);
}

std::string Mailbox::describeRank(int rank) const {
  return "rank " + std::to_string(rank) + " (" + group_.peers[rank].describe() + ")";
}

FrameHeader Mailbox::header(FrameKind kind, int destination) const {
  FrameHeader result;
  result.kind = kind;
  result.source = group_.rank;
  result.destination = destination;
  result.context = group_.context;
  return result;
}

bool Mailbox::checkRank(Transfer& request, int rank, const char* what) {
  if (rank >= 0 && rank < ranks() && rank != group_.rank) return true;
  request.status_ = Status(Code::kInvalidArgument,
                           std::string(what) + " rank " + std::to_string(rank) +
                               (rank == group_.rank ? " is this rank itself" : " is out of range") +
                               " in group '" + group_.name + "' of " + std::to_string(ranks()));
  request.done_.store(true, std::memory_order_release);
  return false;
}

void Mailbox::post(Transfer& request, MessageClass messageClass, uint64_t tag,
                   const Signature& signature, Span data) {
  request.messageClass_ = messageClass;
  request.tag_ = tag;
  request.signature_ = signature;
  request.data_ = data;
  request.transferred_ = 0;
  request.mailbox_ = this;
  request.isPosted_ = true;
  request.done_.store(false, std::memory_order_relaxed);
  request.previous_ = nullptr;
  request.next_ = open_;
  if (open_) open_->previous_ = &request;
  open_ = &request;
  endpoint_->addPending(1);
}

void Mailbox::finish(Transfer& request, Status status) {
  if (request.previous_) {
    request.previous_->next_ = request.next_;
  } else {
    open_ = request.next_;
  }
  if (request.next_) request.next_->previous_ = request.previous_;
  request.isPosted_ = false;
  request.status_ = std::move(status);
  endpoint_->addPending(-1);
  if (request.isDelivered_) {
    endpoint_->finishDelivered(&request);
  } else {
    request.done_.store(true, std::memory_order_release);
  }
}

void Mailbox::send(Transfer& request, int destination, MessageClass messageClass, uint64_t tag,
                   const Signature& signature, Span data) {
  if (!checkRank(request, destination, "destination")) return;
  std::lock_guard<std::mutex> lock(endpoint_->ioMutex());
  post(request, messageClass, tag, signature, data);
  request.isReceive_ = false;
  request.peer_ = destination;
  if (!failure_.ok()) return finish(request, failure_);
  if (left_[destination]) {
    return finish(request, Status(Code::kPeerLost, describeRank(destination) + " has left group '" +
                                                       group_.name + "'"));
  }
  OutLink& link = endpoint_->linkTo(group_.peers[destination], group_, destination);
  OutItem item;
  item.header = header(FrameKind::kEager, destination);
  item.header.messageClass = messageClass;
  item.header.tag = tag;
  item.header.signature = signature;
  item.header.messageBytes = data.bytes;
  if (data.bytes <= endpoint_->options().eagerBytes) {
    item.header.payloadBytes = data.bytes;
    item.payload = data.begin();
    item.request = &request;
  } else {
    request.id_ = nextId_++;
    inFlight_[request.id_] = &request;
    item.header.kind = FrameKind::kRequestToSend;
    item.header.senderRequest = request.id_;
  }
  endpoint_->enqueue(link, std::move(item));
}

void Mailbox::receive(Transfer& request, int source, MessageClass messageClass, uint64_t tag,
                      const Signature& signature, Span data) {
  if (source != kFromAnyone && !checkRank(request, source, "source")) return;
  std::lock_guard<std::mutex> lock(endpoint_->ioMutex());
  post(request, messageClass, tag, signature, data);
  request.isReceive_ = true;
  request.peer_ = source;
  if (!failure_.ok()) return finish(request, failure_);
  for (auto message = unexpected_.begin(); message != unexpected_.end(); ++message) {
    const FrameHeader& came = message->header;
    if (!message->claimedBy && came.messageClass == messageClass && came.tag == tag &&
        (source == kFromAnyone || came.source == source)) {
      return acceptUnexpected(request, message);
    }
  }
  if (source != kFromAnyone && left_[source]) {
    return finish(request, Status(Code::kPeerLost,
                                  describeRank(source) + " has left group '" + group_.name + "'"));
  }
  posted_.push_back(&request);
}

void Mailbox::acceptUnexpected(Transfer& request, std::list<Unexpected>::iterator message) {
  request.peer_ = message->header.source;
  if (!agrees(request, message->header)) return;  // the group has failed, and the request with it
  if (message->header.kind == FrameKind::kRequestToSend) {
    clearToSend(request, message->header);
    unexpected_.erase(message);
  } else if (message->isComplete) {
    if (request.data_.bytes) {
      std::memcpy(request.data_.data, message->payload.get(), request.data_.bytes);
    }
    unexpected_.erase(message);
    finish(request, Status());
  } else {
    message->claimedBy = &request;
  }
}

void Mailbox::clearToSend(Transfer& request, const FrameHeader& came) {
  request.peer_ = came.source;
  request.id_ = nextId_++;
  inFlight_[request.id_] = &request;
  OutItem item;
  item.header = header(FrameKind::kClearToSend, came.source);
  item.header.senderRequest = came.senderRequest;
  item.header.receiverRequest = request.id_;
  endpoint_->enqueue(endpoint_->linkTo(group_.peers[came.source], group_, came.source),
                     std::move(item));
}

void Mailbox::cancel(Transfer& request) {
  std::lock_guard<std::mutex> lock(endpoint_->ioMutex());
  if (request.isPosted_) abandon(request, Status(Code::kAborted, "cancelled"));
}

void Mailbox::abandon(Transfer& request, Status status) {
  endpoint_->forget(&request);
  std::erase(posted_, &request);
  inFlight_.erase(request.id_);
  for (Unexpected& message : unexpected_) {
    // Its payload is still arriving: let it, into memory that nobody asks for.
    if (message.claimedBy == &request) message.claimedBy = nullptr;
  }
  finish(request, std::move(status));
}

Transfer* Mailbox::matchPosted(const FrameHeader& came) {
  for (auto at = posted_.begin(); at != posted_.end(); ++at) {
    Transfer* request = *at;
    if (request->messageClass_ == came.messageClass && request->tag_ == came.tag &&
        (request->peer_ == kFromAnyone || request->peer_ == came.source)) {
      posted_.erase(at);
      request->peer_ = came.source;
      return request;
    }
  }
  return nullptr;
}

bool Mailbox::signaturesAgree(const Signature& mine, const FrameHeader& came) {
  bool agree = came.messageClass == MessageClass::kPointToPoint
                   ? pointToPointAgrees(mine, came.signature)
                   : mine == came.signature;
  if (agree) return true;
  std::string where = came.messageClass == MessageClass::kCollective
                          ? "collective #" + std::to_string(came.tag >> kStepBits)
                          : "tag " + std::to_string(came.tag);
  reportMismatch(mine, came.source, came.signature, where);
  return false;
}

void Mailbox::reportMismatch(const Signature& mine, int source, const Signature& theirs,
                             const std::string& where) {
  failLocked(Status(Code::kMismatch,
                    "mycoll group '" + group_.name + "': MISMATCH at " + where + "\n  " +
                        describeRank(group_.rank) + ": " + mine.describe() + "\n  " +
                        describeRank(source) + ": " + theirs.describe() +
                        "\n  All ranks must call the same operations in the same order, with the "
                        "same dtype, size, reduce op and root."),
             true);
}

// The signature, and the size where it leaves that open (all_to_all with splits, and the like).
bool Mailbox::agrees(const Transfer& request, const FrameHeader& came) {
  if (!signaturesAgree(request.signature_, came)) return false;
  if (came.messageBytes == request.data_.bytes) return true;
  failLocked(
      Status(Code::kMismatch,
             "mycoll group '" + group_.name + "': MISMATCH of sizes\n  " +
                 describeRank(group_.rank) + ": expects " + std::to_string(request.data_.bytes) +
                 " bytes from the other in " + request.signature_.describe() + "\n  " +
                 describeRank(came.source) + ": sends " + std::to_string(came.messageBytes) +
                 " bytes in " + came.signature.describe() +
                 "\n  Each pair of ranks must agree on the size of what one sends to the "
                 "other."),
      true);
  return false;
}

void Mailbox::beginCollective(uint64_t sequence, const Signature& signature) {
  std::lock_guard<std::mutex> lock(endpoint_->ioMutex());
  currentSequence_ = sequence;
  hasBegun_ = true;
  remembered_[sequence % kRemembered] = signature;
  for (const Unexpected& message : unexpected_) {
    if (message.header.messageClass == MessageClass::kCollective &&
        message.header.tag >> kStepBits == sequence &&
        !signaturesAgree(signature, message.header)) {
      return;
    }
  }
  if (probes_.empty()) return;
  std::vector<Probe> probes;
  probes.swap(probes_);
  for (Probe& probe : probes) {
    if (probe.sequence > sequence) {
      probes_.push_back(probe);
    } else {
      checkAgainstCollectives(probe.rank, probe.sequence, probe.signature);
    }
  }
}

void Mailbox::checkAgainstCollectives(int source, uint64_t sequence, const Signature& theirs) {
  if (!hasBegun_ || sequence > currentSequence_ || currentSequence_ - sequence >= kRemembered) {
    return;
  }
  const Signature& mine = remembered_[sequence % kRemembered];
  if (!(mine == theirs)) {
    reportMismatch(mine, source, theirs, "collective #" + std::to_string(sequence));
  }
}

void Mailbox::probe() {
  {
    std::lock_guard<std::mutex> lock(endpoint_->ioMutex());
    if (!hasBegun_ || !failure_.ok()) return;
    std::string payload(reinterpret_cast<const char*>(&currentSequence_), sizeof(uint64_t));
    payload.append(reinterpret_cast<const char*>(&remembered_[currentSequence_ % kRemembered]),
                   sizeof(Signature));
    for (int rank = 0; rank < ranks(); ++rank) {
      if (rank != group_.rank && !left_[rank]) queueControl(rank, FrameKind::kProbe, payload);
    }
  }
  endpoint_->progress();
}

void Mailbox::setTellsOthers(bool tells) {
  std::lock_guard<std::mutex> lock(endpoint_->ioMutex());
  tellsOthers_ = tells;
}

Mailbox::Target Mailbox::onFrame(const FrameHeader& came) {
  Target target;
  if (!failure_.ok()) return target;
  if (came.kind == FrameKind::kData) {
    auto found = inFlight_.find(came.receiverRequest);
    if (found == inFlight_.end()) return target;
    Transfer* request = found->second;
    if (!request->isReceive_ || request->peer_ != came.source ||
        request->data_.bytes - request->transferred_ < came.payloadBytes) {
      failLocked(Status(Code::kInternal, describeRank(came.source) + " sent more than was agreed"),
                 true);
      return target;
    }
    target.request = request;
    target.data = request->data_.begin() + request->transferred_;
    target.isStreaming = request->data_.bytes >= kStreamingBytes;
    return target;
  }
  Transfer* request = matchPosted(came);
  if (request) {
    if (!agrees(*request, came)) return target;
    if (came.kind == FrameKind::kRequestToSend) {
      clearToSend(*request, came);
    } else {
      target.request = request;
      target.data = request->data_.begin();
    }
    return target;
  }
  if (came.messageClass == MessageClass::kCollective) {
    checkAgainstCollectives(came.source, came.tag >> kStepBits, came.signature);
    if (!failure_.ok()) return target;
  }
  Unexpected& message = unexpected_.emplace_back();
  message.header = came;
  if (came.kind == FrameKind::kEager) {
    message.payload = std::make_unique<char[]>(came.payloadBytes);
    target.data = message.payload.get();
    target.unexpected = &message;
  } else {
    message.isComplete = true;
  }
  return target;
}

void Mailbox::onPayload(const FrameHeader& came, const Target& target) {
  if (Transfer* request = target.request) {
    request->transferred_ += came.payloadBytes;
    if (request->transferred_ == request->data_.bytes) {
      if (came.kind == FrameKind::kData) inFlight_.erase(request->id_);
      finish(*request, Status());
    }
  } else if (target.unexpected) {
    target.unexpected->isComplete = true;
    if (Transfer* claimer = target.unexpected->claimedBy) {
      for (auto message = unexpected_.begin(); message != unexpected_.end(); ++message) {
        if (&*message == target.unexpected) {
          message->claimedBy = nullptr;
          acceptUnexpected(*claimer, message);
          return;
        }
      }
    }
  }
}

void Mailbox::onClearToSend(const FrameHeader& came) {
  auto found = inFlight_.find(came.senderRequest);
  if (found == inFlight_.end() || found->second->isReceive_ ||
      found->second->peer_ != came.source) {
    return;
  }
  Transfer* request = found->second;
  inFlight_.erase(found);
  OutItem item;
  item.header = header(FrameKind::kData, came.source);
  item.header.receiverRequest = came.receiverRequest;
  item.header.messageBytes = request->data_.bytes;
  item.message = request->data_;
  item.request = request;
  endpoint_->enqueue(endpoint_->linkTo(group_.peers[came.source], group_, came.source),
                     std::move(item));
}

// The payload of kAbort: the code as one letter, then the text.
void Mailbox::onControl(const FrameHeader& came, const std::string& payload) {
  if (came.kind == FrameKind::kGoodbye) {
    onLeft(came.source);
  } else if (came.kind == FrameKind::kProbe) {
    Probe probe{came.source, 0, {}};
    if (payload.size() != sizeof(probe.sequence) + sizeof(Signature)) return;
    std::memcpy(&probe.sequence, payload.data(), sizeof(probe.sequence));
    std::memcpy(&probe.signature, payload.data() + sizeof(probe.sequence), sizeof(Signature));
    if (hasBegun_ && probe.sequence <= currentSequence_) {
      checkAgainstCollectives(probe.rank, probe.sequence, probe.signature);
    } else if (probes_.size() < kRemembered) {
      probes_.push_back(probe);
    }
  } else if (came.kind == FrameKind::kAbort && !payload.empty()) {
    failLocked(Status(static_cast<Code>(payload[0] - 'a'), payload.substr(1)), false);
  }
}

void Mailbox::onLeft(int rank) {
  left_[rank] = true;
  listener_->onGoodbye(rank);
  // Receives that nothing has come for never will be served.
  for (Transfer* request = open_; request;) {
    Transfer* next = request->next_;
    const bool waitsForIt = request->peer_ == rank &&
                            request->messageClass_ == MessageClass::kPointToPoint &&
                            (!request->isReceive_ ||
                             std::find(posted_.begin(), posted_.end(), request) != posted_.end());
    if (waitsForIt) {
      abandon(*request, Status(Code::kPeerLost,
                               describeRank(rank) + " has left group '" + group_.name + "'"));
    }
    request = next;
  }
}

void Mailbox::fail(const Status& cause, bool tell) {
  {
    std::lock_guard<std::mutex> lock(endpoint_->ioMutex());
    failLocked(cause, tell);
  }
  endpoint_->progress();
  endpoint_->sleeper().wakeAll();
}

void Mailbox::failLocked(const Status& cause, bool tell) {
  if (!failure_.ok()) return;
  failure_ = cause;
  // The moment it is known; closing a group in good order is no news.
  if (tell || cause.code() != Code::kAborted) MYCOLL_LOG_ERROR("%s", cause.message().c_str());
  listener_->onFailure(cause);
  while (open_) {
    Transfer* request = open_;
    endpoint_->forget(request);
    finish(*request, cause);
  }
  posted_.clear();
  inFlight_.clear();
  for (Unexpected& message : unexpected_) message.claimedBy = nullptr;
  if (!tell || !tellsOthers_) return;
  std::string payload = std::string(1, static_cast<char>('a' + static_cast<int>(cause.code()))) +
                        cause.message().substr(0, kMaxControlBytes - 1);
  for (int rank = 0; rank < ranks(); ++rank) {
    if (rank != group_.rank && !left_[rank]) queueControl(rank, FrameKind::kAbort, payload);
  }
}

void Mailbox::queueControl(int destination, FrameKind kind, const std::string& payload) {
  OutLink& link = endpoint_->linkTo(group_.peers[destination], group_, destination);
  OutItem item;
  item.header = header(kind, destination);
  item.header.payloadBytes = payload.size();
  item.owned = payload;
  endpoint_->enqueue(link, std::move(item));
}

void Mailbox::sayGoodbye() {
  {
    std::lock_guard<std::mutex> lock(endpoint_->ioMutex());
    for (int rank = 0; rank < ranks(); ++rank) {
      if (rank == group_.rank) continue;
      if (endpoint_->hasLinkTo(group_.peers[rank])) {
        queueControl(rank, FrameKind::kGoodbye, "");
      } else {
        endpoint_->sendFarewell(group_.peers[rank], {group_.context, group_.rank, rank});
      }
    }
  }
  endpoint_->progress();
}

bool Mailbox::isFlushed() {
  std::lock_guard<std::mutex> lock(endpoint_->ioMutex());
  return !endpoint_->hasQueued(group_.context, group_.rank);
}

void Mailbox::onPeerLost(const std::string& uid, const std::string& how) {
  for (int rank = 0; rank < ranks(); ++rank) {
    if (group_.peers[rank].uid != uid || rank == group_.rank || left_[rank] ||
        listener_->hasLeft(rank)) {
      continue;
    }
    failLocked(
        Status(Code::kPeerLost,
               "mycoll group '" + group_.name + "': " + describeRank(rank) + " " + how +
                   " (seen by rank " + std::to_string(group_.rank) +
                   "). The group is dead; see that rank's log. To go on: destroy the "
                   "group and make a new one, or restart the job (torchrun --max-restarts)."),
        true);
    return;
  }
}

bool Mailbox::sendFd(int destination, int fd, const std::string& cookie) {
  std::lock_guard<std::mutex> lock(endpoint_->ioMutex());
  return endpoint_->sendFd(group_.peers[destination].uid, fd, cookie);
}

Fd Mailbox::takeFd(int source, const std::string& cookie) {
  std::lock_guard<std::mutex> lock(endpoint_->ioMutex());
  return endpoint_->takeFd(group_.peers[source].uid, cookie);
}

}  // namespace mycoll
