#include "backend/mycoll_backend.h"

#include <c10/util/Float8_e4m3fn.h>
#include <pthread.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <unordered_set>
#include <utility>

#include "backend/call_site.h"
#include "backend/callback_pool.h"
#include "backend/control_handlers.h"
#include "backend/device/device_group.h"
#include "backend/device/watchdog.h"
#include "backend/errors.h"
#include "backend/profiling.h"
#include "backend/torch_store.h"
#include "base/log.h"
#include "kernels/reduce.h"

namespace mycoll {
namespace {

// How long destroy_process_group() waits for operations that are still pending.
constexpr std::chrono::seconds kShutdownTimeout(10);
// The same for a group that is dropped without it.
constexpr std::chrono::seconds kDropTimeout(2);

std::atomic<int> forkCount{0};
[[maybe_unused]] const int kForkHandler =
    pthread_atfork(nullptr, nullptr, [] { forkCount.fetch_add(1, std::memory_order_relaxed); });

// Groups that live, for closeAll(). Never destroyed: a group may die during static destruction.
struct Registry {
  std::mutex mutex;
  std::unordered_set<MycollBackend*> groups;
};
Registry& registry() {
  static Registry* const kRegistry = new Registry;
  return *kRegistry;
}

// Messages are matched by rank and tag, not by their order among the collectives.
bool isMessage(c10d::OpType type) {
  return type == c10d::OpType::SEND || type == c10d::OpType::RECV ||
         type == c10d::OpType::RECVANYSOURCE;
}

// The tensors behind the spans of a call; the engine holds this until the operation is done.
struct Kept {
  c10::SmallVector<at::Tensor, 2> tensors;
};

// Consumes the request's calls.
MycollWork::Ops submit(Communicator& communicator, Request& request, uint32_t site) {
  const std::chrono::milliseconds timeout = request.timeout > std::chrono::milliseconds(0)
                                                ? request.timeout
                                                : std::chrono::milliseconds(-1);
  auto kept = std::make_shared<Kept>();
  kept->tensors = std::move(request.keep);
  MycollWork::Ops ops;
  if (request.composite) [[unlikely]] {
    ops.push_back(communicator.submitComposite(request.compositeKind, std::move(request.composite),
                                               kept, !request.async, timeout));
  }
  for (Call& call : request.calls) {
    if (call.kind == OpKind::kSend) {
      ops.push_back(communicator.send(call.in.front(), request.peer, request.tag, call.dtype,
                                      call.opaqueType, kept, !request.async, timeout));
    } else if (call.kind == OpKind::kRecv) {
      ops.push_back(communicator.recv(call.out.front(), request.peer, request.tag, call.dtype,
                                      call.opaqueType, kept, !request.async, timeout));
    } else {
      ops.push_back(communicator.submit(std::move(call), kept, !request.async, timeout));
    }
  }
  if (site) [[unlikely]] {
    for (const OpPtr& op : ops) op->record().setSite(site);
  }
  return ops;
}

}  // namespace

// Counts the works that have still to call the user's hook.
struct MycollBackend::CompletionHook {
  // One more of them, until the last copy is gone: also one that never calls, as its call was
  // refused.
  static std::shared_ptr<void> expect(const std::shared_ptr<CompletionHook>& hook) {
    std::lock_guard<std::mutex> lock(hook->mutex);
    ++hook->pending;
    return {nullptr, [hook](void*) {
              std::lock_guard<std::mutex> done(hook->mutex);
              --hook->pending;
              hook->changed.notify_all();
            }};
  }

