#include "device/device_group.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <set>
#include <thread>
#include <utility>

#include "backend/call_site.h"
#include "backend/callback_pool.h"
#include "backend/errors.h"
#include "base/env.h"
#include "device/device_work.h"
#include "device/host_road.h"
#include "device/nccl_road.h"
#include "device/pause.h"
#include "device/watchdog.h"
#include "nccl/cudart.h"

namespace mycoll {
namespace {

// Marks the notes of two ranks that agree on a road, beside any tag of a user's.
constexpr uint64_t kRoadTag = uint64_t{1} << 48;
// How often a thread that waits for another one looks at signals.
constexpr auto kTick = std::chrono::milliseconds(50);

// What each of two ranks tells the other, once, before its first message to it.
struct Note {
  DeviceRoad road = DeviceRoad::kUnknown;  // the group's, where this rank knows it already
  NcclRoad::Report report;
};

bool isMessage(const Request& request) {
  return request.calls.size() == 1 && isPointToPoint(request.calls.front());
}

}  // namespace

std::shared_ptr<DeviceSupport> DeviceGroup::create(std::string name,
                                                   std::shared_ptr<Communicator> communicator,
                                                   c10::intrusive_ptr<MycollOptions> options) {
  DevicePlace place;
  place.name = std::move(name);
  place.rank = communicator->rank();
  place.ranks = communicator->ranks();
  throwIfFailed(
      Communicator::derive(*communicator, kControlSuffix, /*isExternal=*/true, &place.control));
  throwIfFailed(Communicator::derive(*communicator, " on devices through host memory",
                                     /*isExternal=*/false, &place.host));
  place.cpu = std::move(communicator);
  place.options = std::move(options);
  place.waitsOnHost = Env::process().cudaBlockingWait;
  return std::make_shared<DeviceGroup>(std::move(place));
}

DeviceGroup::DeviceGroup(DevicePlace place)
    : place_(std::move(place)),
      nccl_(std::make_unique<NcclRoad>(place_)),
      host_(std::make_unique<HostRoad>(place_)) {}

DeviceGroup::~DeviceGroup() { close(Deadline::after(std::chrono::milliseconds(0))); }

void warnOfHostRoad(const Status& why) {
  struct Warned {
    std::mutex mutex;
    std::set<std::string> reasons;  // guarded by mutex
  };
  static Warned* const kWarned = new Warned;
  const std::string& reason = why.message();
  {
    const std::lock_guard<std::mutex> lock(kWarned->mutex);
    if (reason.empty() || !kWarned->reasons.insert(reason).second) return;
  }
  TORCH_WARN("mycoll carries device tensors through host memory: ", reason,
             ". MYCOLL_CUDA=nccl makes this an error.");
}

// ---- choosing a road ---------------------------------------------------------------------------

std::string DeviceGroup::path() const {
  switch (knownRoad()) {
    case DeviceRoad::kNccl: return "nccl";
    case DeviceRoad::kHost: return "host";
    default: return "";
  }
}

void DeviceGroup::chooseRoad(c10::Device device, const std::string& caller) {
  if (knownRoad() != DeviceRoad::kUnknown) return;
  std::lock_guard<std::mutex> lock(chooseMutex_);
  if (knownRoad() != DeviceRoad::kUnknown) return;
  const Status met = place_.control->meetNeighbours();
  if (!met.ok()) {
    throwStatus(Status(met.code(), met.message() + "\n  Here: rank " + std::to_string(place_.rank) +
                                       ", " + caller +
                                       ", the first of the group's operations on devices, for "
                                       "which all ranks meet"));
  }
  const auto ranks = static_cast<size_t>(place_.ranks);
  // Kept by the operation: a wait that a signal ends leaves it running.
  const auto kept = std::make_shared<std::vector<NcclRoad::Report>>(ranks);
  std::vector<NcclRoad::Report>& reports = *kept;
  reports[static_cast<size_t>(place_.rank)] = NcclRoad::report(device);
  Call exchange;
  exchange.kind = OpKind::kAllGather;
  exchange.dtype = DType::kUInt8;
  exchange.in = {{&reports[static_cast<size_t>(place_.rank)], sizeof(NcclRoad::Report)}};
  for (auto& entry : reports) exchange.out.push_back({&entry, sizeof(entry)});
  throwIfFailed(place_.control->wait(
      place_.control->submit(std::move(exchange), kept, /*willWait=*/true), Deadline::never()));
  std::vector<int> everybody;
  for (int rank = 0; rank < place_.ranks; ++rank) everybody.push_back(rank);
  const Status judgement = NcclRoad::judge(reports, everybody);
  if (judgement.ok()) {
    nccl_->setCapability(reports);
    road_.store(DeviceRoad::kNccl, std::memory_order_release);
    return;
  }
  if (judgement.code() != Code::kUnsupported) {
    place_.control->fail(judgement);
    throwStatus(judgement);
  }
  if (place_.rank == 0) warnOfHostRoad(judgement);
  road_.store(DeviceRoad::kHost, std::memory_order_release);
}

// ---- carrying ----------------------------------------------------------------------------------

void DeviceGroup::connect(c10::Device device) {
  const c10::DeviceGuard guard(device);
  chooseRoad(device, "connecting");
  if (knownRoad() == DeviceRoad::kNccl) nccl_->connect(device);
}

void DeviceGroup::split(DeviceSupport* made, int color, bool isWilling) {
  throwIfDead();
  auto* const child = static_cast<DeviceGroup*>(made);
  if (knownRoad() != DeviceRoad::kNccl) return;
  if (!nccl_->split(child ? child->nccl_.get() : nullptr, color, isWilling) || !child) return;
  throwIfFailed(child->place_.control->meetNeighbours());
  std::lock_guard<std::mutex> lock(child->chooseMutex_);
  child->road_.store(DeviceRoad::kNccl, std::memory_order_release);
}

void DeviceGroup::registerMemory(c10::Device device, void* address, size_t bytes,
                                 bool isSymmetric) {
  const c10::DeviceGuard guard(device);
  chooseRoad(device, "register_mem_pool");
  if (knownRoad() != DeviceRoad::kNccl) return;
  // For symmetric memory NCCL waits for the other ranks.
  const Waiting waiting(*this, "register_mem_pool", currentStream(device));
  throwIfFailed(nccl_->registerMemory(device, address, bytes, isSymmetric));
}

void DeviceGroup::deregisterMemory(void* address) {
  if (knownRoad() != DeviceRoad::kNccl) return;
  throwIfFailed(nccl_->deregisterMemory(address));
}

Status DeviceGroup::error() const {
  for (const auto& group : {place_.control, place_.host, place_.cpu}) {
    Status status = group->error();
    if (!status.ok()) return status;
  }
  return Status();
}

bool DeviceGroup::isDead() const {
  return place_.control->hasFailed() || place_.host->hasFailed() || place_.cpu->hasFailed();
}

void DeviceGroup::throwIfDead() const {
  if (!isDead()) [[likely]] {
    return;
  }
  const Status cause = error();
  if (isMainThread()) isTold_.store(true, std::memory_order_relaxed);
  throwStatus(Status(cause.code(), cause.message() + "\n  Here: rank " +
                                       std::to_string(place_.rank) + ", called after that" +
                                       (hasLost_.load() ? kNotToBeUsed : "")));
}

DeviceGroup::WorkPtr DeviceGroup::launch(Request& request, at::TensorList outputs, Extras extras) {
  return carry({&request}, outputs, std::move(extras), /*isBatch=*/false);
}

DeviceGroup::WorkPtr DeviceGroup::carry(const std::vector<Request*>& requests,
                                        at::TensorList outputs, Extras extras, bool isBatch) {
  clearReleased();
  throwIfDead();
  const c10::Device device = requests.front()->device;
  // A guard asks the driver when it ends: only where it is needed.
  if (isCurrent(device)) return carryHere(requests, outputs, std::move(extras), isBatch);
  const c10::DeviceGuard guard(device);
  return carryHere(requests, outputs, std::move(extras), isBatch);
}

DeviceGroup::WorkPtr DeviceGroup::carryHere(const std::vector<Request*>& requests,
                                            at::TensorList outputs, Extras extras, bool isBatch) {
  const Request& first = *requests.front();
  const c10::Device device = first.device;
  const c10::Stream caller = currentStream(device);
  const bool isSingle = isMessage(first) && !isBatch;
  if (!isSingle && knownRoad() == DeviceRoad::kUnknown) {
    const bool isOne = requests.size() == 1 && first.calls.size() == 1;
    chooseRoad(device, isOne ? first.calls.front().signature().describe()
                             : std::string(first.site.function) + " (of several)");
  }
  const bool isAsync = first.async;
  const bool isTimed = extras.isTimed || extras.whenOver;
  InFlight inFlight;
  if (isAsync && InFlight::isWanted()) {
    for (const Request* request : requests) inFlight.add(request->allTensors());
  }
  DeviceOperationPtr operation;
  if (isSingle) {
    operation = carryMessage(*requests.front(), isTimed);
  } else if (knownRoad() == DeviceRoad::kNccl) {
    operation = nccl_->carry(*this, requests, isTimed, isBatch);
  } else {
    operation = host_->carry(*this, requests, isTimed);
  }
  if (extras.whenOver) {
    onOver(operation, [operation, whenOver = std::move(extras.whenOver)](const Status&) {
      const std::chrono::duration<double, std::milli> took(operation->milliseconds());
      CallbackPool::get().post([whenOver, took] {
        whenOver(std::chrono::duration_cast<std::chrono::nanoseconds>(took));
      });
    });
  }
  if (!isAsync) {
    // NCCL's ran on the caller's stream; the host road's end is waited for by it.
    throwIfFailed(operation->waitEnqueued(Deadline::never()));
    if (operation->stream() != caller) operation->block(caller);
    operation->release();
    if (!place_.waitsOnHost) return nullptr;
    throwIfFailed(operation->waitOver(Deadline::never()));
    return nullptr;
  }
  return c10::make_intrusive<DeviceWork>(shared_from_this(), first.type, sequence(),
                                         place_.timeoutOf(first), operation, outputs.vec(),
                                         std::move(inFlight), place_.waitsOnHost);
}

// ---- messages between two ranks ----------------------------------------------------------------

DeviceOperationPtr DeviceGroup::carryMessage(Request& request, bool isTimed) {
  const int peer = request.peer;
  bool isOnNccl = false;
  if (Env::process().cuda == CudaPath::kHost || peer == place_.rank) {
    // All ranks were told so, or there is no other: alone NCCL's send would wait for its receive.
  } else if (peer == kAnySource) {
    isOnNccl = knownRoad() != DeviceRoad::kHost;  // there is nobody to ask; NCCL's road refuses it
  } else {
    isOnNccl = connectWith(request);
  }
  return isOnNccl ? nccl_->carry(*this, {&request}, isTimed, /*isBatch=*/false)
                  : host_->carry(*this, {&request}, isTimed);
}

std::optional<bool> DeviceGroup::pairOnNccl(c10::Device device, int peer) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto known = pairs_.find(peer);
  if (known == pairs_.end() || (known->second && !nccl_->hasPair(device, peer))) return {};
  return known->second;
}

