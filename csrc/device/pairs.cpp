#include "device/pairs.h"

#include <c10/core/DeviceGuard.h>

#include <condition_variable>
#include <deque>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "backend/call_site.h"
#include "backend/errors.h"
#include "base/env.h"
#include "device/host_road.h"
#include "device/nccl_road.h"
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

// Runs fn where torch's exceptions must not get out.
template <typename Fn>
Status attempt(const DeviceGroup& group, const Fn& fn) {
  const Untold untold;
  try {
    fn();
    return Status();
  } catch (const std::exception& error) {
    const Status cause = group.error();
    return cause.ok() ? Status(Code::kInternal, error.what()) : cause;
  }
}

}  // namespace

// A message that waits for its pair.
struct Pairs::Aside {
  std::optional<Request> request;
  DeviceOperationPtr operation;
  EventPtr ready;  // behind it the tensor may be read, or written
};

struct Pairs::Pair {
  explicit Pair(int rank) : peer(rank) {}

  const int peer;
  std::mutex mutex;
  std::condition_variable changed;
  bool isBusy = false;        // guarded by mutex: a thread connects, or carries what is put aside
  std::deque<Aside> waiting;  // guarded by mutex
  // Of whoever made it busy; of everybody while it is not.
  std::optional<bool> isOnNccl;
};

Pairs::Pairs(const DevicePlace& place, NcclRoad& nccl, HostRoad& host)
    : place_(place), nccl_(nccl), host_(host) {}

Pairs::~Pairs() = default;

Pairs::PairPtr Pairs::pairWith(int peer) {
  std::lock_guard<std::mutex> lock(mutex_);
  PairPtr& pair = pairs_[peer];
  if (!pair) pair = std::make_shared<Pair>(peer);
  return pair;
}

bool Pairs::isReady(const Pair& pair, c10::Device device) const {
  return pair.isOnNccl && (!*pair.isOnNccl || nccl_.hasPair(device, pair.peer));
}

DeviceOperationPtr Pairs::carryBy(bool isOnNccl, DeviceGroup& group, Request& request, bool isTimed,
                                  EventPtr ready) {
  return isOnNccl ? nccl_.carry(group, {&request}, isTimed, /*isBatch=*/false, std::move(ready))
                  : host_.carry(group, {&request}, isTimed, std::move(ready));
}

DeviceOperationPtr Pairs::carry(DeviceGroup& group, Request& request, bool isTimed) {
  // All ranks were told so, or there is no other: alone NCCL's send would wait for its receive.
  if (Env::process().cuda == CudaPath::kHost || request.peer == place_.rank) {
    return carryBy(false, group, request, isTimed);
  }
  // From any rank there is nobody to ask; NCCL's road refuses it.
  if (request.peer == kAnySource) {
    return carryBy(group.knownRoad() != DeviceRoad::kHost, group, request, isTimed);
  }
  request.calledAt = callSiteOfCall();
  const PairPtr pair = pairWith(request.peer);
  const bool isCaptured = isCapturing(currentStream(request.device));
  std::unique_lock<std::mutex> lock(pair->mutex);
  if (!pair->isBusy && isReady(*pair, request.device)) {
    lock.unlock();
    return carryBy(*pair->isOnNccl, group, request, isTimed);
  }
  if (!isCaptured) return putAside(group, pair, request, isTimed);
  // A capture ends in this thread, so it must contain the message when this returns.
  while (pair->isBusy) {
    pair->changed.wait_for(lock, kTick);
    if (isInterruptPending()) throwStatus(interrupted());
  }
  pair->isBusy = true;
  lock.unlock();
  std::exception_ptr failure;
  try {
    connect(group, *pair, request.device);
  } catch (...) {
    failure = std::current_exception();
  }
  serve(group, *pair);
  if (failure) std::rethrow_exception(failure);
  return carryBy(*pair->isOnNccl, group, request, isTimed);
}

