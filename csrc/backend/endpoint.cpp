#include "backend/endpoint.h"

#include <atomic>
#include <utility>

#include "backend/errors.h"

namespace mycoll {

MycollEndpoint::MycollEndpoint(const std::string& name, Milliseconds timeout,
                               const std::string& storeHost)
    : name_(name) {
  static std::atomic<int> made{0};
  checkTimeout(CallerInfo{"mycoll", 0, 1, &name}, timeout);
  GroupOptions options = MycollBackend::groupOptions(name, made.fetch_add(1), 1, timeout);
  options.storeHost = storeHost;
  throwIfNotFormed(Endpoint::make(std::move(options), /*engine=*/nullptr, &endpoint_));
}

// A forked child closes and frees nothing that is its parent's.
MycollEndpoint::~MycollEndpoint() {
  if (!owner_.isHere()) (void)endpoint_.release();
}

Endpoint& MycollEndpoint::enter(const char* function) const {
  stayIfExiting();
  owner_.check(name_, function);
  return *endpoint_;
}

c10::intrusive_ptr<MycollBackend> MycollEndpoint::form(int64_t number,
                                                       const std::vector<std::string>& handles,
                                                       Milliseconds timeout,
                                                       c10::intrusive_ptr<MycollOptions> options,
                                                       DeviceFactory makeDevice) {
  std::shared_ptr<Communicator> communicator;
  throwIfNotFormed(enter("form").form(number, handles, timeout, &communicator));
  MycollBackend::Identity identity{communicator->options().name, {}, /*isOfJob=*/false, {}};
  return c10::make_intrusive<MycollBackend>(communicator, std::move(identity), std::move(options),
                                            std::move(makeDevice));
}

void MycollEndpoint::send(const std::string& handle, const std::string& text) {
  throwIfFailed(enter("send").send(handle, text));
}

std::vector<std::string> MycollEndpoint::receive(Milliseconds atMost) {
  std::vector<std::string> texts = enter("receive").receive(atMost);
  stayIfExiting();  // the exit has begun meanwhile
  return texts;
}

void MycollEndpoint::watch(const std::vector<std::string>& handles) {
  throwIfFailed(enter("watch").watch(handles));
}

std::string MycollEndpoint::lossOf(const std::string& handle) {
  return enter("loss_of").lossOf(handle);
}

}  // namespace mycoll