// As with torch's nccl, the first message of two ranks waits in its caller for the other rank's
// first one: NCCL must not connect on a second thread beside the caller's operations.
bool DeviceGroup::connectWith(Request& request) {
  const int peer = request.peer;
  if (const auto known = pairOnNccl(request.device, peer)) return *known;
  const Waiting waiting(*this, request);
  std::unique_lock<std::timed_mutex> lock(pairMutex_, std::defer_lock);
  while (!lock.try_lock_for(kTick)) {
    throwIfDead();
    if (isInterruptPending()) throwStatus(interrupted());
  }
  if (const auto known = pairOnNccl(request.device, peer)) return *known;
  const nccl::RelaxedCapture relaxed;  // NCCL allocates
  std::optional<bool> isOnNccl;
  {
    std::lock_guard<std::mutex> reading(mutex_);
    const auto known = pairs_.find(peer);
    if (known != pairs_.end()) isOnNccl = known->second;
  }
  if (!isOnNccl) isOnNccl = agreeWith(request.device, peer);
  if (*isOnNccl) nccl_->connectPair(request.device, peer);
  std::lock_guard<std::mutex> writing(mutex_);
  return pairs_[peer] = *isOnNccl;
}

// Both ranks come to the same answer: the group's, if one of them knows it, else what fits the two.
bool DeviceGroup::agreeWith(c10::Device device, int peer) {
  Communicator& control = *place_.control;
  auto mine = std::make_shared<Note>();
  mine->road = knownRoad();
  mine->report = NcclRoad::report(device);
  const OpPtr sent = control.send({mine.get(), sizeof(Note)}, peer, kRoadTag, DType::kUInt8, 0,
                                  mine, /*willWait=*/false, kNoDeadline);
  if (mine->road != DeviceRoad::kUnknown) return mine->road == DeviceRoad::kNccl;
  auto theirs = std::make_shared<Note>();
  const OpPtr came = control.recv({theirs.get(), sizeof(Note)}, peer, kRoadTag, DType::kUInt8, 0,
                                  theirs, /*willWait=*/true, kNoDeadline);
  for (const OpPtr& op : {came, sent}) nccl_->connected(control.wait(op, Deadline::never()));
  if (theirs->road != DeviceRoad::kUnknown) return theirs->road == DeviceRoad::kNccl;
  const bool isFirst = place_.rank < peer;
  const Status judgement =
      isFirst ? NcclRoad::judge({mine->report, theirs->report}, {place_.rank, peer})
              : NcclRoad::judge({theirs->report, mine->report}, {peer, place_.rank});
  if (!judgement.ok() && judgement.code() != Code::kUnsupported) {
    control.fail(judgement);
    throwStatus(judgement);
  }
  if (isFirst) warnOfHostRoad(judgement);
  return judgement.ok();
}

