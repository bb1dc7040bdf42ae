#include "backend/endpoint.h"

#include <utility>

#include "backend/errors.h"

namespace mycoll {

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
  return MycollBackend::form(enter("form"), number, handles, timeout, std::move(options),
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
