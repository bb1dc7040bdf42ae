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
#include "transport/tcp/address.h"
#include "transport/tcp/link.h"

namespace mycoll {
namespace {

using State = Connection::State;

// Large messages are sent in pieces, so that other items get their turn on the link.
constexpr size_t kPieceBytes = 1024 * 1024;
constexpr size_t kToTheEnd = ~size_t{0};
// From this round-trip time on, one socket's window is often too small for the line, and grows
// slowly.
constexpr std::chrono::milliseconds kFarAway(5);
constexpr int kFlowsFarAway = 8;
// Data that a process of this host sent over TCP before it ended arrives within this time of the
// previous data, or not at all.
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

// Frames for the group itself, and kHold and kGoOn. Their payload is short and delivered whole.
bool isControlFrame(FrameKind kind) {
  return kind == FrameKind::kAbort || kind == FrameKind::kGoodbye || kind == FrameKind::kProbe ||
         kind == FrameKind::kArrived || kind == FrameKind::kQuestion ||
         kind == FrameKind::kAnswer || kind == FrameKind::kDeadlock || kind == FrameKind::kHold ||
         kind == FrameKind::kGoOn || isForming(kind);
}

bool comesInPieces(FrameKind kind) {
  return kind == FrameKind::kData || kind == FrameKind::kMore || kind == FrameKind::kPut;
}

// Whether the sender continues only after an answer from this rank.
bool wantsAnswer(FrameKind kind) {
  return kind == FrameKind::kRequestToSend || kind == FrameKind::kArrived ||
         kind == FrameKind::kQuestion || kind == FrameKind::kInvitation ||
         kind == FrameKind::kJoined;
}

uint64_t mostPayload(FrameKind kind) {
  if (kind == FrameKind::kInvitation) return kMaxInvitationBytes;
  if (kind == FrameKind::kJoined) return kMaxInvitationBytes;
  if (isControlFrame(kind)) return kMaxControlBytes;
  if (kind == FrameKind::kEager) return kMaxEagerBytes;
  if (kind == FrameKind::kRequestToSend) return sizeof(SharedPlace);
  return comesInPieces(kind) ? ~uint64_t{0} : 0;
}

const char* payloadOf(const OutItem& item) {
  return item.owned.empty() ? item.payload : item.owned.data();
}

void seal(OutItem& item) {
  item.header.magic = FrameHeader::kCheckedMagic;
  item.header.payloadCheck = crc32c(payloadOf(item), item.header.payloadBytes);
  item.header.headerCheck = item.header.check();
}

// Finds the unsent parts of a frame: its header, its payload, or both. Returns their number.
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

// The loss that a link's -1 reports: errno holds the error, or 0 for a clean close.
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
  countStuck();
}

void Connection::countStuck() {
  const bool isStuck =
      state_ == State::kOpen &&
      (!queue_.empty() ||
       std::any_of(wires_.begin(), wires_.end(), [](const Wire& wire) { return wire.isSending; }));
  if (isStuck == isStuck_) return;
  isStuck_ = isStuck;
  local_.pending.fetch_add(isStuck ? 1 : -1, std::memory_order_relaxed);
}

Connection::~Connection() {
  while (!joining_.empty()) leaveJoining(joining_.size() - 1);
  close();
  if (isStuck_) local_.pending.fetch_sub(1, std::memory_order_relaxed);
  if (state_ != State::kDialing) return;
  --local_.dialing;
  local_.pending.fetch_sub(1, std::memory_order_relaxed);
}

void Connection::close() {
  for (Wire& wire : wires_) {
    if (wire.link.sender && !wire.link.isShm) --local_.tcpLinks;
    wire.link = {};
  }
}

// ---- being made --------------------------------------------------------------------------------

void Connection::dial() {
  assert(peer_.uid != local_.address.uid);
  moveTo(State::kDialing);
  dial_ = std::make_unique<Dial>(local_, peer_, Dial::Joining{});
}

void Connection::goOnDialing() {
  for (size_t i = 0; i < joining_.size();) {
    Dial& dial = *joining_[i];
    dial.goOn();
    if (dial.state() == Dial::State::kTrying || dial.state() == Dial::State::kWaiting) {
      ++i;
      continue;
    }
    Link link;
    if (dial.state() == Dial::State::kMade) link = dial.takeLink();
    if (dial.state() == Dial::State::kFailed && state_ == State::kOpen) {
      MYCOLL_LOG_WARN("one socket fewer for messages to %s: it %s", peer_.describe().c_str(),
                      dial.loss().describe().c_str());
    }
    leaveJoining(i);
    if (link.sender) join(std::move(link));
  }
  if (state_ != State::kDialing) return;
  dial_->goOn();
  if (dial_->state() == Dial::State::kFailed) {
    end(dial_->loss());
  } else if (dial_->state() == Dial::State::kMade) {
    open(dial_->takeLink());
    joinMore();
  }
}

// This side has made the connection, and so chooses the number of sockets.
void Connection::joinMore() {
  if (state_ != State::kOpen || wires_.front().link.isShm) return;
  int wanted = local_.options.flows;
  if (wanted == 0) {
    const int fd = wires_.front().link.sender->fd();
    wanted = roundTripOf(fd) >= kFarAway ? kFlowsFarAway : 1;
    auto isIpv4 = [](const TcpAddress& entry) {
      return entry.address.find(':') == std::string::npos;
    };
    const auto interfaces = std::count_if(peer_.tcp.begin(), peer_.tcp.end(), isIpv4);
    wanted = std::max(wanted, static_cast<int>(interfaces));
  }
  for (int number = 1; number < std::min<int>(wanted, kMostSockets); ++number) {
    ++local_.dialing;
    local_.pending.fetch_add(1, std::memory_order_relaxed);
    joining_.push_back(std::make_unique<Dial>(
        local_, peer_, Dial::Joining{wires_.front().link.id, static_cast<size_t>(number)}));
  }
}

void Connection::leaveJoining(size_t number) {
  joining_.erase(joining_.begin() + static_cast<ptrdiff_t>(number));
  --local_.dialing;
  local_.pending.fetch_sub(1, std::memory_order_relaxed);
}

void Connection::join(Link link) {
  if (state_ != State::kOpen) return;
  if (wires_.size() == 1) shareLoad(wires_.front().link.sender->fd());
  Wire& wire = wires_.emplace_back();
  wire.link = std::move(link);
  ++local_.tcpLinks;
  shareLoad(wire.link.sender->fd());
  MYCOLL_LOG_DEBUG("%zu sockets to %s", wires_.size(), peer_.describe().c_str());
  if (local_.asleep > 0) setAsleep(true);
  wire.link.receiver->onEvent(false);  // no event reports what arrived with the handshake
  flush();
}

// A group that the peer has left is notified first.
void Connection::dialAgain() {
  const auto again = [&](Dial& dial) REQUIRES(ioRole) {
    if (!dial.isDue()) return;
    const Dial::Left left = dial.left();
    if (left.mailbox == nullptr || !left.mailbox->isPresent(left.rank)) return dial.again();
    local_.raise(left.mailbox, RankLeft{left.rank});
  };
  for (auto& dial : joining_) again(*dial);
  if (state_ == State::kDialing) again(*dial_);
}

void Connection::giveUpDialing() {
  moveTo(State::kIdle);
  dial_.reset();
  for (Mailbox* mailbox : dropUnsent()) {
    local_.raise(mailbox, NotSent{peer_.uid, "has left the group"});
  }
}

void Connection::open(Link link) {
  moveTo(State::kOpen);
  dial_.reset();  // the peer may have connected first
  Wire& first = wires_.emplace_back();
  first.link = std::move(link);
  wasOpen_ = true;
  if (!first.link.isShm) ++local_.tcpLinks;
  MYCOLL_LOG_DEBUG("connected to %s over %s", peer_.describe().c_str(),
                   first.link.isShm ? "shared memory" : "tcp");
  if (local_.asleep > 0) setAsleep(true);
  first.link.receiver->onEvent(false);  // no event reports what arrived with the handshake
  flush();
}

// ---- out ---------------------------------------------------------------------------------------

void Connection::enqueue(OutItem item) {
  if (state_ == State::kLost) {
    if (!item.request) return;
    item.request->isUnsent_ = true;
    return local_.raise(item.request->mailbox_, NotSent{peer_.uid, loss_.describe()});
  }
  const bool mayLeave = queue_.empty() && !(!wires_.empty() && wires_.front().isSending);
  queue_.push_back(std::move(item));
  if (mayLeave || wires_.size() > 1) flush();
}

bool Connection::hasQueued(uint64_t context, int rank) const {
  auto isMeant = [&](const OutItem& item) {
    return item.header.context == context && item.header.source == rank;
  };
  return std::any_of(queue_.begin(), queue_.end(), isMeant) ||
         std::any_of(wires_.begin(), wires_.end(),
                     [&](const Wire& wire) { return wire.isSending && isMeant(wire.out); });
}

// Fills the sockets piece by piece, so that none takes a message that others have room for.
bool Connection::flush(size_t turnBytes) {
  size_t moved = 0;
  if (wires_.size() == 1) moved = flush(wires_.front(), turnBytes);
  for (size_t before = ~size_t{0};
       wires_.size() > 1 && moved != before && moved < turnBytes * wires_.size();) {
    before = moved;
    for (Wire& wire : wires_) moved += flush(wire, kSmallPieceBytes);
  }
  countStuck();
  return moved > 0;
}

// Chooses what this wire sends next. Returns false if there is nothing.
bool Connection::takeNext(Wire& wire) {
  auto item = queue_.begin();
  if (!isFirst(wire)) {
    item = std::find_if(queue_.begin(), queue_.end(),
                        [](const OutItem& each) { return each.header.isPiece(); });
  }
  if (item == queue_.end()) return false;
  wire.isSending = true;
  if (comesInPieces(item->header.kind)) {
    cutPiece(wire, item);
    return true;
  }
  wire.out = std::move(*item);
  queue_.erase(item);
  FrameHeader& header = wire.out.header;
  if (header.isBeginning() && wire.out.message.bytes > 0) header.number = ++begunOut_;
  if (header.kind == FrameKind::kGoodbye) header.number = piecesOut_;
  return true;
}

void Connection::cutPiece(Wire& wire, std::deque<OutItem>::iterator item) {
  const size_t most = wires_.size() > 1 ? kSmallPieceBytes : kPieceBytes;
  const size_t bytes = std::min(most, item->message.bytes - item->cut);
  wire.out = {};
  wire.out.header = item->header;
  wire.out.header.payloadBytes = bytes;
  wire.out.header.offset += item->cut;
  wire.out.payload = item->message.begin() + item->cut;
  wire.out.request = item->request;
  item->cut += bytes;
  if (item->cut == item->message.bytes) {
    queue_.erase(item);
  } else if (item == queue_.begin()) {
    giveWay();
  }
}

void Connection::hasLeft(Wire& wire) {
  wire.isSending = false;
  OutItem& item = wire.out;
  if (item.header.isPiece() && !isFirst(wire)) ++piecesOut_;
  // A rank that is in no call does not poll its rings.
  const FrameKind kind = item.header.kind;
  if (wire.link.isShm && (kind == FrameKind::kAbort || isForming(kind))) {
    local_.bellOf(peer_).ring();
  }
  Transfer* const request = item.request;
  if (!request || item.header.kind == FrameKind::kRequestToSend) return;
  if (item.message.bytes > 0) {
    item.header.kind = FrameKind::kMore;
    item.header.hasDescriptor = 0;
    item.header.magic = FrameHeader::kMagic;  // not sealed yet
    item.sent = 0;
    queue_.push_front(std::move(item));
    return;
  }
  if (comesInPieces(item.header.kind)) {
    request->transferred_ += item.header.payloadBytes;
    if (request->transferred_ < request->data_.bytes) return;
  }
  request->mailbox_->finish(*request, Status());
}

// Before the frame that it belongs to.
void Connection::sendDescriptor(Wire& wire) {
  OutItem& item = wire.out;
  const FrameKind kind = item.header.kind;
  LinkSender& link = *wire.link.sender;
  if (item.header.hasDescriptor || item.sent > 0) return;
  if (item.region != 0) {
    item.header.hasDescriptor = regions_.give(item.region, link);
  } else if (item.request && item.request->attached_ &&
             (kind == FrameKind::kEager || kind == FrameKind::kRequestToSend)) {
    item.header.hasDescriptor = link.sendFd(item.request->attached_->fd());
  }
}

size_t Connection::flush(Wire& wire, size_t most) {
  size_t moved = 0;
  while (state_ == State::kOpen && moved < most) {
    if (!wire.isSending && !takeNext(wire)) break;
    OutItem& item = wire.out;
    if (wire.link.isShm) sendDescriptor(wire);
    if (local_.options.isChecked && !item.header.isChecked()) seal(item);
    const size_t total = sizeof(FrameHeader) + item.header.payloadBytes;
    Span parts[2];
    const int count = partsOf(item, parts);
    const ssize_t wrote = wire.link.sender->write(parts, count);
    if (wrote < 0) end(closed(LossReason::kClosed));
    if (wrote <= 0) break;
    item.sent += static_cast<size_t>(wrote);
    moved += static_cast<size_t>(wrote);
    if (item.sent == total) hasLeft(wire);
  }
  return moved;
}

// Moves the first message behind the others, but not a put behind later frames of its window.
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
  // Drops frames that have not begun to be sent. A frame that has must be completed with its
  // original content, since the receiver may use it before it learns of a failure.
  std::erase_if(queue_, [&](const OutItem& item) { return item.request == request; });
  for (Wire& wire : wires_) {
    if (wire.target.request == request) wire.target = {};
    OutItem& out = wire.out;
    if (!wire.isSending || out.request != request) continue;
    out.request = nullptr;
    if (out.sent == 0 && !out.header.hasDescriptor) {
      wire.isSending = false;
      if (out.header.isBeginning()) --begunOut_;  // the latest: only the first wire sends them
    } else if (out.payload) {
      out.owned.assign(out.payload, out.header.payloadBytes);
    }
  }
}

