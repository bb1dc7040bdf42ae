#include "device/device_group.h"

#include <algorithm>
#include <utility>

#include "backend/errors.h"
#include "base/env.h"
#include "base/text.h"
#include "base/wait.h"
#include "device/device_work.h"
#include "device/watchdog.h"
#include "nccl/cudart.h"

namespace mycoll {
namespace {

using Clock = std::chrono::steady_clock;

// Part of an error if the program relies on results that were lost.
constexpr char kInvalidResults[] = ". Results computed on the device since then are invalid";
// The longest wait for NCCL to stop when a group ends.
constexpr std::chrono::milliseconds kNcclAbortTime(1000);
// NCCL often detects the loss of a rank before its cause is known: the engine has this time to find
// the cause.
constexpr auto kCauseGrace = std::chrono::milliseconds(1000);
// How often the engine's groups and NCCL are checked for failures.
constexpr auto kCheckEvery = std::chrono::milliseconds(20);

// The operations and events that a barrier waits for.
class Fence final : public Condition {
 public:
  bool ready() override {
    return std::all_of(events.begin(), events.end(),
                       [](const EventPtr& event) { return hasPassed(*event); }) &&
           std::all_of(operations.begin(), operations.end(),
                       [](const DeviceOperationPtr& operation) { return operation->isOver(); });
  }

