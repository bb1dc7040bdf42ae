#include "transport/mesh.h"

#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <chrono>
#include <new>
#include <utility>

#include "base/sha256.h"
#include "base/topology.h"

namespace mycoll {
namespace {

constexpr int kFewSockets = 4;
// How long a process that ends waits for its last bytes to arrive; usually they have.
constexpr auto kLastBytes = std::chrono::milliseconds(200);
constexpr int64_t kLookEveryMs = grace(50).count();
constexpr size_t kLookAtMost = 16;
// For a peer without a connection, the last frames of this many groups are kept.
constexpr size_t kMostUnsaid = 16;

}  // namespace

Mesh::Mesh(MeshOptions options)
    : local_(std::move(options)),
      acceptor_(
          local_,
          [this](const Acceptor::AcceptedPeer& accepted)
              REQUIRES(ioRole) { return admit(accepted); },
          [this](Acceptor::AcceptedPeer accepted) REQUIRES(ioRole) {
            Connection& connection = connectionWith(accepted.peer);
            if (accepted.joins != 0) {
              connection.join(std::move(accepted.link));
            } else if (connection.state() == Connection::State::kMaking) {
              connection.open(std::move(accepted.link));
            }
          }),
      watch_(local_.sleeper) {}

Mesh::~Mesh() {
  for (auto& connection : connections_) connection->finishSending();
  const Deadline deadline = Deadline::after(kLastBytes);
  for (auto& connection : connections_) {
    while (!connection->hasArrived() && !deadline.expired()) usleep(200);
  }
}

Status Mesh::create(MeshOptions options, std::shared_ptr<Mesh>* result) {
  auto mesh = std::shared_ptr<Mesh>(new Mesh(std::move(options)));
  MYCOLL_RETURN_IF_ERROR(mesh->open());
  *result = std::move(mesh);
  return Status();
}

Status Mesh::open() {
  unsigned char random[16];
  MYCOLL_RETURN_IF_ERROR(randomBytes(random, sizeof(random)));
  PeerAddress& address = local_.address;
  address.uid = toHex(random, sizeof(random));
  address.pidSpace = local_.options.host + pidSpace();
  address.hostName = hostName() + local_.options.host;
  address.pid = processId();
  address.startTicks = processStartTicks(address.pid);
  // A process that may not use shared memory appears to its peers to be alone on its host.
  const std::string host = hostIdentity() + local_.options.host;
  address.hostIdentity =
      local_.options.transport == TransportChoice::kTcp ? "tcp-only " + address.uid : host;
  MYCOLL_RETURN_IF_ERROR(local_.sleeper.open(
      [this](const epoll_event* events, int count) { onReady(events, count); }));
  MYCOLL_RETURN_IF_ERROR(local_.bell.open(address.uid));
  MYCOLL_RETURN_IF_ERROR(local_.sleeper.watch(local_.bell.fd()));
  return acceptor_.listen();
}

// ---- events and bytes --------------------------------------------------------------------------

// Any part of the work may run out of memory.
template <class Work>
bool Mesh::turn(const Work& work) {
  try {
    if (!hasRunOut_) {
      const bool moved = work();
      if (local_.events.empty()) return moved;
      handleEvents();
      for (auto& connection : connections_) connection->flush();  // what the groups answer
      return true;
    }
  } catch (const std::bad_alloc&) {
    hasRunOut_ = true;
  }
  try {
    giveUp();
  } catch (const std::bad_alloc&) {
    return false;  // retried next time
  }
  return true;
}

// Frames that the connections were sending or receiving are lost, and so may be events.
void Mesh::giveUp() {
  for (auto& connection : connections_) connection->breakOff({LossReason::kNoMemory, ""});
  for (Mailbox* mailbox : local_.groups.all()) {
    const GroupAddress& group = mailbox->group();
    raise(mailbox, GroupFails{Status(Code::kInternal, "mycoll group '" + group.name + "': " +
                                                          mailbox->describeRank(group.rank) +
                                                          " is out of memory")});
  }
  handleEvents();
  acceptor_.lookAgain();
  local_.sleeper.watchAgain(local_.bell.fd());
  hasRunOut_ = false;
}

// A handler may raise further events.
void Mesh::handleEvents() {
  while (!local_.events.empty()) {
    const auto [mailbox, event] = std::move(local_.events.front());
    local_.events.pop_front();
    addPending(-1);
    mailbox->handler().handle(event);
  }
}

void Mesh::onReady(const epoll_event* events, int count) {
  bool moved;
  Transfer* finished;
  {
    IoLock lock(io_);
    moved = turn([&]() REQUIRES(ioRole) {
      for (int i = 0; i < count; ++i) onEvent(events[i]);
      return moveBytes();
    });
    finished = takeDelivered();
  }
  deliver(finished);
  if (moved || finished) local_.sleeper.wakeSleepers();
}

Transfer* Mesh::takeDelivered() {
  lastDelivered_ = &delivered_;
  return std::exchange(delivered_, nullptr);
}

void Mesh::deliver(Transfer* first) NO_THREAD_SAFETY_ANALYSIS {
  while (first) {
    Transfer* const request = std::exchange(first, first->next_);  // it may end its own life
    try {
      request->deliver();
    } catch (const std::bad_alloc&) {
      const IoLock lock(io_);
      runOut();
    }
  }
}

void Mesh::onEvent(const epoll_event& event) {
  const int fd = event.data.fd;
  if (fd == local_.bell.fd()) {
    hasRung_ = true;
    if (!local_.bell.drain()) local_.sleeper.watchAgain(fd);
    return;
  }
  if (acceptor_.onEvent(fd)) return;
  const bool isClosed = event.events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR);
  for (auto& connection : connections_) {
    if (connection->receiver().onEvent(fd, isClosed)) return;
  }
  const std::string ended = watch_.endedBy(fd);
  if (!ended.empty() && watch_.hasEnded(ended)) processEnded(ended);
}

