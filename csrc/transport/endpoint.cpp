#include "transport/endpoint.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

#include "base/log.h"
#include "base/sha256.h"
#include "base/topology.h"
#include "transport/handshake.h"
#include "transport/shm/link.h"
#include "transport/tcp/address.h"

namespace mycoll {
namespace {

constexpr int kFewSockets = 8;
constexpr size_t kToTheEnd = ~size_t{0};
// What a process of this host that has ended had sent over TCP comes within so much time of each
// other, or not at all.
constexpr std::chrono::milliseconds kSilentHere(500);

}  // namespace

Status EndpointOptions::fromEnv(EndpointOptions* result) {
  MYCOLL_RETURN_IF_ERROR(Env::check());
  const Env& env = Env::process();
  result->transport = env.transport;
  result->interfaces = env.socketInterfaces;
  result->eagerBytes = env.eagerBytes;
  result->isChecked = env.checksum;
  result->distance = env.distance;
  result->networkSeconds = env.networkSeconds;
  return Status();
}

Endpoint::Endpoint(EndpointOptions options) : options_(std::move(options)) {}

Status Endpoint::create(EndpointOptions options, std::shared_ptr<Endpoint>* result) {
  auto endpoint = std::shared_ptr<Endpoint>(new Endpoint(std::move(options)));
  MYCOLL_RETURN_IF_ERROR(endpoint->open());
  *result = std::move(endpoint);
  return Status();
}

Status Endpoint::open() {
  unsigned char random[16];
  MYCOLL_RETURN_IF_ERROR(randomBytes(random, sizeof(random)));
  address_.uid = toHex(random, sizeof(random));
  address_.pidSpace = pidSpace();
  address_.hostName = hostName();
  address_.pid = processId();
  address_.startTicks = processStartTicks(address_.pid);
  // Who may use no shared memory is on a host of its own, as far as peers are concerned.
  address_.hostIdentity =
      options_.transport == TransportChoice::kTcp ? "tcp-only " + address_.uid : hostIdentity();
  MYCOLL_RETURN_IF_ERROR(
      sleeper_.open([this](const epoll_event* events, int count) { handleEvents(events, count); }));
  MYCOLL_RETURN_IF_ERROR(bell_.open(address_.uid));
  MYCOLL_RETURN_IF_ERROR(sleeper_.watch(bell_.fd()));
  if (options_.transport != TransportChoice::kTcp) {
    MYCOLL_RETURN_IF_ERROR(listenUnix(address_.uid, &unixListener_));
    MYCOLL_RETURN_IF_ERROR(sleeper_.watch(unixListener_.get()));
  }
  if (options_.transport != TransportChoice::kShm) {
    std::vector<InterfaceAddress> chosen;
    MYCOLL_RETURN_IF_ERROR(chooseInterface(options_.interfaces, options_.storeHost, &chosen));
    Status failure;
    for (const InterfaceAddress& entry : chosen) {
      Fd listener;
      int port = 0;
      Status status = listenOn(entry, &listener, &port);
      if (!status.ok()) {
        failure = status;
        continue;
      }
      MYCOLL_RETURN_IF_ERROR(sleeper_.watch(listener.get()));
      tcpListeners_.push_back(std::move(listener));
      address_.tcp.push_back({entry.address, port});
      MYCOLL_LOG_INFO("listening on %s port %d (%s)", entry.address.c_str(), port,
                      entry.interfaceName.c_str());
    }
    if (tcpListeners_.empty()) return failure;
  }
  return Status();
}

Endpoint::~Endpoint() = default;

// ---- events ------------------------------------------------------------------------------------

void Endpoint::handleEvents(const epoll_event* events, int count) {
  bool moved;
  std::vector<Transfer*> finished;
  {
    std::lock_guard<std::mutex> lock(io_);
    for (int i = 0; i < count; ++i) onEvent(events[i]);
    runHandshakes();
    moved = moveBytes();
    finished.swap(delivered_);
  }
  for (Transfer* request : finished) request->deliver();
  if (moved || !finished.empty()) sleeper_.wakeSleepers();
}

void Endpoint::onEvent(const epoll_event& event) {
  const int fd = event.data.fd;
  if (fd == bell_.fd()) {
    hasRung_ = true;
    return bell_.drain();
  }
  if (fd == unixListener_.get()) return acceptFrom(fd, true);
  for (Fd& listener : tcpListeners_) {
    if (fd == listener.get()) return acceptFrom(fd, false);
  }
  for (auto& accepting : accepting_) {
    if (accepting->socket.get() == fd) {
      accepting->hasNews = true;
      return;
    }
  }
  for (auto& link : inLinks_) {
    if (link->receiver->fd() == fd) {
      return link->receiver->onEvent(event.events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR));
    }
  }
  for (auto& [uid, link] : outLinks_) {
    if (link->sender && link->sender->fd() == fd) return onSenderEvent(*link);
  }
  for (auto& [uid, process] : processes_) {
    if (process.fd.get() != fd) continue;
    pollfd state{fd, POLLIN, 0};
    if (poll(&state, 1, 0) > 0) loseIfEnding(uid, process, true);
    return;
  }
}

