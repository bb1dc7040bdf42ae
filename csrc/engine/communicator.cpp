#include "engine/communicator.h"

#include "base/log.h"
#include "engine/bootstrap.h"
#include "engine/group.h"

namespace mycoll {
namespace {

// Asking for shared memory only, with a rank that has none in common, cannot work.
Status checkTransport(const Endpoint& endpoint, const GroupAddress& address) {
  if (endpoint.options().transport != TransportChoice::kShm) return Status();
  for (size_t rank = 0; rank < address.peers.size(); ++rank) {
    if (!endpoint.isLocal(address.peers[rank])) {
      return Status(Code::kNetwork, "MYCOLL_TRANSPORT=shm, but rank " + std::to_string(rank) +
                                        " (" + address.peers[rank].describe() +
                                        ") is not on this host, or uses another transport");
    }
  }
  return Status();
}

}  // namespace

Status Communicator::create(GroupOptions options, std::shared_ptr<Store> store,
                            std::shared_ptr<Communicator>* result) {
  std::shared_ptr<Engine> engine;
  const Status made = Engine::process(options.storeHost, &engine);
  if (!made.ok()) {
    stayAway(options, *store, made);
    return made;
  }
  return create(std::move(options), std::move(store), std::move(engine), result);
}

Status Communicator::create(GroupOptions options, std::shared_ptr<Store> store,
                            std::shared_ptr<Engine> engine, std::shared_ptr<Communicator>* result) {
  if (options.ranks < 1 || options.rank < 0 || options.rank >= options.ranks) {
    return Status(Code::kInvalidArgument, "rank " + std::to_string(options.rank) +
                                              " is out of range in a group of " +
                                              std::to_string(options.ranks));
  }
  GroupAddress address;
  MYCOLL_RETURN_IF_ERROR(meet(options, *store, *engine, &address));
  MYCOLL_RETURN_IF_ERROR(checkTransport(*engine->endpoint(), address));
  auto group = std::make_shared<Group>(std::move(options), engine, std::move(address));
  engine->add(group);
  *result = std::shared_ptr<Communicator>(new Communicator(std::move(group)));
  return Status();
}

Status Communicator::derive(const Communicator& parent, const std::string& suffix, bool isExternal,
                            std::shared_ptr<Communicator>* result) {
  const Group& group = *parent.group_;
  GroupOptions options = group.options();
  options.name += suffix;
  options.isExternal = isExternal;
  options.timeout = group.timeout();
  addGroup(group.engine(), std::move(options), group.address(), result);
  return Status();
}

Status Communicator::shrink(const Communicator& parent, const std::string& suffix,
                            const std::vector<int>& members,
                            std::shared_ptr<Communicator>* result) {
  const Group& group = *parent.group_;
  GroupOptions options = group.options();
  GroupAddress address = group.address();
  options.name += suffix;
  options.rank = -1;
  options.ranks = static_cast<int>(members.size());
  options.timeout = group.timeout();
  options.globalRanks.clear();
  address.peers.clear();
  for (size_t rank = 0; rank < members.size(); ++rank) {
    const int old = members[rank];
    if (old == group.rank()) options.rank = static_cast<int>(rank);
    options.globalRanks.push_back(
        group.options().globalRanks.empty() ? old : group.options().globalRanks[old]);
    address.peers.push_back(group.address().peers[old]);
  }
  if (options.rank < 0) {
    return Status(Code::kInvalidArgument, "rank " + std::to_string(group.rank()) +
                                              " is not among those that are left of group '" +
                                              group.options().name + "'");
  }
  address.rank = options.rank;
  std::shared_ptr<Communicator> made;
  addGroup(group.engine(), std::move(options), std::move(address), &made);
  Call barrier;
  barrier.kind = OpKind::kBarrier;
  const OpPtr met = made->submit(std::move(barrier), nullptr, /*willWait=*/true);
  MYCOLL_RETURN_IF_ERROR(made->wait(met, Deadline::never()));
  *result = std::move(made);
  return Status();
}

void Communicator::addGroup(const std::shared_ptr<Engine>& engine, GroupOptions options,
                            GroupAddress address, std::shared_ptr<Communicator>* result) {
  address.name = options.name;
  setContext(&address);
  auto group = std::make_shared<Group>(std::move(options), engine, std::move(address));
  engine->add(group);
  *result = std::shared_ptr<Communicator>(new Communicator(std::move(group)));
}

Communicator::Communicator(std::shared_ptr<Group> group) : group_(std::move(group)) {}
Communicator::~Communicator() { group_->close(Deadline::after(std::chrono::milliseconds(0))); }

int Communicator::rank() const { return group_->rank(); }
int Communicator::ranks() const { return group_->ranks(); }
void Communicator::setTimeout(std::chrono::milliseconds timeout) { group_->setTimeout(timeout); }

OpPtr Communicator::submit(Call call, std::shared_ptr<void> keepAlive, bool willWait,
                           std::chrono::milliseconds timeout) {
  return group_->submit(std::move(call), Composite(), std::move(keepAlive), willWait, timeout);
}

OpPtr Communicator::submitComposite(OpKind kind, Composite composite,
                                    std::shared_ptr<void> keepAlive, bool willWait,
                                    std::chrono::milliseconds timeout) {
  Call call;
  call.kind = kind;
  return group_->submit(std::move(call), std::move(composite), std::move(keepAlive), willWait,
                        timeout);
}

Status Communicator::meetNeighbours() { return group_->meetNeighbours(); }

OpPtr Communicator::submitExternal(const Signature& signature, std::shared_ptr<External> external,
                                   std::chrono::milliseconds timeout) {
  return group_->submitExternal(signature, std::move(external), timeout);
}

OpRecord Communicator::recordMessage(const ExternalMessage& message, uint32_t site) {
  return group_->recordMessage(message, site);
}

void Communicator::noteMessage(const ExternalMessage& message) { group_->noteMessage(message); }

std::vector<MessageCounts> Communicator::messageCounts(int peer, bool isSend) const {
  return group_->messageCounts(peer, isSend);
}

void Communicator::noteReplayed(int peer, uint32_t lane) { group_->noteReplayed(peer, lane); }

void Communicator::noteOtherCallers() { group_->noteOtherCallers(); }
void Communicator::advance() { group_->run(0); }
void Communicator::setChore(std::function<void()> chore) { group_->setChore(std::move(chore)); }
bool Communicator::watchExternal() { return group_->watchExternal(); }

OpPtr Communicator::send(Span data, int destination, uint64_t tag, DType dtype, uint8_t opaqueType,
                         std::shared_ptr<void> keepAlive, bool willWait,
                         std::chrono::milliseconds timeout, uint64_t wholeBytes) {
  return group_->message(true, data, destination, tag, dtype, opaqueType, std::move(keepAlive),
                         willWait, timeout, wholeBytes);
}

OpPtr Communicator::recv(Span data, int source, uint64_t tag, DType dtype, uint8_t opaqueType,
                         std::shared_ptr<void> keepAlive, bool willWait,
                         std::chrono::milliseconds timeout, uint64_t wholeBytes) {
  return group_->message(false, data, source, tag, dtype, opaqueType, std::move(keepAlive),
                         willWait, timeout, wholeBytes);
}

Status Communicator::wait(const OpPtr& op, Deadline deadline) { return group_->wait(op, deadline); }

uint64_t Communicator::context() const { return group_->address().context; }
uint64_t Communicator::sequence() const { return group_->sequence(); }
Status Communicator::error() const { return group_->error(); }
bool Communicator::hasFailed() const { return group_->hasFailed(); }
void Communicator::fail(const Status& cause) { group_->fail(cause); }
void Communicator::abort(const std::string& reason) { group_->abort(reason); }
void Communicator::close(Deadline deadline) { group_->close(deadline); }
void Communicator::leaveAfter(int rank) { group_->leaveAfter(rank); }
std::string Communicator::transport() const { return group_->transport(); }
GroupRecord& Communicator::record() const { return group_->record(); }
std::string Communicator::describeRank(int rank) const { return group_->describeRank(rank); }

}  // namespace mycoll
