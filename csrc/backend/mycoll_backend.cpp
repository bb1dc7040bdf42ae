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

  GroupOptions group;
  // Errors, logs and tools use torch's group_name ("0" is the default group). Its group_desc
  // ("default_pg") is set later, and is only shown beside the name.
  group.name = identity.name;
  group.rank = rank;
  group.ranks = size;
  group.timeout = options->timeout;
  group.storeHost = hostOf(store);
  group.globalRanks = globalRanks;
  group.isOfJob = identity.isOfJob;
  group.interrupted = isInterruptPending;
  group.callSite = callSiteOfWaiter;
  group.mayBeCalled = [] { return CallbackOrder::isAnyPending() || mayHaveOtherThreads(); };
  std::shared_ptr<Communicator> communicator;
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
                             DeviceFactory makeDevice)
    : c10d::Backend(rank, size),
      communicator_(std::move(communicator)),
      groupName_(std::move(identity.name)),
      globalRanks_(std::move(identity.globalRanks)),
      options_(std::move(options)),
      shown_(std::move(identity.shown)),
      makeDevice_(std::move(makeDevice)),
      device_(makeDevice_ ? makeDevice_(groupName_, communicator_, options_) : nullptr),
      hook_(std::make_shared<CompletionHook>(groupName_)) {
  init();
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
    new std::shared_ptr<Communicator>(communicator_);
    new std::shared_ptr<DeviceSupport>(device_);
    return;
  }
  {
    MutexLock lock(registry().mutex);
    registry().groups.erase(this);
  }
  const Deadline deadline = Deadline::after(kDropTimeout);
  if (device_) device_->close(deadline);
  communicator_->close(deadline);
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
      open.push_back(group->communicator_);
      orders.push_back(group->callbacks_);
      if (group->device_) devices.emplace(group->groupName_, group->device_);
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
  communicator_->setTimeout(timeout);
  if (shown_) {
    const MutexLock lock(shownMutex_);
    shown_->timeout = timeout;
  }
  if (device_) device_->setTimeout(timeout);
}

void MycollBackend::eagerConnectSingleDevice(at::Device device) {
  const CallSite site = enter("init_process_group");
  if (device.is_cpu()) return;
  if (!device_) refuse(site, c10::str("device_id is ", device, ", but ", whyNoDevices()));
  device_->connect(device);
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

int64_t MycollBackend::ncclComm() const {
  const CallSite site = enter("_comm_ptr");
  void* const comm = device_ ? device_->ncclComm() : nullptr;
  if (comm == nullptr) {
    refuse(site,
           "the group has no communicator of NCCL's on the current device: call a collective there "
           "first; through host memory (MYCOLL_CUDA) there is none");
  }
  return reinterpret_cast<int64_t>(comm);
}

uint64_t MycollBackend::getSequenceNumberForGroup() {
  owner_.check(groupName_, "get_sequence_number");
  return communicator_->sequence() + (device_ ? device_->sequence() : 0);
}

std::string MycollBackend::deviceTransport() const { return device_ ? device_->path() : ""; }

c10d::ErrorType MycollBackend::getError() {
  owner_.check(groupName_, "get_error");
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
  if (device_ && drained.ok()) drained = device_->drain(deadline);
  const bool isPatient = drained.ok() && !deadline.expired();
  const Milliseconds patience = isPatient ? kShutdownTimeout : kDropTimeout;
  if (device_) device_->close(Deadline::after(patience));
  if (outstaysStore_) communicator_->leaveAfter(0);
  bool isInterrupted = false;
  communicator_->close(Deadline::after(patience), reasonToLeave(),
                       drained.ok() ? &isInterrupted : nullptr);
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