  MycollWork::Hook call;
  std::mutex mutex;
  std::condition_variable changed;
  size_t pending = 0;
};

c10::intrusive_ptr<MycollBackend> MycollBackend::create(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::string groupName,
    std::vector<int64_t> globalRanks, c10::intrusive_ptr<MycollOptions> options, bool hasDevice) {
  const CallSite site{"mycoll", rank, size};
  if (!store) refuse(site, "a group needs a store for its ranks to meet");
  if (size < 1) refuse(site, c10::str("the group's size must be at least 1, but it is ", size));
  checkRank(site, "rank", rank);
  checkTimeout(site, options->timeout);
  if (!globalRanks.empty() && globalRanks.size() != static_cast<size_t>(size)) {
    refuse(site, c10::str("global_ranks must name the ", size, " members, but it names ",
                          globalRanks.size()));
  }
  setLogRank(static_cast<int>(globalRanks.empty() ? rank : globalRanks[static_cast<size_t>(rank)]));

  GroupOptions group;
  group.name = groupName;
  group.rank = rank;
  group.ranks = size;
  group.timeout = options->timeout;
  group.storeHost = hostOf(store);
  group.globalRanks = globalRanks;
  group.interrupted = isInterruptPending;
  group.callSite = callSiteOfWaiter;
  std::shared_ptr<Communicator> communicator;
  throwIfFailed(
      Communicator::create(std::move(group), std::make_shared<TorchStore>(store), &communicator));
  std::shared_ptr<DeviceGroup> device;
  if (hasDevice) device = DeviceGroup::create(groupName, communicator, options);
  return c10::make_intrusive<MycollBackend>(rank, size, std::move(communicator),
                                            std::move(groupName), std::move(globalRanks),
                                            std::move(options), std::move(device));
}

MycollBackend::MycollBackend(int rank, int size, std::shared_ptr<Communicator> communicator,
                             std::string groupName, std::vector<int64_t> globalRanks,
                             c10::intrusive_ptr<MycollOptions> options,
                             std::shared_ptr<DeviceGroup> device)
    : c10d::Backend(rank, size),
      communicator_(std::move(communicator)),
      groupName_(std::move(groupName)),
      globalRanks_(std::move(globalRanks)),
      options_(std::move(options)),
      device_(std::move(device)),
      forkCount_(forkCount.load(std::memory_order_relaxed)) {
  init();
  registerControlHandlers();
  // torch has changed what becomes of numbers that are too large: the sums follow the torch at
  // hand.
  static const bool saturates = !std::isnan(static_cast<float>(c10::Float8_e4m3fn(1000.0f)));
  setFloat8Saturates(saturates);
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().groups.insert(this);
}

MycollBackend::~MycollBackend() {
  if (forkCount.load(std::memory_order_relaxed) != forkCount_) {
    // The parent's connections must not hear from its child: nothing is closed, nothing is freed.
    new std::shared_ptr<Communicator>(communicator_);
    new std::shared_ptr<DeviceGroup>(device_);
    return;
  }
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    registry().groups.erase(this);
  }
  const Deadline deadline = Deadline::after(kDropTimeout);
  if (device_) device_->close(deadline);
  communicator_->close(deadline);
}

void MycollBackend::closeAll(Milliseconds timeout) {
  const Deadline deadline = Deadline::after(timeout);
  std::vector<std::shared_ptr<Communicator>> open;
  std::vector<std::shared_ptr<DeviceGroup>> devices;
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    const int forks = forkCount.load(std::memory_order_relaxed);
    for (MycollBackend* group : registry().groups) {
      if (group->forkCount_ != forks) continue;
      open.push_back(group->communicator_);
      if (group->device_) devices.push_back(group->device_);
    }
  }
  for (const auto& device : devices) device->close(deadline);
  Watchdog::get().stop();  // the driver may be unloaded at any time
  for (const auto& communicator : open) communicator->close(deadline);
  if (!CallbackPool::get().drain(deadline.remaining())) {
    MYCOLL_LOG_WARN("a callback of a future has not returned in time for the process's exit");
  }
}

void MycollBackend::setTimeout(Milliseconds timeout) {
  checkTimeout(enter("set_timeout"), timeout);
  options_->timeout = timeout;
  communicator_->setTimeout(timeout);
  if (device_) device_->setTimeout(timeout);
}

void MycollBackend::eagerConnectSingleDevice(at::Device device) {
  enter("init_process_group");
  if (device_ && !device.is_cpu()) device_->connect(device);
}

void MycollBackend::registerMemory(at::Device device, void* address, size_t bytes,
                                   bool isSymmetric) {
  enter("register_mem_pool");
  if (device_) device_->registerMemory(device, address, bytes, isSymmetric);
}

