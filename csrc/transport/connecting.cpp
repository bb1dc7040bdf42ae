// The endpoint's half that makes connections: the calling side of the handshake (handshake.h).
#include <algorithm>
#include <cstring>

#include "base/log.h"
#include "transport/endpoint.h"
#include "transport/handshake.h"
#include "transport/shm/link.h"
#include "transport/tcp/address.h"
#include "transport/tcp/link.h"

namespace mycoll {
namespace {

constexpr auto kConnectTime = std::chrono::milliseconds(30'000);
// After a peer has said that it has not made the group yet, which it says after a while (see
// accepting.cpp); or after it has hung up without a word, which it does when there are too many at
// a time.
constexpr auto kConnectAgain = std::chrono::milliseconds(100);
constexpr int kMaxHangUps = 50;

// In the middle of the handshake. After shared memory TCP is next, which asks again.
Status hungUp(OutLink& link, bool isShm) {
  if (!isShm && ++link.hangUps <= kMaxHangUps) link.standing = Standing::kNotYet;
  return Status(Code::kNetwork, "did not answer the handshake");
}

}  // namespace

OutLink& Endpoint::linkTo(const PeerAddress& peer) {
  auto& link = outLinks_[peer.uid];
  if (!link) {
    link = std::make_unique<OutLink>();
    link->peer = peer;
    ++connecting_;
    addPending(1);
    for (const Farewell& farewell : std::exchange(unsaid_[peer.uid], {})) {
      OutItem item;
      item.header.kind = FrameKind::kGoodbye;
      item.header.context = farewell.context;
      item.header.source = farewell.source;
      item.header.destination = farewell.destination;
      link->queue.push_back(std::move(item));
    }
    // Not dropped here: whoever asks for a link may put something into its queue.
    if (!connect(*link)) refuse(*link, Standing::kGone);
    runHandshakes();
  }
  return *link;
}

// The oldest group that both are in vouches, whichever needs the link: the other side has made it
// long ago, while it may be late with a new one. If not even that, the next one is asked about: it
// may have been made while the oldest cannot be. False: there is none.
bool Endpoint::connect(OutLink& link) {
  std::vector<const Mailbox*> common;
  for (const Mailbox* mailbox : byAge_) {
    if (mailbox->presentRank(link.peer.uid) >= 0) common.push_back(mailbox);
  }
  if (common.empty()) return false;
  const Mailbox& mailbox = *common[link.notYet % common.size()];
  const GroupAddress& group = mailbox.group();
  link.voucher = {group.context, group.secret, group.rank, mailbox.presentRank(link.peer.uid)};
  link.standing = Standing::kMember;
  link.connecting = connectTask(&link);
  link.connecting.resume();
  return true;
}

// connectAgain() goes on with it.
void Endpoint::refuse(OutLink& link, Standing standing) {
  const bool isLater = standing == Standing::kNotYet;
  link.notYet += isLater;
  link.standing = standing;
  link.nextAttempt = Deadline::after(isLater ? kConnectAgain : std::chrono::milliseconds(0));
}

// Where the other side does not know the group that was to vouch.
void Endpoint::connectAgain() {
  // One at a time: news of a departure may add links.
  while (connecting_ > 0) {
    auto found = std::find_if(outLinks_.begin(), outLinks_.end(), [](const auto& entry) {
      return entry.second->standing != Standing::kMember && !entry.second->connecting.valid() &&
             entry.second->nextAttempt.expired();
    });
    if (found == outLinks_.end()) return;
    OutLink& link = *found->second;
    Mailbox* left = link.standing == Standing::kGone
                        ? find(link.voucher.context, link.voucher.source)
                        : nullptr;
    if (left) left->owner().onLeft(link.voucher.destination);
    if (!connect(link)) drop(link);
  }
}

// The other side has left all groups that both were in.
void Endpoint::drop(OutLink& link) {
  const std::string uid = link.peer.uid;
  const std::deque<OutItem> queue = std::move(link.queue);
  outLinks_.erase(uid);
  --connecting_;
  addPending(-1);
  for (const OutItem& item : queue) {
    if (!item.request) continue;
    item.request->mailbox_->abandon(
        *item.request, Status(Code::kPeerLost, "the receiving rank has left the group"));
  }
}

Task Endpoint::connectTask(OutLink* link) {
  std::string reasons;
  bool isGone = true;  // nobody listens where it did
  if (isLocal(link->peer)) {
    Fd socket;
    Status status = connectUnix(link->peer.uid, &socket);
    if (status.ok()) {
      status = co_await connectOver(link, std::move(socket), true);
      if (status.ok() || link->standing != Standing::kMember) co_return status;
    }
    isGone = status.code() == Code::kPeerLost;
    reasons = status.message();
    MYCOLL_LOG_WARN("no shared memory with %s: %s", link->peer.describe().c_str(), reasons.c_str());
  }
  for (const TcpAddress& entry : link->peer.tcp) {
    Fd socket;
    Status status = startConnect(entry.address, entry.port, &socket);
    if (status.ok()) {
      (void)sleeper_.watch(socket.get());
      Connected connected(socket.get(), Deadline::after(kConnectTime));
      co_await connected;
      if (connected.hasFailed()) {
        status = connectFailure(entry.address, entry.port, connected.error());
      } else {
        tuneSocket(socket.get(), options_.networkSeconds);
        status = co_await connectOver(link, std::move(socket), false);
        if (status.ok() || link->standing != Standing::kMember) co_return status;
      }
    }
    isGone &= status.code() == Code::kPeerLost;
    reasons += (reasons.empty() ? "" : "; ") + status.message();
  }
  if (isGone && !reasons.empty()) {
    co_return Status(Code::kPeerLost,
                     "has left the group (destroy_process_group) or ended before "
                     "anything reached it: its process does not listen any more (" +
                         reasons + ")");
  }
  co_return Status(Code::kNetwork, "cannot be reached: " +
                                       (reasons.empty() ? "it has no address in common" : reasons));
}

Task Endpoint::connectOver(OutLink* link, Fd socket, bool isShm) {
  const HandshakeGroup group = link->voucher;
  // The other side may be stopped, and go on: its end would end the connection.
  const Deadline deadline = Deadline::never();
  const int fd = socket.get();
  if (isShm) (void)sleeper_.watch(fd);
  Hello hello;
  hello.isShm = isShm;
  hello.context = group.context;
  hello.source = group.source;
  hello.destination = group.destination;
  std::memcpy(hello.sourceUid, address_.uid.data(), sizeof(hello.sourceUid));
  std::memcpy(hello.destinationUid, link->peer.uid.data(), sizeof(hello.destinationUid));
  MYCOLL_CO_RETURN_IF_ERROR(randomBytes(hello.nonce, sizeof(hello.nonce)));
  WriteExactly sendHello(fd, &hello, sizeof(hello), deadline);
  co_await sendHello;
  Challenge challenge;
  ReadExactly readChallenge(fd, &challenge, sizeof(challenge), deadline);
  co_await readChallenge;
  if (sendHello.hasFailed() || readChallenge.hasFailed()) co_return hungUp(*link, isShm);
  if (challenge.standing == Standing::kNotYet || challenge.standing == Standing::kGone) {
    link->standing = challenge.standing;
    co_return Status(Code::kNetwork, "refused");  // seen by nobody: another attempt follows
  }
  Digest expected = acceptorProof(group.secret, hello, challenge.nonce);
  if (!constantTimeEqual(expected, challenge.mac)) {
    co_return Status(Code::kNetwork, "could not prove that it is a member of this group");
  }
  Proof proof;
  MYCOLL_CO_RETURN_IF_ERROR(randomBytes(proof.cookie, sizeof(proof.cookie)));
  proof.mac = connectorProof(group.secret, hello, challenge.nonce, proof.cookie);
  std::shared_ptr<Segment> segment;
  if (isShm) {
    MYCOLL_CO_RETURN_IF_ERROR(Segment::create(kRingSegmentBytes, &segment));
    auto* ring = reinterpret_cast<RingHeader*>(segment->data());
    std::memcpy(ring->cookie, proof.cookie, sizeof(ring->cookie));
    // A fresh socket has room for so few bytes: this never fails for want of it.
    if (!sendDescriptor(fd, segment->fd(), reinterpret_cast<const char*>(&proof), sizeof(proof))) {
      co_return Status(Code::kNetwork, "the ring's memory could not be handed over");
    }
    segment->closeFd();
  } else {
    WriteExactly sendProof(fd, &proof, sizeof(proof), deadline);
    co_await sendProof;
  }
  Verdict verdict;
  ReadExactly readVerdict(fd, &verdict, sizeof(verdict), deadline);
  co_await readVerdict;
  if (readVerdict.hasFailed()) co_return hungUp(*link, isShm);
  if (!verdict.isAccepted) {
    co_return Status(Code::kNetwork, isShm ? "memory could not be shared" : "was refused");
  }
  if (isShm) {
    link->sender =
        std::make_unique<ShmSender>(std::move(segment), std::move(socket), bellOf(link->peer));
  } else {
    link->sender = std::make_unique<TcpSender>(std::move(socket));
    ++tcpLinks_;
  }
  if (options_.tap) link->sender = options_.tap->tap(std::move(link->sender));
  link->isShm = isShm;
  co_return Status();
}

void Endpoint::goOnConnecting() {
  for (auto& [uid, link] : outLinks_) {
    if (!link->connecting.valid()) continue;
    Condition* condition = link->connecting.waitingFor();
    if (!link->connecting.finished() && condition && condition->ready()) link->connecting.resume();
    if (link->connecting.finished()) finishConnecting(*link);
  }
}

void Endpoint::finishConnecting(OutLink& link) {
  Status status = link.connecting.result();
  link.connecting.reset();
  if (link.standing != Standing::kMember) return refuse(link, link.standing);
  --connecting_;
  addPending(-1);
  if (!status.ok()) {
    link.problem = status.message();
    return;
  }
  MYCOLL_LOG_DEBUG("connected to %s over %s", link.peer.describe().c_str(),
                   link.isShm ? "shared memory" : "tcp");
  if (asleep_ > 0) link.sender->setAsleep(true);
  connected_.push_back(link.peer.uid);
  flush(link, kTurnBytes);
}

}  // namespace mycoll
