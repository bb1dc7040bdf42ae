// The endpoint's half that is connected to: the answering side of the handshake (handshake.h).
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

// A stranger may hold a socket of ours for so long, and so many of them may. Of those that know our
// name: a large job's, all of which may come before we have made the group.
constexpr auto kStrangerTime = std::chrono::milliseconds(5'000);
constexpr size_t kMaxStrangers = 64;
constexpr size_t kMaxNamed = 4096;
constexpr auto kAcceptAgain = std::chrono::milliseconds(100);

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
  // What is left to say was dropped with the last common group. Asked again, we say that it is
  // gone.
  if (memberships_.count(sourceUid) == 0) co_return refused;
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

void Endpoint::goOnAccepting() {
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

}  // namespace mycoll