void MycollBackend::deregisterMemory(void* address) {
  enter("deregister_mem_pool");
  if (device_) device_->deregisterMemory(address);
}

uint64_t MycollBackend::getSequenceNumberForGroup() {
  return communicator_->sequence() + (device_ ? device_->sequence() : 0);
}

std::string MycollBackend::deviceTransport() const { return device_ ? device_->road() : ""; }

c10d::ErrorType MycollBackend::getError() {
  switch ((device_ ? device_->error() : communicator_->error()).code()) {
    case Code::kOk: return c10d::ErrorType::SUCCESS;
    case Code::kTimeout: return c10d::ErrorType::TIMEOUT;
    case Code::kPeerLost: return c10d::ErrorType::REMOTE_ERROR;
    default: return c10d::ErrorType::COMM_ERROR;
  }
}

void MycollBackend::abort() {
  enter("abort");
  const std::string reason = c10::str("rank ", rank_, " called abort()");
  if (device_) {
    device_->abort(reason);
  } else {
    communicator_->abort(reason);
  }
}

void MycollBackend::shutdown() {
  enter("shutdown");
  const Deadline deadline = Deadline::after(kShutdownTimeout);
  if (device_) device_->close(deadline);
  communicator_->close(deadline);
}

void MycollBackend::registerOnCompletionHook(
    std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  const CallSite site = enter("register_on_completion_hook");
  if (hook_) refuse(site, "a hook is registered already");
  // Never copied, as that may need the GIL: everybody shares this one.
  hook_ = std::make_shared<CompletionHook>();
  hook_->call = std::move(hook);
  onCompletionHook_ = [state = hook_](std::shared_ptr<c10d::WorkInfo> info) {
    state->call(std::move(info));
  };
}

void MycollBackend::waitForPendingWorks() {
  enter("wait_for_pending_works");
  if (!hook_) return;
  std::unique_lock<std::mutex> lock(hook_->mutex);
  hook_->changed.wait(lock, [this] { return hook_->pending == 0; });
}

CallSite MycollBackend::enter(const char* function) const {
  if (forkCount.load(std::memory_order_relaxed) != forkCount_) [[unlikely]] {
    C10_THROW_ERROR(
        DistBackendError,
        c10::str(function, ": this process was forked after its mycoll group '", groupName_,
                 "' was made, and a group cannot be used on both sides of a fork; make the group "
                 "in the child, or start processes with torch.multiprocessing's 'spawn'"));
  }
  return CallSite{function, rank_, size_};
}

MycollBackend::WorkPtr MycollBackend::run(Request& request, at::TensorList outputs) {
  if (!isDescribed_.load(std::memory_order_relaxed)) [[unlikely]] {
    // torch tells it some time after the group was made.
    isDescribed_.store(true, std::memory_order_relaxed);
    communicator_->record().describe(pg_desc_);
  }
  if (isProfiling()) [[unlikely]] {
    return runProfiled(request, outputs);
  }
  return launch(request, outputs, /*isProfiled=*/false);
}

void MycollBackend::awaitCallbacks(const Request& request) const {
  const Milliseconds timeout =
      request.timeout > Milliseconds(0) ? request.timeout : options_->timeout;
  switch (callbacks_->here()->wait(Deadline::after(timeout), isInterruptPending)) {
    case CallbackOrder::Outcome::kIdle: return;
    case CallbackOrder::Outcome::kInterrupted:
      throwStatus(Status(Code::kInterrupted, "interrupted by a signal"));
    case CallbackOrder::Outcome::kTimeout: throwStatus(heldTooLong(describe(request), timeout));
  }
}

std::string MycollBackend::describe(const Request& request) const {
  return c10::str(request.site.function, " in mycoll group '", groupName_, "'");
}

MycollBackend::WorkPtr MycollBackend::launch(Request& request, at::TensorList outputs,
                                             bool isProfiled) {
  if (!request.device.is_cpu()) return launchOnDevice(request, outputs);
  if (!callbacks_->isIdle() && !isMessage(request.type)) [[unlikely]] {
    if (request.async) return hold(request, outputs, isProfiled);
    awaitCallbacks(request);
  }
  InFlight inFlight;
  if (request.async && InFlight::isWanted()) inFlight.add(request.allTensors());
  MycollWork::Ops ops = submit(*communicator_, request, callSiteOfCall());
  return finishLaunch(request, outputs, std::move(ops), std::move(inFlight), isProfiled);
}