void Mesh::pollEvents() {
  epoll_event events[Sleeper::kMaxEvents];
  const int count = epoll_wait(local_.sleeper.epollFd(), events, Sleeper::kMaxEvents, 0);
  for (int i = 0; i < count; ++i) onEvent(events[i]);
}

bool Mesh::progress(bool* inHost, bool polls) {
  bool moved, hasRung;
  Transfer* finished;
  {
    if (!io_.try_lock()) return false;
    IoLock lock(io_, std::adopt_lock);
    moved = turn([&]() REQUIRES(ioRole) { return lookAndMove(inHost, polls); });
    hasRung = std::exchange(hasRung_, false);
    finished = takeDelivered();
  }
  deliver(finished);
  // The bell may be meant for a thread that waits for a flag in shared memory.
  if (moved || hasRung || finished) local_.sleeper.wakeSleepers();
  return moved;
}

bool Mesh::lookAndMove(bool* inHost, bool polls) {
  // Rings are polled in memory. A few sockets are read one by one, which saves a system call per
  // arrival. Many are polled with epoll, which is also polled now and then for events such as
  // hang-ups.
  const bool asksEach = local_.tcpLinks > 0 && local_.tcpLinks <= kFewSockets;
  if (asksEach) {
    for (auto& connection : connections_) connection->receiver().lookAgain();
  }
  const uint32_t rarity = asksEach ? 32 : local_.tcpLinks > 0 ? 1 : 1024;
  const bool shakesHands = local_.dialing > 0 || acceptor_.isBusy();
  if (polls || shakesHands || ++pollCount_ % rarity == 0) pollEvents();
  return moveBytes(inHost);
}

void Mesh::setAsleep(bool asleep) {
  IoLock lock(io_);
  local_.asleep += asleep ? 1 : -1;
  if (local_.asleep != (asleep ? 1 : 0)) return;
  for (auto& connection : connections_) connection->setAsleep(asleep);
}

void Mesh::advanceHandshakes() {
  std::vector<Connection*> unneeded;
  for (auto& connection : connections_) {
    connection->advanceDialing();
    if (connection->hasNoGroup()) unneeded.push_back(connection.get());
  }
  // The other side has left all groups that both were in.
  for (Connection* connection : unneeded) {
    connection->giveUpDialing();
    erase(*connection);
  }
  acceptor_.advance();
}

bool Mesh::moveBytes(bool* inHost) {
  bool moved = false;
  const auto note = [&](const Connection& connection, bool hasMoved) REQUIRES(ioRole) {
    moved |= hasMoved;
    if (hasMoved && inHost) *inHost |= connection.isShm();
  };
  const auto drain = [&]() REQUIRES(ioRole) {
    for (auto& connection : connections_) {
      if (connection->receiver().maybeReadable()) note(*connection, connection->drain());
    }
  };
  drain();  // before a dial finds that its peer has left: other ranks may report why
  if (local_.dialing > 0 || acceptor_.isBusy() || acceptor_.isToLookAgain()) {
    advanceHandshakes();
    drain();  // no event reports what arrived with a handshake
  }
  if (sharedReads_.read(Connection::kTurnBytes)) {
    moved = true;
    if (inHost) *inHost = true;
  }
  for (auto& connection : connections_) note(*connection, connection->flush());
  loseEnding();
  return moved;
}

