// Runner: executes a group's collectives, one after the other: in the arena if all ranks share a
// host, else by plans. The first collective decides which of the two.
//
// Thread contract: transport(), encryption(), arena() and the counts [any thread]; all else is
// called by the thread that holds the queue's run lock.
// Lifetime: owned by its communicator; tasks do not outlive it.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "collectives/shm/arena.h"
#include "collectives/shm/peer_memory.h"
#include "engine/op.h"

namespace mycoll {

class PlanCache;
struct Group;

class Runner final : public CollectiveRunner {
 public:
  explicit Runner(Group& group);
  ~Runner();

  // Returns the op's task, not yet resumed. The op must outlive it.
  Task start(CollectiveOp& op);
  // CollectiveRunner: runs a collective as part of a task of this group's queue.
  Task run(Call call) override;

  // The number of collectives begun, the same on all ranks; and the number of the current one.
  uint64_t begun() const { return begun_.load(std::memory_order_relaxed); }
  uint64_t current() const { return begun() > 0 ? begun() - 1 : 0; }
  // "shm", "tcp", "shm+tcp" or "self", once known; for logs and tests.
  std::string transport() const;
  // "TLS 1.3 PSK, AES-128-GCM"; empty if nothing is encrypted.
  std::string encryption() const;
  // The memory shared with ranks of this host, once there is some. A thread that sleeps until its
  // contents change must call its setAsleep().
  Arena* arena() const { return sharedArena_.load(std::memory_order_acquire); }

 private:
  Task carryOut(const Call& call, const Signature& signature);
  Task carryOutFirst(const Call& call, const Signature& signature);
  Task carryOutAlone(const Call& call);
  Task awaitExternal(CollectiveOp& op);
  uint64_t nextNumber();

  Group& group_;
  bool isPrepared_ = false;
  // Shared by all ranks, and then Membership has it, too; or only by those of this host.
  std::unique_ptr<Arena> arena_;
  std::atomic<Arena*> sharedArena_{nullptr};
  PeerMemory memory_;  // used with an arena of all ranks
  std::unique_ptr<PlanCache> plans_;
  std::atomic<uint64_t> begun_{0};
};

}  // namespace mycoll
