// The endpoint's half that makes connections: both sides of the handshake (handshake.h).
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
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
// A stranger may hold a socket of ours for so long, and so many of them may. Of those that know our
// name: a large job's, all of which may come before we have made the group.
constexpr auto kStrangerTime = std::chrono::milliseconds(5'000);
constexpr size_t kMaxStrangers = 64;
constexpr size_t kMaxNamed = 4096;
constexpr auto kAcceptAgain = std::chrono::milliseconds(100);
// After a peer has said that it has not made the group yet, which it says after kStrangerTime; or
// after it has hung up without a word, which it does when there are too many at a time.
constexpr auto kConnectAgain = std::chrono::milliseconds(100);
constexpr int kMaxHangUps = 50;

// The group that a stranger names may be made on this side only in a moment: it saw our address
// before we saw all of theirs. Or it was here, and has been left.
class GroupIsKnown final : public Condition {
 public:
  using Key = std::pair<uint64_t, int>;
  GroupIsKnown(const std::map<Key, Mailbox*>& mailboxes, const std::set<Key>& closed, Key key,
               Deadline deadline)
      : mailboxes_(mailboxes), closed_(closed), key_(key), deadline_(deadline) {}
  bool ready() override {
    return mailboxes_.count(key_) > 0 || closed_.count(key_) > 0 || deadline_.expired();
  }

 private:
  const std::map<Key, Mailbox*>& mailboxes_;
  const std::set<Key>& closed_;
  Key key_;
  Deadline deadline_;
};

}  // namespace

