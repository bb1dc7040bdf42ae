// Groups whose ranks change.
#include <algorithm>
#include <atomic>
#include <utility>

#include "backend/errors.h"
#include "backend/mycoll_backend.h"

namespace mycoll {

std::unique_ptr<Endpoint> MycollBackend::makeEndpoint(const std::string& name, Milliseconds timeout,
                                                      const std::string& storeHost) {
  static std::atomic<int> made{0};
  checkTimeout(CallSite{"mycoll", 0, 1, &name}, timeout);
  std::unique_ptr<Endpoint> endpoint;
  GroupOptions options = groupOptions(name, made.fetch_add(1), 1, timeout);
  options.storeHost = storeHost;
  throwIfFailed(Endpoint::make(std::move(options), &endpoint));
  return endpoint;
}

c10::intrusive_ptr<MycollBackend> MycollBackend::form(Endpoint& endpoint, int64_t number,
                                                      const std::vector<std::string>& handles,
                                                      Milliseconds timeout,
                                                      c10::intrusive_ptr<MycollOptions> options,
                                                      DeviceFactory makeDevice) {
  std::shared_ptr<Communicator> communicator;
  throwIfFailed(endpoint.form(number, handles, timeout, &communicator));
  communicator->setTimeout(options->timeout);
  const int rank = communicator->rank(), ranks = communicator->ranks();
  Identity identity{communicator->options().name, {}, /*isOfJob=*/false, {}};
  return c10::make_intrusive<MycollBackend>(rank, ranks, std::move(communicator),
                                            std::move(identity), std::move(options),
                                            std::move(makeDevice));
}

#if MYCOLL_TORCH_HAS_RECONFIGURE

namespace {

// The longest wait for what is still running in the generation before.
constexpr std::chrono::milliseconds kEndTimeout(100);

}  // namespace

c10d::ReconfigureHandle MycollBackend::get_reconfigure_handle() const {
  const CallSite site = enter("get_reconfigure_handle");
  if (!endpoint_) refuse(site, "the group was not made with enable_reconfigure=True");
  return endpoint_->handle();
}

MycollBackend::WorkPtr MycollBackend::reconfigure(const c10d::ReconfigureOptions& opts) {
  const CallSite site = enter("reconfigure");
  if (!endpoint_) refuse(site, "the group was not made with enable_reconfigure=True");
  const auto* const inOrder = std::get_if<std::vector<std::string>>(&opts.handles);
  std::vector<std::string> handles;
  if (inOrder) {
    handles = *inOrder;
  } else {
    const auto& all = std::get<std::unordered_set<std::string>>(opts.handles);
    handles.assign(all.begin(), all.end());
    std::sort(handles.begin(), handles.end());  // the same on all ranks
  }
  const Milliseconds timeout = opts.timeout.value_or(Milliseconds(timeout_.load()));
  checkTimeout(site, timeout);

  const MutexLock lock(reconfigureMutex_);
  Generation before = generation();
  const std::string reason = c10::str("reconfigured (", opts.uuid, ") without this rank");
  if (before.communicator && before.communicator->hasFailed()) {
    // It is of no use, and keeps its ranks' broken connections from being made again.
    replace({nullptr, nullptr, before.communicator->error()});
    end(before, Deadline::after(kEndTimeout), reason);
    before.communicator->mailbox().detach();
    before = {};
  }
  Generation next;
  throwIfFailed(endpoint_->form(opts.uuid, handles, timeout, &next.communicator));
  next.communicator->setTimeout(Milliseconds(timeout_.load()));
  if (makeDevice_) next.device = makeDevice_(groupName_, next.communicator, options_);
  rank_ = next.communicator->rank();
  size_ = next.communicator->ranks();
  {
    const MutexLock children(childMutex_);
    lastSplit_.reset();
    lastMerged_.reset();
  }
  isDescribed_ = false;
  auto work = c10::make_intrusive<MycollWork>(next.communicator, c10d::OpType::UNKNOWN,
                                              MycollWork::Ops(), Tensors(), MycollWork::Extras());
  replace(std::move(next));
  end(before, Deadline::after(kEndTimeout), reason);
  work->start();
  return work;
}

#endif

}  // namespace mycoll
