#include "transport/frame_sender.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <new>

#include "transport/mailbox.h"

namespace mycoll {
namespace {

// Large messages are sent in pieces, so that other items are sent between them.
constexpr size_t kPieceBytes = 1024 * 1024;

const char* payloadOf(const OutItem& item) {
  return item.owned.empty() ? item.payload : item.owned.data();
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

}  // namespace

Loss lossOf(LossReason reason) {
  if (errno == EBADMSG) return {LossReason::kChanged, ""};  // tcp/tls.h
  const bool isSilent =
      errno == ETIMEDOUT || errno == EHOSTUNREACH || errno == ENETUNREACH || errno == EHOSTDOWN;
  return {isSilent ? LossReason::kSilent : reason, errno == 0 ? "" : strerror(errno)};
}

void FrameSender::add(std::unique_ptr<LinkSender> link, bool isShm) {
  isShm_ = isShm;
  if (!isShm) ++local_.tcpLinks;
  lanes_.emplace_back().link = std::move(link);
}

bool FrameSender::isIdle() const {
  return queue_.empty() && std::none_of(lanes_.begin(), lanes_.end(),
                                        [](const Lane& lane) { return lane.isSending; });
}

bool FrameSender::hasQueued(uint64_t context, int rank) const {
  const auto isMeant = [&](const OutItem& item) {
    return item.header.context == context && item.header.source == rank;
  };
  return std::any_of(queue_.begin(), queue_.end(), isMeant) ||
         std::any_of(lanes_.begin(), lanes_.end(),
                     [&](const Lane& lane) { return lane.isSending && isMeant(lane.item); });
}

// Fills the sockets piece by piece, so that none takes a message that others have room for.
bool FrameSender::flush(size_t turnBytes, bool* hasFailed) {
  if (lanes_.size() == 1) return flush(lanes_.front(), turnBytes, hasFailed) > 0;
  size_t moved = 0;
  for (size_t before = ~size_t{0}; moved != before && moved < turnBytes * lanes_.size();) {
    before = moved;
    for (Lane& lane : lanes_) moved += flush(lane, kSmallPieceBytes, hasFailed);
  }
  return moved > 0;
}

size_t FrameSender::flush(Lane& lane, size_t most, bool* hasFailed) {
  size_t moved = 0;
  while (moved < most && !*hasFailed) {
    if (!lane.isSending && !takeNext(lane)) break;
    OutItem& item = lane.item;
    if (isShm_) sendDescriptor(lane);
    const size_t total = sizeof(FrameHeader) + item.header.payloadBytes;
    Span parts[2];
    const int count = partsOf(item, parts);
    const ssize_t wrote = lane.link->write(parts, count);
    *hasFailed = wrote < 0;
    if (wrote <= 0) break;
    item.sent += static_cast<size_t>(wrote);
    moved += static_cast<size_t>(wrote);
    if (item.sent == total) onSent(lane);
  }
  return moved;
}

// Chooses what this socket sends next. Returns false if there is nothing.
bool FrameSender::takeNext(Lane& lane) {
  auto item = queue_.begin();
  if (!isFirst(lane)) {
    item = std::find_if(queue_.begin(), queue_.end(),
                        [](const OutItem& each) { return each.header.isPiece(); });
  }
  if (item == queue_.end()) return false;
  lane.isSending = true;
  if (comesInPieces(item->header.kind)) {
    cutPiece(lane, item);
    return true;
  }
  lane.item = std::move(*item);
  queue_.erase(item);
  FrameHeader& header = lane.item.header;
  if (header.isBeginning() && lane.item.message.bytes > 0) header.number = ++begun_;
  if (header.kind == FrameKind::kGoodbye) header.number = pieces_;
  return true;
}

void FrameSender::cutPiece(Lane& lane, std::deque<OutItem>::iterator item) {
  const size_t most = lanes_.size() > 1 ? kSmallPieceBytes : kPieceBytes;
  const size_t bytes = std::min(most, item->message.bytes - item->cut);
  lane.item = {};
  lane.item.header = item->header;
  lane.item.header.payloadBytes = bytes;
  lane.item.header.offset += item->cut;
  lane.item.payload = item->message.begin() + item->cut;
  lane.item.request = item->request;
  item->cut += bytes;
  if (item->cut == item->message.bytes) {
    queue_.erase(item);
  } else if (item == queue_.begin()) {
    giveWay();
  }
}

// Moves the first message behind the others, but not a put behind later frames of its window.
void FrameSender::giveWay() {
  const OutItem& first = queue_.front();
  const bool isPut = first.header.kind == FrameKind::kPut;
  auto next = std::next(queue_.begin());
  const auto end = std::find_if(next, queue_.end(), [&](const OutItem& item) {
    return isPut && item.header.messageClass == MessageClass::kWindow &&
           item.header.context == first.header.context && item.header.tag == first.header.tag;
  });
  std::rotate(queue_.begin(), next, end);
}

// Before the frame that it belongs to.
void FrameSender::sendDescriptor(Lane& lane) {
  OutItem& item = lane.item;
  const FrameKind kind = item.header.kind;
  if (!item.request || !item.request->attached_ || item.header.hasDescriptor || item.sent > 0)
    return;
  if (kind != FrameKind::kEager && kind != FrameKind::kRequestToSend) return;
  item.header.hasDescriptor = lane.link->sendFd(item.request->attached_->fd());
}

void FrameSender::onSent(Lane& lane) {
  lane.isSending = false;
  OutItem& item = lane.item;
  const FrameKind kind = item.header.kind;
  if (item.header.isPiece() && !isFirst(lane)) ++pieces_;
  // A rank that is in no call does not poll its rings.
  if (isShm_ && (kind == FrameKind::kAbort || isForming(kind))) local_.bellOf(peer_).ring();
  Transfer* const request = item.request;
  if (!request || kind == FrameKind::kRequestToSend) return;
  if (item.message.bytes > 0) {
    item.header.kind = FrameKind::kMore;
    item.header.hasDescriptor = 0;
    item.sent = 0;
    queue_.push_front(std::move(item));
    return;
  }
  if (comesInPieces(kind)) {
    request->transferred_ += item.header.payloadBytes;
    if (request->transferred_ < request->data_.bytes) return;
  }
  request->mailbox_->finish(*request, Status());
}

bool FrameSender::forget(Transfer* request) {
  bool isKept = true;
  std::erase_if(queue_, [&](const OutItem& item) { return item.request == request; });
  for (Lane& lane : lanes_) {
    OutItem& item = lane.item;
    if (!lane.isSending || item.request != request) continue;
    item.request = nullptr;
    if (item.sent == 0 && !item.header.hasDescriptor) {
      lane.isSending = false;
      if (item.header.isBeginning()) --begun_;  // the latest: only the first socket sends them
    } else if (item.payload) {
      try {
        item.owned.assign(item.payload, item.header.payloadBytes);
      } catch (const std::bad_alloc&) {
        isKept = false;
      }
    }
  }
  return isKept;
}

void FrameSender::shutDown() const {
  for (const Lane& lane : lanes_) shutdown(lane.link->fd(), SHUT_WR);
}

bool FrameSender::hasArrived() const {
  return std::all_of(lanes_.begin(), lanes_.end(),
                     [](const Lane& lane) { return lane.link->hasArrived(); });
}

void FrameSender::close() {
  if (!isShm_) local_.tcpLinks -= static_cast<int>(lanes_.size());
  lanes_.clear();
}

std::set<Mailbox*> FrameSender::dropAll() {
  std::set<Mailbox*> mailboxes;
  const auto drop = [&](const OutItem& item) REQUIRES(ioRole) {
    if (!item.request) return;
    item.request->isUnsent_ = true;
    mailboxes.insert(item.request->mailbox_);
  };
  for (Lane& lane : lanes_) {
    if (std::exchange(lane.isSending, false)) drop(lane.item);
  }
  for (const OutItem& item : std::exchange(queue_, {})) drop(item);
  return mailboxes;
}

}  // namespace mycoll
