#include "device/channels.h"

#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "backend/errors.h"
#include "backend/plain_dispatch.h"
#include "base/log.h"
#include "nccl/collectives.h"
#include "nccl/library.h"

namespace mycoll {
namespace {

// The tag of the message with NCCL's id, from the lower rank of a pair; users' tags are smaller.
constexpr uint64_t kPairTag = uint64_t{1} << 49;
// The time that a call into NCCL may take beyond the group's timeout, as a last resort: a thread
// that waits for an operation ends it earlier, and reports which rank is missing.
constexpr std::chrono::milliseconds kIssueGrace(2000);

// The group's timeout can change, and be milliseconds::max().
std::chrono::milliseconds patienceOf(const Communicator& group) {
  constexpr std::chrono::hours kLongest(24 * 365);
  return std::min<std::chrono::milliseconds>(group.timeout(), kLongest) + kIssueGrace;
}

}  // namespace

void runOnControl(const DevicePlace& place, Call call, std::shared_ptr<void> kept) {
  throwUnlessConnected(
      place, place.control->wait(
                 place.control->submit(std::move(call), std::move(kept), /*willWait=*/true),
                 Deadline::never()));
}

void throwUnlessConnected(const DevicePlace& place, const Status& status,
                          const std::string& onlyHere) {
  if (status.ok()) return;
  const Status named = inGroup(place.name, status);
  place.control->fail(
      status.code() == Code::kInterrupted
          ? inGroup(place.name, Status(Code::kAborted, "rank " + std::to_string(place.rank) +
                                                           " was interrupted by a signal while the "
                                                           "ranks connected for devices"))
          : named);
  throwStatus(named.withMessage(named.message() + onlyHere));
}

nccl::CommOptions Channels::optionsOn(c10::Device device) const {
  nccl::CommOptions options;
  options.nccl = place_.options->nccl;
  // Blocking calls if NCCL can release a thread that hangs in one: otherwise recent versions start
  // a thread for each operation.
  if (!options.nccl.isBlocking) {
    options.nccl.isBlocking = nccl::Library::loaded()->functions().commRevoke != nullptr;
  }
  options.issueTimeout = [group = place_.control] { return patienceOf(*group); };
  options.device = device.index();
  // Immediately and permanently: if there is no context yet, c10's guards only note the device.
  options.bindDevice = [device] {
    try {
      c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
    } catch (...) {
      MYCOLL_LOG_WARN("a thread for NCCL could not choose its device: %s",
                      describeException().c_str());
    }
  };
  return options;
}

Status Channels::interruption() const {
  MYCOLL_RETURN_IF_ERROR(place_.error());
  return isInterruptPending() ? interrupted() : Status();
}

Channel Channels::join(c10::Device device, int rank, int ranks, const std::string& name,
                       const nccl::UniqueId& id) const {
  Channel channel{
      std::make_shared<nccl::Comm>(*nccl::Library::loaded(), rank, ranks, name, optionsOn(device)),
      sideStream(device)};
  throwUnlessConnected(place_,
                       channel.comm->connect(id, Deadline::after(patienceOf(*place_.control)),
                                             [this] { return interruption(); }));
  return channel;
}

template <typename Map, typename Key>
Channel Channels::add(Map* channels, const Key& key, Channel channel) {
  MutexLock lock(mutex_);
  if (isEnded_) {
    Status ended = place_.error();
    if (ended.ok()) ended = Status(Code::kAborted, "the group has ended while NCCL connected");
    (void)channel.comm->abort(Deadline::after(std::chrono::seconds(1)), ended);
    throwStatus(ended);
  }
  return channels->insert_or_assign(key, std::move(channel)).first->second;
}

Channel Channels::ofGroup(c10::Device device) {
  const auto known = [&]() -> const Channel* {
    MutexLock lock(mutex_);
    const auto found = ofGroup_.find(device.index());
    return found == ofGroup_.end() ? nullptr : &found->second;  // never erased
  };
  if (const Channel* channel = known()) return *channel;
  MutexLock connecting(connectMutex_);
  if (const Channel* channel = known()) return *channel;
  const auto id = std::make_shared<nccl::UniqueId>();
  if (place_.rank == 0) {
    throwUnlessConnected(place_, nccl::Comm::createId(*nccl::Library::loaded(), id.get()));
  }
  Call share;
  share.kind = OpKind::kBroadcast;
  share.dtype = DType::kUInt8;
  share.root = 0;
  share.out = {{id.get(), sizeof(*id)}};
  runOnControl(place_, std::move(share), id);
  return add(&ofGroup_, device.index(), join(device, place_.rank, place_.ranks, place_.name, *id));
}

bool Channels::hasPair(c10::Device device, int peer) const {
  MutexLock lock(mutex_);
  return readyPairs_.count({device.index(), peer}) != 0;
}

nccl::RawComm* Channels::handleHere() const {
  MutexLock lock(mutex_);
  for (const auto& [index, channel] : ofGroup_) {
    const c10::Device device = channel.stream.device();
    const bool isHere = c10::impl::VirtualGuardImpl(device.type()).getDevice() == device;
    if (isHere) return channel.comm->handle();
  }
  return nullptr;
}

Channel Channels::ofPair(c10::Device device, int peer) {
  const Pair key(device.index(), peer);
  {
    MutexLock lock(mutex_);
    const auto found = ofPairs_.find(key);
    if (found != ofPairs_.end()) return found->second;
  }
  Communicator& control = *place_.control;
  const auto id = std::make_shared<nccl::UniqueId>();
  const bool isLower = place_.rank < peer;
  if (isLower) {
    throwUnlessConnected(place_, nccl::Comm::createId(*nccl::Library::loaded(), id.get()));
  }
  const Message message{{id.get(), sizeof(*id)}, peer, kPairTag, DType::kUInt8};
  const OpPtr exchanged = isLower ? control.send(message, id, /*willWait=*/true, kNoDeadline)
                                  : control.recv(message, id, /*willWait=*/true, kNoDeadline);
  throwUnlessConnected(place_, control.wait(exchanged, Deadline::never()));
  const std::string name = place_.name + " " + std::to_string(std::min(place_.rank, peer)) + "-" +
                           std::to_string(std::max(place_.rank, peer));
  // From here on, an abort of the group ends a call that hangs.
  const Channel channel = add(&ofPairs_, key, join(device, isLower ? 0 : 1, 2, name, *id));
  // NCCL connects two ranks at their first message in each direction, and assumes that the other
  // rank receives what one sends: if both send first, each takes the other's send buffer for a
  // receive buffer. It also blocks the calling thread until the other rank has connected. So before
  // the first message, each rank sends one byte to the other.
  const PlainDispatch plain;
  const c10::StreamGuard guard(channel.stream);
  const at::Tensor bytes =
      at::empty({2}, at::TensorOptions(at::kByte).device(channel.stream.device()));
  auto* const memory = static_cast<char*>(bytes.mutable_data_ptr());
  nccl::Issue issue(*channel.comm);
  (void)issue.group();
  const int other = isLower ? 1 : 0;  // the peer's rank in the communicator
  (void)nccl::send(issue, {memory, 1}, other, channel.stream.native_handle());
  (void)nccl::receive(issue, {memory + 1, 1}, other, channel.stream.native_handle());
  throwUnlessConnected(place_, issue.end());
  MutexLock lock(mutex_);
  readyPairs_.insert(key);
  return channel;
}

bool Channels::split(Channels* child, int color, bool isWilling) {
  const Channel* parent = nullptr;
  {
    MutexLock lock(mutex_);
    // With several devices, it is unknown which one the child will use.
    if (!isEnded_ && ofGroup_.size() == 1) parent = &ofGroup_.begin()->second;
  }
  const nccl::Library& library = *nccl::Library::loaded();
  // All ranks or none: if one rank did not take part, the others would wait for it in NCCL.
  const auto vote = std::make_shared<int32_t>(isWilling && parent != nullptr &&
                                              library.functions().commSplit != nullptr);
  Call agree;
  agree.kind = OpKind::kAllReduce;
  agree.dtype = DType::kInt32;
  agree.elementBytes = sizeof(*vote);
  agree.reduceOp = ReduceOp::kMin;
  agree.in = agree.out = {spanOf(*vote)};
  runOnControl(place_, std::move(agree), vote);
  if (*vote == 0) return false;

  const c10::Device device = parent->stream.device();
  const OnDevice guard(device);
  std::shared_ptr<nccl::Comm> made;
  if (child != nullptr) {
    const DevicePlace& place = child->place_;
    made = std::make_shared<nccl::Comm>(library, place.rank, place.ranks, place.name,
                                        child->optionsOn(device));
  }
  throwUnlessConnected(place_,
                       parent->comm->split(child != nullptr ? color : nccl::kSplitNoColor,
                                           child != nullptr ? child->place_.rank : 0, made.get(),
                                           Deadline::after(patienceOf(*place_.control)),
                                           [this] { return interruption(); }));
  if (child != nullptr) {
    child->add(&child->ofGroup_, device.index(), {std::move(made), sideStream(device)});
  }
  return true;
}

Channels::Comms Channels::all() const {
  Comms found;
  for (const auto& [pair, channel] : ofPairs_) found.push_back(channel.comm);
  for (const auto& [index, channel] : ofGroup_) found.push_back(channel.comm);
  return found;
}

Channels::Comms Channels::end() {
  MutexLock lock(mutex_);
  return std::exchange(isEnded_, true) ? Comms() : all();
}

Status Channels::check() const {
  Comms open;
  {
    MutexLock lock(mutex_);
    if (!isEnded_) open = all();
  }
  for (const auto& comm : open) MYCOLL_RETURN_IF_ERROR(comm->check());
  return Status();
}

// Stops all communicators together: the abort of one may wait for operations of another.
void Channels::beginAbort(const Status& why) {
  for (const auto& comm : end()) comm->beginAbort(why);
}

void Channels::abort(Deadline deadline, const Status& why) {
  beginAbort(why);
  MutexLock lock(mutex_);
  const Comms comms = all();
  lock.unlock();
  for (const auto& comm : comms) (void)comm->abort(deadline, why);
}

// One after another. The thread that closes a late communicator stays in NCCL, where none of the
// others may be closed meanwhile; aborting them is allowed.
Status Channels::close(Deadline deadline, const nccl::Comm::Check& check) {
  Status first;
  for (const auto& comm : end()) {
    if (first.ok()) {
      first = comm->close(deadline, check);
    } else {
      comm->beginAbort(first);
    }
  }
  return first;
}

void Channels::keepForever() { new Comms(end()); }

void Channels::addStreams(std::vector<c10::Stream>* streams) const {
  MutexLock lock(mutex_);
  for (const auto& [index, channel] : ofGroup_) streams->push_back(channel.stream);
}

}  // namespace mycoll