  std::vector<EventPtr> events;
  std::vector<DeviceOperationPtr> operations;  // that no event follows
};

}  // namespace

std::shared_ptr<DeviceSupport> DeviceGroup::create(std::string name,
                                                   std::shared_ptr<Communicator> communicator,
                                                   c10::intrusive_ptr<MycollOptions> options) {
  DevicePlace place;
  place.name = std::move(name);
  place.rank = communicator->rank();
  place.ranks = communicator->ranks();
  place.control = Communicator::derive(*communicator, " on devices", /*isExternal=*/true);
  place.host = Communicator::derive(*communicator, " on devices through host memory",
                                    /*isExternal=*/false);
  place.cpu = std::move(communicator);
  place.options = std::move(options);
  place.waitsOnHost = Env::process().cudaBlockingWait;
  return std::make_shared<DeviceGroup>(std::move(place));
}

DeviceGroup::DeviceGroup(DevicePlace place)
    : place_(std::move(place)), choice_(place_), channels_(place_), host_(place_) {}

DeviceGroup::~DeviceGroup() { close(Deadline::after(std::chrono::milliseconds(0))); }

std::string DeviceGroup::path() const {
  const DevicePath path = choice_.known();
  return path == DevicePath::kNccl ? "nccl" : path == DevicePath::kHost ? "host" : "";
}

// While it lives, its thread waits for other ranks outside of any operation: a failure of the
// group, or the message's deadline, ends that wait.
class DeviceGroup::Waiting {
 public:
  Waiting(DeviceGroup& group, const char* what, c10::Device device)
      : operation_(std::make_shared<DeviceOperation>(what, currentStream(device))) {
    group.watch({.operation = operation_, .isMessage = true});  // no barrier waits for it
  }
  Waiting(DeviceGroup& group, Request& message)
      : operation_(std::make_shared<DeviceOperation>(message.caller.function,
                                                     currentStream(message.device))) {
    Request* const one = &message;
    group.watchMessages(operation_, {&one, 1}, /*isOfPair=*/true,
                        /*isRecorded=*/false);  // the launch records it
  }
  ~Waiting() { operation_->fail(Status(Code::kAborted, operation_->what())); }  // not read
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  const DeviceOperationPtr operation_;
};

// ---- connecting ---------------------------------------------------------------------------------

void DeviceGroup::connect(c10::Device device) {
  const OnDevice guard(device);
  choice_.agree(device, "connecting");
  watched_.addDevice(device);
  if (choice_.known() == DevicePath::kNccl) (void)channels_.ofGroup(device);
}

void DeviceGroup::split(DeviceSupport* made, int color, bool isWilling) {
  throwIfDead();
  if (choice_.known() != DevicePath::kNccl) return;
  auto* const child = static_cast<DeviceGroup*>(made);
  // NCCL requires that no operation is pending on a communicator that it splits.
  for (DevicePause pause; watched_.hasOfGroup();) {
    throwIfDead();
    if (pause.rest() && isInterruptPending()) throwStatus(interrupted());
  }
  const bool isSplit =
      channels_.split(child != nullptr ? &child->channels_ : nullptr, color, isWilling);
  if (!isSplit || child == nullptr) return;
  throwUnlessConnected(child->place_, child->place_.control->meetNeighbours());
  child->choice_.adoptNccl(choice_);
  for (const c10::Device device : watched_.devices()) child->watched_.addDevice(device);
}

void DeviceGroup::registerMemory(c10::Device device, void* address, size_t bytes,
                                 bool isSymmetric) {
  const OnDevice guard(device);
  if (isCapturing(currentStream(device))) {
    refuse(
        {"register_mem_pool", place_.rank, place_.ranks, &place_.name},
        "it cannot be captured in a graph, as NCCL allocates for it: call it before the capture");
  }
  choice_.agree(device, "register_mem_pool");
  if (choice_.known() != DevicePath::kNccl) return;
  // For symmetric memory NCCL waits for the other ranks.
  const Waiting waiting(*this, "register_mem_pool", device);
  throwIfFailed(memory_.add(channels_.ofGroup(device).comm, address, bytes, isSymmetric));
}

void DeviceGroup::deregisterMemory(void* address) {
  if (choice_.known() == DevicePath::kNccl) throwIfFailed(memory_.remove(address));
}

void* DeviceGroup::ncclComm() const { return channels_.handleHere(); }

// As with torch's nccl, the first message of two ranks blocks its caller until the other rank's
// first one: NCCL must not connect on a second thread beside the caller's operations.
DevicePath DeviceGroup::connectWith(Request& request) {
  const c10::Device device = request.device;
  const int peer = request.peer;
  const auto connected = [&] {
    const DevicePath path = choice_.knownWith(peer);
    const bool isReady =
        path != DevicePath::kNccl || peer == kAnySource || channels_.hasPair(device, peer);
    return isReady ? path : DevicePath::kUnknown;
  };
  if (const DevicePath path = connected(); path != DevicePath::kUnknown) return path;
  const Waiting waiting(*this, request);
  std::unique_lock<std::timed_mutex> lock(pairMutex_, std::defer_lock);
  while (!lock.try_lock_for(kWaitTick)) {
    throwIfDead();
    if (isInterruptPending()) throwStatus(interrupted());
  }
  if (const DevicePath path = connected(); path != DevicePath::kUnknown) return path;
  const nccl::RelaxedCapture relaxed;  // NCCL allocates
  const DevicePath path = choice_.agreeWith(device, peer);
  if (path == DevicePath::kNccl) (void)channels_.ofPair(device, peer);
  return path;
}

// ---- launching ----------------------------------------------------------------------------------

DevicePath DeviceGroup::pathOf(Requests requests, bool isBatch) {
  Request& first = *requests.front();
  if (first.isMessage() && !isBatch) return connectWith(first);
  if (choice_.known() == DevicePath::kUnknown) {
    const bool isOne = requests.size() == 1 && first.calls.size() == 1;
    choice_.agree(first.device, isOne ? first.calls.front().signature().describe()
                                      : std::string(first.caller.function) + " (of several)");
  }
  return choice_.known();
}

DeviceGroup::WorkPtr DeviceGroup::launch(Requests requests, at::TensorList outputs, Extras extras) {
  throwIfDead();
  const Request& first = *requests.front();
  for (const Request* request : requests) {
    if (request->device == first.device) continue;
    refuse(request->caller, "operations that are coalesced must be on one device, but there are ",
           first.device, " and ", request->device);
  }
  const OnDevice guard(first.device);
  const c10::Stream caller = currentStream(first.device);
  const bool isAsync = first.async;
  const bool isBatch = extras.isBatch;
  const DeviceOperationPtr operation = pathOf(requests, isBatch) == DevicePath::kNccl
                                           ? launchOnNccl(requests, extras.isTimed, isBatch)
                                           : host_.launch(*this, requests, extras.isTimed);
  const bool isCollective = std::any_of(requests.begin(), requests.end(),
                                        [](auto* request) { return !request->isMessage(); });
  const uint64_t sequence = collectives_.fetch_add(isCollective, std::memory_order_relaxed);
  if (!isAsync && !extras.wantsWork) {
    // NCCL's operation is on the caller's stream; for the host path's, that stream waits.
    throwIfFailed(operation->waitEnqueued(Deadline::never()));
    if (operation->stream() != caller) operation->block(caller);
    operation->release().dropHere();
    if (place_.waitsOnHost) throwIfFailed(operation->waitOver(Deadline::never()));
    return nullptr;
  }
  return c10::make_intrusive<DeviceWork>(
      shared_from_this(), isBatch ? c10d::OpType::COALESCED : first.type, sequence,
      place_.timeoutOf(first), operation, outputs.vec(), isBatch ? 0 : first.perList,
      place_.waitsOnHost, std::move(extras.order));
}

std::shared_ptr<Condition> DeviceGroup::fence() {
  auto fence = std::make_shared<Fence>();
  fence->operations = watched_.besideChannels();
  std::vector<c10::Stream> streams;
  for (const c10::Device device : watched_.devices()) streams.push_back(currentStream(device));
  channels_.addStreams(&streams);
  for (const c10::Stream& stream : streams) {
    const OnDevice guard(stream.device());
    if (!isCapturing(stream)) fence->events.push_back(recordEvent(stream));
  }
  if (fence->events.empty() && fence->operations.empty()) return nullptr;
  return fence;
}

Status DeviceGroup::waitFor(Condition& fence) const {
  DevicePause pause;
  while (!fence.ready()) {
    MYCOLL_RETURN_IF_ERROR(error());
    if (pause.rest() && isInterruptPending()) return interrupted();
  }
  return Status();
}

// ---- watching -----------------------------------------------------------------------------------

void DeviceGroup::watch(Watched watched) {
  // If the device does everything, its end may be detected later, unless a function waits for it:
  // waking a thread for every operation would cost more than the operation. The host path's next
  // step waits for the watchdog.
  const bool isUrgent = choice_.known() != DevicePath::kNccl || watched.onOver;
  const bool isFirst = watched_.add(std::move(watched));
  if (isFirst || isUrgent) Watchdog::get().add(shared_from_this(), isUrgent);
}

void DeviceGroup::watchMessages(const DeviceOperationPtr& operation, Requests requests,
                                bool isOfPair, bool isRecorded) {
  auto messages = std::make_shared<WatchedMessages>();
  messages->isOfPair = isOfPair;
  for (const Request* request : requests) {
    const Signature signature = request->calls.front().signature();
    messages->each.push_back(
        Operation::ofMessage(signature, request->peer, request->tag, signature.bytes));
  }
  messages->calledAt = callSiteOfCall();
  messages->timeout = place_.timeoutOf(*requests.front());
  messages->deadline = Deadline::after(messages->timeout);
  if (isRecorded) {
    for (const Operation& message : messages->each) {
      messages->records.push_back(place_.control->recordMessage(message, messages->calledAt));
    }
  }
  watch({.operation = operation, .isMessage = true, .messages = std::move(messages)});
}

void DeviceGroup::watchCaptured(const c10::Stream& stream) {
  captured_.add(stream);
  Watchdog::get().add(shared_from_this(), /*isUrgent=*/false);
}

bool DeviceGroup::needsWatch() const {
  return watched_.isBusy() || (isOpen() && !isNcclStopped_ && (!captured_.isEmpty() || isDead()));
}

DeviceGroup::Progress DeviceGroup::poll() {
  Progress seen;
  checkForFailures();
  seen.hasMoved = watched_.takeOver([this](const Status& error) {
    if (!isDead() && !hasLeft()) fail(inContext(error));
  });
  const bool isReleasing = !watched_.releaseMemory();  // even if the group has ended
  failLate();
  const bool hasNotes = place_.control->watchExternal();
  seen.wantsSoon = host_.advance();
  seen.isBusy = needsWatch() || seen.wantsSoon || hasNotes || isReleasing;
  return seen;
}

std::string DeviceGroup::describe(const WatchedMessages& messages) const {
  constexpr size_t kShown = 8;
  std::string text;
  const size_t count = messages.each.size();
  for (size_t i = 0; i < std::min(count, kShown); ++i) {
    const Operation& message = messages.each[i];
    const bool isSend = message.signature.kind == OpKind::kSend;
    text += std::string(i > 0 ? ", " : "") + (isSend ? "send to " : "recv from ") +
            place_.control->describeRank(message.peer) + " of " +
            std::to_string(message.signature.bytes) + " bytes";
  }
  if (count > 1) {
    text = "a batch of " + std::to_string(count) + " sends and receives (" + text +
           (count > kShown ? ", ..." : "") + ")";
  }
  const std::string place = messages.place();
  return text + (place.empty() ? "" : " (" + place + ")");
}

// The first late message fails the group.
void DeviceGroup::failLate() {
  const std::shared_ptr<const WatchedMessages> late = watched_.late();
  if (!late || isDead()) return;
  fail(Status(Code::kTimeout,
              "mycoll group '" + place_.name + "': [Rank " + std::to_string(place_.rank) + "]: " +
                  describe(*late) + " timed out after " + std::to_string(late->timeout.count()) +
                  " ms: the other side never came, or the device is busy with something else."));
}

// ---- failing ------------------------------------------------------------------------------------

void DeviceGroup::whenFailed(const std::function<void()>& fn) {
  place_.control->whenFailed(fn);
  place_.host->whenFailed(fn);
}

Status DeviceGroup::failure() const {
  const Status cause = error();
  const bool isOwnEnd = state_.load() >= State::kLeaving && cause.cause().rank == place_.rank;
  return isOwnEnd ? Status() : cause;
}

bool DeviceGroup::isDead() const {
  return place_.control->hasFailed() || place_.host->hasFailed() || place_.cpu->hasFailed();
}

void DeviceGroup::throwIfDead() const {
  if (!isDead()) return;
  const Status cause = error();
  if (isMainThread()) isRaised_.store(true, std::memory_order_relaxed);
  throwStatus(cause.withMessage(cause.message() + onThisRank(place_.rank) +
                                "called after the group had failed" +
                                (hasLost_.load() ? kInvalidResults : "")));
}

void DeviceGroup::fail(const Status& cause) {
  for (const auto& group : {place_.control, place_.host, place_.cpu}) group->fail(cause);
}

// As the other ranks receive it.
Status DeviceGroup::inContext(const Status& error) const {
  return error.withMessage("mycoll group '" + place_.name + "': rank " +
                           std::to_string(place_.rank) + ": " + error.message());
}

void DeviceGroup::checkForFailures() {
  const auto now = Clock::now();
  const bool isNews = isDead() && !isNcclStopped_;
  if (!isNews && now - checkedAt_ < kCheckEvery) return;
  checkedAt_ = now;
  Status cause = failure();
  if (hasLeft()) return;  // in this order: it is set before the groups end
  if (cause.ok()) {
    const Status ofNccl = channels_.check();
    if (ofNccl.ok()) {
      ncclErrorSince_ = {};
    } else if (ncclErrorSince_ == Clock::time_point{}) {
      ncclErrorSince_ = now;
    } else if (now - ncclErrorSince_ > kCauseGrace) {
      cause = inContext(ofNccl);
    }
    if (cause.ok()) return;
  }
  fail(cause);
  failWatched(cause);
  if (!isNcclStopped_.exchange(true)) channels_.beginAbort(cause);
}

// Must be called before NCCL is stopped: then devices continue with the work after these
// operations, as if they had been executed, and so would the program.
void DeviceGroup::failWatched(const Status& cause) {
  place_.control->watchExternal();  // gives every operation its own text
  const bool isReplayed = captured_.isAnyBusy();
  const WatchList::Failed failed = watched_.failAll(cause);
  // Ranks made different calls on devices, which may have been executed, unless an operation fails
  // because of it.
  const bool isWrong = cause.code() == Code::kMismatch && !failed.isAny && !isRaised_.load() &&
                       cause.cause().group == place_.control->context();
  if ((!failed.lost && !isReplayed && !isWrong) || hasLost_.exchange(true)) return;
  const std::string place = failed.lost ? failed.lost->place() : "";
  const std::string what =
      failed.lost  ? failed.lost->operation->what() + (place.empty() ? "" : " (" + place + ")") +
                         " was under way on the device"
      : isReplayed ? "a graph with operations of this group may have been under way on the device"
                   : "a call that does not match may have been carried out on the device";
  // The next call would throw, but the program may use the numbers before it makes one. Not if the
  // program has aborted the group meanwhile.
  raiseInMainThread(
      cause.withMessage(cause.message() + onThisRank(place_.rank) + what + kInvalidResults),
      failed.lost ? failed.lost->operation->reliedOnSince() : 0,
      [group = weak_from_this(), isAborted = isAbortedHere_.load()] {
        const std::shared_ptr<DeviceGroup> living = group.lock();
        return !(living ? living->isAbortedHere_.load() : isAborted);
      });
}

// ---- ending -------------------------------------------------------------------------------------

void DeviceGroup::setTimeout(std::chrono::milliseconds timeout) {
  place_.control->setTimeout(timeout);
  place_.host->setTimeout(timeout);
}

void DeviceGroup::abort(const std::string& reason) {
  isAbortedHere_.store(true);
  place_.cpu->abort(reason);
  fail(place_.cpu->error());
  Watchdog::get().add(shared_from_this(), /*isUrgent=*/true);
}

Status DeviceGroup::drain(Deadline deadline) const {
  DevicePause pause;
  bool isLong = false;
  auto isAwaited = [&] {
    return watched_.hasUndrained() || (watched_.isBusy() && !deadline.expired());
  };
  while (isAwaited() && !isDead() && isOpen()) {
    if (!isLong) Watchdog::get().wake();
    if (!pause.rest()) continue;
    isLong = true;
    if (isInterruptPending()) return interrupted();
  }
  return Status();
}

void DeviceGroup::close(Deadline deadline) {
  State open = State::kOpen;
  if (!state_.compare_exchange_strong(open, State::kClosing)) return;
  (void)place_.control->watchExternal();  // handles what other ranks have sent meanwhile
  for (DevicePause pause; watched_.isBusy() && !isDead() && !deadline.expired();
       (void)pause.rest()) {
    Watchdog::get().wake();
  }
  const bool isExiting = Watchdog::get().isExiting();
  if (isExiting) {
    // NCCL's communicators stay. The destructor has no pointer to the group.
    if (auto self = weak_from_this().lock()) {
      new std::shared_ptr<DeviceGroup>(std::move(self));
    } else {
      channels_.keepForever();
    }
  }
  const auto stop = [&](const Status& why) {
    if (isExiting) return;
    failWatched(why);
    channels_.abort(earlier(Deadline::after(kNcclAbortTime), deadline), why);
  };
  Status cause = error();
  if (!cause.ok()) {
    fail(cause);  // ranks that have left receive it on the CPU's group only
  } else if (watched_.isBusy()) {
    cause =
        Status(Code::kAborted, "mycoll group '" + place_.name +
                                   "': the group was destroyed with operations that were not done");
  }
  if (!cause.ok()) stop(cause);
  state_.store(State::kLeaving);
  place_.control->leave(deadline);
  place_.host->leave(deadline);
  if (cause.ok()) {
    cause = failure();
    if (!cause.ok()) {
      fail(cause);
      stop(cause);
    } else if (!isExiting) {
      endNccl(deadline);
      (void)place_.control->watchExternal();  // handles what other ranks sent as they left
    }
  }
  const Status last = failure();
  if (last.code() == Code::kMismatch) failWatched(last);
  state_.store(State::kLeft);  // failures from now on are this rank's own end
  place_.control->endLeaving();
  place_.host->endLeaving();
}

void DeviceGroup::detach() {
  for (const auto& group : {place_.control, place_.host}) group->mailbox().detach();
}

void DeviceGroup::endNccl(Deadline deadline) {
  Deadline patience = Deadline::never();
  const Status closed = channels_.close(deadline, [&] {
    const Status cause = failure();
    if (!cause.ok() && patience.isNever()) patience = Deadline::after(kNcclAbortTime);
    return patience.expired() ? cause : Status();
  });
  // If it was late, it has stopped running operations: replays of graphs.
  if (!closed.ok()) failWatched(closed);
}

}  // namespace mycoll
