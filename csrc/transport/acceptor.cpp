#include "transport/acceptor.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include "base/log.h"
#include "transport/handshake.h"
#include "transport/mailbox.h"
#include "transport/shm/link.h"
#include "transport/tcp/address.h"

namespace mycoll {
namespace {

// An unauthenticated connection may exist for this long, and so many of them. kMaxNamed: those that
// know this process's uid. All ranks of a large job may connect before this process has made the
// group.
constexpr auto kAuthenticationTime = grace(5'000);
constexpr size_t kMostUnauthenticated = 64;
constexpr size_t kMaxNamed = 4096;
constexpr int kMostAtOnce = 64;  // connections that are accepted in a row
constexpr auto kAcceptAgain = std::chrono::milliseconds(100);

// Waits until the group that a Hello names is known here. This process may be about to make it, as
// the peer had this process's address earlier than this process had all others. Or this process has
// left it.
class GroupIsKnown final : public Condition {
 public:
  GroupIsKnown(const GroupTable& groups, uint64_t context, int rank, Deadline deadline)
      : groups_(groups), context_(context), rank_(rank), deadline_(deadline) {}
  bool ready() override REQUIRES(ioRole) {
    return groups_.standing(context_, rank_) != Outcome::kNotYet || deadline_.expired();
  }

 private:
  const GroupTable& groups_;
  const uint64_t context_;
  const int rank_;
  const Deadline deadline_;
};

}  // namespace

// A connection that is not authenticated yet.
struct Acceptor::Incoming {
  Fd socket;
  bool isUnix = false;
  Deadline deadline;
  bool isReady = true;   // its socket may have something to read
  bool namesUs = false;  // it knows this process's uid, as members do; strangers do not
  Task task;
  AcceptedPeer accepted;  // what the handshake ends with; without a link when it failed
};

Acceptor::Acceptor(Local& local, Admit admit, OnAccepted onAccepted)
    : local_(local), admit_(std::move(admit)), onAccepted_(std::move(onAccepted)) {}

Acceptor::~Acceptor() = default;

Status Acceptor::listen() {
  const MeshOptions& options = local_.options;
  if (options.transport != TransportChoice::kTcp) {
    MYCOLL_RETURN_IF_ERROR(listenUnix(local_.address.uid, &unixListener_));
    MYCOLL_RETURN_IF_ERROR(local_.sleeper.watch(unixListener_.get()));
  }
  if (options.transport == TransportChoice::kShm) return Status();
  std::vector<InterfaceAddress>& chosen = local_.interfaces;
  MYCOLL_RETURN_IF_ERROR(chooseInterface(options.interfaces, options.storeHost, &chosen));
  Status failure;
  for (const InterfaceAddress& entry : chosen) {
    Fd listener;
    int port = 0;
    Status status = listenOn(entry, options.ports, &listener, &port);
    if (!status.ok()) {
      failure = status;
      continue;
    }
    MYCOLL_RETURN_IF_ERROR(local_.sleeper.watch(listener.get()));
    tcpListeners_.push_back(std::move(listener));
    const AdvertisedAddress& advertised = options.advertised;
    if (advertised.address.empty()) {
      local_.address.tcp.push_back({entry.address, port});
    } else if (local_.address.tcp.empty()) {
      local_.address.tcp.push_back({advertised.address, advertised.port ? advertised.port : port});
    }
    MYCOLL_LOG_INFO("listening on %s port %d (%s)", entry.address.c_str(), port,
                    entry.interfaceName.c_str());
  }
  return tcpListeners_.empty() ? failure : Status();
}

bool Acceptor::onEvent(int fd) {
  if (fd == unixListener_.get()) return acceptFrom(fd, true), true;
  for (Fd& listener : tcpListeners_) {
    if (fd == listener.get()) return acceptFrom(fd, false), true;
  }
  for (auto& incoming : handshakes_) {
    if (incoming->socket.get() == fd) return incoming->isReady = true;
  }
  return false;
}

// Drops the oldest connection that does not know this process's uid, so that a member finds a place
// among any number of strangers. Returns false if there is none.
bool Acceptor::dropUnauthenticated() {
  auto found = std::find_if(handshakes_.begin(), handshakes_.end(),
                            [](const auto& incoming) { return !incoming->namesUs; });
  if (found == handshakes_.end()) return false;
  handshakes_.erase(found);
  return true;
}

void Acceptor::acceptFrom(int listener, bool isUnix) {
  for (int i = 0; i < kMostAtOnce; ++i) {
    const size_t named = std::count_if(handshakes_.begin(), handshakes_.end(),
                                       [](const auto& incoming) { return incoming->namesUs; });
    const bool isFull = named >= kMaxNamed;
    Fd socket;
    if (!isFull) socket = Fd(accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket.isOpen()) {
      if (!isFull) {
        if (errno == EAGAIN) return;
        if (errno == EINTR || errno == ECONNABORTED || errno == EPROTO) continue;
        if (errno == EMFILE && dropUnauthenticated()) continue;
      }
      MYCOLL_LOG_WARN("a connection has to wait: %s", isFull ? "too many" : strerror(errno));
      acceptAgain_ = Deadline::after(kAcceptAgain);  // the kernel keeps it until then
      return;
    }
    socket.keepFromChildren();
    if (handshakes_.size() - named >= kMostUnauthenticated) dropUnauthenticated();
    if (isUnix && !isSameUser(socket.get())) continue;  // closes it
    if (!isUnix) tuneSocket(socket.get(), local_.options.networkSeconds);
    auto incoming = std::make_unique<Incoming>();
    incoming->socket = std::move(socket);
    incoming->isUnix = isUnix;
    incoming->deadline = Deadline::after(kAuthenticationTime);
    if (!local_.sleeper.watch(incoming->socket.get()).ok()) continue;  // its events would be missed
    incoming->task = answer(incoming.get());
    incoming->task.resume();
    if (incoming->task.finished()) {
      accept(*incoming);
    } else {
      handshakes_.push_back(std::move(incoming));
    }
  }
  local_.sleeper.watchAgain(listener);  // the rest waits for its turn
}

// Called immediately after admission: if this side continued with a connection of its own to the
// same process in between, each side could keep the connection that the other one has dropped.
void Acceptor::accept(Incoming& incoming) {
  // The peer may take itself for admitted.
  if (detail::isOutOfMemory(incoming.task.result())) throw std::bad_alloc();
  if (incoming.accepted.link.sender) onAccepted_(std::move(incoming.accepted));
}

void Acceptor::lookAgain() {
  acceptAgain_ = Deadline::after(std::chrono::milliseconds(0));
  for (auto& incoming : handshakes_) incoming->isReady = true;
}

void Acceptor::acceptAll() {
  acceptAgain_ = Deadline::never();
  if (unixListener_.isOpen()) acceptFrom(unixListener_.get(), true);
  for (Fd& listener : tcpListeners_) acceptFrom(listener.get(), false);
}

Task Acceptor::answer(Incoming* incoming) {
  const int fd = incoming->socket.get();
  Deadline deadline = incoming->deadline;
  const Status refused(Code::kNetwork, "refused");
  HandshakeSocket stream(fd, incoming->isUnix ? nullptr : local_.options.tls,
                         /*isConnector=*/false);
  Hello hello;
  ReadExactly readHello(stream, &hello, sizeof(hello), deadline);
  co_await readHello;
  const std::string failure = stream.failure();
  if (!failure.empty()) MYCOLL_LOG_WARN("refused a connection: the peer %s", failure.c_str());
  if (readHello.hasFailed() || hello.magic != kHandshakeMagic ||
      hello.version != kProtocolVersion || (hello.isShm && hello.joins) ||
      (hello.isShm != 0) != incoming->isUnix ||
      std::memcmp(hello.destinationUid, local_.address.uid.data(), sizeof(hello.destinationUid)) !=
          0) {
    co_return refused;
  }
  incoming->namesUs = true;
  const bool isOpened = hello.isInvitation && !hello.opensLater;
  if (!isOpened) {
    GroupIsKnown known(local_.groups, hello.context, hello.destination, deadline);
    co_await known;
  }
  const Mailbox* mailbox = local_.groups.find(hello.context, hello.destination);
  if (!mailbox) {
    Challenge answer{};
    answer.outcome =
        isOpened ? Outcome::kGone : local_.groups.standing(hello.context, hello.destination);
    (void)stream.send(&answer, sizeof(answer));
    co_return refused;
  }
  deadline = incoming->deadline =
      Deadline::after(kAuthenticationTime);  // it has waited for this process
  const std::string sourceUid(hello.sourceUid, sizeof(hello.sourceUid));
  const bool isInvitation = mailbox->group().isInvitation;
  if (!mailbox->isOf(hello.source, sourceUid) || isInvitation != (hello.isInvitation != 0)) {
    co_return refused;
  }
  const std::string secret = mailbox->group().secret;
  incoming->accepted = {mailbox->group().peers[hello.source], hello.joins, isInvitation, Link()};
  PeerAddress& peer = incoming->accepted.peer;
  peer.uid = sourceUid;
  Challenge challenge;
  MYCOLL_CO_RETURN_IF_ERROR(randomBytes(challenge.nonce, sizeof(challenge.nonce)));
  challenge.mac = acceptorProof(secret, hello, challenge.nonce);
  if (!stream.send(&challenge, sizeof(challenge))) co_return refused;
  Proof proof;
  Fd memory;
  ReadExactly readProof(stream, &proof, sizeof(proof), deadline, hello.isShm ? &memory : nullptr);
  co_await readProof;
  if (readProof.hasFailed()) co_return refused;
  Digest expected = connectorProof(secret, hello, challenge.nonce, proof.cookie);
  if (!constantTimeEqual(expected, proof.mac)) {
    MYCOLL_LOG_WARN("refused a connection that claims to be rank %d", hello.source);
    co_return refused;
  }
  const bool isStill = local_.groups.find(hello.context, hello.destination) != nullptr;
  Verdict verdict;
  verdict.outcome = isInvitation && !isStill ? Outcome::kGone : admit_(incoming->accepted);
  if (verdict.outcome == Outcome::kGone) co_return refused;
  std::shared_ptr<Segment> segment;
  if (hello.isShm && verdict.outcome == Outcome::kAccepted) {
    const bool isMapped = memory.isOpen() &&
                          Segment::adopt(std::move(memory), ringSegmentBytes(), &segment).ok() &&
                          std::memcmp(reinterpret_cast<RingHeader*>(segment->data())->cookie,
                                      proof.cookie, sizeof(proof.cookie)) == 0;
    if (!isMapped) verdict.outcome = Outcome::kRefused;
  }
  if (!stream.send(&verdict, sizeof(verdict)) || verdict.outcome != Outcome::kAccepted) {
    co_return refused;
  }
  Link& link = incoming->accepted.link;
  link = local_.makeLink(peer, std::move(incoming->socket), std::move(segment), RingSide::kTaker,
                         stream.tls());
  link.id = idOf(proof);
  co_return Status();
}

void Acceptor::advance() {
  const auto now = Deadline::Clock::now();
  if (acceptAgain_.when() <= now) acceptAll();
  for (size_t i = 0; i < handshakes_.size();) {
    Incoming& incoming = *handshakes_[i];
    // Silent connections cost no system call, so many of them do not slow a job down.
    if (incoming.isReady || incoming.namesUs || incoming.deadline.when() <= now) {
      incoming.isReady = false;
      Condition* condition = incoming.task.waitingFor();
      if (!incoming.task.finished() && condition && condition->ready()) incoming.task.resume();
    }
    if (!incoming.task.finished()) {
      ++i;
      continue;
    }
    const std::unique_ptr<Incoming> done = std::move(handshakes_[i]);
    handshakes_.erase(handshakes_.begin() + static_cast<ptrdiff_t>(i));
    accept(*done);
  }
}

}  // namespace mycoll
