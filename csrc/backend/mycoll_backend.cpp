#include "backend/mycoll_backend.h"

#include <c10/util/Float8_e4m3fn.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <thread>
#include <unordered_set>
#include <utility>

#include "backend/callback_order.h"
#include "backend/callback_pool.h"
#include "backend/errors.h"
#include "backend/torch_store.h"
#include "base/log.h"
#include "base/os.h"
#include "kernels/reduce.h"

namespace mycoll {
namespace {

// The longest wait for the other ranks if operations are still pending after the shutdown timeout,
// or if the group is dropped without a shutdown.
constexpr std::chrono::milliseconds kDropTimeout(2000);
// The longest wait for the last messages of a group that another one replaces.
constexpr std::chrono::milliseconds kDiscardTimeout(100);
#if MYCOLL_TORCH_HAS_RECONFIGURE
constexpr char kNotElastic[] = "the group was not made with enable_reconfigure=True";
#endif
// The time that rank 0 needs to close its store after it has left. See outstaysStore_.
constexpr std::chrono::milliseconds kStoreGrace(30);

// All existing groups of this process, for closeAll().
struct Registry {
  Mutex mutex;
  std::unordered_set<MycollBackend*> groups GUARDED_BY(mutex);
};
Registry& registry() { return perProcess<Registry>(); }

std::string& whyNone() {
  static std::string* const kWhy =
      new std::string("this process had no accelerator when the group was made");
  return *kWhy;
}

}  // namespace

void setWhyNoDevices(std::string why) { whyNone() = std::move(why); }
const std::string& whyNoDevices() { return whyNone(); }

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
  const CallerInfo caller{"mycoll", rank, size, &identity.name};
  if (!store) refuse(caller, "a group needs a store for its ranks to meet");
  if (size < 1) refuse(caller, "the group's size must be at least 1, but it is ", size);
  checkRank(caller, "rank", rank);
  checkTimeout(caller, options->timeout);
  if (!globalRanks.empty() && globalRanks.size() != static_cast<size_t>(size)) {
    refuse(caller, "global_ranks must name the ", size, " members, but it names ",
           globalRanks.size());
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
    throwIfNotFormed(Endpoint::make(std::move(group), /*engine=*/nullptr, &endpoint));
    identity.globalRanks.clear();
    return c10::make_intrusive<MycollBackend>(rank, size, nullptr, std::move(identity),
                                              std::move(options), std::move(makeDevice),
                                              std::move(endpoint));
  }
#endif
  throwIfNotFormed(Communicator::create(std::move(group), std::make_shared<TorchStore>(store),
                                        /*engine=*/nullptr, &communicator));
  const bool isOfJob = identity.isOfJob;
  auto made = c10::make_intrusive<MycollBackend>(communicator, std::move(identity),
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
      shown_(std::move(identity.shown)),
      generations_(groupName_, std::move(options), std::move(makeDevice),
                   {std::move(communicator), nullptr, Status(), rank, size}, std::move(endpoint)),
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
    generations_.abandon();  // a child must not use its parent's connections
    return;
  }
  {
    MutexLock lock(registry().mutex);
    registry().groups.erase(this);
  }
  generations_.current().end(
      Deadline::after(std::min(generations_.shutdownTimeout(), kDropTimeout)), "");
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
      Generation now = group->generations_.current();
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
  generations_.setTimeout(timeout);
  if (!shown_) return;
  const MutexLock lock(shownMutex_);
  shown_->timeout = timeout;
}

#if MYCOLL_TORCH_HAS_EPHEMERAL_TIMEOUT
void MycollBackend::addEphemeralTimeout(const Milliseconds& timeout) {
  checkTimeout(enter("add_ephemeral_timeout"), timeout);
  extensions_->add(timeout);
}
#endif

void MycollBackend::eagerConnectSingleDevice(at::Device device) {
  const UserCall caller = enter("init_process_group");
  if (device.is_cpu()) return;
  if (generations_.endpoint()) return;  // the ranks are not known yet
  const auto& support = caller.generation.device;
  if (!support) refuse(caller, "device_id is ", device, ", but ", whyNoDevices());
  support->connect(device);
}

int64_t MycollBackend::ncclComm() const {
  const UserCall caller = enter("_comm_ptr");
  const auto& support = caller.generation.device;
  void* const comm = support ? support->ncclComm() : nullptr;
  if (comm == nullptr) {
    refuse(caller,
           "the group has no communicator of NCCL's on the current device: call a collective there "
           "first; through host memory (MYCOLL_CUDA) there is none");
  }
  return reinterpret_cast<int64_t>(comm);
}

