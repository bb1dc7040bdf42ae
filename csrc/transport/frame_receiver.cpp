#include "transport/frame_receiver.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/copy.h"
#include "transport/connection.h"
#include "transport/mailbox.h"

namespace mycoll {
namespace {

// Frames for the group itself, and kHold and kResume. Their payload is short and delivered whole.
bool isControlFrame(FrameKind kind) {
  return kind == FrameKind::kAbort || kind == FrameKind::kGoodbye || kind == FrameKind::kProbe ||
         kind == FrameKind::kArrived || kind == FrameKind::kQuestion ||
         kind == FrameKind::kAnswer || kind == FrameKind::kDeadlock || kind == FrameKind::kHold ||
         kind == FrameKind::kResume || isForming(kind);
}

// Whether a mailbox receives the frame with its payload, not the payload separately.
bool isPassedWhole(FrameKind kind) {
  return kind == FrameKind::kRequestToSend || kind == FrameKind::kClearToSend ||
         kind == FrameKind::kTaken || isControlFrame(kind);
}

// Whether the sender continues only after an answer from this rank.
bool wantsAnswer(FrameKind kind) {
  return kind == FrameKind::kRequestToSend || kind == FrameKind::kArrived ||
         kind == FrameKind::kQuestion || kind == FrameKind::kInvitation ||
         kind == FrameKind::kJoined;
}

uint64_t mostPayload(FrameKind kind) {
  if (kind == FrameKind::kInvitation || kind == FrameKind::kJoined) return kMaxInvitationBytes;
  if (isControlFrame(kind)) return kMaxControlBytes;
  if (kind == FrameKind::kEager) return kMaxEagerBytes;
  if (kind == FrameKind::kRequestToSend) return sizeof(SharedPlace);
  return comesInPieces(kind) ? ~uint64_t{0} : 0;
}

// Whether a process with this uid may send such a frame to the group. In an invitation nothing is
// answered: the address of its sender may be unknown.
bool mayCome(const Mailbox& mailbox, const FrameHeader& header, const std::string& uid) {
  if (!mailbox.isOf(header.source, uid)) return false;
  return !mailbox.group().isInvitation || header.kind == FrameKind::kInvitation ||
         header.kind == FrameKind::kGoodbye;
}

void pass(Mailbox& mailbox, WholeFrame& frame) REQUIRES(ioRole) {
  const FrameHeader& header = frame.header;
  if (isControlFrame(header.kind)) return mailbox.onControl(header, frame.payload);
  if (header.kind == FrameKind::kClearToSend || header.kind == FrameKind::kTaken) {
    return mailbox.onAnswer(header);
  }
  const FrameTarget target = mailbox.onFrame(header, std::move(frame.descriptor), frame.place);
  if (header.kind != FrameKind::kEager) return;  // only a kept frame has its payload here
  if (target.data) copy(target.data, frame.payload.data(), frame.payload.size());
  mailbox.onPayload(header, target);
}

}  // namespace

void FrameReceiver::add(std::unique_ptr<LinkReceiver> link) {
  link->onEvent(false);  // no event reports what arrived with the handshake
  lanes_.emplace_back().link = std::move(link);
}

bool FrameReceiver::onEvent(int fd, bool isClosed) {
  for (Lane& lane : lanes_) {
    if (lane.link->fd() == fd) return lane.link->onEvent(isClosed), true;
  }
  return false;
}

bool FrameReceiver::maybeReadable() const {
  return std::any_of(lanes_.begin(), lanes_.end(), [&](const Lane& lane) REQUIRES(ioRole) {
    return !isWaiting(lane) && lane.link->maybeReadable();
  });
}

// Sockets whose frames wait for each other would wait forever.
bool FrameReceiver::isOver() const {
  return std::all_of(lanes_.begin(), lanes_.end(), [&](const Lane& lane) REQUIRES(ioRole) {
    return lane.isOver || isWaiting(lane);
  });
}

void FrameReceiver::discard(const std::function<bool(const FrameTarget&)>& isMeant) {
  for (Lane& lane : lanes_) {
    if (isMeant(lane.target)) lane.target = {};
  }
}

// Repeats while a frame that one socket has received allows another one to continue.
bool FrameReceiver::drain(size_t turnBytes) {
  bool moved = false;
  const auto isFreed = [&](const Lane& lane) REQUIRES(ioRole) {
    return lane.headerGot == sizeof(FrameHeader) && !lane.isBegun && !lane.isOver &&
           !mustWait(lane.header);
  };
  do {
    for (Lane& lane : lanes_) moved |= drain(lane, turnBytes);
  } while (lanes_.size() > 1 && std::any_of(lanes_.begin(), lanes_.end(), isFreed));
  return moved;
}

bool FrameReceiver::drain(Lane& lane, size_t turnBytes) {
  bool moved = false;
  size_t movedBytes = 0;
  char discarded[4096];
  const FrameHeader& header = lane.header;
  while (!lane.isOver && movedBytes < turnBytes) {
    if (lane.headerGot < sizeof(FrameHeader) && !readHeader(lane, &moved)) return moved;
    if (!lane.isBegun) {
      if (mustWait(header)) return moved;
      lane.isBegun = true;
      if (!beginFrame(lane)) return moved;
    }
    const size_t left = header.payloadBytes - lane.payloadGot;
    if (left > 0) {
      const bool isKept = lane.target.data || !lane.payload.empty();
      char* into = lane.target.data        ? lane.target.data + lane.payloadGot
                   : !lane.payload.empty() ? lane.payload.data() + lane.payloadGot
                                           : discarded;
      const ssize_t got = lane.link->read(into, isKept ? left : std::min(left, sizeof(discarded)),
                                          lane.target.isStreaming);
      if (got < 0) end(lane, LossReason::kClosedInMessage);
      if (got <= 0) return moved;
      moved = true;
      lane.payloadGot += static_cast<size_t>(got);
      movedBytes += static_cast<size_t>(got);
      if (lane.payloadGot < header.payloadBytes) continue;
    }
    lane.headerGot = 0;
    endFrame(lane);
  }
  return moved;
}

// Returns true when all of it has been read and is valid.
bool FrameReceiver::readHeader(Lane& lane, bool* moved) {
  FrameHeader& header = lane.header;
  while (lane.headerGot < sizeof(FrameHeader)) {
    const ssize_t got = lane.link->read(reinterpret_cast<char*>(&header) + lane.headerGot,
                                        sizeof(FrameHeader) - lane.headerGot, false);
    if (got < 0) end(lane, LossReason::kClosed);
    if (got <= 0) return false;
    *moved = true;
    lane.headerGot += static_cast<size_t>(got);
  }
  lane.payloadGot = 0;
  lane.isBegun = false;
  if (!isSound(lane)) return connection_.breakOff({LossReason::kNotAFrame, ""}), false;
  return true;
}

// The other sockets are still read to their ends: the peer also closes them when it detects this
// end.
void FrameReceiver::end(Lane& lane, LossReason reason) {
  lane.isOver = true;
  connection_.end(lossOf(reason));
}

bool FrameReceiver::isSound(const Lane& lane) const {
  const FrameHeader& header = lane.header;
  if (header.magic != FrameHeader::kMagic || header.kind < FrameKind::kEager ||
      header.kind > kLastFrameKind || header.messageClass > kLastMessageClass ||
      header.payloadBytes > mostPayload(header.kind)) {
    return false;
  }
  if (header.hasDescriptor && header.kind != FrameKind::kEager &&
      header.kind != FrameKind::kRequestToSend) {
    return false;
  }
  if (!isFirst(lane)) return header.isPiece();
  if (header.kind != FrameKind::kEager) return true;
  if (header.isBeginning()) {
    return header.messageBytes <= kMaxEagerBytes && header.number == begun_ + 1;
  }
  return header.messageBytes == header.payloadBytes;
}

// Whether the frame must wait for frames that arrive on another socket.
bool FrameReceiver::mustWait(const FrameHeader& header) const {
  if (header.kind == FrameKind::kMore) return header.number > begun_;
  return header.kind == FrameKind::kGoodbye && header.number > pieces_;
}

bool FrameReceiver::isWaiting(const Lane& lane) const {
  return lane.headerGot == sizeof(FrameHeader) && !lane.isBegun && mustWait(lane.header);
}

// Decides where the payload goes. Returns false if the frame is invalid and broke the connection.
bool FrameReceiver::beginFrame(Lane& lane) {
  const FrameHeader& header = lane.header;
  lane.target = {};
  lane.payload.clear();
  lane.isEarly = false;
  lane.descriptor.reset();
  if (header.hasDescriptor && !lane.link->takeFd(&lane.descriptor)) {
    return connection_.breakOff({LossReason::kNotAFrame, ""}), false;
  }
  if (header.kind == FrameKind::kFarewell) {
    return connection_.breakOff({LossReason::kLeft, ""}), false;
  }
  if (header.isBeginning()) begun_ = header.number;
  Mailbox* const mailbox = local_.groups.find(header.context, header.destination);
  if (!mailbox) return beginWithoutGroup(lane), true;
  if (!mayCome(*mailbox, header, connection_.peer().uid)) {
    return connection_.breakOff({LossReason::kNotItsName, ""}), false;
  }
  if (isPassedWhole(header.kind)) {
    lane.payload.resize(header.payloadBytes);
  } else {
    lane.target = mailbox->onFrame(header, std::move(lane.descriptor));
  }
  lane.target.mailbox = mailbox;
  return true;
}

// A group that does not exist here cannot have requested a piece of a message.
void FrameReceiver::beginWithoutGroup(Lane& lane) {
  const FrameHeader& header = lane.header;
  const bool isOver = header.kind == FrameKind::kInvitation && header.tag == 1;
  const bool isLate =
      isOver || local_.groups.standing(header.context, header.destination) == Outcome::kGone;
  if (isLate && wantsAnswer(header.kind)) connection_.repeatGoodbye(header);
  lane.isEarly = !isLate && !comesInPieces(header.kind) && !header.isBeginning() &&
                 local_.groups.makeRoom(header.context, header.destination, header.payloadBytes);
  if (lane.isEarly) lane.payload.resize(header.payloadBytes);
}

void FrameReceiver::endFrame(Lane& lane) {
  const FrameHeader& header = lane.header;
  if (header.isPiece() && !isFirst(lane)) ++pieces_;
  const FrameTarget target = std::exchange(lane.target, {});
  Mailbox* const mailbox = target.mailbox;
  if (mailbox && !isPassedWhole(header.kind)) return mailbox->onPayload(header, target);
  WholeFrame frame{"", header, std::exchange(lane.payload, {}), {}, std::move(lane.descriptor)};
  SharedPlace& place = frame.place;
  if (header.kind == FrameKind::kRequestToSend && frame.payload.size() == sizeof(place)) {
    std::memcpy(&place, frame.payload.data(), sizeof(place));
    if (header.hasDescriptor) {
      connection_.regions().add(place.region, place.regionBytes, std::move(frame.descriptor));
    }
  }
  if (mailbox) return pass(*mailbox, frame);
  if (!lane.isEarly) return;
  frame.uid = connection_.peer().uid;
  if (Mailbox* const late = local_.groups.find(header.context, header.destination)) {
    // Its group was made while the payload was arriving.
    if (!deliver(*late, frame)) connection_.breakOff({LossReason::kNotItsName, ""});
  } else if (local_.groups.standing(header.context, header.destination) != Outcome::kGone) {
    local_.groups.keep(std::move(frame));
  }
}

bool FrameReceiver::deliver(Mailbox& mailbox, WholeFrame& frame) {
  if (!mayCome(mailbox, frame.header, frame.uid)) return false;
  pass(mailbox, frame);
  return true;
}

}  // namespace mycoll