// With the pair's mutex.
DeviceOperationPtr Pairs::putAside(DeviceGroup& group, const PairPtr& pair, Request& request,
                                   bool isTimed) {
  const c10::Stream caller = currentStream(request.device);
  auto operation = std::make_shared<DeviceOperation>(request.site.function, caller);
  EventPtr ready = recordEvent(caller, isTimed);
  operation->setTimed(isTimed);
  if (isTimed) operation->setStarted(ready);
  operation->keep(request.allTensors());
  DeviceGroup::MessagesCalled called{messagesOf({&request}), place_.timeoutOf(request),
                                     request.calledAt};
  called.messages.front().lane = laneOf(0, /*isOfPair=*/true);
  called.isRecorded = false;  // that comes when it is carried out
  group.followMessages(operation, std::move(called));
  pair->waiting.push_back({std::move(request), operation, std::move(ready)});
  if (std::exchange(pair->isBusy, true)) return operation;
  auto connecting = [this, pair, held = group.shared_from_this()] { serve(*held, *pair); };
  try {
    std::thread(connecting).detach();
  } catch (const std::system_error& error) {
    pair->isBusy = false;
    pair->waiting.pop_back();
    const Status cause(Code::kInternal,
                       std::string("no thread for ") + request.site.function + ": " + error.what());
    operation->fail(cause);
    throwStatus(cause);
  }
  return operation;
}

// Of whoever made the pair busy: until nothing is put aside any more.
void Pairs::serve(DeviceGroup& group, Pair& pair) {
  for (;;) {
    Aside aside;
    {
      std::lock_guard<std::mutex> lock(pair.mutex);
      if (pair.waiting.empty()) {
        pair.isBusy = false;
        pair.changed.notify_all();
        return;
      }
      aside = std::move(pair.waiting.front());
      pair.waiting.pop_front();
    }
    const Status status = attempt(group, [&] {
      connect(group, pair, aside.operation->device());
      carryAside(group, pair, aside);
    });
    if (!status.ok()) aside.operation->fail(status);
  }
}

void Pairs::connect(DeviceGroup& group, Pair& pair, c10::Device device) {
  const c10::DeviceGuard guard(device);
  const nccl::RelaxedCapture relaxed;  // NCCL allocates
  throwIfFailed(group.error());
  if (!pair.isOnNccl) pair.isOnNccl = isPairOnNccl(group, device, pair.peer);
  const DeviceGroup::Inside inside(group);
  if (*pair.isOnNccl) nccl_.connectPair(device, pair.peer);
}

// Both ranks come to the same answer: that of the group, if one of them knows it, else what fits
// the two of them.
bool Pairs::isPairOnNccl(const DeviceGroup& group, c10::Device device, int peer) {
  Communicator& control = *place_.control;
  auto mine = std::make_shared<Note>();
  mine->road = group.knownRoad();
  mine->report = NcclRoad::report(device);
  const OpPtr sent = control.send({mine.get(), sizeof(Note)}, peer, kRoadTag, DType::kUInt8, 0,
                                  mine, /*willWait=*/false, kNoDeadline);
  if (mine->road != DeviceRoad::kUnknown) return mine->road == DeviceRoad::kNccl;
  auto theirs = std::make_shared<Note>();
  const OpPtr came = control.recv({theirs.get(), sizeof(Note)}, peer, kRoadTag, DType::kUInt8, 0,
                                  theirs, /*willWait=*/true, kNoDeadline);
  throwIfFailed(control.wait(came, Deadline::never()));
  throwIfFailed(control.wait(sent, Deadline::never()));
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

// No stream plays the caller's part: one of the pool could be that of another pair, and stand
// behind a message there that waits for this one.
void Pairs::carryAside(DeviceGroup& group, const Pair& pair, Aside& aside) {
  const c10::DeviceGuard guard(aside.operation->device());
  const DeviceOperationPtr inner = carryBy(*pair.isOnNccl, group, *aside.request,
                                           aside.operation->isTimed(), std::move(aside.ready));
  aside.request.reset();  // before the user can see the end, and expects its memory back
  inner->onEnqueued([inner, outer = aside.operation] {
    if (!inner->status().ok()) return outer->fail(inner->status());
    outer->setSource(inner->source());
    outer->setEnqueued(inner->stream(), inner->ended());
  });
}

}  // namespace mycoll