// ---- connecting --------------------------------------------------------------------------------

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
    if (left) left->onLeft(link.voucher.destination);
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
  if (sendHello.hasFailed() || readChallenge.hasFailed()) {
    if (!isShm && ++link->hangUps <= kMaxHangUps) link->standing = Standing::kNotYet;
    co_return Status(Code::kNetwork, "did not answer the handshake");
  }
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
  if (readVerdict.hasFailed() || !verdict.isAccepted) {
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

// ---- accepting ---------------------------------------------------------------------------------

// Whoever does not know a name of ours makes room, the oldest first: however many strangers there
// are, a member that comes among them finds a place. False: there is no such stranger.
bool Endpoint::dropStranger() {
  auto found = std::find_if(accepting_.begin(), accepting_.end(),
                            [](const auto& accepting) { return !accepting->namesUs; });
  if (found == accepting_.end()) return false;
  accepting_.erase(found);
  return true;
}

void Endpoint::acceptFrom(int listener, bool isUnix) {
  for (;;) {
    const size_t named = std::count_if(accepting_.begin(), accepting_.end(),
                                       [](const auto& accepting) { return accepting->namesUs; });
    const bool isFull = named >= kMaxNamed;
    Fd socket;
    if (!isFull) socket = Fd(accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket.isOpen()) {
      if (!isFull) {
        if (errno == EAGAIN) return;
        if (errno == EINTR || errno == ECONNABORTED || errno == EPROTO) continue;
        if (errno == EMFILE && dropStranger()) continue;
      }
      MYCOLL_LOG_WARN("a connection has to wait: %s", isFull ? "too many" : strerror(errno));
      acceptAgain_ = Deadline::after(kAcceptAgain);  // the kernel keeps it until then
      return;
    }
    socket.keepFromChildren();
    if (accepting_.size() - named >= kMaxStrangers) dropStranger();
    if (isUnix && !isSameUser(socket.get())) continue;  // closes it
    if (!isUnix) tuneSocket(socket.get(), options_.networkSeconds);
    auto accepting = std::make_unique<Accepting>();
    accepting->socket = std::move(socket);
    accepting->isUnix = isUnix;
    accepting->deadline = Deadline::after(kStrangerTime);
    if (!sleeper_.watch(accepting->socket.get()).ok()) continue;  // we would never hear of it
    accepting->task = acceptTask(accepting.get());
    accepting->task.resume();
    accepting_.push_back(std::move(accepting));
  }
}

void Endpoint::acceptAll() {
  acceptAgain_ = Deadline::never();
  if (unixListener_.isOpen()) acceptFrom(unixListener_.get(), true);
  for (Fd& listener : tcpListeners_) acceptFrom(listener.get(), false);
}

Task Endpoint::acceptTask(Accepting* accepting) {
  const int fd = accepting->socket.get();
  Deadline deadline = accepting->deadline;
  const Status refused(Code::kNetwork, "refused");
  Hello hello;
  ReadExactly readHello(fd, &hello, sizeof(hello), deadline);
  co_await readHello;
  if (readHello.hasFailed() || hello.magic != kHandshakeMagic ||
      hello.version != kHandshakeVersion || (hello.isShm != 0) != accepting->isUnix ||
      std::memcmp(hello.destinationUid, address_.uid.data(), sizeof(hello.destinationUid)) != 0) {
    co_return refused;
  }
  accepting->namesUs = true;
  const GroupIsKnown::Key key{hello.context, hello.destination};
  GroupIsKnown known(mailboxes_, closed_, key, deadline);
  co_await known;
  Mailbox* mailbox = find(hello.context, hello.destination);
  if (!mailbox) {
    Challenge answer{};
    answer.standing = closed_.count(key) ? Standing::kGone : Standing::kNotYet;
    WriteExactly sendAnswer(fd, &answer, sizeof(answer), deadline);
    co_await sendAnswer;
    co_return refused;
  }
  deadline = accepting->deadline = Deadline::after(kStrangerTime);  // it has waited for us
  const std::string sourceUid(hello.sourceUid, sizeof(hello.sourceUid));
  if (hello.source < 0 || hello.source >= mailbox->ranks() ||
      mailbox->group().peers[hello.source].uid != sourceUid) {
    co_return refused;
  }
  const std::string secret = mailbox->group().secret;
  const PeerAddress peer = mailbox->group().peers[hello.source];
  Challenge challenge;
  MYCOLL_CO_RETURN_IF_ERROR(randomBytes(challenge.nonce, sizeof(challenge.nonce)));
  challenge.mac = acceptorProof(secret, hello, challenge.nonce);
  WriteExactly sendChallenge(fd, &challenge, sizeof(challenge), deadline);
  co_await sendChallenge;
  Proof proof;
  Fd memory;
  ReadExactly readProof(fd, &proof, sizeof(proof), deadline, hello.isShm ? &memory : nullptr);
  co_await readProof;
  if (sendChallenge.hasFailed() || readProof.hasFailed()) co_return refused;
  Digest expected = connectorProof(secret, hello, challenge.nonce, proof.cookie);
  if (!constantTimeEqual(expected, proof.mac)) {
    MYCOLL_LOG_WARN("refused a connection that claims to be rank %d", hello.source);
    co_return refused;
  }
  auto link = std::make_unique<InLink>();
  link->peerUid = sourceUid;
  link->isShm = hello.isShm != 0;
  Verdict verdict;
  verdict.isAccepted = 1;
  std::shared_ptr<Segment> segment;
  if (hello.isShm) {
    verdict.isAccepted = memory.isOpen() &&
                         Segment::adopt(std::move(memory), kRingSegmentBytes, &segment).ok() &&
                         std::memcmp(reinterpret_cast<RingHeader*>(segment->data())->cookie,
                                     proof.cookie, sizeof(proof.cookie)) == 0;
  }
  WriteExactly sendVerdict(fd, &verdict, sizeof(verdict), deadline);
  co_await sendVerdict;
  if (sendVerdict.hasFailed() || !verdict.isAccepted) co_return refused;
  if (hello.isShm) {
    link->receiver = std::make_unique<ShmReceiver>(std::move(segment), std::move(accepting->socket),
                                                   bellOf(peer), options_.distance);
  } else {
    link->receiver = std::make_unique<TcpReceiver>(std::move(accepting->socket));
  }
  if (options_.tap) link->receiver = options_.tap->tap(std::move(link->receiver));
  accepting->link = std::move(link);
  co_return Status();
}

// ---- both --------------------------------------------------------------------------------------

void Endpoint::runHandshakes() {
  for (auto& [uid, link] : outLinks_) {
    if (!link->connecting.valid()) continue;
    Condition* condition = link->connecting.waitingFor();
    if (!link->connecting.finished() && condition && condition->ready()) link->connecting.resume();
    if (link->connecting.finished()) finishConnecting(*link);
  }
  const auto now = Deadline::Clock::now();
  if (acceptAgain_.when() <= now) acceptAll();
  for (size_t i = 0; i < accepting_.size();) {
    Accepting& accepting = *accepting_[i];
    // Those that say nothing cost no system call: a job goes on at its pace among many of them.
    if (accepting.hasNews || accepting.namesUs || accepting.deadline.when() <= now) {
      accepting.hasNews = false;
      Condition* condition = accepting.task.waitingFor();
      if (!accepting.task.finished() && condition && condition->ready()) accepting.task.resume();
    }
    if (!accepting.task.finished()) {
      ++i;
      continue;
    }
    if (accepting.link) {
      if (asleep_ > 0) accepting.link->receiver->setAsleep(true);
      if (!accepting.link->isShm) ++tcpLinks_;
      sayUnsaid(*accepting.link);
      accepting.link->receiver->onEvent(false);  // what has come meanwhile raises no event any more
      inLinks_.push_back(std::move(accepting.link));
    }
    accepting_.erase(accepting_.begin() + static_cast<ptrdiff_t>(i));
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
