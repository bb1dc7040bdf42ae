#include "backend/generations.h"

#include <utility>

#include "backend/callback_pool.h"
#include "backend/errors.h"
#include "base/log.h"

namespace mycoll {
namespace {

// The longest wait for what is still running in the former generation.
constexpr std::chrono::milliseconds kEndTimeout(100);

// Posts the hooks: they may take the GIL and any time, and may unregister themselves.
void post(const HookTable<>& abortHooks) {
  for (const auto& hook : abortHooks.all()) {
    CallbackPool::get().post([hook] {
      try {
        (*hook)();
      } catch (...) {
        MYCOLL_LOG_ERROR("an abort hook has failed: %s", describeException().c_str());
      }
    });
  }
}

}  // namespace

Status Generation::error() const {
  return device ? device->error() : communicator ? communicator->error() : why;
}

uint64_t Generation::sequence() const {
  return (communicator ? communicator->sequence() : 0) + (device ? device->sequence() : 0);
}

void Generation::end(Deadline deadline, const std::string& reason) const {
  const bool hasFailed = !error().ok();
  if (device) device->close(deadline);
  if (communicator) communicator->close(deadline, reason);
  if (!hasFailed) return;
  if (device) device->detach();
  if (communicator) communicator->mailbox().detach();
}

const std::shared_ptr<Communicator>& UserCall::communicator() const {
  if (!generation.communicator) {
    throwIfFailed(generation.why);
    throwStatus(Status(Code::kInvalidArgument,
                       "mycoll group '" + *group +
                           "': it was made with enable_reconfigure and has no ranks yet: call "
                           "reconfigure() first"));
  }
  return generation.communicator;
}

Generations::Generations(std::string name, c10::intrusive_ptr<MycollOptions> options,
                         DeviceFactory makeDevice, Generation first,
                         std::unique_ptr<Endpoint> endpoint)
    : name_(std::move(name)),
      options_(std::move(options)),
      makeDevice_(std::move(makeDevice)),
      endpoint_(std::move(endpoint)),
      abortHooks_(std::make_shared<HookTable<>>()),
      timeout_(options_->timeout.count()) {
  replace(first.communicator ? make(std::move(first.communicator)) : std::move(first));
}

// The locks may be held by threads that the child does not have.
void Generations::abandon() NO_THREAD_SAFETY_ANALYSIS {
  (void)endpoint_.release();
  new Generation(std::move(current_));
}

Generation Generations::make(std::shared_ptr<Communicator> communicator) const {
  communicator->setTimeout(timeout());
  communicator->setWarnAfter(options_->warnAfter);
  auto device = makeDevice_ ? makeDevice_(name_, communicator, options_) : nullptr;
  const int rank = communicator->rank(), ranks = communicator->ranks();
  return {std::move(communicator), std::move(device), Status(), rank, ranks};
}

Generation Generations::current() const {
  const MutexLock lock(mutex_);
  return current_;
}

void Generations::replace(Generation next) {
  const auto whenFailed = [hooks = abortHooks_] { post(*hooks); };
  if (next.communicator) next.communicator->whenFailed(whenFailed);
  if (next.device) next.device->whenFailed(whenFailed);
  const MutexLock lock(mutex_);
  std::swap(current_, next);
}

// Small calls need no lock and no reference if the generation never changes.
Generation Generations::pinned() const NO_THREAD_SAFETY_ANALYSIS {
  if (endpoint_) return current();
  const auto pin = [](const auto& part) {
    return std::decay_t<decltype(part)>(std::shared_ptr<void>(), part.get());
  };
  return {pin(current_.communicator), pin(current_.device), Status(), current_.rank,
          current_.ranks};
}

std::shared_ptr<Communicator> Generations::kept(
    const std::shared_ptr<Communicator>& communicator) const NO_THREAD_SAFETY_ANALYSIS {
  return endpoint_ ? communicator : current_.communicator;
}

c10::intrusive_ptr<MycollOptions> Generations::options() const {
  auto now = c10::make_intrusive<MycollOptions>(*options_);
  now->timeout = timeout();
  return now;
}

void Generations::setTimeout(Milliseconds timeout) {
  timeout_ = timeout.count();
  const Generation now = current();
  if (now.communicator) now.communicator->setTimeout(timeout);
  if (now.device) now.device->setTimeout(timeout);
}

void Generations::reconfigure(
    int64_t number, const std::vector<std::string>& handles, Milliseconds timeout,
    const std::function<void(const std::shared_ptr<Communicator>&)>& whenFormed) {
  const MutexLock lock(reconfigureMutex_);
  Generation former = current();
  const std::string reason = "reconfigured (" + std::to_string(number) + ") without this rank";
  if (former.communicator && former.communicator->hasFailed()) {
    // It is of no use, and keeps its ranks' broken connections from being made again.
    replace({nullptr, nullptr, former.communicator->error(), former.rank, former.ranks});
    former.end(Deadline::after(kEndTimeout), reason);
    former = {};
  }
  std::shared_ptr<Communicator> formed;
  throwIfNotFormed(endpoint_->form(number, handles, timeout, &formed));
  Generation next = make(formed);
  whenFormed(formed);
  replace(std::move(next));
  setTimeout(this->timeout());  // it may have been set meanwhile
  former.end(Deadline::after(kEndTimeout), reason);
}

}  // namespace mycoll
