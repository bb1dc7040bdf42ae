// Group: what the parts of a communicator have in common. Each part holds a reference to it.
//
// Thread contract: that of each member; the other values never change.
// Lifetime: owned by the communicator, and outlives the parts that are not in it.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/plan/shape.h"
#include "engine/agreement.h"
#include "engine/control_tree.h"
#include "engine/membership.h"
#include "observe/recorder.h"
#include "transport/event.h"
#include "transport/mailbox.h"

namespace mycoll {

class Engine;

struct GroupOptions {
  std::string name;  // the same on all ranks; appears in messages
  int rank = 0;
  int ranks = 1;
  std::chrono::milliseconds timeout{1800'000};
  // The host of the rendezvous store, if known, as a name or an address: peers are reached on the
  // interface that routes there.
  std::string storeHost;
  // Its operations run elsewhere (see External), except a few whose callers wait for them
  // immediately: these use no shared memory, and the engine's thread never works on them.
  bool isExternal = false;
  // A group of more ranks sends a failure along the control tree, not directly to each rank.
  int mostNotifiedDirectly = 64;
  // The job's rank of each member; empty: the ranks themselves. For records and messages only.
  std::vector<int64_t> globalRanks;
  // Its ranks are ranks of the job that this process was started as a part of. False: they were
  // numbered for this group only, so the loss of one does not concern other groups.
  bool isOfJob = true;
  // Held while the group lives; may be empty. See Engine::process().
  std::shared_ptr<const void> seat;
  // Called about every 50 ms while a user's thread waits; true ends the wait with kInterrupted and
  // leaves the operation running. May be empty. Called without locks.
  std::function<bool()> interrupted;
  // Returns where the program called the operation that this thread waits for, as a number of
  // BlackBox::intern(); 0: unknown. Called on a user's thread that has waited a while, or whose
  // operation has failed. May be empty. Called without locks.
  std::function<uint32_t()> callSite;
  // Whether threads that have not called this group so far may still call it: threads of the
  // program, callbacks of futures. If so, the group is not stuck when its known callers wait
  // elsewhere. Empty: no. Called without locks.
  std::function<bool()> mayBeCalled;
};

// The job's rank of each member.
std::vector<int64_t> jobRanks(const GroupOptions& options);

struct Group {
  // engine: null in tests of the parts that are members of this.
  Group(GroupOptions options, std::shared_ptr<Engine> engine, Mailbox& mailbox);
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // The text begins with the group's name.
  Status error(Code code, const std::string& text, const Cause& cause = {}) const {
    return Status(code, "mycoll group '" + options.name + "': " + text, cause);
  }

  // Applies an event of the mailbox. Returns false for a control frame of another part.
  bool handle(const Event& event) REQUIRES(ioRole);

  // The ranks on this one's host, itself included: they may share memory.
  const std::vector<int>& hostRanks() const { return shape.membersOf(shape.hostOf(options.rank)); }

  const GroupOptions options;
  const std::shared_ptr<Engine> engine;
  Mailbox& mailbox;
  GroupRecord record;
  const Shape shape;
  const ControlTree tree;
  Membership membership;
  Agreement agreement;
};

}  // namespace mycoll
