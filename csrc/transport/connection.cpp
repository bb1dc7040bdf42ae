#include "transport/connection.h"

#include <algorithm>
#include <cassert>
#include <chrono>
#include <string>
#include <utility>

#include "base/log.h"
#include "transport/mailbox.h"
#include "transport/tcp/address.h"
#include "transport/tcp/link.h"

namespace mycoll {
namespace {

using State = Connection::State;

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
    case State::kMaking: return to == State::kOpen || to == State::kEnding;
    case State::kOpen: return to == State::kEnding;
    case State::kEnding: return to == State::kLost;
    case State::kLost: break;
  }
  return false;
}

const char* name(State state) {
  constexpr const char* kNames[] = {"making", "open", "ending", "lost"};
  return kNames[static_cast<int>(state)];
}

}  // namespace

// The one place where the state changes.
void Connection::moveTo(State next) {
  assert(isLegal(state_, next));
  MYCOLL_LOG_DEBUG("connection with %s: %s -> %s", peer_.describe().c_str(), name(state_),
                   name(next));
  state_ = next;
  countStuck();
}

void Connection::countStuck() {
  const bool isStuck = state_ == State::kOpen && !sender_.isIdle();
  if (isStuck == isStuck_) return;
  isStuck_ = isStuck;
  local_.pending.fetch_add(isStuck ? 1 : -1, std::memory_order_relaxed);
}

Connection::~Connection() {
  if (isStuck_) local_.pending.fetch_sub(1, std::memory_order_relaxed);
}

// ---- being made --------------------------------------------------------------------------------

void Connection::dial() {
  assert(peer_.uid != local_.address.uid);
  if (state_ != State::kMaking || dial_) return;
  dial_ = std::make_unique<Dial>(local_, peer_, Dial::Joining{});
}

void Connection::advanceDialing() {
  if (!dial_) return advanceJoining();
  dial_->advance();
  if (dial_->state() == Dial::State::kFailed) {
    end(dial_->loss());
  } else if (dial_->state() == Dial::State::kMade) {
    open(dial_->takeLink());
    joinMore();
  }
}

void Connection::advanceJoining() {
  for (size_t i = 0; i < joining_.size();) {
    Dial& dial = *joining_[i];
    dial.advance();
    if (dial.state() == Dial::State::kTrying || dial.state() == Dial::State::kWaiting) {
      ++i;
      continue;
    }
    if (dial.state() == Dial::State::kFailed) {
      MYCOLL_LOG_WARN("one socket fewer for messages to %s: it %s", peer_.describe().c_str(),
                      dial.loss().describe().c_str());
    }
    Link link = dial.takeLink();
    joining_.erase(joining_.begin() + static_cast<ptrdiff_t>(i));
    if (link.sender) join(std::move(link));
  }
}

// This side has made the connection, and so chooses the number of sockets.
void Connection::joinMore() {
  if (state_ != State::kOpen || isShm()) return;
  int wanted = local_.options.flows;
  if (wanted == 0) {
    wanted = roundTripOf(sender_.fd()) >= kFarAway ? kFlowsFarAway : 1;
    auto isIpv4 = [](const TcpAddress& entry) {
      return entry.address.find(':') == std::string::npos;
    };
    const auto interfaces = std::count_if(peer_.tcp.begin(), peer_.tcp.end(), isIpv4);
    wanted = std::max(wanted, static_cast<int>(interfaces));
  }
  for (int number = 1; number < std::min<int>(wanted, kMostSockets); ++number) {
    joining_.push_back(
        std::make_unique<Dial>(local_, peer_, Dial::Joining{id_, static_cast<size_t>(number)}));
  }
}

void Connection::join(Link link) {
  if (state_ != State::kOpen) return;
  if (sender_.sockets() == 1) shareLoad(sender_.fd());
  shareLoad(link.sender->fd());
  MYCOLL_LOG_DEBUG("%zu sockets to %s", sender_.sockets() + 1, peer_.describe().c_str());
  add(std::move(link));
}