MycollBackend::WorkPtr MycollBackend::hold(Request& request, at::TensorList outputs,
                                           bool isProfiled) {
  InFlight inFlight;
  if (InFlight::isWanted()) inFlight.add(request.allTensors());
  MycollWork::Extras extras = extrasOf(request, outputs, std::move(inFlight), isProfiled);
  extras.heldCall = describe(request);
  const auto work = track(request, outputs, {}, std::move(extras));
  callbacks_->here()->hold([communicator = communicator_, work, site = callSiteOfCall(),
                            held = std::make_shared<Request>(std::move(request))] {
    work->begin(submit(*communicator, *held, site));
  });
  return work;
}

std::function<void(std::chrono::nanoseconds)> MycollBackend::hookFor(c10d::OpType type) {
  if (!hook_) return {};
  return [state = hook_, type, sequence = getSequenceNumberForGroup(),
          expected = CompletionHook::expect(hook_)](std::chrono::nanoseconds took) {
    const auto ended = MycollWork::Clock::now();
    state->call(std::make_shared<c10d::WorkInfo>(type, sequence, ended - took, ended,
                                                 std::chrono::duration<float, std::nano>(took)));
  };
}

MycollBackend::WorkPtr MycollBackend::launchOnDevice(Request& request, at::TensorList outputs) {
  if (!device_) {
    refuse(request.site, c10::str("there are tensors on ", request.device,
                                  ", but this process had no accelerator when the group was made"));
  }
  if (isCoalescing()) {
    device_->addToBatch(std::move(request), outputs);
    return nullptr;
  }
  return device_->launch(request, outputs, {isTimed_, hookFor(request.type)});
}

MycollBackend::WorkPtr MycollBackend::finishLaunch(Request& request, at::TensorList outputs,
                                                   MycollWork::Ops ops, InFlight inFlight,
                                                   bool isProfiled) {
  if (request.async) {
    return track(request, outputs, std::move(ops),
                 extrasOf(request, outputs, std::move(inFlight), isProfiled));
  }
  if (hook_) [[unlikely]] {
    track(request, outputs, std::move(ops), extrasOf(request, outputs, InFlight(), isProfiled))
        ->wait();
    return nullptr;
  }
  for (const OpPtr& op : ops) throwIfFailed(communicator_->wait(op, Deadline::never()));
  for (const CopyBack& copy : request.copyBacks) {
    unpack(static_cast<const char*>(copy.packed.const_data_ptr()) + copy.offsetBytes, copy.target);
  }
  return nullptr;
}

MycollWork::Extras MycollBackend::extrasOf(Request& request, at::TensorList outputs,
                                           InFlight inFlight, bool isProfiled) {
  MycollWork::Extras extras;
  extras.copyBacks = std::move(request.copyBacks);
  extras.isTimed = isTimed_;
  extras.started = MycollWork::Clock::now();
  extras.timeout = request.timeout > Milliseconds(0) ? request.timeout : options_->timeout;
  if (!isMessage(request.type)) extras.order = callbacks_;
  extras.inFlight = std::move(inFlight);
  if (hook_) {
    extras.hook = [state = hook_, expected = CompletionHook::expect(hook_)](
                      std::shared_ptr<c10d::WorkInfo> info) { state->call(std::move(info)); };
  }
  if (isProfiled && request.async) {
    extras.profilingTitle = request.title;
    extras.profiledInputs = outputs.vec();
  }
  return extras;
}

c10::intrusive_ptr<MycollWork> MycollBackend::track(const Request& request, at::TensorList outputs,
                                                    MycollWork::Ops ops,
                                                    MycollWork::Extras extras) {
  auto work = c10::make_intrusive<MycollWork>(communicator_, request.type, std::move(ops),
                                              outputs.vec(), std::move(extras));
  work->start();
  if (request.async && isCoalescing()) coalesced_.push_back(work);
  return work;
}

}  // namespace mycoll