void Connection::forget(const Mailbox::Unexpected* message) {
  for (Wire& wire : wires_) {
    if (wire.target.unexpected == message) wire.target = {};
  }
}

void Connection::forget(Mailbox* mailbox) {
  for (Wire& wire : wires_) {
    if (wire.mailbox != mailbox) continue;
    wire.mailbox = nullptr;
    wire.target = {};
  }
}

void Connection::forget(Mailbox* mailbox, uint64_t window) {
  for (Wire& wire : wires_) {
    if (wire.mailbox == mailbox && wire.target.window == window) wire.target = {};
  }
}

void Connection::setAsleep(bool asleep) {
  for (Wire& wire : wires_) {
    if (!wire.link.sender) continue;
    wire.link.receiver->setAsleep(asleep);
    wire.link.sender->setAsleep(asleep);
  }
}

// ---- in ----------------------------------------------------------------------------------------

bool Connection::onEvent(int fd, bool isClosed) {
  for (Wire& wire : wires_) {
    if (!wire.link.receiver || wire.link.receiver->fd() != fd) continue;
    wire.link.receiver->onEvent(isClosed);
    return true;
  }
  return false;
}

bool Connection::maybeReadable() const {
  return std::any_of(wires_.begin(), wires_.end(), [&](const Wire& wire) REQUIRES(ioRole) {
    return wire.link.receiver && !isHeld(wire) && wire.link.receiver->maybeReadable();
  });
}