void Endpoint::onSenderEvent(OutLink& link) {
  for (;;) {
    char* into = reinterpret_cast<char*>(&link.farewell) + link.farewellGot;
    ssize_t got = recv(link.sender->fd(), into, sizeof(Farewell) - link.farewellGot, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) {
      link.problem = "closed its connection";
      link.isSilent = got < 0 && errno == ETIMEDOUT;
      return;
    }
    link.farewellGot += static_cast<size_t>(got);
    if (link.farewellGot < sizeof(Farewell)) continue;
    link.farewellGot = 0;
    const Farewell& farewell = link.farewell;
    Mailbox* mailbox = find(farewell.context, farewell.destination);
    if (mailbox && farewell.source >= 0 && farewell.source < mailbox->ranks() &&
        mailbox->group().peers[farewell.source].uid == link.peer.uid) {
      mailbox->onLeft(farewell.source);
    }
  }
}

void Endpoint::sendFarewell(const PeerAddress& peer, const Farewell& farewell) {
  unsaid_[peer.uid].push_back(farewell);
  for (auto& link : inLinks_) {
    if (link->peerUid == peer.uid) return sayUnsaid(*link);
  }
}

void Endpoint::sayUnsaid(InLink& link) {
  const auto unsaid = unsaid_.extract(link.peerUid);
  if (unsaid.empty()) return;
  for (const Farewell& farewell : unsaid.mapped()) {
    // Fits in any socket's buffer; and if it does not, the peer hears of a lost rank instead.
    (void)send(link.receiver->fd(), &farewell, sizeof(farewell), MSG_DONTWAIT | MSG_NOSIGNAL);
  }
}

void Endpoint::pollEvents() {
  epoll_event events[Sleeper::kMaxEvents];
  int count = epoll_wait(sleeper_.epollFd(), events, Sleeper::kMaxEvents, 0);
  for (int i = 0; i < count; ++i) onEvent(events[i]);
}

bool Endpoint::progress() {
  bool moved, hasRung;
  std::vector<Transfer*> finished;
  {
    std::unique_lock<std::mutex> lock(io_, std::try_to_lock);
    if (!lock.owns_lock()) return false;
    // Rings can be seen. A few sockets are asked one by one, which is one system call less for what
    // arrives; many by way of epoll, which now and then is also asked for news such as hang-ups.
    const bool asksEach = tcpLinks_ > 0 && tcpLinks_ <= kFewSockets;
    if (asksEach) {
      for (auto& link : inLinks_) link->receiver->lookAgain();
    }
    const uint32_t rarity = asksEach ? 32 : tcpLinks_ > 0 ? 1 : 1024;
    const bool shakesHands = connecting_ > 0 || !accepting_.empty();
    if (shakesHands || ++pollCount_ % rarity == 0) pollEvents();
    if (shakesHands || !acceptAgain_.isNever()) runHandshakes();
    moved = moveBytes();
    hasRung = std::exchange(hasRung_, false);
    finished.swap(delivered_);
  }
  for (Transfer* request : finished) request->deliver();
  // The bell may have meant a thread that waits for a flag in shared memory.
  if (moved || hasRung || !finished.empty()) sleeper_.wakeSleepers();
  return moved;
}