DeviceGroup::Waiting::Waiting(DeviceGroup& group, const char* what, const c10::Stream& caller)
    : operation_(std::make_shared<DeviceOperation>(what, caller)) {
  Followed followed;
  followed.operation = operation_;
  followed.isMessage = true;  // no barrier waits for it
  group.follow(std::move(followed));
}

DeviceGroup::Waiting::Waiting(DeviceGroup& group, Request& request)
    : operation_(
          std::make_shared<DeviceOperation>(request.site.function, currentStream(request.device))) {
  MessagesCalled called{messagesOf({&request}), group.place_.timeoutOf(request), callSiteOfCall()};
  called.isRecorded = false;  // that comes when it is carried out
  group.followMessages(operation_, std::move(called));
}

DeviceGroup::Waiting::~Waiting() { operation_->fail(Status(Code::kInternal, "it has come back")); }

void DeviceGroup::addToBatch(Request request, at::TensorList outputs) {
  batch_.push_back({std::move(request), outputs.vec()});
}

void DeviceGroup::dropBatch() { batch_.clear(); }

DeviceGroup::WorkPtr DeviceGroup::endBatch(Extras extras) {
  std::vector<Batched> batch = std::exchange(batch_, {});
  std::vector<Request*> requests;
  std::vector<at::Tensor> outputs;
  for (Batched& entry : batch) {
    entry.request.async = true;
    requests.push_back(&entry.request);
    outputs.insert(outputs.end(), entry.outputs.begin(), entry.outputs.end());
    if (entry.request.device != batch.front().request.device) {
      refuse(entry.request.site,
             c10::str("operations that are coalesced must be on one device, but "
                      "there are ",
                      batch.front().request.device, " and ", entry.request.device));
    }
  }
  return carry(requests, outputs, std::move(extras), /*isBatch=*/true);
}