void Connection::lookAgain() {
  for (Wire& wire : wires_) {
    if (wire.link.receiver) wire.link.receiver->lookAgain();
  }
}

void Connection::breakOff(Loss loss) {
  for (Wire& wire : wires_) wire.isReadOver = true;
  end(std::move(loss));
}

// Repeats while a frame that one wire has received allows another wire to continue.
bool Connection::drain(size_t turnBytes) {
  bool moved = false;
  auto isFreed = [&](const Wire& wire) REQUIRES(ioRole) {
    return wire.headerGot == sizeof(FrameHeader) && !wire.isBegun && !wire.isReadOver &&
           !mustWait(wire);
  };
  do {
    for (Wire& wire : wires_) moved |= drain(wire, turnBytes);
  } while (wires_.size() > 1 && std::any_of(wires_.begin(), wires_.end(), isFreed));
  return moved;
}

bool Connection::drain(Wire& wire, size_t turnBytes) {
  bool moved = false;
  size_t movedBytes = 0;
  char discarded[4096];
  while (wire.link.receiver && !wire.isReadOver && movedBytes < turnBytes) {
    FrameHeader& header = wire.header;
    if (wire.headerGot < sizeof(FrameHeader)) {
      const ssize_t got =
          wire.link.receiver->read(reinterpret_cast<char*>(&header) + wire.headerGot,
                                   sizeof(FrameHeader) - wire.headerGot, false);
      if (got < 0) readIsOver(wire, LossReason::kClosed);
      if (got <= 0) return moved;
      moved = true;
      wire.headerGot += static_cast<size_t>(got);
      if (wire.headerGot < sizeof(FrameHeader)) continue;
      wire.payloadGot = 0;
      wire.payloadCheck = 0;
      wire.isBegun = false;
      if (header.isChecked() && header.headerCheck != header.check()) {
        breakOff({LossReason::kChanged, ""});
        return moved;
      }
      if (!isSound(wire)) {
        breakOff({LossReason::kNotAFrame, ""});
        return moved;
      }
    }
    if (!wire.isBegun) {
      if (mustWait(wire)) return moved;
      wire.isBegun = true;
      if (!beginFrame(wire)) return moved;
    }
    const size_t left = header.payloadBytes - wire.payloadGot;
    if (left > 0) {
      const bool isKept = wire.target.data || !wire.control.empty();
      char* into = wire.target.data        ? wire.target.data + wire.payloadGot
                   : !wire.control.empty() ? wire.control.data() + wire.payloadGot
                                           : discarded;
      const ssize_t got = wire.link.receiver->read(
          into, isKept ? left : std::min(left, sizeof(discarded)), wire.target.isStreaming);
      if (got < 0) readIsOver(wire, LossReason::kClosedInMessage);
      if (got <= 0) return moved;
      moved = true;
      if (header.isChecked()) {
        wire.payloadCheck = crc32c(into, static_cast<size_t>(got), wire.payloadCheck);
      }
      wire.payloadGot += static_cast<size_t>(got);
      movedBytes += static_cast<size_t>(got);
      if (wire.payloadGot < header.payloadBytes) continue;
    }
    wire.headerGot = 0;
    if (header.isChecked() && header.payloadCheck != wire.payloadCheck) {
      breakOff({LossReason::kChanged, ""});
      return moved;
    }
    endFrame(wire);
  }
  return moved;
}

