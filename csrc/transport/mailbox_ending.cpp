// The mailbox's half that ends things: failures and how the others hear of them, goodbyes, deaths.
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/log.h"
#include "base/sanitize.h"
#include "transport/endpoint.h"
#include "transport/mailbox.h"

namespace mycoll {

// The payload of kAbort: the code as one letter, the first collective that fails, then the text.
void Mailbox::onControl(const FrameHeader& came, const std::string& payload) {
  if (came.kind == FrameKind::kGoodbye) {
    onLeft(came.source);
    endReceivesFrom(came.source);
  } else if (came.kind == FrameKind::kProbe) {
    onProbe(came.source, payload);
  } else if (came.kind == FrameKind::kPosition) {
    uint64_t begun = 0;
    if (payload.size() != sizeof(begun)) return;
    std::memcpy(&begun, payload.data(), sizeof(begun));
    reached_[came.source] = std::max(reached_[came.source], begun);
  } else if (came.kind == FrameKind::kQuestion || came.kind == FrameKind::kAnswer ||
             came.kind == FrameKind::kVerdict || came.kind == FrameKind::kMessages) {
    listener_->onWord(came.source, came.kind, payload);
  } else if (came.kind == FrameKind::kHold || came.kind == FrameKind::kGoOn) {
    onFlow(came);
  } else if (came.kind == FrameKind::kAbort && payload.size() > 1 + sizeof(uint64_t)) {
    uint64_t from = 0;
    std::memcpy(&from, payload.data() + 1, sizeof(from));
    failLocked(statusFromPeer(payload[0] - 'a', payload.substr(1 + sizeof(from))), false, from);
  }
}

template <typename Wanted>
void Mailbox::abandonAll(const Status& status, Wanted isWanted) {
  for (Transfer* request = open_; request;) {
    Transfer* next = request->next_;
    if (isWanted(*request)) abandon(*request, status);
    request = next;
  }
}

void Mailbox::onLeft(int rank) {
  if (left_[rank]) return;  // it is told on every road that there is
  left_[rank] = true;
  const Status known = listener_->onGoodbye(rank);
  if (!known.ok()) return failLocked(known, false);
  // Receives that nothing has come for never will be served.
  abandonAll(departed(rank), [&](const Transfer& request) {
    return request.peer_ == rank && request.messageClass_ == MessageClass::kPointToPoint &&
           (!request.isReceive_ ||
            std::find(posted_.begin(), posted_.end(), &request) != posted_.end());
  });
}

Status Mailbox::departed(int rank) const {
  return Status(Code::kPeerLost, describeRank(rank) + " has left group '" + group_.name + "'");
}

// Its link has said all that it will ever say for this group. (The arena, too, tells that it has
// left, and may be faster than messages that are still on the link.)
void Mailbox::endReceivesFrom(int rank) {
  std::erase_if(unexpected_, [rank](const Unexpected& message) {
    return message.header.source == rank && message.header.kind == FrameKind::kRequestToSend;
  });
  abandonAll(departed(rank), [&](const Transfer& request) {
    return request.isReceive_ && request.peer_ == rank && inFlight_.count(request.id_) > 0;
  });
}

void Mailbox::fail(const Status& cause, bool tell) {
  bool wakesOthers = false;
  {
    std::lock_guard<std::mutex> lock(endpoint_->ioMutex());
    wakesOthers = failure_.ok() && tell && tellsOthers_;
    failLocked(cause, tell);
  }
  endpoint_->progress();
  endpoint_->sleeper().wakeAll();
  if (!wakesOthers) return;
  // Who is in no call does not look at rings; what it believes meanwhile may be wrong.
  for (const PeerAddress& peer : group_.peers) {
    if (endpoint_->isLocal(peer)) endpoint_->bellOf(peer).ring();
  }
}

// With this failure: collectives from failedFrom_ on, and all messages.
bool Mailbox::isOver(MessageClass messageClass, uint64_t tag) const {
  if (failure_.ok()) return false;
  return messageClass == MessageClass::kCollective     ? tag >> kStepBits >= failedFrom_
         : messageClass == MessageClass::kPointToPoint ? true
                                                       : failedFrom_ == 0;
}

void Mailbox::endOpen() {
  abandonAll(failure_, [this](const Transfer& request) {
    return isOver(request.messageClass_, request.tag_);
  });
}

void Mailbox::failLocked(const Status& cause, bool tell, uint64_t from) {
  if (!failure_.ok()) {
    if (from >= failedFrom_) return;
    failedFrom_ = from;
    listener_->onFailure(failure_, from);
    return endOpen();
  }
  failure_ = cause;
  failedFrom_ = from;
  // The moment it is known; closing a group in good order is no news.
  if (cause.code() != Code::kAborted) {
    logFailure(cause.message());
  } else if (tell) {
    MYCOLL_LOG_ERROR("%s", cause.message().c_str());
  }
  listener_->onFailure(cause, from);
  endOpen();
  if (!tell || !tellsOthers_) return;
  const std::string payload = abortPayload();
  for (int rank = 0; rank < ranks(); ++rank) {
    if (rank != group_.rank && !left_[rank]) queueControl(rank, FrameKind::kAbort, payload);
  }
}

std::string Mailbox::abortPayload() const {
  std::string payload(1, static_cast<char>('a' + static_cast<int>(failure_.code())));
  payload.append(reinterpret_cast<const char*>(&failedFrom_), sizeof(failedFrom_));
  return payload + failure_.message().substr(0, kMaxControlBytes - payload.size());
}

void Mailbox::queueControl(int destination, FrameKind kind, const std::string& payload) {
  if (destination == group_.rank) return onControl(header(kind, destination), payload);
  OutLink& link = endpoint_->linkTo(group_.peers[destination]);
  OutItem item;
  item.header = header(kind, destination);
  item.header.payloadBytes = payload.size();
  item.owned = payload;
  endpoint_->enqueue(link, std::move(item));
}

void Mailbox::sayGoodbye(const Status& cause) {
  {
    std::lock_guard<std::mutex> lock(endpoint_->ioMutex());
    abandonAll(cause, [](const Transfer& request) { return !request.isReceive_; });
    for (int rank = 0; rank < ranks(); ++rank) {
      if (rank == group_.rank) continue;
      if (endpoint_->hasLinkTo(group_.peers[rank])) {
        // Or it might hear of the departure before it hears why.
        if (!failure_.ok() && tellsOthers_) queueControl(rank, FrameKind::kAbort, abortPayload());
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

bool Mailbox::isReceiving(bool orPosted) {
  bool isIt = false;
  forEachMessage([&](const Transfer& message) {
    isIt |= message.isReceive_ &&
            (orPosted || std::find(posted_.begin(), posted_.end(), &message) == posted_.end());
  });
  return isIt;
}

// Nothing of what is sent to it or received from it is finished.
bool Mailbox::needs(int rank) const {
  for (const Transfer* request = open_; request; request = request->next_) {
    if (request->peer_ == rank) return true;
  }
  return false;
}

// A message to or from a rank that has left.
void Mailbox::refuse(Transfer& request, int rank) {
  auto vanished = vanished_.find(rank);
  if (vanished != vanished_.end()) return failLocked(vanished->second, true);  // ends it, too
  finish(request, departed(rank));
}

// A rank without a connection to this one says no goodbye to it: its end alone is no failure. If it
// was one, those that have a connection to it know, and tell; and who needs it, now or later, is
// failed by that. Only a rank that nobody had a connection to can die without its group hearing of
// it before it is needed.
void Mailbox::onPeerLost(const std::string& uid, const std::string& how, bool wasLinked) {
  for (int rank = 0; rank < ranks(); ++rank) {
    if (group_.peers[rank].uid != uid || rank == group_.rank) continue;
    if (left_[rank]) {
      endReceivesFrom(rank);
      continue;
    }
    const Departure departure = listener_->departureOf(rank);
    if (departure == Departure::kLeft) continue;
    const bool isUnclear = departure == Departure::kUnknown && !wasLinked && !needs(rank);
    Status story(Code::kPeerLost,
                 "mycoll group '" + group_.name + "': " + describeRank(rank) + " " +
                     (isUnclear && how == kHasEnded ? kHasVanished : how) + " (seen by rank " +
                     std::to_string(group_.rank) +
                     "). The group is dead; see that rank's log. To go on: destroy the "
                     "group and make a new one, or restart the job (torchrun --max-restarts).");
    if (!isUnclear) return failLocked(story, true);
    vanished_.emplace(rank, std::move(story));
    onLeft(rank);
  }
}

void Mailbox::setTellsOthers(bool tells) {
  std::lock_guard<std::mutex> lock(endpoint_->ioMutex());
  tellsOthers_ = tells;
}

}  // namespace mycoll
