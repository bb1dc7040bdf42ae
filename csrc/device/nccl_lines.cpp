// The communicators of NCCL's road: connected, split off, for pairs.
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "backend/errors.h"
#include "base/env.h"
#include "device/nccl_road.h"
#include "nccl/library.h"

// What ranks tell each other here is kept by the operation that carries it: a wait that a signal
// ends leaves it running.
namespace mycoll {
namespace {

// Marks the note by which the lower rank of a pair tells NCCL's id, beside any tag of a user's.
constexpr uint64_t kPairTag = uint64_t{1} << 49;

}  // namespace

nccl::CommOptions NcclRoad::optionsOn(c10::Device device) const {
  nccl::CommOptions options;
  options.nccl = place_.options->nccl;
  // Without it recent NCCLs start a thread for every operation. Connecting has its deadline either
  // way, and what hangs in NCCL is ended by the watchdog's abort.
  if (!options.nccl.isBlocking) {
    options.nccl.isBlocking = Env::process().nccl.isBlocking.value_or(true);
  }
  options.bindDevice = [device] {
    c10::impl::VirtualGuardImpl(device.type()).uncheckedSetDevice(device);
  };
  return options;
}

Status NcclRoad::interruption() const {
  for (const auto& group : {place_.control, place_.cpu}) {
    Status status = group->error();
    if (!status.ok()) return status;
  }
  return isInterruptPending() ? interrupted() : Status();
}

// The first cause is the group's; where this rank is the first to know, it tells the others.
void NcclRoad::connected(const Status& status) {
  if (status.ok()) return;
  place_.control->fail(status.code() == Code::kInterrupted
                           ? Status(Code::kAborted, "interrupted while NCCL connected")
                           : status);
  throwStatus(status);
}

NcclRoad::LinePtr NcclRoad::join(c10::Device device, int rank, int ranks, const std::string& name,
                                 const nccl::UniqueId& id) {
  auto line = std::make_shared<Line>(Line{
      std::make_shared<nccl::Comm>(*nccl::Library::loaded(), rank, ranks, name, optionsOn(device)),
      sideStream(device)});
  const Status status = line->communicator->connect(id, Deadline::after(place_.options->timeout),
                                                    [this] { return interruption(); });
  connected(status);
  return line;
}

bool NcclRoad::split(NcclRoad* child, int color, bool isWilling) {
  LinePtr parent;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    // Of several devices nobody could say which one the child will use.
    if (!isEnded_ && lines_.size() == 1) parent = lines_.begin()->second;
  }
  const nccl::Library& library = *nccl::Library::loaded();
  // All or none: one rank that stays away would keep the others waiting in NCCL.
  struct Vote {
    int32_t mine, all;
  };
  const auto vote = std::make_shared<Vote>();
  vote->mine = isWilling && parent && library.has(nccl::Capability::kSplit) ? 1 : 0;
  Call agree;
  agree.kind = OpKind::kAllReduce;
  agree.dtype = DType::kInt32;
  agree.elementBytes = sizeof(vote->mine);
  agree.reduceOp = ReduceOp::kMin;
  agree.in = {{&vote->mine, sizeof(vote->mine)}};
  agree.out = {{&vote->all, sizeof(vote->all)}};
  throwIfFailed(place_.control->wait(
      place_.control->submit(std::move(agree), vote, /*willWait=*/true), Deadline::never()));
  if (vote->all == 0) return false;

  const c10::Device device = parent->stream.device();
  const c10::DeviceGuard guard(device);
  std::shared_ptr<nccl::Comm> made;
  if (child != nullptr) {
    const DevicePlace& place = child->place_;
    made = std::make_shared<nccl::Comm>(library, place.rank, place.ranks, place.name,
                                        child->optionsOn(device));
  }
  const Status status = parent->communicator->split(
      child != nullptr ? color : nccl::kSplitNoColor, child != nullptr ? child->place_.rank : 0,
      made.get(), Deadline::after(place_.options->timeout), [this] { return interruption(); });
  connected(status);
  if (child == nullptr) return true;
  auto line = std::make_shared<Line>(Line{std::move(made), sideStream(device)});
  child->capability_.store(capability_.load(std::memory_order_relaxed), std::memory_order_relaxed);
  std::lock_guard<std::mutex> lock(child->mutex_);
  child->lines_[device.index()] = child->keepUnlessEnded(std::move(line));
  return true;
}

