// MycollEndpoint: an Endpoint of the engine for the program. Its functions throw. As those of
// MycollBackend, they refuse a forked child, and do not return while the process exits.
//
// [any thread], without the GIL.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "backend/mycoll_backend.h"
#include "backend/owning_process.h"
#include "engine/endpoint.h"

namespace mycoll {

class MycollEndpoint {
 public:
  using Milliseconds = std::chrono::milliseconds;

  // Several of one name in a process are processes of their own to others. storeHost: as in
  // GroupOptions.
  MycollEndpoint(const std::string& name, Milliseconds timeout, const std::string& storeHost);
  ~MycollEndpoint();

  const std::string& handle() const { return endpoint_->handle(); }
  std::string mismatch(const std::string& handle) const { return endpoint_->mismatch(handle); }
  // See Endpoint::form(). options: of this group.
  c10::intrusive_ptr<MycollBackend> form(int64_t number, const std::vector<std::string>& handles,
                                         Milliseconds timeout,
                                         c10::intrusive_ptr<MycollOptions> options,
                                         DeviceFactory makeDevice);
  void send(const std::string& handle, const std::string& text);
  std::vector<std::string> receive(Milliseconds atMost);
  void watch(const std::vector<std::string>& handles);
  std::string lossOf(const std::string& handle);

 private:
  Endpoint& enter(const char* function) const;

  const std::string name_;
  const OwningProcess owner_;
  std::unique_ptr<Endpoint> endpoint_;
};

}  // namespace mycoll
