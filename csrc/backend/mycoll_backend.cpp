#include "backend/mycoll_backend.h"

#include <c10/util/Float8_e4m3fn.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <map>
#include <thread>
#include <unordered_set>
#include <utility>

#include "backend/call_site.h"
#include "backend/callback_order.h"
#include "backend/callback_pool.h"
#include "backend/errors.h"
#include "backend/torch_store.h"
#include "base/log.h"
#include "base/mutex.h"
#include "kernels/reduce.h"
#include "observe/trace_file.h"

namespace mycoll {
namespace {

// How long destroy_process_group() waits for operations that are still pending.
constexpr std::chrono::seconds kShutdownTimeout(10);
// The same for a group that is dropped without that call.
constexpr std::chrono::seconds kDropTimeout(2);
// How often a wait checks for signals.
constexpr std::chrono::milliseconds kTick(50);
// The time that rank 0 needs to close its store after it has left. See outstaysStore_.
constexpr std::chrono::milliseconds kStoreGrace(30);

// All existing groups, for closeAll(). Never destroyed: a group may be destroyed during static
// destruction.
struct Registry {
  Mutex mutex;
  std::unordered_set<MycollBackend*> groups GUARDED_BY(mutex);
};
Registry& registry() {
  static Registry* const kRegistry = new Registry;
  return *kRegistry;
}

std::string& whyNone() {
  static std::string* const kWhy =
      new std::string("this process had no accelerator when the group was made");
  return *kWhy;
}

}  // namespace

void setWhyNoDevices(std::string why) { whyNone() = std::move(why); }
const std::string& whyNoDevices() { return whyNone(); }

// The user's hook, and the number of works that have yet to call it.
struct MycollBackend::CompletionHook {
  explicit CompletionHook(std::string name) : group(std::move(name)) {}

  // The hook is code of the program: an exception is logged, and does not end the calling thread or
  // the group. By default only the first exception of each hook is logged: it may throw at every
  // operation.
  void run(std::shared_ptr<c10d::WorkInfo> info) {
    const std::string operation =
        c10::str(c10d::opTypeToString(info->opType), ", operation ", info->seq);
    try {
      call(std::move(info));
    } catch (...) {
      const bool isFirst = !hasThrown.exchange(true, std::memory_order_relaxed);
      MYCOLL_LOG_AT(isFirst ? LogLevel::kFailure : LogLevel::kError,
                    "group '%s': the completion hook has failed after %s: %s", group.c_str(),
                    operation.c_str(), describeException().c_str());
    }
  }

  // Counts one more work until the last copy of the result is destroyed, even if the work never
  // calls the hook because its call was refused.
  static std::shared_ptr<void> expect(const std::shared_ptr<CompletionHook>& hook) {
    MutexLock lock(hook->mutex);
    ++hook->pending;
    return {nullptr, [hook](void*) {
              MutexLock done(hook->mutex);
              --hook->pending;
              hook->changed.notify_all();
            }};
  }

