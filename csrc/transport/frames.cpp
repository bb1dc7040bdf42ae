// The endpoint's half that reads and writes frames on links.
#include <algorithm>
#include <cerrno>

#include "base/log.h"
#include "kernels/copy.h"
#include "transport/endpoint.h"

namespace mycoll {
namespace {

// Large messages leave in pieces, so that others get their turn on the link.
constexpr size_t kPieceBytes = 1024 * 1024;
// Frames for groups that are not made yet on this side.
constexpr size_t kMaxOrphans = 4096;
constexpr size_t kMaxOrphanBytes = 64 * 1024 * 1024;

constexpr char kChanged[] =
    "sent something that has changed on its way (MYCOLL_CHECKSUM): memory or a network that fails, "
    "or its program wrote to a tensor that was still being sent";

constexpr char kNotItsName[] = "sent a message in the name of another rank";

bool isInItsName(const Mailbox& mailbox, const FrameHeader& header, const std::string& uid) {
  return header.source >= 0 && header.source < mailbox.ranks() &&
         mailbox.group().peers[header.source].uid == uid;
}

// Frames of the group itself; their payload is short and handed over whole.
bool isControlFrame(FrameKind kind) {
  return kind == FrameKind::kAbort || kind == FrameKind::kGoodbye || kind == FrameKind::kProbe ||
         kind == FrameKind::kPosition || kind == FrameKind::kQuestion ||
         kind == FrameKind::kAnswer || kind == FrameKind::kVerdict || kind == FrameKind::kHold ||
         kind == FrameKind::kGoOn;
}

// Of a message in pieces: nothing of the next one is prepared or has left.
bool isBetweenPieces(const OutItem& item) {
  return item.header.kind == FrameKind::kData && item.sent == 0 && item.header.payloadBytes == 0;
}

void beginPiece(OutItem& item) {
  size_t bytes = std::min(kPieceBytes, item.message.bytes - item.messageSent);
  item.payload = item.message.begin() + item.messageSent;
  item.header.payloadBytes = bytes;
}

void endPiece(OutItem& item) {
  item.messageSent += item.header.payloadBytes;
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

}  // namespace

bool Endpoint::flush(OutLink& link, size_t turnBytes) {
  bool moved = false;
  size_t movedBytes = 0;
  while (link.sender && link.problem.empty() && !link.queue.empty() && movedBytes < turnBytes) {
    OutItem& item = link.queue.front();
    if (isBetweenPieces(item)) beginPiece(item);
    if (options_.isChecked && !item.header.isChecked()) seal(item);
    size_t total = sizeof(FrameHeader) + item.header.payloadBytes;
    const char* payload = payloadOf(item);
    Span parts[2];
    int count = 0;
    if (item.sent < sizeof(FrameHeader)) {
      char* start = reinterpret_cast<char*>(&item.header) + item.sent;
      parts[count++] = {start, sizeof(FrameHeader) - item.sent};
    }
    size_t payloadSent = item.sent < sizeof(FrameHeader) ? 0 : item.sent - sizeof(FrameHeader);
    if (payloadSent < item.header.payloadBytes) {
      parts[count++] = {const_cast<char*>(payload) + payloadSent,
                        item.header.payloadBytes - payloadSent};
    }
    ssize_t wrote = link.sender->write(parts, count);
    if (wrote < 0) {
      link.isSilent = errno == ETIMEDOUT;
      link.problem = "closed its connection";
      return moved;
    }
    if (wrote == 0) return moved;
    moved = true;
    item.sent += static_cast<size_t>(wrote);
    movedBytes += static_cast<size_t>(wrote);
    if (item.sent < total) continue;
    if (item.header.kind == FrameKind::kData && item.request) {
      endPiece(item);
      if (item.messageSent < item.message.bytes) {
        if (link.queue.size() > 1) {
          link.queue.push_back(std::move(item));
          link.queue.pop_front();
        }
        continue;
      }
    }
    Transfer* request = item.request;
    link.queue.pop_front();
    if (request) request->mailbox_->finish(*request, Status());
  }
  return moved;
}

void Endpoint::forget(Transfer* request) {
  for (auto& [uid, link] : outLinks_) {
    for (auto item = link->queue.begin(); item != link->queue.end();) {
      if (item->request != request) {
        ++item;
      } else if (item->sent == 0) {
        item = link->queue.erase(item);
      } else {
        // Half of the frame has left, and the rest must follow: as it was, since the receiver may
        // get to use it before it hears of a failure.
        if (item->payload) item->owned.assign(item->payload, item->header.payloadBytes);
        item->request = nullptr;
        ++item;
      }
    }
  }
  for (auto& link : inLinks_) {
    if (link->target.request == request) link->target = {};
  }
}

bool Endpoint::drain(InLink& link, size_t turnBytes) {
  bool moved = false;
  size_t movedBytes = 0;
  char discarded[4096];
  while (link.problem.empty() && movedBytes < turnBytes) {
    if (link.headerGot < sizeof(FrameHeader)) {
      ssize_t got = link.receiver->read(reinterpret_cast<char*>(&link.header) + link.headerGot,
                                        sizeof(FrameHeader) - link.headerGot, false);
      if (got < 0) link.problem = "closed its connection";
      if (got <= 0) return moved;
      moved = true;
      link.headerGot += static_cast<size_t>(got);
      if (link.headerGot < sizeof(FrameHeader)) continue;
      link.payloadGot = 0;
      link.payloadCheck = 0;
      if (!beginFrame(link)) return moved;
    }
    size_t left = link.header.payloadBytes - link.payloadGot;
    if (left > 0) {
      bool isKept = link.target.data || !link.control.empty();
      char* into = link.target.data        ? link.target.data + link.payloadGot
                   : !link.control.empty() ? link.control.data() + link.payloadGot
                                           : discarded;
      ssize_t got = link.receiver->read(into, isKept ? left : std::min(left, sizeof(discarded)),
                                        link.target.isStreaming);
      if (got < 0) link.problem = "closed its connection in the middle of a message";
      if (got <= 0) return moved;
      moved = true;
      if (link.header.isChecked()) {
        link.payloadCheck = crc32c(into, static_cast<size_t>(got), link.payloadCheck);
      }
      link.payloadGot += static_cast<size_t>(got);
      movedBytes += static_cast<size_t>(got);
      if (link.payloadGot < link.header.payloadBytes) continue;
    }
    link.headerGot = 0;
    if (link.header.isChecked() && link.header.payloadCheck != link.payloadCheck) {
      link.problem = kChanged;
      return moved;
    }
    endFrame(link);
  }
  return moved;
}

// Decides where the payload goes. False: the frame makes no sense, and the link is given up.
bool Endpoint::beginFrame(InLink& link) {
  const FrameHeader& header = link.header;
  link.mailbox = nullptr;
  link.target = {};
  link.control.clear();
  link.isOrphan = false;
  const bool isControl = isControlFrame(header.kind);
  uint64_t limit = isControl                          ? kMaxControlBytes
                   : header.kind == FrameKind::kEager ? kMaxEagerBytes
                   : header.kind == FrameKind::kData  ? ~uint64_t{0}
                                                      : 0;
  if (header.isChecked() && header.headerCheck != header.check()) {
    link.problem = kChanged;
    return false;
  }
  if ((header.magic != FrameHeader::kMagic && !header.isChecked()) || header.payloadBytes > limit ||
      (header.kind == FrameKind::kEager && header.messageBytes != header.payloadBytes)) {
    link.problem = "sent something that is not a mycoll frame";
    return false;
  }
  Mailbox* mailbox = find(header.context, header.destination);
  if (!mailbox) {
    // A piece of a message was never asked for by a group that does not exist.
    const std::pair<uint64_t, int> group{header.context, header.destination};
    if (closed_.count(group) || header.kind == FrameKind::kData ||
        !makeRoomForOrphan(group, header.payloadBytes)) {
      return true;  // read and thrown away
    }
    link.isOrphan = true;
    link.control.resize(header.payloadBytes);
    return true;
  }
  if (!isInItsName(*mailbox, header, link.peerUid)) {
    link.problem = kNotItsName;
    return false;
  }
  link.mailbox = mailbox;
  if (isControl) {
    link.control.resize(header.payloadBytes);
  } else if (header.kind != FrameKind::kClearToSend) {
    link.target = mailbox->onFrame(header);
  }
  return true;
}

// The group that has waited longest, which is probably never made, gives way to others.
bool Endpoint::makeRoomForOrphan(const std::pair<uint64_t, int>& group, size_t bytes) {
  while (orphans_.size() >= kMaxOrphans || orphanBytes_ + bytes > kMaxOrphanBytes) {
    const FrameHeader& oldest = orphans_.front().header;
    const std::pair<uint64_t, int> victim{oldest.context, oldest.destination};
    // Nobody makes so many groups at a time: those of long ago.
    if (overflown_.size() >= kMaxOrphans) overflown_.erase(overflown_.begin());
    overflown_.insert(victim);
    if (victim == group) return false;
    std::erase_if(orphans_, [&](const Orphan& orphan) {
      const bool isIts =
          orphan.header.context == victim.first && orphan.header.destination == victim.second;
      if (isIts) orphanBytes_ -= orphan.payload.size();
      return isIts;
    });
  }
  return !overflown_.count(group);
}

void Endpoint::endFrame(InLink& link) {
  const FrameHeader& header = link.header;
  Mailbox* mailbox = link.mailbox;
  if (!mailbox) {
    if (!link.isOrphan) return;
    Orphan orphan{link.peerUid, header, std::move(link.control)};
    link.control.clear();
    if (Mailbox* late = find(header.context, header.destination)) {
      deliverWhole(*late, orphan);  // its group was made while the payload was arriving
    } else if (!closed_.count({header.context, header.destination})) {
      orphanBytes_ += orphan.payload.size();
      orphans_.push_back(std::move(orphan));
    }
  } else if (header.kind == FrameKind::kClearToSend) {
    mailbox->onClearToSend(header);
  } else if (isControlFrame(header.kind)) {
    mailbox->onControl(header, link.control);
  } else {
    mailbox->onPayload(header, link.target);
  }
  link.mailbox = nullptr;
  link.target = {};
  link.control.clear();
}

void Endpoint::deliverWhole(Mailbox& mailbox, const Orphan& orphan) {
  const FrameHeader& header = orphan.header;
  const std::string& payload = orphan.payload;
  if (!isInItsName(mailbox, header, orphan.peerUid)) {
    for (auto& link : inLinks_) {
      if (link->peerUid == orphan.peerUid) link->problem = kNotItsName;
    }
    return;
  }
  if (isControlFrame(header.kind)) {
    return mailbox.onControl(header, payload);
  }
  if (header.kind != FrameKind::kEager && header.kind != FrameKind::kRequestToSend) return;
  Mailbox::Target target = mailbox.onFrame(header);
  if (target.data) copy(target.data, payload.data(), payload.size());
  if (header.kind == FrameKind::kEager) mailbox.onPayload(header, target);
}

}  // namespace mycoll