// The other wires are still read to their ends: the peer also closes them when it detects this end.
void Connection::readIsOver(Wire& wire, LossReason reason) {
  wire.isReadOver = true;
  end(closed(reason));
}

bool Connection::isSound(const Wire& wire) const {
  const FrameHeader& header = wire.header;
  if ((header.magic != FrameHeader::kMagic && !header.isChecked()) ||
      header.payloadBytes > mostPayload(header.kind)) {
    return false;
  }
  if (header.hasDescriptor && header.kind != FrameKind::kEager &&
      header.kind != FrameKind::kRequestToSend) {
    return false;
  }
  if (!isFirst(wire)) return header.isPiece();
  if (header.kind != FrameKind::kEager) return true;
  if (header.isBeginning()) {
    return header.messageBytes <= kMaxEagerBytes && header.number == begunIn_ + 1;
  }
  return header.messageBytes == header.payloadBytes;
}

// Whether the frame must wait for frames that arrive on another wire.
bool Connection::mustWait(const Wire& wire) const {
  const FrameHeader& header = wire.header;
  if (header.kind == FrameKind::kMore) return header.number > begunIn_;
  return header.kind == FrameKind::kGoodbye && header.number > piecesIn_;
}

bool Connection::isHeld(const Wire& wire) const {
  return wire.headerGot == sizeof(FrameHeader) && !wire.isBegun && mustWait(wire);
}