void Endpoint::setAsleep(bool asleep) {
  std::lock_guard<std::mutex> lock(io_);
  asleep_ += asleep ? 1 : -1;
  if (asleep_ != (asleep ? 1 : 0)) return;
  for (auto& link : inLinks_) link->receiver->setAsleep(asleep);
  for (auto& [uid, link] : outLinks_) {
    if (link->sender) link->sender->setAsleep(asleep);
  }
}

// ---- bytes -------------------------------------------------------------------------------------

bool Endpoint::moveBytes() {
  bool moved = false;
  for (size_t i = 0; i < inLinks_.size(); ++i) {
    InLink& link = *inLinks_[i];
    if (link.receiver->maybeReadable()) moved |= drain(link, kTurnBytes);
  }
  for (auto& [uid, link] : outLinks_) {
    if (!link->queue.empty()) moved |= flush(*link, kTurnBytes);
  }
  // What came with the verdict raises no event any more.
  for (const std::string& uid : std::exchange(connected_, {})) {
    auto found = outLinks_.find(uid);
    if (found != outLinks_.end() && found->second->sender) onSenderEvent(*found->second);
  }
  connectAgain();
  loseBroken();
  return moved;
}

void Endpoint::loseBroken() {
  std::map<std::string, std::string> broken;  // and why
  for (auto& link : inLinks_) {
    if (!link->problem.empty()) broken[link->peerUid] = link->problem;
  }
  for (auto& [uid, link] : outLinks_) {
    if (!link->problem.empty() && !link->isLost) broken[uid] = link->problem;
  }
  for (auto& [uid, losing] : losing_) broken[uid] = losing.how;
  for (auto& [uid, problem] : broken) {
    // A killed process closes its connections, too: say what it was.
    peerLost(uid, isEnding(uid) ? kHasEnded : problem);
  }
}

// What it had sent before counts, also that it was leaving. Over TCP that may still be on its way
// when the connection in the other direction, or its process, has ended: until this one ends, too,
// or is silent. Each piece of news may be answered, to other ranks too, and so add to both lists of
// links.
bool Endpoint::hasSaidAll(const std::string& uid, const std::string& how) {
  const InLink* open = nullptr;
  for (size_t i = 0; i < inLinks_.size(); ++i) {
    InLink& link = *inLinks_[i];
    if (link.peerUid != uid) continue;
    link.receiver->lookAgain();
    if (drain(link, kToTheEnd)) link.lastByte = Deadline::Clock::now();
    if (!link.isShm && link.problem.empty()) open = &link;
  }
  const auto out = outLinks_.find(uid);
  if (open == nullptr || (out != outLinks_.end() && out->second->isSilent)) return true;
  const auto now = Deadline::Clock::now();
  const Losing& losing = losing_.try_emplace(uid, Losing{how, now}).first->second;
  const std::chrono::milliseconds patience =
      isEnding(uid) ? kSilentHere : std::chrono::seconds(options_.networkSeconds);
  return now - std::max(losing.since, open->lastByte) > patience;
}

