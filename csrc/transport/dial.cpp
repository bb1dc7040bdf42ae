#include "transport/dial.h"

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <new>
#include <set>
#include <utility>
#include <vector>

#include "base/log.h"
#include "transport/mailbox.h"
#include "transport/shm/link.h"
#include "transport/tcp/address.h"

namespace mycoll {
namespace {

constexpr auto kConnectTime = std::chrono::milliseconds(30'000);
// After a peer has reported that it has not made the group yet, which it does after a while (see
// acceptor.cpp); or after it has closed the socket without an answer, which it does when there
// are too many connections at a time.
constexpr auto kConnectAgain = grace(100);
constexpr int kMaxHangUps = 50;
// A peer that is gone may be gone because of a failure that other ranks are about to report, and
// which is the better explanation.
constexpr auto kLastWords = grace(400);
constexpr auto kLookAgain = grace(50);
// A peer that has lost a connection with this process refuses another one until it has left all
// groups that both were in. This process may have left them, and may have a new one, earlier.
constexpr auto kForgets = grace(1000);

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

// Not kNobody yet: the caller may have something to send, which ends with the next attempt.
Dial::Dial(Local& local, const PeerAddress& peer, Joining joining)
    : local_(local), peer_(peer), joining_(joining) {
  if (!begin()) nextAttempt_ = Deadline::after(std::chrono::milliseconds(0));
  ++local_.dialing;
  local_.pending.fetch_add(1, std::memory_order_relaxed);
}

Dial::~Dial() {
  --local_.dialing;
  local_.pending.fetch_sub(1, std::memory_order_relaxed);
}

// The oldest group that both are in authenticates the connection, whichever group needs it: the
// peer has made it long ago, but may be late with a new one. If the peer has not made the oldest,
// the next one is tried, which it may have made. Returns false if there is no such group.
bool Dial::begin() {
  std::vector<Mailbox*> common = local_.groups.commonWith(peer_.uid);
  if (common.empty()) return false;
  if (joining_.connection != 0) {
    // An invitation ends soon, and the group that it is for follows.
    std::erase_if(common, [](const Mailbox* mailbox) { return mailbox->group().isInvitation; });
    nextAttempt_ = Deadline::after(kConnectAgain);
    if (common.empty()) return true;
  }
  const Mailbox& mailbox = *common[notYet_ % common.size()];
  const GroupAddress& group = mailbox.group();
  secret_ = group.secret;
  hello_ = {};
  hello_.joins = joining_.connection;
  hello_.isInvitation = group.isInvitation;
  hello_.opensLater = group.opensLater;
  hello_.context = group.context;
  hello_.source = group.rank;
  hello_.destination = mailbox.presentRank(peer_.uid);
  std::memcpy(hello_.sourceUid, local_.address.uid.data(), sizeof(hello_.sourceUid));
  std::memcpy(hello_.destinationUid, peer_.uid.data(), sizeof(hello_.destinationUid));
  outcome_ = Outcome::kAccepted;
  moveTo(State::kTrying);
  task_ = attempt();
  task_.resume();
  return true;
}

// Returns false if the group that the peer has left knows that, or there is none.
bool Dial::raisesLeft() {
  Mailbox* const mailbox =
      outcome_ == Outcome::kGone ? local_.groups.find(hello_.context, hello_.source) : nullptr;
  if (!mailbox || !mailbox->isPresent(hello_.destination)) return false;
  local_.raise(mailbox, RankLeft{hello_.destination});
  return true;
}

void Dial::advance() {
  // The peer would answer when it makes a group that is over.
  const Mailbox* const mailbox = local_.groups.find(hello_.context, hello_.source);
  if (state_ == State::kTrying && hello_.opensLater && !hasProved_ &&
      (!mailbox || !mailbox->isPresent(hello_.destination))) {
    task_.reset();
    nextAttempt_ = Deadline::after(std::chrono::milliseconds(0));
    moveTo(State::kWaiting);
  }
  if (state_ == State::kTrying) {
    Condition* condition = task_.waitingFor();
    if (!task_.finished() && condition && condition->ready()) task_.resume();
    if (task_.finished()) finish();
  }
  if (state_ != State::kWaiting || !nextAttempt_.expired() || raisesLeft()) return;
  if (!begin()) moveTo(State::kNobody);
}

void Dial::finish() {
  const bool isMade = task_.result().ok();
  if (detail::isOutOfMemory(task_.result())) throw std::bad_alloc();  // the peer is not at fault
  task_.reset();
  if (outcome_ == Outcome::kLost) {
    if (givesUp_.isNever()) givesUp_ = Deadline::after(kForgets);
    loss_ = {LossReason::kClosed, "it has lost an earlier one"};
    if (givesUp_.expired()) return moveTo(State::kFailed);
  }
  if (isToTryAgain()) {
    const bool isLater = outcome_ != Outcome::kGone;
    notYet_ += outcome_ == Outcome::kNotYet;
    const bool isLastGroup = local_.groups.commonWith(peer_.uid).size() == 1;
    nextAttempt_ =
        Deadline::after(isLater                               ? kConnectAgain
                        : isLastGroup && !hello_.isInvitation ? kLastWords
                                                              : std::chrono::milliseconds(0));
    return moveTo(State::kWaiting);
  }
  if (!isMade && loss_.reason == LossReason::kNotListening && joining_.connection == 0 &&
      !hello_.isInvitation) {
    if (givesUp_.isNever()) givesUp_ = Deadline::after(kLastWords);
    if (!givesUp_.expired()) {
      nextAttempt_ = Deadline::after(kLookAgain);
      return moveTo(State::kWaiting);
    }
  }
  moveTo(isMade ? State::kMade : State::kFailed);
}

// The peer closed the socket before or during the handshake. After shared memory TCP is tried,
// which asks again. If nothing listens on TCP either, the peer closed because it is gone.
Status Dial::hungUp(bool isShm) {
  if (!isShm && ++hangUps_ <= kMaxHangUps) outcome_ = Outcome::kBusy;
  return Status(isShm ? Code::kPeerLost : Code::kNetwork, "did not answer the handshake");
}

Status Dial::notNow(Outcome outcome) {
  outcome_ = outcome;
  return Status(Code::kNetwork, "refused");  // not reported
}

// The addresses in the order in which they are tried: those in a common network first, those that
// failed before last. Each further socket begins with the next one, so that all are used.
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
  // If there is a common network, only it is used; likewise only IPv4, if there are both.
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

// If this host has several addresses in that network, they are used in turn.
const InterfaceAddress* Dial::ownFor(const TcpAddress& entry) const {
  std::vector<const InterfaceAddress*> own;
  for (const InterfaceAddress& each : local_.interfaces) {
    if (isInSubnetOf(each, entry.address)) own.push_back(&each);
  }
  return own.size() > 1 ? own[joining_.number % own.size()] : nullptr;
}

// If nothing listens there, the process is gone, and the address is not at fault.
void Dial::setAside(const TcpAddress& entry, const Status& failure) {
  if (peer_.tcp.size() < 2 || failure.code() == Code::kPeerLost) return;
  if (!local_.unreachable.insert(entry.address).second) return;
  MYCOLL_LOG_WARN("%s has several addresses, and one is not used, as it does not work: %s",
                  peer_.describe().c_str(), failure.message().c_str());
}

Task Dial::attempt() {
  std::string reasons;
  std::set<std::string> given;  // each once
  const auto give = [&](const Status& status) {
    if (!given.insert(status.message()).second) return;
    reasons += (reasons.empty() ? "" : "; ") + status.message();
  };
  bool isGone = true;  // nothing listens at its addresses
  if (joining_.connection == 0 && local_.isOnThisHost(peer_)) {
    Fd socket;
    bool isFull = false;
    Status status = connectUnix(peer_.uid, &socket, &isFull);
    if (isFull) co_return notNow(Outcome::kBusy);
    if (status.ok()) {
      status = co_await shakeHands(std::move(socket), true);
      if (status.ok() || isToTryAgain()) co_return status;
    }
    isGone = status.code() == Code::kPeerLost;
    give(status);
    MYCOLL_LOG_WARN("no shared memory with %s: %s", peer_.describe().c_str(), reasons.c_str());
  }
  for (const TcpAddress* each : addresses()) {
    const TcpAddress& entry = *each;
    Fd socket;
    Status status = startConnect(entry.address, entry.port, ownFor(entry), &socket);
    if (!status.ok()) setAside(entry, status);
    if (status.ok()) status = local_.sleeper.watch(socket.get());
    if (status.ok()) {
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
      if (status.ok() || isToTryAgain()) co_return status;
    }
    isGone &= status.code() == Code::kPeerLost;
    give(status);
  }
  if (isGone && !reasons.empty()) {
    loss_ = {LossReason::kNotListening, reasons};
    co_return Status(Code::kPeerLost, reasons);
  }
  loss_ = {isUnauthenticated_ ? LossReason::kUnauthenticated : LossReason::kUnreachable,
           reasons.empty() ? "it has no address in common" : reasons};
  co_return Status(Code::kNetwork, reasons);
}

// The connecting side of the handshake. There is no deadline: the peer may be stopped and continue
// later. If it ends, so does the socket.
Task Dial::shakeHands(Fd socket, bool isShm) {
  const int fd = socket.get();
  const Deadline never = Deadline::never();
  if (isShm) MYCOLL_CO_RETURN_IF_ERROR(local_.sleeper.watch(fd));
  hasProved_ = false;
  HandshakeSocket stream(fd, isShm ? nullptr : local_.options.tls, /*isConnector=*/true);
  hello_.isShm = isShm;
  MYCOLL_CO_RETURN_IF_ERROR(randomBytes(hello_.nonce, sizeof(hello_.nonce)));
  if (!stream.send(&hello_, sizeof(hello_))) co_return hungUp(isShm);
  Challenge challenge;
  ReadExactly readChallenge(stream, &challenge, sizeof(challenge), never);
  co_await readChallenge;
  isUnauthenticated_ |= !stream.failure().empty();
  if (!stream.failure().empty()) co_return Status(Code::kNetwork, stream.failure());
  if (readChallenge.hasFailed()) co_return hungUp(isShm);
  if (challenge.outcome == Outcome::kNotYet || challenge.outcome == Outcome::kGone) {
    co_return notNow(challenge.outcome);
  }
  if (!constantTimeEqual(acceptorProof(secret_, hello_, challenge.nonce), challenge.mac)) {
    isUnauthenticated_ = true;
    co_return Status(Code::kNetwork, "could not prove that it is a member of this group");
  }

  Proof proof;
  MYCOLL_CO_RETURN_IF_ERROR(randomBytes(proof.cookie, sizeof(proof.cookie)));
  proof.mac = connectorProof(secret_, hello_, challenge.nonce, proof.cookie);
  hasProved_ = true;
  std::shared_ptr<Segment> rings;
  if (isShm) {
    MYCOLL_CO_RETURN_IF_ERROR(Segment::create(ringSegmentBytes(), &rings));
    std::memcpy(reinterpret_cast<RingHeader*>(rings->data())->cookie, proof.cookie,
                sizeof(proof.cookie));
    if (!sendDescriptor(fd, rings->fd(), reinterpret_cast<const char*>(&proof), sizeof(proof))) {
      if (errno == EPIPE || errno == ECONNRESET) co_return hungUp(isShm);
      co_return Status(Code::kNetwork, "the ring's memory could not be handed over");
    }
    rings->closeFd();
  } else if (!stream.send(&proof, sizeof(proof))) {
    co_return hungUp(isShm);
  }
  Verdict verdict;
  ReadExactly readVerdict(stream, &verdict, sizeof(verdict), never);
  co_await readVerdict;
  if (readVerdict.hasFailed()) co_return hungUp(isShm);
  if (verdict.outcome == Outcome::kAskAgain || verdict.outcome == Outcome::kLost) {
    co_return notNow(verdict.outcome);
  }
  if (verdict.outcome != Outcome::kAccepted) {
    co_return Status(Code::kNetwork, isShm ? "memory could not be shared" : "was refused");
  }
  link_ =
      local_.makeLink(peer_, std::move(socket), std::move(rings), RingSide::kMaker, stream.tls());
  link_.id = idOf(proof);
  co_return Status();
}

}  // namespace mycoll