// The sender may not know that this rank has left: for a peer without a connection, only the
// goodbyes of the latest groups are kept.
void Connection::sayGoodbyeAgain(const FrameHeader& came) {
  OutItem item;
  item.header.kind = FrameKind::kGoodbye;
  item.header.source = came.destination;
  item.header.destination = came.source;
  item.header.context = came.context;
  enqueue(std::move(item));
}

// Decides where the payload goes. Returns false if the frame is invalid and broke the connection.
bool Connection::beginFrame(Wire& wire) {
  const FrameHeader& header = wire.header;
  wire.mailbox = nullptr;
  wire.target = {};
  wire.control.clear();
  wire.isEarly = false;
  wire.descriptor.reset();
  if (header.hasDescriptor && !wire.link.receiver->takeFd(&wire.descriptor)) {
    return breakOff({LossReason::kNotAFrame, ""}), false;
  }
  if (header.kind == FrameKind::kFarewell) return breakOff({LossReason::kLeft, ""}), false;
  if (header.isBeginning()) begunIn_ = header.number;
  Mailbox* mailbox = local_.groups.find(header.context, header.destination);
  if (!mailbox) {
    // A group that does not exist here cannot have asked for a piece of a message.
    const bool isOver = header.kind == FrameKind::kInvitation && header.tag == 1;
    const bool isLate =
        isOver || local_.groups.standing(header.context, header.destination) == Outcome::kGone;
    if (isLate && wantsAnswer(header.kind)) sayGoodbyeAgain(header);
    if (isLate || comesInPieces(header.kind) || header.isBeginning() ||
        !local_.groups.makeRoom(header.context, header.destination, header.payloadBytes)) {
      return true;  // read and discarded
    }
    wire.isEarly = true;
    wire.control.resize(header.payloadBytes);
    return true;
  }
  if (!mailbox->isOf(header.source, peer_.uid)) {
    return breakOff({LossReason::kNotItsName, ""}), false;
  }
  wire.mailbox = mailbox;
  if (isControlFrame(header.kind) || header.kind == FrameKind::kRequestToSend) {
    wire.control.resize(header.payloadBytes);
  } else if (header.kind != FrameKind::kClearToSend && header.kind != FrameKind::kTaken) {
    wire.target = mailbox->onFrame(header, std::move(wire.descriptor));
  }
  return true;
}