// ---- connections -------------------------------------------------------------------------------

Connection* Mesh::find(const std::string& uid) const {
  const auto found = byUid_.find(uid);
  return found == byUid_.end() ? nullptr : found->second;
}

Connection& Mesh::connectionWith(const PeerAddress& peer) {
  assert(!peer.uid.empty());
  Connection*& connection = byUid_[peer.uid];
  if (!connection) {
    connections_.push_back(std::make_unique<Connection>(local_, peer));
    connection = connections_.back().get();
    if (auto waiting = unconnected_.extract(peer.uid)) {
      for (auto& group : waiting.mapped()) {
        for (OutItem& item : group) connection->enqueue(std::move(item));
      }
    }
  }
  return *connection;
}

void Mesh::enqueueQuietly(const PeerAddress& peer, OutItem item) {
  if (Connection* connection = find(peer.uid)) return connection->enqueue(std::move(item));
  // By group: the frames of one group are sent one after the other.
  std::list<std::vector<OutItem>>& groups = unconnected_[peer.uid];
  if (!groups.empty() && groups.back().front().header.context == item.header.context) {
    return groups.back().push_back(std::move(item));
  }
  std::vector<OutItem> first;
  first.push_back(std::move(item));
  groups.push_back(std::move(first));
  if (groups.size() > kMostUnsaid) groups.pop_front();
}

void Mesh::erase(const Connection& connection) {
  byUid_.erase(connection.peer().uid);
  std::erase_if(connections_, [&](const auto& each) { return each.get() == &connection; });
}

Connection& Mesh::linkTo(const PeerAddress& peer) {
  Connection& connection = connectionWith(peer);
  connection.dial();
  return connection;
}

bool Mesh::hasLinkTo(const PeerAddress& peer) const { return find(peer.uid) != nullptr; }

void Mesh::forget(Transfer* request) {
  for (auto& connection : connections_) {
    if (!connection->sender().forget(request)) connection->breakOff({LossReason::kNoMemory, ""});
  }
  discard([&](const FrameTarget& target) { return target.request == request; });
}

void Mesh::discard(const std::function<bool(const FrameTarget&)>& isMeant) {
  for (auto& connection : connections_) connection->receiver().discard(isMeant);
}

bool Mesh::hasQueued(uint64_t context, int rank) const {
  return std::any_of(connections_.begin(), connections_.end(),
                     [&](const auto& connection) REQUIRES(ioRole) {
                       return connection->sender().hasQueued(context, rank);
                     });
}

// If two processes connect to each other at the same time, the connection made by the smaller uid
// is kept, unless this side's own cannot be open at the peer yet.
Outcome Mesh::admit(const Acceptor::AcceptedPeer& accepted) const {
  const std::string& uid = accepted.peer.uid;
  // The frames queued for it were dropped with the last common group.
  if (!accepted.isInvitation && !local_.groups.names(uid)) return Outcome::kGone;
  const Connection* connection = find(uid);
  if (accepted.joins != 0) {
    return connection && connection->mayBeJoined(accepted.joins) ? Outcome::kAccepted
                                                                 : Outcome::kRefused;
  }
  if (!connection) return Outcome::kAccepted;
  switch (connection->state()) {
    case Connection::State::kMaking:
      if (connection->mayBeOpen() && address().uid < uid) return Outcome::kAskAgain;
      break;
    // The peer asked before it had the one that is open; or it has lost that one, and this side is
    // about to detect the loss.
    case Connection::State::kOpen:
    case Connection::State::kEnding: return Outcome::kAskAgain;
    case Connection::State::kLost: return Outcome::kLost;
  }
  return Outcome::kAccepted;
}

// ---- losses ------------------------------------------------------------------------------------

void Mesh::processEnded(const std::string& uid) {
  const Loss loss{LossReason::kEnded, ""};
  Connection* connection = find(uid);
  if (!connection || connection->state() == Connection::State::kLost) {
    return raiseLost({uid, loss, connection && connection->wasOpen()});
  }
  connection->end(loss);
  loseEnding();
}

