#include "transport/dial.h"

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "base/log.h"
#include "transport/mailbox.h"
#include "transport/shm/link.h"
#include "transport/tcp/address.h"

namespace mycoll {
namespace {

constexpr auto kConnectTime = std::chrono::milliseconds(30'000);
// After a peer has said that it has not made the group yet, which it says after a while (see
// doorkeeper.cpp); or after it has hung up without a word, which it does when there are too many at
// a time.
constexpr auto kConnectAgain = std::chrono::milliseconds(100);
constexpr int kMaxHangUps = 50;
// A peer that is gone may have gone because of a failure, which the others are about to tell, and
// which says more.
constexpr auto kLastWords = std::chrono::milliseconds(400);
constexpr auto kLookAgain = std::chrono::milliseconds(50);

[[maybe_unused]] bool isLegal(Dial::State from, Dial::State to) {
  switch (from) {
    case Dial::State::kTrying:
      return to == Dial::State::kMade || to == Dial::State::kFailed || to == Dial::State::kWaiting;
    case Dial::State::kWaiting: return to == Dial::State::kTrying || to == Dial::State::kNobody;
    case Dial::State::kMade:
    case Dial::State::kFailed:
    case Dial::State::kNobody: break;
  }
  return false;
}

bool isIpv6Address(const std::string& address) { return address.find(':') != address.npos; }

}  // namespace

void Dial::moveTo(State next) {
  assert(isLegal(state_, next));
  state_ = next;
}

// Not kNobody at once: the caller may have something to send, which ends with the next attempt.
Dial::Dial(Local& local, const PeerAddress& peer, Joining joining)
    : local_(local), peer_(peer), joining_(joining) {
  if (!begin()) nextAttempt_ = Deadline::after(std::chrono::milliseconds(0));
}

// The oldest group that both are in vouches, whichever needs the connection: the other side has
// made it long ago, while it may be late with a new one. If not even that, the next one is asked
// about: it may have been made while the oldest cannot be. False: there is none.
bool Dial::begin() {
  const std::vector<Mailbox*> common = local_.groups.commonWith(peer_.uid);
  if (common.empty()) return false;
  const Mailbox& mailbox = *common[notYet_ % common.size()];
  const GroupAddress& group = mailbox.group();
  voucher_ = {group.context, group.secret, group.rank, mailbox.presentRank(peer_.uid)};
  standing_ = Standing::kMember;
  isCrossed_ = false;
  moveTo(State::kTrying);
  task_ = attempt();
  task_.resume();
  return true;
}

void Dial::goOn() {
  if (state_ != State::kTrying) return;
  Condition* condition = task_.waitingFor();
  if (!task_.finished() && condition && condition->ready()) task_.resume();
  if (task_.finished()) finish();
}

void Dial::finish() {
  const bool isMade = task_.result().ok();
  task_.reset();
  if (standing_ != Standing::kMember) {
    const bool isLater = standing_ == Standing::kNotYet;
    notYet_ += isLater && !isCrossed_;
    const bool isLastGroup = local_.groups.commonWith(peer_.uid).size() == 1;
    nextAttempt_ = Deadline::after(isLater       ? kConnectAgain
                                   : isLastGroup ? kLastWords
                                                 : std::chrono::milliseconds(0));
    return moveTo(State::kWaiting);
  }
  if (!isMade && loss_.reason == LossReason::kNotListening && joining_.connection == 0) {
    if (givesUp_.isNever()) givesUp_ = Deadline::after(kLastWords);
    if (!givesUp_.expired()) {
      nextAttempt_ = Deadline::after(kLookAgain);
      return moveTo(State::kWaiting);
    }
  }
  moveTo(isMade ? State::kMade : State::kFailed);
}

Dial::Left Dial::left() const {
  if (standing_ != Standing::kGone) return {nullptr, -1};
  return {local_.groups.find(voucher_.context, voucher_.source), voucher_.destination};
}

void Dial::again() {
  if (!begin()) moveTo(State::kNobody);
}

// In the middle of the handshake, or before it began. After shared memory TCP is next, which asks
// again; where nobody listens there either, it hung up because it is gone.
Status Dial::hungUp(bool isShm) {
  if (!isShm && ++hangUps_ <= kMaxHangUps) standing_ = Standing::kNotYet;
  return Status(isShm ? Code::kPeerLost : Code::kNetwork, "did not answer the handshake");
}

// Another attempt follows.
Status Dial::notNow(Standing standing) {
  standing_ = standing;
  return Status(Code::kNetwork, "refused");  // seen by nobody
}

// In the order in which they are tried: those of a network that both are in come first, those that
// did not work before come last. Further sockets begin one later each, and so use all of them.
std::vector<const TcpAddress*> Dial::addresses() const {
  auto isNear = [this](const TcpAddress* entry) {
    return std::any_of(
        local_.interfaces.begin(), local_.interfaces.end(),
        [&](const InterfaceAddress& own) { return isInSubnetOf(own, entry->address); });
  };
  auto isGood = [this](const TcpAddress* entry)
                    REQUIRES(ioRole) { return !local_.unreachable.contains(entry->address); };
  std::vector<const TcpAddress*> order;
  for (const TcpAddress& entry : peer_.tcp) order.push_back(&entry);
  if (order.size() < 2) return order;
  const auto bad = std::stable_partition(order.begin(), order.end(), isGood);
  const auto far = std::stable_partition(order.begin(), bad, isNear);
  // Where they have a network in common it is used; also IPv4 only, where it is not the only one.
  auto last = far != order.begin() ? far : bad;
  const bool isIpv6 = isIpv6Address(order.front()->address);
  last = std::stable_partition(order.begin(), last, [&](const TcpAddress* entry) {
    return isIpv6Address(entry->address) == isIpv6;
  });
  if (last != order.begin()) {
    std::rotate(order.begin(),
                order.begin() + static_cast<ptrdiff_t>(joining_.number %
                                                       static_cast<size_t>(last - order.begin())),
                last);
  }
  return order;
}

// Where this host has several addresses in that network, they take turns.
const InterfaceAddress* Dial::ownFor(const TcpAddress& entry) const {
  std::vector<const InterfaceAddress*> own;
  for (const InterfaceAddress& each : local_.interfaces) {
    if (isInSubnetOf(each, entry.address)) own.push_back(&each);
  }
  return own.size() > 1 ? own[joining_.number % own.size()] : nullptr;
}

// Where nobody listens it is the process that is gone, and not the way to it.
void Dial::setAside(const TcpAddress& entry, const Status& failure) {
  if (peer_.tcp.size() < 2 || failure.code() == Code::kPeerLost) return;
  if (!local_.unreachable.insert(entry.address).second) return;
  MYCOLL_LOG_WARN("%s has several addresses, and one is not used, as it does not work: %s",
                  peer_.describe().c_str(), failure.message().c_str());
}

Task Dial::attempt() {
  std::string reasons;
  bool isGone = true;  // nobody listens where it did
  if (joining_.connection == 0 && local_.isOnThisHost(peer_)) {
    Fd socket;
    bool isFull = false;
    Status status = connectUnix(peer_.uid, &socket, &isFull);
    if (isFull) co_return notNow(Standing::kNotYet);
    if (status.ok()) {
      status = co_await shakeHands(std::move(socket), true);
      if (status.ok() || standing_ != Standing::kMember) co_return status;
    }
    isGone = status.code() == Code::kPeerLost;
    reasons = status.message();
    MYCOLL_LOG_WARN("no shared memory with %s: %s", peer_.describe().c_str(), reasons.c_str());
  }
  for (const TcpAddress* each : addresses()) {
    const TcpAddress& entry = *each;
    Fd socket;
    Status status = startConnect(entry.address, entry.port, ownFor(entry), &socket);
    if (status.ok()) {
      (void)local_.sleeper.watch(socket.get());
      Connected connected(socket.get(), Deadline::after(kConnectTime));
      co_await connected;
      if (connected.error() == ECONNRESET) {
        status = hungUp(false);
      } else if (connected.hasFailed()) {
        status = connectFailure(entry.address, entry.port, connected.error());
        setAside(entry, status);
      } else {
        tuneSocket(socket.get(), local_.options.networkSeconds);
        status = co_await shakeHands(std::move(socket), false);
      }
      if (status.ok() || standing_ != Standing::kMember) co_return status;
    } else {
      setAside(entry, status);
    }
    isGone &= status.code() == Code::kPeerLost;
    reasons += (reasons.empty() ? "" : "; ") + status.message();
  }
  if (isGone && !reasons.empty()) {
    loss_ = {LossReason::kNotListening, reasons};
    co_return Status(Code::kPeerLost, reasons);
  }
  loss_ = {LossReason::kUnreachable, reasons.empty() ? "it has no address in common" : reasons};
  co_return Status(Code::kNetwork, reasons);
}

Task Dial::shakeHands(Fd socket, bool isShm) {
  using End = Handshake::End;
  if (isShm) (void)local_.sleeper.watch(socket.get());
  handshake_ = {};
  handshake_.socket = socket.get();
  handshake_.secret = voucher_.secret;
  // The other side may be stopped, and go on: its end would end the connection.
  handshake_.deadline = Deadline::never();
  handshake_.makesRings = isShm;
  Hello& hello = handshake_.hello;
  hello.isShm = isShm;
  hello.joins = joining_.connection;
  hello.context = voucher_.context;
  hello.source = voucher_.source;
  hello.destination = voucher_.destination;
  std::memcpy(hello.sourceUid, local_.address.uid.data(), sizeof(hello.sourceUid));
  std::memcpy(hello.destinationUid, peer_.uid.data(), sizeof(hello.destinationUid));
  MYCOLL_CO_RETURN_IF_ERROR(co_await mycoll::shakeHands(handshake_));
  switch (handshake_.end) {
    case End::kAccepted: break;
    case End::kHungUp: co_return hungUp(isShm);
    case End::kGone: co_return notNow(Standing::kGone);
    case End::kNotYet: co_return notNow(Standing::kNotYet);
    case End::kAskAgain: isCrossed_ = true; co_return notNow(Standing::kNotYet);
    case End::kDistrusted:
      co_return Status(Code::kNetwork, "could not prove that it is a member of this group");
    case End::kRefused:
      co_return Status(Code::kNetwork, isShm ? "memory could not be shared" : "was refused");
  }
  link_ = local_.makeLink(peer_, std::move(socket), std::move(handshake_.rings), RingSide::kMaker);
  link_.id = idOf(handshake_.proof);
  co_return Status();
}

}  // namespace mycoll