bool DeviceFence::ready() {
  for (const EventPtr& event : events) {
    if (!hasPassed(*event)) return false;
  }
  for (const DeviceOperationPtr& operation : operations) {
    if (!operation->isOver()) return false;
  }
  return true;
}

std::shared_ptr<Condition> DeviceGroup::fence() {
  auto fence = std::make_shared<DeviceFence>();
  std::vector<c10::Stream> streams;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const c10::Device device : devices_) streams.push_back(currentStream(device));
    forEachFollowed([&](const Followed& entry) {
      // Not for messages: their other ends may come after the barrier.
      if (entry.isMessage || entry.operation->isEnqueued()) return;
      fence->operations.push_back(entry.operation);
    });
  }
  nccl_->addStreams(&streams);
  for (const c10::Stream& stream : streams) {
    const c10::DeviceGuard guard(stream.device());
    if (!isCapturing(stream)) fence->events.push_back(recordEvent(stream));
  }
  if (fence->events.empty() && fence->operations.empty()) return nullptr;
  return fence;
}

Status DeviceGroup::waitFor(Condition& fence) const {
  Pause pause;
  while (!fence.ready()) {
    MYCOLL_RETURN_IF_ERROR(error());
    if (pause.rest() && isInterruptPending()) return interrupted();
  }
  return Status();
}