void Mesh::loseEnding() {
  std::vector<Connection*> lost;
  for (auto& connection : connections_) {
    if (connection->state() != Connection::State::kEnding) continue;
    // A killed process closes its connections, too: report its end as the reason.
    const bool isEnded = watch_.isEnding(connection->peer().uid);
    if (isEnded) connection->processEnded();
    if (connection->isDrained(isEnded)) lost.push_back(connection.get());
  }
  for (Connection* connection : lost) lose(*connection);
}

void Mesh::lose(Connection& connection) {
  const std::string uid = connection.peer().uid;
  connection.lose();
  raiseLost({uid, connection.loss(), connection.wasOpen()});
  // While a group names it, the connection is kept, so that groups made later learn of the loss.
  if (!local_.groups.names(uid)) erase(connection);
}

void Mesh::raiseLost(const PeerLost& lost) {
  for (Mailbox* mailbox : local_.groups.all()) raise(mailbox, lost);
}

std::shared_ptr<const Fd> Mesh::descriptorOf(const PeerAddress& peer) {
  IoLock lock(io_);
  return watch_.descriptorOf(peer.uid);
}

bool Mesh::hasLost(const PeerAddress& peer) {
  IoLock lock(io_);
  const Connection* connection = find(peer.uid);
  return watch_.isLost(peer.uid) || (connection && connection->state() == Connection::State::kLost);
}

void Mesh::checkProcesses() {
  const int64_t now = nowMilliseconds();
  int64_t last = processesChecked_.load(std::memory_order_relaxed);
  if (now - last < kLookEveryMs || !processesChecked_.compare_exchange_strong(last, now)) return;
  std::vector<ProcessWatch::Seen> seen;
  {
    IoLock lock(io_);
    seen = watch_.next(kLookAtMost);
  }
  bool isAnyLost = false;
  for (const ProcessWatch::Seen& each : seen) {
    if (isLiving(lookAtProcess(each.pid, each.startTicks))) continue;
    IoLock lock(io_);
    isAnyLost |= turn([&]() REQUIRES(ioRole) {
      const bool hasEnded = watch_.hasEnded(each.uid);
      if (hasEnded) processEnded(each.uid);
      return hasEnded;
    });
  }
  if (!isAnyLost) return;
  progress();  // notifies other ranks immediately
  local_.sleeper.wakeAll();
}

// ---- groups ------------------------------------------------------------------------------------

void Mesh::addMailbox(Mailbox* mailbox) {
  const GroupAddress& group = mailbox->group();
  for (const PeerAddress* peer : local_.groups.add(mailbox)) {
    watch_.add(*peer, isLocal(*peer), local_.address);
  }
  bool isComplete = true;
  std::vector<WholeFrame> early = local_.groups.takeEarly(group.context, group.rank, &isComplete);
  if (!isComplete) {
    raise(mailbox, GroupFails{Status(
                       Code::kInternal,
                       "mycoll group '" + group.name + "': rank " + std::to_string(group.rank) +
                           " received more early messages than it can buffer before it joined "
                           "the group")});
  }
  for (WholeFrame& frame : early) {
    if (FrameReceiver::deliver(*mailbox, frame)) continue;
    if (Connection* connection = find(frame.uid))
      connection->breakOff({LossReason::kNotItsName, ""});
  }
  // A lost connection stays lost for as long as any group names its peer: a group that is made
  // meanwhile would otherwise wait for messages that cannot arrive.
  for (auto& connection : connections_) {
    if (connection->state() != Connection::State::kLost) continue;
    raise(mailbox, PeerLost{connection->peer().uid, connection->loss(), connection->wasOpen()});
  }
}

void Mesh::removeMailbox(Mailbox* mailbox) {
  local_.groups.remove(mailbox);
  addPending(-static_cast<int>(
      std::erase_if(local_.events, [&](const auto& entry) { return entry.first == mailbox; })));
  for (const PeerAddress& peer : mailbox->group().peers) {
    if (local_.groups.names(peer.uid)) continue;
    watch_.remove(peer.uid);
    unconnected_.erase(peer.uid);
    const Connection* connection = find(peer.uid);
    if (connection && connection->state() == Connection::State::kLost) erase(*connection);
  }
  discard([&](const FrameTarget& target) { return target.mailbox == mailbox; });
}

}  // namespace mycoll