void Connection::endFrame(Wire& wire) {
  if (wire.header.isPiece() && !isFirst(wire)) ++piecesIn_;
  const FrameHeader header = wire.header;
  std::string control = std::exchange(wire.control, {});
  Mailbox* const mailbox = std::exchange(wire.mailbox, nullptr);
  const Mailbox::Target target = std::exchange(wire.target, {});
  SharedPlace place;
  if (header.hasDescriptor && control.size() == sizeof(place)) {
    std::memcpy(&place, control.data(), sizeof(place));
    regions_.add(place.region, place.regionBytes, std::move(wire.descriptor));
  }
  if (!mailbox) {
    if (!wire.isEarly) return;
    EarlyFrame frame{peer_.uid, header, std::move(control), std::move(wire.descriptor)};
    if (Mailbox* late = local_.groups.find(header.context, header.destination)) {
      // Its group was made while the payload was arriving.
      if (!deliver(*late, frame)) breakOff({LossReason::kNotItsName, ""});
    } else if (local_.groups.standing(header.context, header.destination) != Outcome::kGone) {
      local_.groups.keep(std::move(frame));
    }
  } else if (header.kind == FrameKind::kClearToSend) {
    mailbox->onClearToSend(header);
  } else if (header.kind == FrameKind::kTaken) {
    mailbox->onTaken(header);
  } else if (header.kind == FrameKind::kRequestToSend) {
    mailbox->onRequestToSend(header, control, std::move(wire.descriptor));
  } else if (isControlFrame(header.kind)) {
    mailbox->onControl(header, control);
  } else {
    mailbox->onPayload(header, target);
  }
}