  const std::string group;
  MycollWork::Hook call;  // set before hasHook_, and read after it
  std::atomic<bool> hasThrown{false};
  Mutex mutex;
  std::condition_variable changed;
  size_t pending GUARDED_BY(mutex) = 0;
};

GroupOptions MycollBackend::groupOptions(const std::string& name, int rank, int size,
                                         Milliseconds timeout) {
  GroupOptions group;
  group.name = name;
  group.rank = rank;
  group.ranks = size;
  group.timeout = timeout;
  group.interrupted = isInterruptPending;
  group.callSite = callSiteOfWaiter;
  group.mayBeCalled = [] { return CallbackOrder::isAnyPending() || mayHaveOtherThreads(); };
  return group;
}

c10::intrusive_ptr<MycollBackend> MycollBackend::create(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Identity identity,
    c10::intrusive_ptr<MycollOptions> options, DeviceFactory makeDevice) {
  const std::vector<int64_t>& globalRanks = identity.globalRanks;
  const CallSite site{"mycoll", rank, size, &identity.name};
  if (!store) refuse(site, "a group needs a store for its ranks to meet");
  if (size < 1) refuse(site, c10::str("the group's size must be at least 1, but it is ", size));
  checkRank(site, "rank", rank);
  checkTimeout(site, options->timeout);
  if (!globalRanks.empty() && globalRanks.size() != static_cast<size_t>(size)) {
    refuse(site, c10::str("global_ranks must name the ", size, " members, but it names ",
                          globalRanks.size()));
  }
  if (identity.isOfJob) {
    setLogRank(
        static_cast<int>(globalRanks.empty() ? rank : globalRanks[static_cast<size_t>(rank)]));
  }

  // Errors, logs and tools use torch's group_name ("0" is the default group). Its group_desc
  // ("default_pg") is set later, and is only shown beside the name.
  GroupOptions group = groupOptions(identity.name, rank, size, options->timeout);
  group.storeHost = hostOf(store);
  group.globalRanks = globalRanks;
  group.isOfJob = identity.isOfJob;
  std::shared_ptr<Communicator> communicator;
#if MYCOLL_TORCH_HAS_RECONFIGURE
  if (options->enable_reconfigure) {
    std::unique_ptr<Endpoint> endpoint;
    throwIfFailed(Endpoint::make(std::move(group), &endpoint));
    identity.globalRanks.clear();
    return c10::make_intrusive<MycollBackend>(rank, size, nullptr, std::move(identity),
                                              std::move(options), std::move(makeDevice),
                                              std::move(endpoint));
  }
#endif
  throwIfFailed(
      Communicator::create(std::move(group), std::make_shared<TorchStore>(store), &communicator));
  const bool isOfJob = identity.isOfJob;
  auto made =
      c10::make_intrusive<MycollBackend>(rank, size, std::move(communicator), std::move(identity),
                                         std::move(options), std::move(makeDevice));
  MutexLock lock(registry().mutex);
  const bool isFirst = isOfJob && registry().groups.size() == 1;
  made->outstaysStore_ = rank != 0 && isFirst && isServedByRankZero(store);
  return made;
}

MycollBackend::MycollBackend(int rank, int size, std::shared_ptr<Communicator> communicator,
                             Identity identity, c10::intrusive_ptr<MycollOptions> options,
                             DeviceFactory makeDevice, std::unique_ptr<Endpoint> endpoint)
    : c10d::Backend(rank, size),
      groupName_(std::move(identity.name)),
      globalRanks_(std::move(identity.globalRanks)),
      options_(std::move(options)),
      shown_(std::move(identity.shown)),
      makeDevice_(std::move(makeDevice)),
      timeout_(options_->timeout.count()),
      endpoint_(std::move(endpoint)),
      hook_(std::make_shared<CompletionHook>(groupName_)) {
  init();
  if (communicator) {
    auto device = makeDevice_ ? makeDevice_(groupName_, communicator, options_) : nullptr;
    replace({std::move(communicator), std::move(device), Status()});
  }
  // torch versions convert numbers that are too large in different ways: sums follow the torch in
  // use.
  static const bool saturates = !std::isnan(static_cast<float>(c10::Float8_e4m3fn(1000.0f)));
  setFloat8Saturates(saturates);
  MutexLock lock(registry().mutex);
  registry().groups.insert(this);
}

MycollBackend::~MycollBackend() {
  if (isForked()) {
    // A child must not use its parent's connections: closes nothing and frees nothing.
    new Generation(generation());
    return;
  }
  {
    MutexLock lock(registry().mutex);
    registry().groups.erase(this);
  }
  end(generation(), Deadline::after(kDropTimeout), "");
}

MycollBackend::Generation MycollBackend::generation() const {
  const MutexLock lock(generationMutex_);
  return generation_;
}

void MycollBackend::replace(Generation next) {
  const auto whenFailed = [hooks = abortHooks_] { hooks->call(); };
  if (next.communicator) next.communicator->whenFailed(whenFailed);
  if (next.device) next.device->whenFailed(whenFailed);
  const MutexLock lock(generationMutex_);
  generation_ = std::move(next);
}

// Small calls need no lock and no reference if the generation never changes.
template <typename Part>
std::shared_ptr<Part> MycollBackend::pin(std::shared_ptr<Part> Generation::* part) const
    NO_THREAD_SAFETY_ANALYSIS {
  if (!endpoint_) return {std::shared_ptr<void>(), (generation_.*part).get()};
  return generation().*part;
}

std::shared_ptr<Communicator> MycollBackend::communicator() const {
  std::shared_ptr<Communicator> now = pin(&Generation::communicator);
  if (now) [[likely]]
    return now;
  const Status why = generation().why;
  throwIfFailed(why);
  throwStatus(Status(Code::kInvalidArgument,
                     c10::str("mycoll group '", groupName_,
                              "': it was made with enable_reconfigure and has no ranks yet: call "
                              "reconfigure() first")));
}

std::shared_ptr<Communicator> MycollBackend::keptCommunicator() const NO_THREAD_SAFETY_ANALYSIS {
  return endpoint_ ? communicator() : generation_.communicator;
}

std::shared_ptr<DeviceSupport> MycollBackend::device() const { return pin(&Generation::device); }

void MycollBackend::end(const Generation& generation, Deadline deadline,
                        const std::string& reason) {
  if (generation.device) generation.device->close(deadline);
  if (generation.communicator) generation.communicator->close(deadline, reason);
}

void MycollBackend::closeAll(Milliseconds timeout, const std::string& reason) {
  beginExit();
  const Deadline deadline = Deadline::after(timeout);
  std::vector<std::shared_ptr<Communicator>> open;
  std::vector<std::shared_ptr<CallbackOrder>> orders;
  // By name: NCCL may wait for other ranks, so all ranks must close their groups in the same order.
  std::multimap<std::string, std::shared_ptr<DeviceSupport>> devices;
  {
    MutexLock lock(registry().mutex);
    for (MycollBackend* group : registry().groups) {
      if (group->isForked()) continue;
      Generation now = group->generation();
      if (now.communicator) open.push_back(std::move(now.communicator));
      orders.push_back(group->callbacks_);
      if (now.device) devices.emplace(group->groupName_, std::move(now.device));
    }
  }
  // As in shutdown(), but for half of the time: the rest is for close() if a callback does not
  // return.
  const Deadline held = Deadline::after(timeout / 2);
  for (const auto& order : orders) (void)order->pass(held, nullptr);
  for (const auto& [name, device] : devices) device->close(deadline);
  for (const auto& communicator : open) communicator->close(deadline, reason);
  if (!CallbackPool::get().drain(deadline.remaining())) {
    MYCOLL_LOG_WARN("a callback of a future has not returned in time for the process's exit");
  }
}

void MycollBackend::setTimeout(Milliseconds timeout) {
  checkTimeout(enter("set_timeout"), timeout);
  timeout_ = timeout.count();
  if (shown_) {
    const MutexLock lock(shownMutex_);
    shown_->timeout = timeout;
  }
  const Generation now = generation();
  if (now.communicator) now.communicator->setTimeout(timeout);
  if (now.device) now.device->setTimeout(timeout);
}

void MycollBackend::eagerConnectSingleDevice(at::Device device) {
  const CallSite site = enter("init_process_group");
  if (device.is_cpu()) return;
  if (endpoint_) return;  // the ranks are not known yet
  const auto support = this->device();
  if (!support) refuse(site, c10::str("device_id is ", device, ", but ", whyNoDevices()));
  support->connect(device);
}

void MycollBackend::registerMemory(at::Device device, void* address, size_t bytes,
                                   bool isSymmetric) {
  enter("register_mem_pool");
  const auto support = this->device();
  if (support) support->registerMemory(device, address, bytes, isSymmetric);
}

void MycollBackend::deregisterMemory(void* address) {
  enter("deregister_mem_pool");
  if (const auto support = device()) support->deregisterMemory(address);
}

int64_t MycollBackend::ncclComm() const {
  const CallSite site = enter("_comm_ptr");
  const auto support = device();
  void* const comm = support ? support->ncclComm() : nullptr;
  if (comm == nullptr) {
    refuse(site,
           "the group has no communicator of NCCL's on the current device: call a collective there "
           "first; through host memory (MYCOLL_CUDA) there is none");
  }
  return reinterpret_cast<int64_t>(comm);
}

uint64_t MycollBackend::getSequenceNumberForGroup() {
  owner_.check(groupName_, "get_sequence_number");
  const Generation now = generation();
  return (now.communicator ? now.communicator->sequence() : 0) +
         (now.device ? now.device->sequence() : 0);
}

std::string MycollBackend::deviceTransport() const {
  const auto support = device();
  return support ? support->path() : "";
}

c10d::ErrorType MycollBackend::getError() {
  owner_.check(groupName_, "get_error");
  const Generation now = generation();
  const Status error = now.device         ? now.device->error()
                       : now.communicator ? now.communicator->error()
                                          : now.why;
  switch (error.code()) {
    case Code::kOk: return c10d::ErrorType::SUCCESS;
    case Code::kTimeout: return c10d::ErrorType::TIMEOUT;
    case Code::kPeerLost: return c10d::ErrorType::REMOTE_ERROR;
    default: return c10d::ErrorType::COMM_ERROR;
  }
}

void MycollBackend::abort() {
  enter("abort");
  const std::string reason = c10::str("rank ", rank_, " called abort()");
  const Generation now = generation();
  if (now.device) {
    now.device->abort(reason);
  } else if (now.communicator) {
    now.communicator->abort(reason);
  }
}

void MycollBackend::shutdown() {
  // A forked child abandons its parent's group, and may make its own.
  if (isForked()) return;
  enter("shutdown");
  const Deadline deadline = Deadline::after(kShutdownTimeout);
  Status drained;
  // Held operations are pending, too; they begin when the callbacks before them have run.
  if (CallbackOrder::here(callbacks_)->pass(deadline, isInterruptPending) ==
      CallbackOrder::Outcome::kInterrupted) {
    drained = interrupted();
  }
  const Generation now = generation();
  if (now.device && drained.ok()) drained = now.device->drain(deadline);
  const bool isPatient = drained.ok() && !deadline.expired();
  const Milliseconds patience = isPatient ? kShutdownTimeout : kDropTimeout;
  if (now.device) now.device->close(Deadline::after(patience));
  bool isInterrupted = false;
  if (now.communicator) {
    if (outstaysStore_) now.communicator->leaveAfter(0);
    now.communicator->close(Deadline::after(patience), reasonToLeave(),
                            drained.ok() ? &isInterrupted : nullptr);
  }
  if (isInterrupted) drained = interrupted();
  if (outstaysStore_) std::this_thread::sleep_for(kStoreGrace);
  throwIfFailed(drained);
}

void MycollBackend::registerOnCompletionHook(
    std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  const CallSite site = enter("register_on_completion_hook");
  const MutexLock lock(hook_->mutex);
  if (hasHook_.load(std::memory_order_relaxed)) refuse(site, "a hook is registered already");
  // Never copied, as that may take the GIL: all works share this one.
  hook_->call = std::move(hook);
  onCompletionHook_ = [state = hook_](std::shared_ptr<c10d::WorkInfo> info) {
    state->run(std::move(info));
  };
  hasHook_.store(true, std::memory_order_release);
}

void MycollBackend::enableCollectivesTiming() {
  enter("enable_collectives_timing");
  isTimed_.store(true, std::memory_order_relaxed);
}

void MycollBackend::waitForPendingWorks() {
  enter("wait_for_pending_works");
  MutexLock lock(hook_->mutex);
  while (hook_->pending != 0) {
    hook_->changed.wait_for(lock.native(), kTick);
    if (hook_->pending == 0) return;
    lock.unlock();
    if (isInterruptPending()) throwStatus(interrupted());
    lock.lock();
  }
}

CallSite MycollBackend::enter(const char* function) const {
  stayIfExiting();
  owner_.check(groupName_, function);
  return CallSite{function, rank_, size_, &groupName_};
}

std::function<void(std::chrono::nanoseconds)> MycollBackend::hookFor(c10d::OpType type) {
  if (!hasHook_.load(std::memory_order_acquire)) return {};
  return [state = hook_, type, sequence = getSequenceNumberForGroup(),
          expected = CompletionHook::expect(hook_)](std::chrono::nanoseconds took) {
    const auto ended = MycollWork::Clock::now();
    state->run(std::make_shared<c10d::WorkInfo>(type, sequence, ended - took, ended,
                                                std::chrono::duration<float, std::nano>(took)));
  };
}

MycollWork::Hook MycollBackend::workHook() {
  if (!hasHook_.load(std::memory_order_acquire)) return {};
  return [state = hook_, expected = CompletionHook::expect(hook_)](
             std::shared_ptr<c10d::WorkInfo> info) { state->run(std::move(info)); };
}

}  // namespace mycoll
