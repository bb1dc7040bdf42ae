// Runner: carries out a group's collectives, one after the other: in the arena where all ranks
// share a host, by plans otherwise. Which of the two is settled with the first collective.
//
// Thread contract: everything but transport(), arena() and the counts by whoever holds the queue's
// run lock.
// Lifetime: owned by its communicator, as are the parts that it refers to; tasks do not outlive it.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "collectives/plan/shape.h"
#include "collectives/shm/arena.h"
#include "collectives/shm/peer_memory.h"
#include "engine/op.h"

namespace mycoll {

class Agreement;
class Mesh;
class Mailbox;
class Membership;
class PlanCache;
struct GroupOptions;

class Runner final : public CollectiveRunner {
 public:
  Runner(const GroupOptions& options, Mailbox& mailbox, const Shape& shape, Membership& membership,
         Agreement& agreement, GroupRecord& record);
  ~Runner();

  // The op's task, not yet resumed. The op outlives it.
  Task start(CollectiveOp& op);
  // CollectiveRunner: a collective as part of a task of this group's queue.
  Task run(Call call) override;

  // Collectives begun, as all ranks count them; and the number of the one that runs.
  uint64_t begun() const { return begun_.load(std::memory_order_relaxed); }
  uint64_t current() const { return begun() > 0 ? begun() - 1 : 0; }
  // "shm", "tcp", "shm+tcp" or "self", once known; for logs and tests.
  std::string transport() const;
  // The memory that it shares with ranks of its host, once there is some: whoever sleeps until
  // something changes in there says so to it.
  Arena* arena() const { return sharedArena_.load(std::memory_order_acquire); }

 private:
  Task carryOut(const Call& call, const Signature& signature);
  Task carryOutFirst(const Call& call, const Signature& signature);
  Task carryOutAlone(const Call& call);
  Task runComposite(const Composite& composite);
  Task awaitExternal(CollectiveOp& op);
  Task prepare(const Signature& first);
  Task shareWithHost(const Signature& first);
  bool mayShareMemory(const std::vector<int>& ranks) const;
  uint64_t nextNumber();

  const GroupOptions& options_;
  Mailbox& mailbox_;
  const Shape& shape_;
  Membership& membership_;
  Agreement& agreement_;
  GroupRecord& record_;

  bool isPrepared_ = false;
  bool isPlanned_ = true;  // false: the arena is of all ranks, and does everything
  std::unique_ptr<Arena> arena_;
  std::atomic<Arena*> sharedArena_{nullptr};
  PeerMemory memory_;  // beside an arena of all ranks
  std::unique_ptr<PlanCache> plans_;
  std::atomic<uint64_t> begun_{0};
};

}  // namespace mycoll