bool Connection::deliver(Mailbox& mailbox, EarlyFrame& frame) {
  const FrameHeader& header = frame.header;
  if (!mailbox.isOf(header.source, frame.uid)) return false;
  if (isControlFrame(header.kind)) {
    mailbox.onControl(header, frame.payload);
  } else if (header.kind == FrameKind::kRequestToSend) {
    mailbox.onRequestToSend(header, frame.payload, std::move(frame.descriptor));
  } else if (header.kind == FrameKind::kEager) {
    const Mailbox::Target target = mailbox.onFrame(header, std::move(frame.descriptor));
    if (target.data) copy(target.data, frame.payload.data(), frame.payload.size());
    mailbox.onPayload(header, target);
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
  while (!joining_.empty()) leaveJoining(joining_.size() - 1);
  // Nothing more is sent. Shutting down every socket notifies the peer even if one is broken.
  if (wires_.size() < 2) return;
  for (const Wire& wire : wires_) shutdown(wire.link.sender->fd(), SHUT_WR);
}

bool Connection::hasSaidAll(bool isEnded) {
  if (wires_.empty()) return true;
  lookAgain();
  if (drain(kToTheEnd)) lastByte_ = Deadline::Clock::now();
  // Wires that wait for each other would wait forever.
  const bool isReadOver = std::all_of(
      wires_.begin(), wires_.end(),
      [&](const Wire& wire) REQUIRES(ioRole) { return wire.isReadOver || isHeld(wire); });
  if (wires_.front().link.isShm || isReadOver || loss_.reason == LossReason::kSilent) return true;
  const std::chrono::milliseconds patience =
      isEnded ? kSilentHere : std::chrono::seconds(local_.options.networkSeconds);
  return Deadline::Clock::now() - lastByte_ > patience;
}

void Connection::sayNoMore() NO_THREAD_SAFETY_ANALYSIS {
  if (state_ != State::kOpen) return;
  OutItem farewell;
  farewell.header.kind = FrameKind::kFarewell;
  queue_.push_back(std::move(farewell));
  flush();
  if (state_ != State::kOpen || wires_.front().link.isShm) return;
  for (const Wire& wire : wires_) shutdown(wire.link.sender->fd(), SHUT_WR);
}

bool Connection::hasArrived() NO_THREAD_SAFETY_ANALYSIS {
  if (state_ != State::kOpen || wires_.front().link.isShm) return true;
  bool hasAll = true;
  for (const Wire& wire : wires_) {
    const int fd = wire.link.sender->fd();
    char discarded[16 * 1024];
    // Limited, as the peer may continue to send.
    for (int i = 0; i < 64; ++i) {
      if (recv(fd, discarded, sizeof(discarded), MSG_DONTWAIT) <= 0) break;
    }
    int unacknowledged = 0;
    hasAll &= ioctl(fd, SIOCOUTQ, &unacknowledged) != 0 || unacknowledged == 0;
  }
  return hasAll;
}

// Returns the mailboxes whose requests were dropped.
std::set<Mailbox*> Connection::dropUnsent() {
  std::set<Mailbox*> mailboxes;
  const auto drop = [&](const OutItem& item) REQUIRES(ioRole) {
    if (!item.request) return;
    item.request->isUnsent_ = true;
    mailboxes.insert(item.request->mailbox_);
  };
  for (Wire& wire : wires_) {
    if (std::exchange(wire.isSending, false)) drop(wire.out);
  }
  for (const OutItem& item : std::exchange(queue_, {})) drop(item);
  return mailboxes;
}

void Connection::lose() {
  moveTo(State::kLost);
  close();
  (void)dropUnsent();
}

}  // namespace mycoll
