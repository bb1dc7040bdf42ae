// Endpoint: how a process takes part in elastic groups. It publishes a handle of the process.
// Processes that have each other's handles, wherever they come from, form a group:
//
//   each process    Endpoint::make()          passes handle() to the others, and receives theirs
//   each of them    form(number, handles)     the same number and handles; blocks
//
// It needs no store and no earlier group. The connections between processes that were in a group
// together are used again. An endpoint may form any number of groups, one after the other or beside
// each other, each with a number of its own.
//
// Processes that have each other's handles can also send each other texts, for instance to agree on
// the next group.
//
// Security: each rank proves that it has the handle of the rank that it connects to, and with
// MYCOLL_SECRET_FILE that it has that file. The secret of a group is made of all handles.
//
// Thread contract: [any thread]; form() and receive() block.
// Lifetime: keeps the process's engine.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "engine/communicator.h"
#include "engine/invitation.h"
#include "engine/roster.h"

namespace mycoll {

class Engine;

class Endpoint {
 public:
  // options: the name, the store's host and the callbacks of all its groups. rank: distinguishes
  // several endpoints of this name in one process.
  // engine: as Communicator::create().
  static Status make(GroupOptions options, std::shared_ptr<Engine> engine,
                     std::unique_ptr<Endpoint>* result);

  const std::string& handle() const { return text_; }
  // Empty: nothing prevents a group with the process of this handle. Else the settings that differ,
  // with the process's host and pid; or that it is not a handle of this version of mycoll.
  std::string mismatch(const std::string& handle) const;
  // Returns when all ranks have joined, or at the deadline of this timeout, which the group has at
  // first, with an error that names the missing ones; then no rank has the group, and it may be
  // tried again with another number. Refuses a number that was used before, and handles among which
  // this one is not exactly once.
  Status form(int64_t number, const std::vector<std::string>& handles,
              std::chrono::milliseconds timeout, std::shared_ptr<Communicator>* result)
      EXCLUDES(mutex_);

  // Sends the text to a process, which receives it when it calls receive(). Each process's texts
  // arrive in order. A text to a process that has ended is dropped.
  Status send(const std::string& handle, const std::string& text) EXCLUDES(mutex_);
  // The texts that have arrived since the last call. Waits for one, or for a process that ends, at
  // most for this time.
  std::vector<std::string> receive(std::chrono::milliseconds atMost);
  // The processes that lossOf() is to be asked about, beside those of later send().
  Status watch(const std::vector<std::string>& handles) EXCLUDES(mutex_);
  // Not empty: this process has detected that the other one has ended or cannot be reached, and
  // how.
  std::string lossOf(const std::string& handle) EXCLUDES(mutex_);

 private:
  Endpoint(GroupOptions options, std::shared_ptr<Engine> engine);
  Status link(const std::string& handle) REQUIRES(mutex_);
  Status check(int64_t number, const std::vector<std::string>& handles, GroupOptions* options,
               KnownPeers* known) const;

  const GroupOptions options_;
  const std::shared_ptr<Engine> engine_;
  Handle own_;
  std::string text_;
  Mutex mutex_;
  std::set<int64_t> used_ GUARDED_BY(mutex_);
  Wakeup wakeup_;
  std::unique_ptr<Reception> reception_;                                         // of texts
  std::map<std::string, std::unique_ptr<Invitation>> links_ GUARDED_BY(mutex_);  // by handle
};

}  // namespace mycoll
