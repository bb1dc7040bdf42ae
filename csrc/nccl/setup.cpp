// How a communicator comes to be: connect, split, shrink; and the memory that it knows.
#include <thread>

#include "base/log.h"
#include "nccl/communicator.h"

namespace mycoll::nccl {
namespace {

// For those who have no communicator yet.
Status describeWithout(const Library& library, Result result, const char* function) {
  if (result == Result::kSuccess) return {};
  const char* const error = library.functions().getErrorString(result);
  const char* const last = library.functions().getLastError(nullptr);
  std::string text = std::string(function) + " failed: " + (error ? error : "unknown error");
  if (last != nullptr && *last != '\0') text += std::string("; last error: ") + last;
  return Status(Code::kInternal, text + "; " + library.describe());
}

Status lacks(const Library& library, const char* function) {
  return Status(Code::kUnsupported, library.describe() + " has no " + function);
}

template <typename T>
void fill(std::optional<T>& mine, const std::optional<T>& other) {
  if (!mine) mine = other;
}

}  // namespace

void CommunicatorOptions::fillFrom(const NcclEnv& env) {
  fill(isBlocking, env.isBlocking);
  fill(splitShare, env.splitShare);
  fill(minCtas, env.minCtas);
  fill(maxCtas, env.maxCtas);
  fill(cgaClusterSize, env.cgaClusterSize);
  fill(nvlsCtas, env.nvlsCtas);
  fill(ctaPolicy, env.ctaPolicy);
  fill(trafficClass, env.trafficClass);
  if (netName.empty()) netName = env.netName;
}

// Its strings are this communicator's.
Config Communicator::config() const {
  Config config;
  config.blocking = options_.isBlocking.value_or(false) ? 1 : 0;
  config.minCtas = options_.minCtas.value_or(kUndefined);
  config.maxCtas = options_.maxCtas.value_or(kUndefined);
  config.cgaClusterSize = options_.cgaClusterSize.value_or(kUndefined);
  config.nvlsCtas = options_.nvlsCtas.value_or(kUndefined);
  config.ctaPolicy = options_.ctaPolicy.value_or(kUndefined);
  config.trafficClass = options_.trafficClass.value_or(kUndefined);
  auto flag = [](std::optional<bool> value) { return value ? (*value ? 1 : 0) : kUndefined; };
  config.splitShare = flag(options_.splitShare);
  config.shrinkShare = flag(options_.shrinkShare);
  config.collnetEnable = flag(options_.collnet);
  if (!options_.netName.empty()) config.netName = options_.netName.c_str();
  if (!name_.empty()) config.commName = name_.c_str();
  return config;
}

Status Communicator::createId(const Library& library, UniqueId* id) {
  return describeWithout(library, library.functions().getUniqueId(id), "ncclGetUniqueId");
}

Status Communicator::connect(const UniqueId& id, Deadline deadline, const Check& check) {
  if (!moveTo(State::kConnecting)) return unusable();
  constexpr const char* kFunction = "ncclCommInitRankConfig";
  const Slot slot = std::make_shared<Comm*>(nullptr);
  auto call = [this, slot, id] {
    Config config = this->config();
    return library_.functions().commInitRankConfig(slot.get(), ranks_, id, rank_, &config);
  };
  auto whenLate = [this, slot] {
    if (*slot != nullptr) (void)library_.functions().commAbort(*slot);
  };
  const Status called = aside(kFunction, call, deadline, check, whenLate);
  if (!called.ok()) {
    const Status why = fail(called);
    (void)abort(Deadline::after(std::chrono::seconds(1)), why).ok();
    return why;
  }
  return becomeReady(slot, kFunction, deadline, check);
}

// NCCL has made a handle, and may still be at work on it.
Status Communicator::becomeReady(const Slot& slot, const char* function, Deadline deadline,
                                 const Check& check) {
  Comm* const comm = *slot;
  bool isOurs = false;
  {
    std::lock_guard<std::mutex> lock(stateMutex_);
    isOurs = state() == State::kConnecting;
    if (isOurs) comm_.store(comm, std::memory_order_release);
  }
  if (!isOurs) {  // aborted meanwhile, by somebody who did not have the handle
    auto free = [this, comm] { return library_.functions().commAbort(comm); };
    (void)aside("ncclCommAbort", free, Deadline::after(std::chrono::seconds(1)), nullptr).ok();
    return unusable();
  }
  Status settled = comm == nullptr
                       ? Status(Code::kInternal, std::string(function) + " gave no communicator")
                       : settle(function, comm, deadline, check);
  if (settled.ok() && !moveTo(State::kReady)) settled = unusable();
  if (!settled.ok()) {
    settled = fail(settled);
    (void)abort(Deadline::after(std::chrono::seconds(1)), settled).ok();
    return settled;
  }
  MYCOLL_LOG_INFO("NCCL communicator '%s': rank %d of %d is ready, %s", name_.c_str(), rank_,
                  ranks_, library_.describe().c_str());
  return {};
}

Status Communicator::makeChild(const char* function,
                               const std::function<Result(Comm*, Comm**, Config*)>& call,
                               Communicator* child, bool mayHaveFailed, Deadline deadline,
                               const Check& check) {
  const auto since = Deadline::Clock::now();
  std::unique_lock<std::mutex> lock(issue_, std::try_to_lock);
  while (!lock.owns_lock()) {
    if (deadline.expired()) return late(function, since);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    (void)lock.try_lock();
  }
  Comm* const comm = handle();
  const bool isUsable =
      state() == State::kReady || (state() == State::kFailed && (mayHaveFailed || isRevoked_));
  if (comm == nullptr || !isUsable) return unusable();
  if (child != nullptr && !child->moveTo(State::kConnecting)) return child->unusable();

  const Slot slot = std::make_shared<Comm*>(nullptr);
  auto keepsChild = child != nullptr ? child->shared_from_this() : nullptr;
  const Config config = child != nullptr ? child->config() : this->config();
  auto made = [call, comm, slot, config, keepsChild] {
    Config copy = config;
    return call(comm, slot.get(), &copy);
  };
  Status status = aside(function, made, deadline, check);
  if (status.ok()) status = settle(function, comm, deadline, check);
  if (!status.ok()) {
    {
      std::lock_guard<std::mutex> guard(stateMutex_);
      unfinished_.push_back(slot);
    }
    status = fail(status);
    lock.unlock();
    if (child != nullptr) {
      (void)child->abort(Deadline::after(std::chrono::seconds(1)), status).ok();
    }
    return status;
  }
  lock.unlock();
  return child != nullptr ? child->becomeReady(slot, function, deadline, check) : Status();
}

Status Communicator::split(int color, int key, Communicator* child, Deadline deadline,
                           const Check& check) {
  const auto commSplit = library_.functions().commSplit;
  if (commSplit == nullptr) return lacks(library_, "ncclCommSplit");
  auto call = [commSplit, color, key](Comm* comm, Comm** made, Config* config) {
    return commSplit(comm, color, key, made, config);
  };
  return makeChild("ncclCommSplit", call, child, false, deadline, check);
}

Status Communicator::shrink(const std::vector<int>& excluded, bool abortParent, Communicator* child,
                            Deadline deadline, const Check& check) {
  const auto commShrink = library_.functions().commShrink;
  if (commShrink == nullptr) return lacks(library_, "ncclCommShrink");
  const int flags = abortParent ? kShrinkAbort : kShrinkDefault;
  auto call = [commShrink, excluded, flags](Comm* comm, Comm** made, Config* config) {
    std::vector<int> list = excluded;
    return commShrink(comm, list.data(), static_cast<int>(list.size()), made, config, flags);
  };
  return makeChild("ncclCommShrink", call, child, abortParent, deadline, check);
}

// --- memory

// An error here is the call's own; the communicator lives on.
Status Communicator::managed(const char* function, bool isThere,
                             const std::function<Result(Comm*)>& call) {
  if (!isThere) return lacks(library_, function);
  Issue issue(*this);
  if (!issue.status().ok()) return issue.status();
  Comm* const comm = issue.comm();
  const Deadline deadline = Deadline::after(options_.issueTimeout);
  MYCOLL_RETURN_IF_ERROR(aside(function, [call, comm] { return call(comm); }, deadline, nullptr));
  return settle(function, comm, deadline, nullptr);
}

Status Communicator::registerBuffer(void* memory, size_t bytes, void** handle) {
  const auto made = std::make_shared<void*>(nullptr);
  const auto function = library_.functions().commRegister;
  MYCOLL_RETURN_IF_ERROR(managed("ncclCommRegister", function != nullptr, [=](Comm* comm) {
    return function(comm, memory, bytes, made.get());
  }));
  *handle = *made;
  return {};
}

Status Communicator::deregisterBuffer(void* handle) {
  const auto function = library_.functions().commDeregister;
  return managed("ncclCommDeregister", function != nullptr,
                 [=](Comm* comm) { return function(comm, handle); });
}

Status Communicator::registerWindow(void* memory, size_t bytes, int flags, Window** window) {
  const auto made = std::make_shared<Window*>(nullptr);
  const auto function = library_.functions().commWindowRegister;
  MYCOLL_RETURN_IF_ERROR(managed("ncclCommWindowRegister", function != nullptr, [=](Comm* comm) {
    return function(comm, memory, bytes, made.get(), flags);
  }));
  *window = *made;
  return {};
}

Status Communicator::deregisterWindow(Window* window) {
  const auto function = library_.functions().commWindowDeregister;
  return managed("ncclCommWindowDeregister", function != nullptr,
                 [=](Comm* comm) { return function(comm, window); });
}

Status Communicator::allocate(const Library& library, size_t bytes, void** memory) {
  *memory = nullptr;
  const auto function = library.functions().memAlloc;
  if (function == nullptr) return lacks(library, "ncclMemAlloc");
  return describeWithout(library, function(memory, bytes), "ncclMemAlloc");
}

Status Communicator::free(const Library& library, void* memory) {
  const auto function = library.functions().memFree;
  if (function == nullptr) return lacks(library, "ncclMemFree");
  return describeWithout(library, function(memory), "ncclMemFree");
}

}  // namespace mycoll::nccl