void Connection::giveUpDialing() {
  dial_.reset();
  for (Mailbox* mailbox : sender_.dropAll()) {
    local_.raise(mailbox, NotSent{peer_.uid, "has left the group"});
  }
}

void Connection::open(Link link) {
  moveTo(State::kOpen);
  dial_.reset();  // the peer may have connected first
  wasOpen_ = true;
  id_ = link.id;
  MYCOLL_LOG_DEBUG("connected to %s over %s", peer_.describe().c_str(),
                   link.isShm ? "shared memory" : "tcp");
  add(std::move(link));
}

void Connection::add(Link link) {
  // Until now the socket had no receiver, and its events were ignored. One of them may have been
  // the end of the peer.
  local_.sleeper.watchAgain(link.receiver->fd());
  sender_.add(std::move(link.sender), link.isShm);
  receiver_.add(std::move(link.receiver));
  if (local_.asleep > 0) setAsleep(true);
  flush();
}

// ---- bytes -------------------------------------------------------------------------------------

void Connection::enqueue(OutItem item) {
  if (state_ == State::kLost) {
    if (!item.request) return;
    item.request->isUnsent_ = true;
    return local_.raise(item.request->mailbox_, NotSent{peer_.uid, loss_.describe()});
  }
  if (sender_.enqueue(std::move(item))) flush();
}

void Connection::repeatGoodbye(const FrameHeader& came) {
  OutItem item;
  item.header.kind = FrameKind::kGoodbye;
  item.header.source = came.destination;
  item.header.destination = came.source;
  item.header.context = came.context;
  enqueue(std::move(item));
}

bool Connection::flush(size_t turnBytes) {
  if (state_ != State::kOpen) return false;
  bool hasFailed = false;
  const bool moved = sender_.flush(turnBytes, &hasFailed);
  if (hasFailed) end(lossOf(LossReason::kClosed));
  countStuck();
  return moved;
}

void Connection::setAsleep(bool asleep) {
  receiver_.setAsleep(asleep);
  sender_.setAsleep(asleep);
}

// ---- ending ------------------------------------------------------------------------------------

void Connection::end(Loss loss) {
  if (state_ == State::kEnding && loss.reason == LossReason::kSilent) loss_ = std::move(loss);
  if (state_ == State::kEnding || state_ == State::kLost) return;
  moveTo(State::kEnding);
  loss_ = std::move(loss);
  lastByte_ = Deadline::Clock::now();
  dial_.reset();
  joining_.clear();
  // Nothing more is sent. Shutting down every socket notifies the peer even if one is broken.
  if (sender_.sockets() > 1) sender_.shutDown();
}

void Connection::breakOff(Loss loss) {
  receiver_.stop();
  end(std::move(loss));
}

bool Connection::isDrained(bool isEnded) {
  if (!wasOpen_) return true;
  receiver_.lookAgain();
  if (drain(kToTheEnd)) lastByte_ = Deadline::Clock::now();
  if (isShm() || receiver_.isOver() || loss_.reason == LossReason::kSilent) return true;
  const std::chrono::milliseconds patience =
      isEnded ? kSilentHere : std::chrono::seconds(local_.options.networkSeconds);
  return Deadline::Clock::now() - lastByte_ > patience;
}

void Connection::finishSending() NO_THREAD_SAFETY_ANALYSIS {
  if (state_ != State::kOpen) return;
  OutItem farewell;
  farewell.header.kind = FrameKind::kFarewell;
  sender_.enqueue(std::move(farewell));
  flush();
  if (state_ == State::kOpen && !isShm()) sender_.shutDown();
}

bool Connection::hasArrived() NO_THREAD_SAFETY_ANALYSIS {
  return state_ != State::kOpen || sender_.hasArrived();
}

void Connection::lose() {
  moveTo(State::kLost);
  (void)sender_.dropAll();
  sender_.close();
  receiver_.close();
}

}  // namespace mycoll
