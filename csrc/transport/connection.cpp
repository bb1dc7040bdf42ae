#include "transport/connection.h"

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

#include "base/crc32c.h"
#include "base/log.h"
#include "kernels/copy.h"
#include "transport/loopback.h"

namespace mycoll {
namespace {

using State = Connection::State;

// Large messages leave in pieces, so that others get their turn on the link.
constexpr size_t kPieceBytes = 1024 * 1024;
constexpr size_t kToTheEnd = ~size_t{0};
// What a process of this host that has ended had sent over TCP comes within so much time of each
// other, or not at all.
constexpr std::chrono::milliseconds kSilentHere(500);

[[maybe_unused]] bool isLegal(State from, State to) {
  switch (from) {
    case State::kIdle: return to == State::kDialing || to == State::kOpen || to == State::kEnding;
    case State::kDialing: return to == State::kOpen || to == State::kEnding || to == State::kIdle;
    case State::kOpen: return to == State::kEnding;
    case State::kEnding: return to == State::kLost;
    case State::kLost: break;
  }
  return false;
}

bool isInItsName(const Mailbox& mailbox, const FrameHeader& header, const std::string& uid) {
  return header.source >= 0 && header.source < mailbox.ranks() &&
         mailbox.group().peers[header.source].uid == uid;
}

// Frames of the group itself; their payload is short and handed over whole.
bool isControlFrame(FrameKind kind) {
  return kind == FrameKind::kAbort || kind == FrameKind::kGoodbye || kind == FrameKind::kProbe ||
         kind == FrameKind::kArrived || kind == FrameKind::kQuestion ||
         kind == FrameKind::kAnswer || kind == FrameKind::kDeadlock || kind == FrameKind::kHold ||
         kind == FrameKind::kGoOn;
}

bool comesInPieces(FrameKind kind) { return kind == FrameKind::kData || kind == FrameKind::kPut; }

uint64_t mostPayload(FrameKind kind) {
  if (isControlFrame(kind)) return kMaxControlBytes;
  if (kind == FrameKind::kEager) return kMaxEagerBytes;
  return comesInPieces(kind) ? ~uint64_t{0} : 0;
}

// Whether a message in pieces is between two of them: nothing of the next one is prepared or sent.
bool isBetweenPieces(const OutItem& item) {
  return comesInPieces(item.header.kind) && item.sent == 0 && item.header.payloadBytes == 0;
}

void beginPiece(OutItem& item) {
  size_t bytes = std::min(kPieceBytes, item.message.bytes - item.messageSent);
  item.payload = item.message.begin() + item.messageSent;
  item.header.payloadBytes = bytes;
}

void endPiece(OutItem& item) {
  item.messageSent += item.header.payloadBytes;
  if (item.header.kind == FrameKind::kPut) item.header.receiverRequest += item.header.payloadBytes;
  item.header.payloadBytes = 0;
  item.header.magic = FrameHeader::kMagic;
  item.sent = 0;
}

const char* payloadOf(const OutItem& item) {
  return item.owned.empty() ? item.payload : item.owned.data();
}

void seal(OutItem& item) {
  item.header.magic = FrameHeader::kCheckedMagic;
  item.header.payloadCheck = crc32c(payloadOf(item), item.header.payloadBytes);
  item.header.headerCheck = item.header.check();
}

// What is left of a frame: its header, its payload, or both. Returns how many parts.
int partsOf(OutItem& item, Span parts[2]) {
  int count = 0;
  if (item.sent < sizeof(FrameHeader)) {
    char* start = reinterpret_cast<char*>(&item.header) + item.sent;
    parts[count++] = {start, sizeof(FrameHeader) - item.sent};
  }
  const size_t payloadSent = item.sent < sizeof(FrameHeader) ? 0 : item.sent - sizeof(FrameHeader);
  if (payloadSent < item.header.payloadBytes) {
    parts[count++] = {const_cast<char*>(payloadOf(item)) + payloadSent,
                      item.header.payloadBytes - payloadSent};
  }
  return count;
}

// What a link's -1 means: errno says why, 0 is an end in good order.
Loss closed(LossReason reason) {
  return {errno == ETIMEDOUT ? LossReason::kSilent : reason, errno == 0 ? "" : strerror(errno)};
}

}  // namespace

const char* name(State state) {
  switch (state) {
    case State::kIdle: return "idle";
    case State::kDialing: return "dialing";
    case State::kOpen: return "open";
    case State::kEnding: return "ending";
    case State::kLost: return "lost";
  }
  return "unknown state";
}

// The one place where the state changes.
void Connection::moveTo(State next) {
  assert(isLegal(state_, next));
  MYCOLL_LOG_DEBUG("connection with %s: %s -> %s", peer_.describe().c_str(), name(state_),
                   name(next));
  const int dialing = (next == State::kDialing) - (state_ == State::kDialing);
  local_.dialing += dialing;
  local_.pending.fetch_add(dialing, std::memory_order_relaxed);
  state_ = next;
}

Connection::~Connection() {
  close();
  if (state_ != State::kDialing) return;
  --local_.dialing;
  local_.pending.fetch_sub(1, std::memory_order_relaxed);
}

void Connection::close() {
  if (link_.sender && !link_.isShm) --local_.tcpLinks;
  link_ = {};
}

// ---- being made --------------------------------------------------------------------------------

void Connection::dial() {
  if (peer_.uid == local_.address.uid) return open(Loopback::make());
  moveTo(State::kDialing);
  dial_ = std::make_unique<Dial>(local_, peer_);
}

void Connection::goOnDialing() {
  if (state_ != State::kDialing) return;
  dial_->goOn();
  if (dial_->state() == Dial::State::kFailed) {
    end(dial_->loss());
  } else if (dial_->state() == Dial::State::kMade) {
    open(dial_->takeLink());
  }
}

void Connection::dialAgain() {
  if (state_ == State::kDialing && dial_->isDue()) dial_->again();
}

std::vector<Transfer*> Connection::giveUpDialing() {
  moveTo(State::kIdle);
  dial_.reset();
  return takeUnsent();
}

void Connection::open(Link link) {
  moveTo(State::kOpen);
  dial_.reset();  // the peer may have been faster
  link_ = std::move(link);
  wasOpen_ = true;
  if (!link_.isShm) ++local_.tcpLinks;
  MYCOLL_LOG_DEBUG("connected to %s over %s", peer_.describe().c_str(),
                   link_.isShm ? "shared memory" : "tcp");
  if (local_.asleep > 0) setAsleep(true);
  link_.receiver->onEvent(false);  // what came with the handshake raises no event any more
  flush();
}

// ---- out ---------------------------------------------------------------------------------------

void Connection::enqueue(OutItem item) {
  if (state_ == State::kLost) {
    if (!item.request) return;
    item.request->mailbox_->abandon(
        *item.request, Status(Code::kPeerLost, "the receiving rank " + loss_.describe()));
    return;
  }
  const bool wasEmpty = queue_.empty();
  queue_.push_back(std::move(item));
  if (wasEmpty) flush();
}

bool Connection::hasQueued(uint64_t context, int rank) const {
  return std::any_of(queue_.begin(), queue_.end(), [&](const OutItem& item) {
    return item.header.context == context && item.header.source == rank;
  });
}

bool Connection::flush(size_t turnBytes) {
  bool moved = false;
  size_t movedBytes = 0;
  while (state_ == State::kOpen && !queue_.empty() && movedBytes < turnBytes) {
    OutItem& item = queue_.front();
    if (isBetweenPieces(item)) beginPiece(item);
    if (local_.options.isChecked && !item.header.isChecked()) seal(item);
    const size_t total = sizeof(FrameHeader) + item.header.payloadBytes;
    Span parts[2];
    const int count = partsOf(item, parts);
    const ssize_t wrote = link_.sender->write(parts, count);
    if (wrote < 0) {
      end(closed(LossReason::kClosed));
      return moved;
    }
    if (wrote == 0) return moved;
    moved = true;
    item.sent += static_cast<size_t>(wrote);
    movedBytes += static_cast<size_t>(wrote);
    if (item.sent < total) continue;
    if (comesInPieces(item.header.kind) && item.request) {
      endPiece(item);
      if (item.messageSent < item.message.bytes) {
        giveWay();
        continue;
      }
    }
    Transfer* request = item.request;
    queue_.pop_front();
    if (request) request->mailbox_->finish(*request, Status());
  }
  return moved;
}

// What follows a put in its window does not overtake it.
void Connection::giveWay() {
  const OutItem& first = queue_.front();
  const bool isPut = first.header.kind == FrameKind::kPut;
  auto next = std::next(queue_.begin());
  const auto end = std::find_if(next, queue_.end(), [&](const OutItem& item) {
    return isPut && item.header.messageClass == MessageClass::kWindow &&
           item.header.context == first.header.context && item.header.tag == first.header.tag;
  });
  std::rotate(queue_.begin(), next, end);
}

void Connection::forget(Transfer* request) {
  for (auto item = queue_.begin(); item != queue_.end();) {
    if (item->request != request) {
      ++item;
    } else if (item->sent == 0) {
      item = queue_.erase(item);
    } else {
      // A part of the frame has left, and the rest must follow: as it was, since the receiver may
      // get to use it before it hears of a failure.
      if (item->payload) item->owned.assign(item->payload, item->header.payloadBytes);
      item->request = nullptr;
      ++item;
    }
  }
  if (target_.request == request) target_ = {};
}

void Connection::forget(Mailbox* mailbox) {
  if (link_.receiver) link_.receiver->dropFds(mailbox->fdPrefix());
  if (mailbox_ != mailbox) return;
  mailbox_ = nullptr;
  target_ = {};
}

void Connection::forget(Mailbox* mailbox, uint64_t window) {
  if (mailbox_ == mailbox && target_.window == window) target_ = {};
}

bool Connection::sendFd(int fd, const std::string& cookie) {
  return link_.isShm && link_.sender->sendFd(fd, cookie);
}

Fd Connection::takeFd(const std::string& cookie) {
  return link_.isShm ? link_.receiver->takeFd(cookie) : Fd();
}

void Connection::setAsleep(bool asleep) {
  if (!link_.sender) return;
  link_.receiver->setAsleep(asleep);
  link_.sender->setAsleep(asleep);
}

// ---- in ----------------------------------------------------------------------------------------

bool Connection::onEvent(int fd, bool isClosed) {
  if (!link_.receiver || link_.receiver->fd() != fd) return false;
  link_.receiver->onEvent(isClosed);
  return true;
}

void Connection::breakOff(Loss loss) {
  isReadOver_ = true;
  end(std::move(loss));
}

bool Connection::drain(size_t turnBytes) {
  bool moved = false;
  size_t movedBytes = 0;
  char discarded[4096];
  while (link_.receiver && !isReadOver_ && movedBytes < turnBytes) {
    if (headerGot_ < sizeof(FrameHeader)) {
      const ssize_t got = link_.receiver->read(reinterpret_cast<char*>(&header_) + headerGot_,
                                               sizeof(FrameHeader) - headerGot_, false);
      if (got < 0) breakOff(closed(LossReason::kClosed));
      if (got <= 0) return moved;
      moved = true;
      headerGot_ += static_cast<size_t>(got);
      if (headerGot_ < sizeof(FrameHeader)) continue;
      payloadGot_ = 0;
      payloadCheck_ = 0;
      if (!beginFrame()) return moved;
    }
    const size_t left = header_.payloadBytes - payloadGot_;
    if (left > 0) {
      const bool isKept = target_.data || !control_.empty();
      char* into = target_.data        ? target_.data + payloadGot_
                   : !control_.empty() ? control_.data() + payloadGot_
                                       : discarded;
      const ssize_t got = link_.receiver->read(
          into, isKept ? left : std::min(left, sizeof(discarded)), target_.isStreaming);
      if (got < 0) breakOff(closed(LossReason::kClosedInMessage));
      if (got <= 0) return moved;
      moved = true;
      if (header_.isChecked()) {
        payloadCheck_ = crc32c(into, static_cast<size_t>(got), payloadCheck_);
      }
      payloadGot_ += static_cast<size_t>(got);
      movedBytes += static_cast<size_t>(got);
      if (payloadGot_ < header_.payloadBytes) continue;
    }
    headerGot_ = 0;
    if (header_.isChecked() && header_.payloadCheck != payloadCheck_) {
      breakOff({LossReason::kChanged, ""});
      return moved;
    }
    endFrame();
  }
  return moved;
}

// Decides where the payload goes. False: the frame makes no sense, and the connection is given up.
bool Connection::beginFrame() {
  mailbox_ = nullptr;
  target_ = {};
  control_.clear();
  isEarly_ = false;
  if (header_.isChecked() && header_.headerCheck != header_.check()) {
    return breakOff({LossReason::kChanged, ""}), false;
  }
  if ((header_.magic != FrameHeader::kMagic && !header_.isChecked()) ||
      header_.payloadBytes > mostPayload(header_.kind) ||
      (header_.kind == FrameKind::kEager && header_.messageBytes != header_.payloadBytes)) {
    return breakOff({LossReason::kNotAFrame, ""}), false;
  }
  Mailbox* mailbox = local_.groups.find(header_.context, header_.destination);
  if (!mailbox) {
    // A piece of a message was never asked for by a group that does not exist.
    const bool isLate =
        local_.groups.standing(header_.context, header_.destination) == Standing::kGone;
    if (isLate || comesInPieces(header_.kind) ||
        !local_.groups.makeRoom(header_.context, header_.destination, header_.payloadBytes)) {
      return true;  // read and thrown away
    }
    isEarly_ = true;
    control_.resize(header_.payloadBytes);
    return true;
  }
  if (!isInItsName(*mailbox, header_, peer_.uid)) {
    return breakOff({LossReason::kNotItsName, ""}), false;
  }
  mailbox_ = mailbox;
  if (isControlFrame(header_.kind)) {
    control_.resize(header_.payloadBytes);
  } else if (header_.kind != FrameKind::kClearToSend) {
    target_ = mailbox->onFrame(header_);
  }
  return true;
}

void Connection::endFrame() {
  if (!mailbox_) {
    if (!isEarly_) return;
    EarlyFrame frame{peer_.uid, header_, std::exchange(control_, {})};
    if (Mailbox* late = local_.groups.find(header_.context, header_.destination)) {
      // Its group was made while the payload was arriving.
      if (!deliver(*late, frame)) breakOff({LossReason::kNotItsName, ""});
    } else if (local_.groups.standing(header_.context, header_.destination) != Standing::kGone) {
      local_.groups.keep(std::move(frame));
    }
  } else if (header_.kind == FrameKind::kClearToSend) {
    mailbox_->onClearToSend(header_);
  } else if (isControlFrame(header_.kind)) {
    mailbox_->onControl(header_, control_);
  } else {
    mailbox_->onPayload(header_, target_);
  }
  mailbox_ = nullptr;
  target_ = {};
  control_.clear();
}

bool Connection::deliver(Mailbox& mailbox, const EarlyFrame& frame) {
  const FrameHeader& header = frame.header;
  if (!isInItsName(mailbox, header, frame.uid)) return false;
  if (isControlFrame(header.kind)) {
    mailbox.onControl(header, frame.payload);
  } else if (header.kind == FrameKind::kEager || header.kind == FrameKind::kRequestToSend) {
    const Mailbox::Target target = mailbox.onFrame(header);
    if (target.data) copy(target.data, frame.payload.data(), frame.payload.size());
    if (header.kind == FrameKind::kEager) mailbox.onPayload(header, target);
  }
  return true;
}

// ---- ending ------------------------------------------------------------------------------------

void Connection::end(Loss loss) {
  if (state_ == State::kEnding && loss.reason == LossReason::kSilent) loss_ = std::move(loss);
  if (state_ == State::kEnding || state_ == State::kLost) return;
  moveTo(State::kEnding);
  loss_ = std::move(loss);
  lastByte_ = Deadline::Clock::now();
  dial_.reset();
}

bool Connection::hasSaidAll(bool isEnded) {
  if (!link_.receiver) return true;
  link_.receiver->lookAgain();
  if (drain(kToTheEnd)) lastByte_ = Deadline::Clock::now();
  if (link_.isShm || isReadOver_ || loss_.reason == LossReason::kSilent) return true;
  const std::chrono::milliseconds patience =
      isEnded ? kSilentHere : std::chrono::seconds(local_.options.networkSeconds);
  return Deadline::Clock::now() - lastByte_ > patience;
}

void Connection::sayNoMore() NO_THREAD_SAFETY_ANALYSIS {
  if (state_ == State::kOpen && !link_.isShm) shutdown(link_.sender->fd(), SHUT_WR);
}

bool Connection::hasArrived() NO_THREAD_SAFETY_ANALYSIS {
  if (state_ != State::kOpen || link_.isShm) return true;
  char discarded[16 * 1024];
  // Some of it: the peer may go on sending.
  for (int i = 0; i < 64; ++i) {
    if (recv(link_.sender->fd(), discarded, sizeof(discarded), MSG_DONTWAIT) <= 0) break;
  }
  int unacknowledged = 0;
  return ioctl(link_.sender->fd(), SIOCOUTQ, &unacknowledged) != 0 || unacknowledged == 0;
}

std::vector<Transfer*> Connection::takeUnsent() {
  std::vector<Transfer*> unsent;
  for (const OutItem& item : std::exchange(queue_, {})) {
    if (item.request) unsent.push_back(item.request);
  }
  return unsent;
}

std::vector<Transfer*> Connection::lose() {
  moveTo(State::kLost);
  close();
  return takeUnsent();
}

}  // namespace mycoll
