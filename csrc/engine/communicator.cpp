#include "engine/communicator.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cassert>
#include <cstring>
#include <new>

#include "base/fd.h"
#include "base/log.h"
#include "base/recycler.h"
#include "base/wait.h"
#include "engine/engine.h"
#include "engine/formation.h"
#include "engine/invitation.h"
#include "engine/timed_store.h"
#include "engine/window.h"
#include "kernels/copy.h"
#include "observe/trace_file.h"

namespace mycoll {
namespace {

// How long a group that is being destroyed keeps its receives open for messages that are about to
// be sent, and how long a dead one tries to send its goodbye.
constexpr auto kUnsentGrace = grace(500);
// The longest wait for the rank of leaveAfter().
constexpr auto kLastGrace = grace(800);

// The ranks of a new group, by their numbers in a group that contains them.
KnownPeers knownFrom(const std::shared_ptr<Communicator>& group, const std::vector<int>& members,
                     const std::string& name) {
  KnownPeers known = KnownPeers::from(group->address(), members, name);
  known.departure = [group, members](int rank, bool asks) {
    const Membership& membership = group->membership();
    const bool hasLeft = membership.hasLeft(members[rank]);
    // A rank that has left answers everything with its goodbye.
    if (asks && !hasLeft) group->mailbox().notify(members[rank], FrameKind::kQuestion, "");
    return hasLeft ? membership.describeDeparture(members[rank]) : std::string();
  };
  return known;
}

// The ranks of the new group, if a group of the job contains all of them.
KnownPeers knownPeers(Engine& engine, const GroupOptions& options) {
  for (const std::shared_ptr<Communicator>& group : engine.groups()) {
    if (!group->options().isOfJob || group->membership().isLeaving()) continue;
    const std::vector<int64_t> ranks = jobRanks(group->options());
    std::vector<int> members;
    for (const int64_t rank : options.globalRanks) {
      const auto found = std::find(ranks.begin(), ranks.end(), rank);
      if (found == ranks.end()) break;
      members.push_back(static_cast<int>(found - ranks.begin()));
    }
    if (members.size() == options.globalRanks.size()) {
      return knownFrom(group, members, options.name);
    }
  }
  return {};
}

// The number of ranks that compete with this one for its cores. A container that has only some of
// the machine's cores does not share them with other containers.
int localRanks(const Engine& engine, const GroupAddress& address) {
  const PeerAddress& self = engine.mesh()->address();
  const bool hasAllCores = usableCores() >= sysconf(_SC_NPROCESSORS_ONLN);
  auto competes = [&](const PeerAddress& peer) {
    return peer.sharesKernelWith(self) && (hasAllCores || peer.pidSpace == self.pidSpace);
  };
  return static_cast<int>(std::count_if(address.peers.begin(), address.peers.end(), competes));
}

// An explicit request for shared memory fails if a rank shares none with this one.
Status checkTransport(const Mesh& mesh, const GroupAddress& address) {
  if (mesh.options().transport != TransportChoice::kShm) return Status();
  for (size_t rank = 0; rank < address.peers.size(); ++rank) {
    if (!mesh.isLocal(address.peers[rank])) {
      return Status(Code::kNetwork, "MYCOLL_TRANSPORT=shm, but rank " + std::to_string(rank) +
                                        " (" + address.peers[rank].describe() +
                                        ") is not on this host, or uses another transport");
    }
  }
  return Status();
}

bool isOutgoing(OpKind kind) {
  return kind == OpKind::kSend || kind == OpKind::kPut || kind == OpKind::kSignal;
}

// Writes large data past the caches, as this rank does not read it. The source may lie in a window,
// too, and overlap the destination.
void copyOver(char* place, const Span& data) {
  constexpr size_t kStreamingBytes = 1024 * 1024;
  if (data.bytes == 0) return;
  if (place < data.begin() + data.bytes && data.begin() < place + data.bytes) {
    std::memmove(place, data.data, data.bytes);
    return;
  }
  copy(place, data.data, data.bytes, /*isStreaming=*/data.bytes >= kStreamingBytes);
}

Signature signatureOf(OpKind kind, const Message& message = {}) {
  Signature signature;
  signature.kind = kind;
  signature.dtype = message.dtype;
  signature.opaqueType = message.opaqueType;
  signature.bytes = message.wholeBytes ? message.wholeBytes : message.data.bytes;
  return signature;
}

}  // namespace

// ---- making one --------------------------------------------------------------------------------

Status Communicator::create(GroupOptions options, std::shared_ptr<Store> store,
                            std::shared_ptr<Engine> engine, std::shared_ptr<Communicator>* result) {
  TimedStore timed(std::move(store), options);
  const Status made = engine ? Status() : Engine::process(&options, &engine);
  if (!made.ok()) {
    return inGroup(options.name, reportAbsence(options, timed, made));
  }
  if (options.ranks < 1 || options.rank < 0 || options.rank >= options.ranks) {
    return inGroup(options.name,
                   Status(Code::kInvalidArgument, "rank " + std::to_string(options.rank) +
                                                      " is out of range in a group of " +
                                                      std::to_string(options.ranks)));
  }
  KnownPeers known;
  if (options.isOfJob && !options.globalRanks.empty()) {
    known = knownPeers(*engine, options);
  }
  return form(std::move(options), &timed, engine, std::move(known), result);
}

Status Communicator::form(GroupOptions options, Store* store, const std::shared_ptr<Engine>& engine,
                          KnownPeers known, std::shared_ptr<Communicator>* result) {
  raiseDescriptorLimit(options.ranks);
  GroupAddress address;
  std::shared_ptr<void> connections;
  MYCOLL_RETURN_IF_ERROR(inGroup(
      options.name, formGroup(options, store, *engine, std::move(known), &connections, &address)));
  MYCOLL_RETURN_IF_ERROR(inGroup(options.name, checkTransport(*engine->mesh(), address)));
  *result = add(engine, options, std::move(address));
  return Status();
}

std::shared_ptr<Communicator> Communicator::add(const std::shared_ptr<Engine>& engine,
                                                GroupOptions options, GroupAddress address) {
  std::shared_ptr<Communicator> group(
      new Communicator(std::move(options), engine, std::move(address)));
  group->mailbox_.open();
  engine->add(group);
  engine->mesh()->progress();  // raises events for the frames that arrived before
  return group;
}

std::shared_ptr<Communicator> Communicator::derive(const Communicator& parent,
                                                   const std::string& suffix, bool isExternal) {
  GroupOptions options = parent.group_.options;
  options.name += suffix;
  options.isExternal = isExternal;
  options.timeout = parent.timeout();
  GroupAddress address = parent.address();
  address.name = options.name;
  setContext(&address);
  std::shared_ptr<Communicator> part =
      add(parent.group_.engine, std::move(options), std::move(address));
  part->record().setPart();
  part->setWarnAfter(parent.diagnosis_.warnAfter());
  return part;
}

Status Communicator::shrink(Communicator& parent, const std::string& suffix,
                            const std::vector<int>& members,
                            std::shared_ptr<Communicator>* result) {
  GroupOptions options = parent.group_.options;
  options.name += suffix;
  options.rank = -1;
  options.ranks = static_cast<int>(members.size());
  options.timeout = parent.timeout();
  const std::vector<int64_t> ranksOfParent = jobRanks(parent.group_.options);
  options.globalRanks.clear();
  for (size_t rank = 0; rank < members.size(); ++rank) {
    const int old = members[rank];
    if (old == parent.rank()) options.rank = static_cast<int>(rank);
    options.globalRanks.push_back(ranksOfParent[old]);
  }
  if (options.rank < 0) {
    return Status(Code::kInvalidArgument, "rank " + std::to_string(parent.rank()) +
                                              " is not among those that are left of group '" +
                                              parent.group_.options.name + "'");
  }
  KnownPeers known = knownFrom(parent.shared_from_this(), members, options.name);
  return form(std::move(options), /*store=*/nullptr, parent.group_.engine, std::move(known),
              result);
}

Communicator::Communicator(GroupOptions options, std::shared_ptr<Engine> engine,
                           GroupAddress address)
    : mailbox_(engine->mesh(), std::move(address), this),
      group_(std::move(options), std::move(engine), mailbox_),
      timeout_(group_.options.timeout.count()),
      runner_(group_),
      queue_(group_, runner_, diagnosis_, localRanks(*group_.engine, mailbox_.group())),
      diagnosis_(*this, group_, runner_, queue_) {}

Communicator::~Communicator() {
  try {
    close(Deadline::after(Milliseconds(0)));
  } catch (const std::bad_alloc&) {
    // No goodbye was sent: what the other ranks wait for ends by its timeout.
  }
  mailbox_.detach();  // before the members that handle events are destroyed
}

// ---- calls -------------------------------------------------------------------------------------

Deadline Communicator::deadlineOf(const Op& op, Milliseconds timeout) const {
  return Deadline::after(timeout.count() > 0 ? timeout : this->timeout(), op.submitted);
}

OpPtr Communicator::endAtOnce(std::shared_ptr<Op> op, const Operation& operation) {
  const int64_t now = steadyNanos();
  OpRecord record = group_.record.enqueue(operation, now, /*isStarted=*/true);
  if (group_.options.callSite) record.setSite(group_.options.callSite());
  op->setRecord(record);
  op->finish(hasFailed() ? diagnosis_.calledLate(op->kind()) : destroyed());
  TraceFile::writeWanted();
  return op;
}

OpPtr Communicator::enqueue(std::shared_ptr<CollectiveOp> op, std::shared_ptr<void> keepAlive,
                            bool willWait, Milliseconds timeout) {
  diagnosis_.noteCaller();
  op->keepAlive = std::move(keepAlive);
  op->deadline = deadlineOf(*op, timeout);
  bool isFirst = false;
  if (group_.membership.isOver(runner_.begun()) || !queue_.push(op, &isFirst)) {
    op->setSequence(sequence());
    const Operation late = op->description();
    return endAtOnce(std::move(op), late);
  }
  if (!willWait) {
    // Run it as far as it goes now: often that completes this rank's part.
    if (isFirst) queue_.run(0);
    if (!op->done() && !op->external) group_.engine->wake();
  }
  return op;
}

OpPtr Communicator::submit(Call call, std::shared_ptr<void> keepAlive, bool willWait,
                           Milliseconds timeout) {
  assert(call.isFor(rank(), ranks()));
  auto op = std::make_shared<CollectiveOp>(call.signature());
  op->call = std::move(call);
  return enqueue(std::move(op), std::move(keepAlive), willWait, timeout);
}

OpPtr Communicator::submitComposite(OpKind kind, Composite composite,
                                    std::shared_ptr<void> keepAlive, bool willWait,
                                    Milliseconds timeout) {
  auto op = std::make_shared<CollectiveOp>(signatureOf(kind));
  op->call.kind = kind;
  op->composite = std::move(composite);
  return enqueue(std::move(op), std::move(keepAlive), willWait, timeout);
}

std::shared_ptr<CollectiveOp> Communicator::submitExternal(const Signature& signature,
                                                           Milliseconds timeout) {
  auto op = std::allocate_shared<CollectiveOp>(Recycler<CollectiveOp>(), signature);
  op->external.emplace();
  enqueue(op, /*keepAlive=*/nullptr, /*willWait=*/false, timeout);
  return op;
}

OpRecord Communicator::recordMessage(Operation message, uint32_t site) {
  message.sequence = messages_.fetch_add(1, std::memory_order_relaxed);
  message.flags = kIsOnDevice;
  message.site = site;
  return group_.record.enqueue(message, steadyNanos(), /*isStarted=*/true);
}

OpPtr Communicator::putInto(char* place, const Message& message) {
  diagnosis_.noteCaller();
  group_.membership.checkArena();
  const auto op = makeMessage(message, signatureOf(OpKind::kPut, message));
  if (op->done()) return op;
  if (group_.membership.hasLeft(message.rank)) {
    op->finish(group_.membership.departed(message.rank));
    return op;
  }
  copyOver(place, message.data);
  op->finish(hasFailed() ? diagnosis_.calledLate(OpKind::kPut) : Status());
  return op;
}

std::shared_ptr<MessageOp> Communicator::makeMessage(const Message& message,
                                                     const Signature& signature) {
  auto op =
      std::make_shared<MessageOp>(signature.kind, messages_.fetch_add(1, std::memory_order_relaxed),
                                  group_.options.rank, message.rank, message.tag);
  if (hasFailed()) {
    op->finish(diagnosis_.calledLate(op->kind()));
    return op;
  }
  Operation operation =
      Operation::ofMessage(signature, message.rank, message.tag, message.data.bytes);
  operation.sequence = op->sequence();
  op->setRecord(group_.record.enqueue(operation, op->submitted.time_since_epoch().count(), true));
  return op;
}

OpPtr Communicator::post(OpKind kind, const Message& message, std::shared_ptr<void> keepAlive,
                         bool willWait, Milliseconds timeout) {
  diagnosis_.noteCaller();
  const Signature signature = signatureOf(kind, message);
  const auto op = makeMessage(message, signature);
  if (op->done()) return op;
  op->keepAlive = std::move(keepAlive);
  op->timeout = timeout.count() > 0 ? timeout : this->timeout();
  if (!message.isTimedLater) op->noteWaiting(op->submitted);
  op->self = op;
  const auto messageClass = kind == OpKind::kSend || kind == OpKind::kRecv
                                ? MessageClass::kPointToPoint
                                : MessageClass::kWindow;
  if (kind == OpKind::kPut) {
    mailbox_.windows().put(*op, message.rank, message.tag, message.offset, signature, message.data);
  } else if (isOutgoing(kind)) {
    mailbox_.send(*op, message.rank, messageClass, message.tag, signature, message.data);
  } else {
    mailbox_.receive(*op, message.rank, messageClass, message.tag, signature, message.data);
  }
  group_.engine->mesh()->progress();
  if (!willWait && !op->done()) {
    if (message.data.bytes <= group_.engine->mesh()->options().eagerBytes) {
      group_.engine->wakeIfAsleep();
    } else {
      group_.engine->wake();
    }
  }
  return op;
}

uint64_t Communicator::addWindow(const std::shared_ptr<Window>& window) {
  MutexLock lock(openWindowsMutex_);
  std::erase_if(openWindows_, [](const auto& entry) { return entry.expired(); });
  openWindows_.push_back(window);
  return ++windows_;
}

void Communicator::releaseWindows() {
  std::vector<std::shared_ptr<Window>> windows;  // dropped without the lock
  {
    MutexLock lock(openWindowsMutex_);
    for (const auto& entry : std::exchange(openWindows_, {})) windows.push_back(entry.lock());
  }
  for (const auto& window : windows) {
    if (window) window->releaseOthers();
  }
}

// ---- what runs elsewhere -----------------------------------------------------------------------

// The barrier detects which rank is missing and reports it to all ranks.
Status Communicator::meetNeighbours() {
  Call barrier;
  barrier.kind = OpKind::kMonitoredBarrier;
  barrier.waitAllRanks = true;
  MYCOLL_RETURN_IF_ERROR(
      wait(submit(std::move(barrier), nullptr, /*willWait=*/true), Deadline::never()));
  if (ranks() < 2) return Status();
  // Held until both are done, also if a signal ends this wait.
  const auto bytes = std::make_shared<std::array<char, 2>>();
  const int next = (rank() + 1) % ranks();
  const int previous = (rank() + ranks() - 1) % ranks();
  const OpPtr sending = send({{&(*bytes)[0], 1}, next, 0, DType::kUInt8}, bytes, true);
  const OpPtr receiving = recv({{&(*bytes)[1], 1}, previous, 0, DType::kUInt8}, bytes, true);
  MYCOLL_RETURN_IF_ERROR(wait(receiving, Deadline::never()));
  return wait(sending, Deadline::never());
}

bool Communicator::watchExternal() {
  queue_.run(0);
  const bool hasMore = group_.agreement.compareWithNext(/*atOnce=*/group_.membership.isLeaving());
  group_.engine->mesh()->checkProcesses();
  group_.engine->handleMessages();
  diagnosis_.checkHealth();
  if (!hasFailed()) return hasMore;
  queue_.run(0);  // a failure ends the operations here and now, not with the next call
  return false;
}

// ---- the end -----------------------------------------------------------------------------------

void Communicator::abort(const std::string& reason) {
  fail(group_.error(Code::kAborted,
                    "the group was aborted on " + describeRank(rank()) + ": " + reason));
  queue_.run(0);
}

int Communicator::sending() {
  int count = 0;
  mailbox_.forEachMessage([&](Transfer& message) {
    const auto& op = static_cast<const MessageOp&>(message);
    count += isOutgoing(op.kind()) && op.rank != rank();
  });
  return count;
}

bool Communicator::isBusy(Deadline unsent) {
  return !queue_.isEmpty() || sending() > 0 || !mailbox_.isFlushed() ||
         mailbox_.isReceiving(/*orPosted=*/!unsent.expired());
}

Status Communicator::destroyed() const {
  return group_.error(
      Code::kAborted,
      "the group has been destroyed on this rank; nothing more can be called on it");
}

void Communicator::close(Deadline deadline, const std::string& reason, bool* isInterrupted) {
  if (leave(deadline, reason, isInterrupted)) endLeaving();
}

bool Communicator::leave(Deadline deadline, const std::string& reason, bool* isInterrupted) {
  if (!group_.membership.beginToLeave()) return false;
  Mesh& mesh = *group_.engine->mesh();
  // Messages that their senders have not begun to send may never be sent: do not wait long for
  // them.
  const Deadline unsent = earlier(deadline, Deadline::after(kUnsentGrace));
  const Queue::Waiting waiting(queue_, /*isInQueue=*/false);
  Deadline tick = Deadline::after(kWaitTick);
  while (!hasFailed() && isBusy(unsent) && !deadline.expired()) {
    bool moved = queue_.run(0);
    moved |= mesh.progress();
    if (!moved) usleep(200);
    if (isInterrupted == nullptr || !tick.expired()) continue;
    tick = Deadline::after(kWaitTick);
    *isInterrupted = group_.options.interrupted && group_.options.interrupted();
    if (*isInterrupted) deadline = Deadline::after(kUnsentGrace);
    if (*isInterrupted) break;
  }
  if (!hasFailed() && isBusy(unsent)) {
    logFailure("mycoll group '" + group_.options.name +
               "': destroyed on this rank with operations that are not done (collectives: " +
               std::to_string(queue_.size()) + ", sends: " + std::to_string(sending()) +
               "). They are lost: wait() for every operation before destroy_process_group()");
    if (!queue_.isEmpty()) {
      group_.membership.failFrom(runner_.current());
      deadline = Deadline::after(kUnsentGrace);
    }
  }
  TraceFile::writeWanted();
  group_.record.close();
  if (group_.options.isExternal) {
    watchExternal();
    group_.agreement.sendLast();
  }
  group_.membership.sendGoodbye(destroyed(), reason);
  const int last = leavesAfter_.load();
  const Membership& members = group_.membership;
  const bool isMet =
      last >= 0 && (members.hasLeft(last) || members.arena() || mailbox_.isConnectedTo(last));
  const Deadline patience = earlier(deadline, Deadline::after(kLastGrace));
  // A connection that hangs may be the reason why the group is dead: do not wait long for it.
  const Deadline flushed =
      hasFailed() ? earlier(deadline, Deadline::after(kUnsentGrace)) : deadline;
  auto isDone = [&] {
    if (flushed.expired()) return true;
    return mailbox_.isFlushed() && (!isMet || members.hasLeft(last) || patience.expired());
  };
  while (!isDone()) {
    if (!mesh.progress()) usleep(50);
  }
  return true;
}

void Communicator::endLeaving() {
  // Another thread may have called a collective since leave(). None begins unnoticed from here on.
  const bool isUnfinished = !queue_.close() && !hasFailed();
  if (isUnfinished && group_.membership.arena()) group_.membership.failFrom(runner_.begun());
  group_.membership.endLeaving(destroyed());
  queue_.run(0);
  group_.engine->mesh()->progress();
}

void Communicator::handle(const Event& event) {
  if (group_.handle(event)) return;
  const ControlFrame& frame = std::get<ControlFrame>(event);
  diagnosis_.onMessage(frame.header.source, frame.header.kind, frame.payload);
}

}  // namespace mycoll
