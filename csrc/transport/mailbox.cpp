#include "transport/mailbox.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "base/log.h"
#include "kernels/copy.h"
#include "transport/mesh.h"

namespace mycoll {
namespace {

// The approximate memory of a buffered message beside its payload.
constexpr size_t kBufferedOverhead = 256;

// Made at program start: a request is cancelled also if there is no memory. Never destroyed.
const Status& kCancelled = *new Status(Code::kAborted, "cancelled");

// Whether a failure from this collective on ends such a message. ~0: there is no failure.
bool endsWith(uint64_t from, MessageClass messageClass, uint64_t tag) {
  switch (messageClass) {
    case MessageClass::kCollective: return tag >> kStepBits >= from;
    case MessageClass::kControl: return from == 0;
    case MessageClass::kPointToPoint:
    case MessageClass::kWindow: break;
  }
  return from != ~uint64_t{0};
}

// Whether a message belongs to one call on each of two ranks, or for a window, on one of them.
bool isBetweenTwo(MessageClass messageClass) {
  return messageClass == MessageClass::kPointToPoint || messageClass == MessageClass::kWindow;
}

}  // namespace

// A rank that has not made the group yet must have room for one message from every rank.
size_t eagerInCollectives(const MeshOptions& options, size_t ranks) {
  const size_t room = GroupTable::kMaxEarlyBytes / 2 / std::max<size_t>(ranks, 1);
  return std::min(options.eagerInCollectives, std::max(options.eagerBytes, room));
}

Transfer::~Transfer() {
  // Once the request is done, no other thread uses it. Until then another thread may be ending it:
  // cancel() waits for the I/O lock, under which that happens.
  if (mailbox_ != nullptr && !isDone()) mailbox_->cancel(*this);
}

Mailbox::Mailbox(std::shared_ptr<Mesh> mesh, GroupAddress group, EventHandler* handler)
    : mesh_(std::move(mesh)),
      group_(std::move(group)),
      handler_(handler),
      eagerInCollectives_(eagerInCollectives(mesh_->options(), group_.peers.size())),
      flows_(group_.peers.size()) {}

Mailbox::~Mailbox() { detach(); }

void Mailbox::open() {
  IoLock lock(ioMutex());
  isOpen_ = true;
  mesh_->addMailbox(this);
}

void Mailbox::detach() {
  IoLock lock(ioMutex());
  if (std::exchange(isOpen_, false)) mesh_->removeMailbox(this);
}

IoMutex& Mailbox::ioMutex() const { return mesh_->ioMutex(); }

std::string Mailbox::describeRank(int rank) const {
  return "rank " + std::to_string(rank) + " (" + group_.peers[rank].describe() + ")";
}

bool Mailbox::isOf(int rank, const std::string& uid) const {
  if (rank < 0 || rank >= ranks() || rank == group_.rank) return false;
  const std::string& known = group_.peers[rank].uid;
  return known == uid || (group_.isInvitation && known.empty());
}

FrameHeader Mailbox::header(FrameKind kind, int destination) const {
  FrameHeader result;
  result.kind = kind;
  result.source = group_.rank;
  result.destination = destination;
  result.context = group_.context;
  return result;
}

FrameHeader Mailbox::header(FrameKind kind, const Transfer& request) const {
  FrameHeader result = header(kind, request.peer_);
  result.messageClass = request.messageClass_;
  result.tag = request.tag_;
  result.signature = request.signature_;
  result.messageBytes = request.data_.bytes;
  return result;
}

void Mailbox::post(Transfer& request, MessageClass messageClass, uint64_t tag,
                   const Signature& signature, Span data) {
  assert(!request.isPosted_);
  request.messageClass_ = messageClass;
  request.tag_ = tag;
  request.signature_ = signature;
  request.data_ = data;
  request.transferred_ = 0;
  request.begun_ = 0;
  request.id_ = 0;
  request.isShared_ = false;
  request.isTimed_ = false;
  request.isUnsent_ = false;
  request.descriptor_.reset();
  request.mailbox_ = this;
  request.isPosted_ = true;
  request.done_.store(false, std::memory_order_relaxed);
  request.previous_ = nullptr;
  request.next_ = open_;
  if (open_) open_->previous_ = &request;
  open_ = &request;
  mesh_->addPending(1);
}

void Mailbox::finish(Transfer& request, Status status) {
  assert(request.isPosted_ && !request.isDone());
  assert(!isWaiting(request));
  if (request.isTimed_) mesh_->sharedReads().onTimed(request, status.ok());
  if (request.previous_) {
    request.previous_->next_ = request.next_;
  } else {
    open_ = request.next_;
  }
  if (request.next_) request.next_->previous_ = request.previous_;
  request.isPosted_ = false;
  request.status_ = std::move(status);
  mesh_->addPending(-1);
  if (request.isDelivered_) {
    mesh_->finishDelivered(&request);
  } else {
    request.done_.store(true, std::memory_order_release);
  }
}

void Mailbox::send(Transfer& request, int destination, MessageClass messageClass, uint64_t tag,
                   const Signature& signature, Span data, std::shared_ptr<const Segment> attached) {
  assert(destination >= 0 && destination < ranks());
  IoLock lock(ioMutex());
  request.attached_ = std::move(attached);
  if (!postSend(request, destination, messageClass, tag, signature, data)) return;
  Flow& flow = flows_[destination];
  if (flow.hasGroup || destination == group_.rank) return dispatch(request);
  if (flow.waiting.empty() && flow.early + kBufferedOverhead <= earlyRoom()) {
    return dispatch(request);
  }
  flow.waiting.push_back(&request);
}

bool Mailbox::postSend(Transfer& request, int destination, MessageClass messageClass, uint64_t tag,
                       const Signature& signature, Span data) {
  post(request, messageClass, tag, signature, data);
  request.isReceive_ = false;
  request.peer_ = destination;
  return admit(request, failureOf(messageClass, tag)) && admit(request, absenceOf(destination));
}

// Sends the message, or a request to send it.
void Mailbox::dispatch(Transfer& request) {
  assert(request.isPosted_ && !request.isReceive_ && request.id_ == 0);
  if (isEnding(request.messageClass_, request.tag_)) return;
  const int destination = request.peer_;
  const MessageClass messageClass = request.messageClass_;
  const Span data = request.data_;
  Flow& flow = flows_[destination];
  OutItem item;
  item.request = &request;
  item.header = header(FrameKind::kEager, request);
  const size_t eagerBytes =
      messageClass == MessageClass::kCollective ? eagerInCollectives_ : mesh_->options().eagerBytes;
  Connection* connection = nullptr;
  if (destination != group_.rank) connection = &mesh_->linkTo(group_.peers[destination]);
  const bool isCut = connection && connection->sender().cuts(data.bytes);
  // The receiver accepts pieces only if it knows the group.
  const bool mayBeCut = !isCut || flow.hasGroup;
  const bool isHeld = flow.holdsUs && messageClass != MessageClass::kWindow;
  const bool hasRoom =
      flow.hasGroup || !connection || flow.early + kBufferedOverhead + data.bytes <= earlyRoom();
  size_t early = kBufferedOverhead;
  if (data.bytes <= eagerBytes && !isHeld && mayBeCut && hasRoom) {
    if (isCut) item.message = data;
    if (!isCut) item.header.payloadBytes = data.bytes;
    item.payload = data.begin();
    early += data.bytes;
  } else {
    putInFlight(request);
    item.header.kind = FrameKind::kRequestToSend;
    item.header.senderRequest = request.id_;
    if (connection) mesh_->sharedReads().offer(request, *connection, &item);
  }
  if (!connection) return sendToSelf(request, item.header);
  if (!flow.hasGroup) flow.early += early;
  flow.isAnswered = true;
  connection->enqueue(std::move(item));
}

// Its answer will name it by this number.
void Mailbox::putInFlight(Transfer& request) {
  assert(!inFlight_.contains(request.id_));
  request.id_ = nextId_++;
  inFlight_[request.id_] = &request;
}

void Mailbox::enqueue(int destination, OutItem item) {
  flows_[destination].isAnswered = true;
  mesh_->linkTo(group_.peers[destination]).enqueue(std::move(item));
}

// All senders together may use a quarter of what the receiver's process can keep for all groups.
size_t Mailbox::earlyRoom() const {
  return std::max<size_t>(GroupTable::kMaxEarlyBytes / 4 / group_.peers.size(), 4096);
}

void Mailbox::noteReceived(int source) {
  flows_[source].hasReceived = true;
  noteHasGroup(source);
}

void Mailbox::noteHasGroup(int source) {
  Flow& flow = flows_[source];
  if (std::exchange(flow.hasGroup, true)) return;
  for (Transfer* request : std::exchange(flow.waiting, {})) dispatch(*request);
}

void Mailbox::noteUnanswered(const FrameHeader& came) {
  Flow& flow = flows_[came.source];
  if (flow.isAnswered || came.source == group_.rank) return;
  flow.unanswered += came.payloadBytes + kBufferedOverhead;
  if (flow.unanswered >= earlyRoom() / 2) sendControl(came.source, FrameKind::kResume, "");
}

bool Mailbox::admit(Transfer& request, Status refusal) {
  if (refusal.ok()) return true;
  finish(request, std::move(refusal));
  return false;
}

// ---- decisions of the group

Status Mailbox::failureOf(MessageClass messageClass, uint64_t tag) const {
  return endsWith(failedFrom_, messageClass, tag) ? failure_ : Status();
}

bool Mailbox::isEnding(MessageClass messageClass, uint64_t tag) const {
  return endsWith(endsFrom_, messageClass, tag);
}

void Mailbox::failFrom(uint64_t number, const Status& cause) {
  assert(!cause.ok());
  failure_ = cause;
  failedFrom_ = number;
  endsFrom_ = std::min(endsFrom_, number);
  endAll(cause, [this](const Transfer& request) REQUIRES(ioRole) {
    return !failureOf(request.messageClass_, request.tag_).ok();
  });
}

void Mailbox::setAbsent(int rank, Status status, bool isFailure) {
  absent_.insert_or_assign(rank, Absence{std::move(status), isFailure});
}

Status Mailbox::absenceOf(int rank) {
  const auto found = rank == kFromAnyone && isAlone() ? absent_.begin() : absent_.find(rank);
  if (found == absent_.end()) return Status();
  const Absence& absence = found->second;
  if (!absence.isFailure) return absence.status;
  raiseFailure(0, GroupFails{absence.status});
  return failure_.ok() ? absence.status : failure_;
}

void Mailbox::raise(Event event) { mesh_->raise(this, std::move(event)); }

void Mailbox::raiseFailure(uint64_t from, Event event) {
  endsFrom_ = std::min(endsFrom_, from);
  raise(std::move(event));
}

void Mailbox::failBy(const std::string& what) {
  raiseFailure(0,
               GroupFails{Status(Code::kInternal, "mycoll group '" + group_.name + "': " + what)});
}

// Reports one mismatch only, as the group fails by it.
void Mailbox::beginCollective(uint64_t number, const Signature& signature) {
  calls_.begin(number, signature);
  for (const UnexpectedMessage& message : unexpected_) {
    const FrameHeader& came = message.header;
    if (!came.isOfCollective() || came.collective() != number) continue;
    if (!agreesEarly(came)) return;
  }
}

// Compares the signatures, and the sizes, which the signatures may leave open (all_to_all with
// splits).
bool Mailbox::agrees(const Transfer& request, const FrameHeader& came) {
  if (agree(came.messageClass, request.signature_, came.signature) &&
      came.messageBytes == request.data_.bytes) {
    return true;
  }
  raiseFailure(came.isOfCollective() ? came.collective() : 0,
               CallsDiffer{request.signature_, request.data_.bytes, came});
  return false;
}

// For a message that matches no request yet.
bool Mailbox::agreesEarly(const FrameHeader& came) {
  if (!came.isOfCollective()) return true;
  const Signature* const mine = calls_.find(came.collective());
  if (mine == nullptr || *mine == came.signature) return true;
  raiseFailure(came.collective(), CallsDiffer{*mine, came.messageBytes, came});
  return false;
}

// ---- messages

void Mailbox::sendToSelf(Transfer& request, const FrameHeader& message) {
  const FrameTarget target = onFrame(message);
  if (message.kind != FrameKind::kEager) return;
  const bool isTaken =
      target.request || target.message || message.messageClass == MessageClass::kWindow;
  if (!isTaken) return;  // the calls differ: the group fails and ends the request
  copy(target.data, request.data_.data, request.data_.bytes);
  onPayload(message, target);
  finish(request, Status());
}

void Mailbox::receive(Transfer& request, int source, MessageClass messageClass, uint64_t tag,
                      const Signature& signature, Span data) {
  assert(source == kFromAnyone || (source >= 0 && source < ranks()));
  IoLock lock(ioMutex());
  post(request, messageClass, tag, signature, data);
  request.isReceive_ = true;
  request.peer_ = source;
  if (!admit(request, failureOf(messageClass, tag)) || isEnding(messageClass, tag)) return;
  if (messageClass == MessageClass::kWindow && windows_.finishNow(request)) return;
  for (auto message = unexpected_.begin(); message != unexpected_.end(); ++message) {
    const FrameHeader& came = message->header;
    if (!message->claimedBy && came.messageClass == messageClass && came.tag == tag &&
        (source == kFromAnyone || came.source == source)) {
      return acceptUnexpected(request, message);
    }
  }
  if (!admit(request, absenceOf(source))) return;
  posted_.push_back(&request);
}

void Mailbox::acceptUnexpected(Transfer& request, std::list<UnexpectedMessage>::iterator message) {
  assert(request.isReceive_ && message->claimedBy == nullptr);
  request.peer_ = message->header.source;
  if (!agrees(request, message->header)) return;
  request.descriptor_ = std::move(message->descriptor);
  if (message->header.kind == FrameKind::kRequestToSend) {
    clearToSend(request, message->header, message->place);
    unexpected_.erase(message);
  } else if (message->isComplete) {
    copy(request.data_.data, message->payload.get(), request.data_.bytes);
    countBuffered(message->header, false);
    unexpected_.erase(message);
    finish(request, Status());
  } else {
    message->claimedBy = &request;
  }
}

template <typename Wanted>
void Mailbox::eraseUnexpected(Wanted isWanted) {
  std::erase_if(unexpected_, [&](const UnexpectedMessage& message) REQUIRES(ioRole) {
    if (!isWanted(message)) return false;
    if (!message.isComplete) {
      mesh_->discard([&](const FrameTarget& target) { return target.message == &message; });
    }
    return true;
  });
}

void Mailbox::countBuffered(const FrameHeader& came, bool isMore) {
  Flow& flow = flows_[came.source];
  const size_t bytes = came.payloadBytes + kBufferedOverhead;
  flow.bufferedBytes += isMore ? bytes : -bytes;
  const size_t limit = flow.isHeld ? kMaxBufferedBytes / 2 : kMaxBufferedBytes;
  const bool isTooMuch = flow.bufferedBytes > limit;
  if (isTooMuch == flow.isHeld || !isPresent(came.source) || !failure_.ok()) return;
  flow.isHeld = isTooMuch;
  sendControl(came.source, isTooMuch ? FrameKind::kHold : FrameKind::kResume, "");
}

// Messages that have not begun to be sent wait, too.
void Mailbox::onHold(const FrameHeader& came) {
  if (came.source == group_.rank) return;
  for (OutItem& item : mesh_->linkTo(group_.peers[came.source]).sender().queue()) {
    if (item.header.kind != FrameKind::kEager ||
        item.header.messageClass == MessageClass::kWindow ||
        item.header.context != group_.context || item.header.destination != came.source ||
        item.sent > 0 || !item.request) {
      continue;
    }
    putInFlight(*item.request);
    item.payload = nullptr;
    item.message = {};
    item.header.kind = FrameKind::kRequestToSend;
    item.header.senderRequest = item.request->id_;
    item.header.payloadBytes = 0;
    item.header.magic = FrameHeader::kMagic;  // not sealed yet
  }
}

void Mailbox::clearToSend(Transfer& request, const FrameHeader& came, SharedPlace place) {
  request.peer_ = came.source;
  if (came.source == group_.rank) {
    Transfer& sender = *inFlight_.at(came.senderRequest);
    inFlight_.erase(sender.id_);
    copy(request.data_.data, sender.data_.data, request.data_.bytes,
         request.data_.bytes >= kStreamingBytes);
    finish(sender, Status());
    return finish(request, Status());
  }
  putInFlight(request);
  Connection& connection = mesh_->linkTo(group_.peers[came.source]);
  if (place.region != 0 && mesh_->sharedReads().begin(request, came, &place, connection)) return;
  OutItem item;
  item.header = header(FrameKind::kClearToSend, came.source);
  item.header.senderRequest = came.senderRequest;
  item.header.receiverRequest = request.id_;
  item.header.tag = place.region;
  flows_[came.source].isAnswered = true;
  connection.enqueue(std::move(item));
}

void Mailbox::onRead(Transfer& request, const FrameHeader& came, bool isValid) {
  inFlight_.erase(request.id_);
  if (!isValid) {
    request.isShared_ = false;
    request.transferred_ = 0;
    return clearToSend(request, came, {});
  }
  OutItem item;
  item.header = header(FrameKind::kTaken, came.source);
  item.header.senderRequest = came.senderRequest;
  enqueue(came.source, std::move(item));
  finish(request, Status());
}

void Mailbox::cancel(Transfer& request) {
  IoLock lock(ioMutex());
  if (request.isPosted_) abandon(request, kCancelled);
}

int Mailbox::presentRank(const std::string& uid) const {
  for (int rank = 0; rank < ranks(); ++rank) {
    if (rank != group_.rank && group_.peers[rank].uid == uid && isPresent(rank)) return rank;
  }
  return -1;
}

void Mailbox::abandon(Transfer& request, Status status) {
  mesh_->forget(&request);
  std::erase(posted_, &request);
  inFlight_.erase(request.id_);
  if (!request.isReceive_) flows_[request.peer_].waiting.remove(&request);
  if (request.isShared_) mesh_->sharedReads().end(request);
  for (UnexpectedMessage& message : unexpected_) {
    // Its payload continues to arrive; another receive may claim the message.
    if (message.claimedBy == &request) message.claimedBy = nullptr;
  }
  eraseUnexpected([&](const UnexpectedMessage& message) REQUIRES(ioRole) {  // a message to itself
    return message.header.source == group_.rank && !request.isReceive_ &&
           message.header.kind == FrameKind::kRequestToSend &&
           message.header.senderRequest == request.id_;
  });
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

FrameTarget Mailbox::onFrame(const FrameHeader& came, Fd descriptor, const SharedPlace& place) {
  FrameTarget target;
  noteReceived(came.source);
  if (came.isPiece()) return targetOfPiece(came);
  noteUnanswered(came);
  if (isEnding(came.messageClass, came.tag)) return target;
  if (came.kind == FrameKind::kPut || came.messageClass == MessageClass::kWindow) {
    return windows_.onFrame(came);
  }
  Transfer* request = matchPosted(came);
  if (request) {
    if (!agrees(*request, came)) return target;
    request->descriptor_ = std::move(descriptor);
    if (came.kind == FrameKind::kRequestToSend) {
      clearToSend(*request, came, place);
    } else if (came.isBeginning()) {
      putInFlight(*request);
      assemblies_[{came.source, came.number}] = {request->id_, nullptr, came.messageBytes};
    } else {
      target.request = request;
      target.data = request->data_.begin();
    }
    return target;
  }
  if (!agreesEarly(came)) return target;
  UnexpectedMessage& message = unexpected_.emplace_back();
  message.header = came;
  message.place = place;
  message.descriptor = std::move(descriptor);
  if (came.kind == FrameKind::kEager) {
    message.header.payloadBytes = came.messageBytes;
    message.payload = std::make_unique_for_overwrite<char[]>(came.messageBytes);
    countBuffered(message.header, true);
    if (came.isBeginning()) {
      assemblies_[{came.source, came.number}] = {0, &message, came.messageBytes};
      return target;
    }
    target.data = message.payload.get();
    target.message = &message;
  } else {
    message.isComplete = true;
  }
  return target;
}

FrameTarget Mailbox::targetOfPiece(const FrameHeader& came) {
  uint64_t id = came.receiverRequest;
  if (came.kind == FrameKind::kMore) {
    auto found = assemblies_.find({came.source, came.number});
    if (found == assemblies_.end()) return {};  // the message was abandoned
    Assembly& assembly = found->second;
    UnexpectedMessage* const message = assembly.message;
    id = assembly.request;
    if (came.payloadBytes > assembly.left ||
        (message && (came.offset > message->header.messageBytes ||
                     came.payloadBytes > message->header.messageBytes - came.offset))) {
      failBy(describeRank(came.source) + " sent more than it had announced");
      return {};
    }
    assembly.left -= came.payloadBytes;
    if (assembly.left == 0) assemblies_.erase(found);
    if (message) {
      FrameTarget target;
      target.message = message;
      target.data = message->payload.get() + came.offset;
      return target;
    }
  }
  auto found = inFlight_.find(id);
  return found == inFlight_.end() ? FrameTarget{} : targetIn(*found->second, came);
}

// Counts the bytes of a piece when it begins to arrive. As the total is limited, the request
// finishes only when no piece is in flight.
FrameTarget Mailbox::targetIn(Transfer& request, const FrameHeader& came) {
  if (!request.isReceive_ || request.peer_ != came.source || request.isShared_ ||
      came.offset > request.data_.bytes || came.payloadBytes > request.data_.bytes - came.offset ||
      came.payloadBytes > request.data_.bytes - request.begun_) {
    failBy(describeRank(came.source) + " sent more than was agreed");
    return {};
  }
  if (request.isTimed_ && request.begun_ == 0) mesh_->sharedReads().onData();
  request.begun_ += came.payloadBytes;
  FrameTarget target;
  target.request = &request;
  target.data = request.data_.begin() + came.offset;
  target.isStreaming = request.data_.bytes >= kStreamingBytes;
  return target;
}

void Mailbox::onPayload(const FrameHeader& came, const FrameTarget& target) {
  if (Transfer* request = target.request) {
    request->transferred_ += came.payloadBytes;
    if (request->transferred_ == request->data_.bytes) {
      if (came.isPiece()) inFlight_.erase(request->id_);
      finish(*request, Status());
    }
  } else if (UnexpectedMessage* const complete = target.message) {
    complete->got += came.payloadBytes;
    complete->isComplete = complete->got >= complete->header.messageBytes;
    Transfer* const claimer = complete->claimedBy;
    if (!complete->isComplete || !claimer) return;
    complete->claimedBy = nullptr;
    acceptUnexpected(*claimer, std::find_if(unexpected_.begin(), unexpected_.end(),
                                            [&](const auto& each) { return &each == complete; }));
  }
}

void Mailbox::onAnswer(const FrameHeader& came) {
  noteReceived(came.source);
  const auto found = inFlight_.find(came.senderRequest);
  if (found == inFlight_.end()) return;
  Transfer& request = *found->second;
  const bool isTaken = came.kind == FrameKind::kTaken;
  if (request.isReceive_ || request.peer_ != came.source || (isTaken && !request.isShared_)) return;
  inFlight_.erase(found);
  if (isTaken) return finish(request, Status());
  Connection& connection = mesh_->linkTo(group_.peers[came.source]);
  if (request.isShared_ && came.tag != 0) {
    connection.regions().takeBack(SharedReads::regionOf(request.data_));
  }
  OutItem item;
  item.header = header(FrameKind::kData, came.source);
  item.header.receiverRequest = came.receiverRequest;
  item.header.messageBytes = request.data_.bytes;
  item.message = request.data_;
  item.request = &request;
  flows_[came.source].isAnswered = true;
  connection.enqueue(std::move(item));
}

void Mailbox::forEachMessage(const std::function<void(Transfer&)>& visit) {
  IoLock lock(ioMutex());
  for (Transfer* request = open_; request; request = request->next_) {
    if (isBetweenTwo(request->messageClass_)) visit(*request);
  }
}

// ---- for the group -----------------------------------------------------------------------------

void Mailbox::onControl(const FrameHeader& came, const std::string& payload) {
  // A rank that has failed or left receives nothing more.
  if (came.kind != FrameKind::kAbort && came.kind != FrameKind::kGoodbye) noteHasGroup(came.source);
  if (came.kind == FrameKind::kHold || came.kind == FrameKind::kResume) {
    flows_[came.source].holdsUs = came.kind == FrameKind::kHold;
    if (came.kind == FrameKind::kHold) onHold(came);
    return;
  }
  raise(ControlFrame{came, payload});
}

void Mailbox::sendControl(int destination, FrameKind kind, const std::string& payload,
                          uint64_t subject) {
  if (destination == group_.rank) return onControl(header(kind, destination), payload);
  enqueue(destination, controlItem(destination, kind, payload, subject));
}

void Mailbox::sendControlIfConnected(int destination, FrameKind kind, const std::string& payload) {
  mesh_->enqueueQuietly(group_.peers[destination], controlItem(destination, kind, payload));
}

OutItem Mailbox::controlItem(int destination, FrameKind kind, const std::string& payload,
                             uint64_t subject) const {
  OutItem item;
  item.header = header(kind, destination);
  item.header.tag = subject;
  item.header.payloadBytes = payload.size();
  item.owned = payload;
  return item;
}

void Mailbox::notify(int rank, FrameKind kind, const std::string& payload, uint64_t subject) {
  {
    IoLock lock(ioMutex());
    if (!isOpen_ || !isPresent(rank)) return;
    sendControl(rank, kind, payload, subject);
  }
  // An idle process has not asked to be rung for data in its rings.
  const PeerAddress& peer = group_.peers[rank];
  if (mesh_->isLocal(peer)) mesh_->bellOf(peer).ring();
  mesh_->progress();
}

bool Mailbox::isFlushed() {
  IoLock lock(ioMutex());
  return !mesh_->hasQueued(group_.context, group_.rank);
}

bool Mailbox::isConnectedTo(int rank) {
  IoLock lock(ioMutex());
  return mesh_->hasLinkTo(group_.peers[rank]);
}

// Whether no message has arrived for it.
bool Mailbox::isWaiting(const Transfer& request) const {
  return std::find(posted_.begin(), posted_.end(), &request) != posted_.end();
}

bool Mailbox::isUnmatched(const Transfer& request) {
  IoLock lock(ioMutex());
  if (!request.isPosted_) return false;
  if (request.isReceive_) return isWaiting(request);
  const std::list<Transfer*>& waiting = flows_[request.peer_].waiting;
  return inFlight_.count(request.id_) > 0 ||
         std::find(waiting.begin(), waiting.end(), &request) != waiting.end();
}

template <typename Wanted>
bool Mailbox::isAnyOpen(Wanted isWanted) const {
  const Transfer* request = open_;
  while (request && !isWanted(*request)) request = request->next_;
  return request != nullptr;
}

bool Mailbox::isReceiving(bool orPosted) {
  IoLock lock(ioMutex());
  return isAnyOpen([&](const Transfer& request) REQUIRES(ioRole) {
    return request.messageClass_ == MessageClass::kPointToPoint && request.isReceive_ &&
           (orPosted || !isWaiting(request));
  });
}

bool Mailbox::needs(int rank) const {
  return isAnyOpen([rank](const Transfer& request) { return request.peer_ == rank; });
}

void Mailbox::endAll(const Status& status, const std::function<bool(const Transfer&)>& isMeant) {
  for (Transfer* request = open_; request;) {
    Transfer* next = request->next_;
    if (isMeant(*request)) abandon(*request, status);
    request = next;
  }
}

void Mailbox::endSends(const Status& status) {
  endAll(status, [](const Transfer& request) { return !request.isReceive_; });
}

void Mailbox::endMessagesOf(int rank, const Status& status) {
  endAll(status, [&](const Transfer& request) REQUIRES(ioRole) {
    const bool isFrom = request.peer_ == rank || (request.peer_ == kFromAnyone && isAlone());
    return isFrom && isBetweenTwo(request.messageClass_) &&
           (!request.isReceive_ || isWaiting(request));
  });
}

void Mailbox::endUnsent(const std::string& uid, const std::string& how) {
  for (Transfer* request = open_; request;) {
    Transfer& each = *std::exchange(request, request->next_);
    if (!each.isUnsent_ || group_.peers[each.peer_].uid != uid) continue;
    Status why = absenceOf(each.peer_);
    if (why.ok()) {
      why = Status(Code::kPeerLost,
                   "mycoll group '" + group_.name + "': " + describeRank(each.peer_) + " " + how);
    }
    abandon(each, std::move(why));
  }
}

void Mailbox::endReceivesFrom(int rank, const Status& status) {
  endAll(status, [&](const Transfer& request) REQUIRES(ioRole) {
    return request.isReceive_ && request.peer_ == rank && !isWaiting(request);
  });
  std::erase_if(assemblies_, [rank](const auto& entry) { return entry.first.first == rank; });
  eraseUnexpected([rank](const UnexpectedMessage& message) {
    return message.header.source == rank &&
           (message.header.kind == FrameKind::kRequestToSend || !message.isComplete);
  });
}

}  // namespace mycoll