// ---- ending ------------------------------------------------------------------------------------

void DeviceGroup::setTimeout(std::chrono::milliseconds timeout) {
  place_.control->setTimeout(timeout);
  place_.host->setTimeout(timeout);
}

void DeviceGroup::fail(const Status& cause) {
  place_.control->fail(cause);
  place_.host->fail(cause);
  place_.cpu->fail(cause);
}

void DeviceGroup::abort(const std::string& reason) {
  isAbortedHere_.store(true);
  place_.cpu->abort(reason);
  fail(place_.cpu->error());
  Watchdog::get().add(shared_from_this(), /*isUrgent=*/true);
}

bool DeviceGroup::hasUndrained() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return !inOrder_.empty() ||
         std::any_of(followed_.begin(), followed_.end(),
                     [](const Followed& entry) { return entry.operation->isTaken(); });
}

Status DeviceGroup::drain(Deadline deadline) const {
  Pause pause;
  bool isLong = false;
  auto isAwaited = [&] { return hasUndrained() || (isBusy() && !deadline.expired()); };
  while (isAwaited() && !isDead() && !isClosed_.load()) {
    if (!isLong) Watchdog::get().wake();
    if (!pause.rest()) continue;
    isLong = true;
    if (isInterruptPending()) return interrupted();
  }
  return Status();
}

void DeviceGroup::close(Deadline deadline) {
  if (isClosed_.exchange(true)) return;
  (void)place_.control->watchExternal();  // what others have said meanwhile
  while (isBusy() && error().ok() && !deadline.expired()) {
    Watchdog::get().wake();
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  if (error().ok() && !isBusy()) {
    // Where it is late it stops what runs: replays of graphs.
    const Status closed = nccl_->close(deadline);
    if (!closed.ok()) {
      endWith(closed);
    }
  } else {
    const Status cause = error().ok() ? Status(Code::kAborted, "mycoll group '" + place_.name +
                                                                   "' was destroyed with "
                                                                   "operations that were not done")
                                      : error();
    endWith(cause);
    nccl_->abort(earlier(Deadline::after(kNcclAbortTime), deadline), cause);
  }
  isLeft_.store(true);
  place_.control->close(deadline);
  place_.host->close(deadline);
  const Status last = place_.control->error();
  if (last.code() == Code::kMismatch) endWith(last);
  clearReleased();
}

}  // namespace mycoll