// The group may have ended while NCCL connected.
NcclRoad::LinePtr NcclRoad::keepUnlessEnded(LinePtr line) {
  if (!isEnded_) return line;
  const Status ended(Code::kAborted, "the group has ended while NCCL connected");
  (void)line->communicator->abort(Deadline::after(std::chrono::seconds(1)), ended);
  throwStatus(ended);
}

NcclRoad::LinePtr NcclRoad::lineFor(c10::Device device) {
  if (LinePtr known = find(lines_, device.index())) return known;
  std::lock_guard<std::mutex> connecting(connectMutex_);
  if (LinePtr known = find(lines_, device.index())) return known;
  const auto id = std::make_shared<nccl::UniqueId>();
  if (place_.rank == 0) {
    const Status made = nccl::Comm::createId(*nccl::Library::loaded(), id.get());
    if (!made.ok()) place_.control->fail(made);
    throwIfFailed(made);
  }
  Call tell;
  tell.kind = OpKind::kBroadcast;
  tell.dtype = DType::kUInt8;
  tell.root = 0;
  tell.out = {{id.get(), sizeof(*id)}};
  throwIfFailed(place_.control->wait(place_.control->submit(std::move(tell), id, /*willWait=*/true),
                                     Deadline::never()));
  LinePtr line = join(device, place_.rank, place_.ranks, place_.name, *id);
  std::lock_guard<std::mutex> lock(mutex_);
  return lines_[device.index()] = keepUnlessEnded(std::move(line));
}

// NCCL connects two ranks at their first message in each direction, and takes for granted there
// that what one of them sends the other one receives: if both send first, each takes the other's
// send buffer for a receive buffer. It also waits for the other rank meanwhile, in the calling
// thread. So one byte goes both ways before the first message does.
void NcclRoad::connectBothWays(Line& line, int peer) {
  const c10::StreamGuard guard(line.stream);
  const at::Tensor bytes =
      at::empty({2}, at::TensorOptions(at::kByte).device(line.stream.device()));
  auto* const memory = static_cast<char*>(bytes.mutable_data_ptr());
  nccl::Issue issue(*line.communicator);
  (void)issue.group();
  (void)nccl::send(issue, {memory, 1}, peer, line.stream.native_handle());
  (void)nccl::receive(issue, {memory + 1, 1}, peer, line.stream.native_handle());
  const Status status = issue.end();
  connected(status);
}

NcclRoad::LinePtr NcclRoad::pairFor(c10::Device device, int peer) {
  const std::pair<c10::DeviceIndex, int> key(device.index(), peer);
  if (LinePtr known = find(pairs_, key)) return known;
  Communicator& control = *place_.control;
  const auto id = std::make_shared<nccl::UniqueId>();
  const bool isLower = place_.rank < peer;
  if (isLower) throwIfFailed(nccl::Comm::createId(*nccl::Library::loaded(), id.get()));
  const Span span{id.get(), sizeof(*id)};
  const OpPtr told = isLower ? control.send(span, peer, kPairTag, DType::kUInt8, 0, id,
                                            /*willWait=*/true, kNoDeadline)
                             : control.recv(span, peer, kPairTag, DType::kUInt8, 0, id,
                                            /*willWait=*/true, kNoDeadline);
  connected(control.wait(told, Deadline::never()));
  const std::string name = place_.name + " " + std::to_string(std::min(place_.rank, peer)) + "-" +
                           std::to_string(std::max(place_.rank, peer));
  LinePtr line = join(device, isLower ? 0 : 1, 2, name, *id);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    pairs_[key] = keepUnlessEnded(line);  // what hangs from here on is aborted with the others
  }
  connectBothWays(*line, isLower ? 1 : 0);
  return line;
}

}  // namespace mycoll