uint64_t MycollBackend::getSequenceNumberForGroup() {
  owner_.check(groupName_, "get_sequence_number");
  return generations_.current().sequence();
}

c10d::ErrorType MycollBackend::getError() {
  owner_.check(groupName_, "get_error");
  switch (generations_.current().error().code()) {
    case Code::kOk: return c10d::ErrorType::SUCCESS;
    case Code::kTimeout: return c10d::ErrorType::TIMEOUT;
    case Code::kPeerLost: return c10d::ErrorType::REMOTE_ERROR;
    default: return c10d::ErrorType::COMM_ERROR;
  }
}

void MycollBackend::abort() {
  enter("abort");
  const Generation now = generations_.current();
  const std::string reason = c10::str("rank ", now.rank, " called abort()");
  if (now.device) {
    now.device->abort(reason);
  } else if (now.communicator) {
    now.communicator->abort(reason);
  }
}

void MycollBackend::discard() {
  abort();
  generations_.current().end(Deadline::after(kDiscardTimeout), "");
}

void MycollBackend::shutdown() {
  // A forked child abandons its parent's group, and may make its own.
  if (isForked()) return;
  enter("shutdown");
  const Milliseconds longest = generations_.shutdownTimeout();
  const Deadline deadline = Deadline::after(longest);
  Status drained;
  // Held operations are pending, too; they begin when the callbacks before them have run.
  if (CallbackOrder::here(callbacks_)->pass(deadline, isInterruptPending) ==
      CallbackOrder::Outcome::kInterrupted) {
    drained = interrupted();
  }
  const Generation now = generations_.current();
  if (now.device && drained.ok()) drained = now.device->drain(deadline);
  const bool isPatient = drained.ok() && !deadline.expired();
  const Milliseconds patience = isPatient ? longest : std::min(longest, kDropTimeout);
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
  const UserCall caller = enter("register_on_completion_hook");
  if (!hook_->set(std::move(hook))) refuse(caller, "a hook is registered already");
  onCompletionHook_ = [state = hook_](std::shared_ptr<c10d::WorkInfo> info) {
    state->run(std::move(info));
  };
}

void MycollBackend::enableCollectivesTiming() {
  enter("enable_collectives_timing");
  isTimed_.store(true, std::memory_order_relaxed);
}

void MycollBackend::waitForPendingWorks() {
  enter("wait_for_pending_works");
  hook_->awaitAll();
}

#if MYCOLL_TORCH_HAS_RECONFIGURE

c10d::ReconfigureHandle MycollBackend::get_reconfigure_handle() const {
  const UserCall caller = enter("get_reconfigure_handle");
  if (!generations_.endpoint()) refuse(caller, kNotElastic);
  return generations_.endpoint()->handle();
}

MycollBackend::WorkPtr MycollBackend::reconfigure(const c10d::ReconfigureOptions& opts) {
  const UserCall caller = enter("reconfigure");
  if (!generations_.endpoint()) refuse(caller, kNotElastic);
  std::vector<std::string> handles;
  if (const auto* const inOrder = std::get_if<std::vector<std::string>>(&opts.handles)) {
    handles = *inOrder;
  } else {
    const auto& all = std::get<std::unordered_set<std::string>>(opts.handles);
    handles.assign(all.begin(), all.end());
    std::sort(handles.begin(), handles.end());  // the same on all ranks
  }
  const Milliseconds timeout = opts.timeout.value_or(generations_.timeout());
  checkTimeout(caller, timeout);
  {
    // If they have failed, too, they keep broken connections from being made again.
    c10::intrusive_ptr<MycollBackend> lastSplit, lastMerged;
    const MutexLock lock(childMutex_);
    std::swap(lastSplit, children_.lastSplit);
    std::swap(lastMerged, children_.lastMerged);
  }
  c10::intrusive_ptr<MycollWork> work;
  generations_.reconfigure(
      opts.uuid, handles, timeout, [&](const std::shared_ptr<Communicator>& next) {
        rank_ = next->rank();  // for torch; mycoll's own calls use their generation's
        size_ = next->ranks();
        Request nothing(caller, c10d::OpType::UNKNOWN, timeout, /*isAsync=*/true);
        work = c10::make_intrusive<MycollWork>(next, nothing, MycollWork::Ops(), Tensors(),
                                               MycollWork::Traits());
      });
  isDescribed_ = false;
  work->start();
  return work;
}

#endif

UserCall MycollBackend::enter(const char* function) const {
  stayIfExiting();
  owner_.check(groupName_, function);
  const Block* const block = openBlock();
  return block ? callOf(function, block->generation) : callOf(function);
}

}  // namespace mycoll