void Endpoint::peerLost(const std::string& uid, const std::string& how) {
  if (!hasSaidAll(uid, how)) return;
  losing_.erase(uid);
  if (auto found = outLinks_.find(uid); found != outLinks_.end() && found->second->sender) {
    onSenderEvent(*found->second);
  }
  bool wasLinked = false;
  std::vector<std::pair<Mailbox*, Transfer*>> unsent;
  if (auto found = outLinks_.find(uid); found != outLinks_.end()) {
    OutLink& link = *found->second;
    if (link.sender && !link.isShm) --tcpLinks_;
    wasLinked = link.sender || link.isLost;
    if (link.isConnecting()) --connecting_, addPending(-1);
    link.standing = Standing::kMember;
    link.isLost = true;
    link.problem = how;
    link.sender.reset();
    link.connecting.reset();
    for (OutItem& item : link.queue) {
      if (item.request) unsent.emplace_back(item.request->mailbox_, item.request);
    }
    link.queue.clear();
  }
  for (size_t i = 0; i < inLinks_.size();) {
    if (inLinks_[i]->peerUid == uid) {
      wasLinked = true;
      if (!inLinks_[i]->isShm) --tcpLinks_;
      inLinks_.erase(inLinks_.begin() + static_cast<ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
  // Groups first, so that the requests below end with the group's story where it has failed. Those
  // are then gone: who waited for one may have dropped it by now.
  std::vector<Mailbox*> mailboxes;
  for (auto& [key, mailbox] : mailboxes_) mailboxes.push_back(mailbox);
  for (Mailbox* mailbox : mailboxes) mailbox->onPeerLost(uid, how, wasLinked);
  for (const auto& [mailbox, request] : unsent) {
    if (mailbox->isOpen(request)) {
      mailbox->abandon(*request, Status(Code::kPeerLost, "the receiving rank " + how));
    }
  }
  // Groups that are made with it yet are to hear of the loss; when there are none, nobody asks.
  if (memberships_.count(uid) == 0) outLinks_.erase(uid);
}

void Endpoint::enqueue(OutLink& link, OutItem item) {
  if (link.isLost) {
    if (item.request) {
      item.request->mailbox_->abandon(
          *item.request, Status(Code::kPeerLost, "the receiving rank " + link.problem));
    }
    return;
  }
  bool wasEmpty = link.queue.empty();
  link.queue.push_back(std::move(item));
  if (wasEmpty && link.sender) flush(link, kTurnBytes);
}

// ---- groups ------------------------------------------------------------------------------------

Mailbox* Endpoint::find(uint64_t context, int rank) {
  auto found = mailboxes_.find({context, rank});
  return found == mailboxes_.end() ? nullptr : found->second;
}

void Endpoint::addMailbox(Mailbox* mailbox) {
  const GroupAddress& group = mailbox->group();
  mailboxes_[{group.context, group.rank}] = mailbox;
  byAge_.push_back(mailbox);
  for (const PeerAddress& peer : group.peers) {
    if (memberships_[peer.uid]++ == 0) watchProcess(peer);
  }
  if (overflown_.erase({group.context, group.rank})) {
    mailbox->failLocked(
        Status(Code::kInternal, "mycoll group '" + group.name + "': more was sent to rank " +
                                    std::to_string(group.rank) +
                                    " before it had made the group than it can keep"),
        true);
  }
  std::vector<Orphan> waiting;
  waiting.swap(orphans_);
  orphanBytes_ = 0;
  for (Orphan& orphan : waiting) {
    if (orphan.header.context != group.context || orphan.header.destination != group.rank) {
      orphanBytes_ += orphan.payload.size();
      orphans_.push_back(std::move(orphan));
      continue;
    }
    deliverWhole(*mailbox, orphan);
  }
}

void Endpoint::removeMailbox(Mailbox* mailbox) {
  std::pair<uint64_t, int> key{mailbox->group().context, mailbox->group().rank};
  mailboxes_.erase(key);
  std::erase(byAge_, mailbox);
  closed_.insert(key);
  // A peer that makes its groups anew comes under another name each time.
  for (const PeerAddress& peer : mailbox->group().peers) {
    auto membership = memberships_.find(peer.uid);
    if (--membership->second > 0) continue;
    memberships_.erase(membership);
    processes_.erase(peer.uid);
    unsaid_.erase(peer.uid);
    auto link = outLinks_.find(peer.uid);
    if (link != outLinks_.end() && link->second->isLost) outLinks_.erase(link);
  }
  for (auto& link : inLinks_) {
    link->receiver->dropFds(mailbox->fdPrefix());
    if (link->mailbox == mailbox) {
      link->mailbox = nullptr;
      link->target = {};
    }
  }
}

bool Endpoint::hasQueued(uint64_t context, int rank) const {
  for (auto& [uid, link] : outLinks_) {
    for (const OutItem& item : link->queue) {
      if (item.header.context == context && item.header.source == rank) return true;
    }
  }
  return false;
}

bool Endpoint::sendFd(const std::string& uid, int fd, const std::string& cookie) {
  auto found = outLinks_.find(uid);
  if (found == outLinks_.end() || !found->second->sender || !found->second->isShm) return false;
  return found->second->sender->sendFd(fd, cookie);
}

Fd Endpoint::takeFd(const std::string& uid, const std::string& cookie) {
  for (auto& link : inLinks_) {
    if (link->peerUid != uid || !link->isShm) continue;
    Fd fd = link->receiver->takeFd(cookie);
    if (fd.isOpen()) return fd;
  }
  return Fd();
}

}  // namespace mycoll
