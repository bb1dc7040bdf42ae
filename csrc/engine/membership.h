// Membership: which ranks are in the group. It knows which ranks are here, have left or are lost,
// whether the group has failed and by which first cause. It is the only place where a group fails,
// whatever the sign of the failure: a lost process, another rank's message, the arena, a device, or
// a call of this rank.
//
//   own state   kOpen -> kFailed -> kLeaving -> kLeft
//               kOpen ------------> kLeaving
//
// A failure ends all messages, and the collectives from a number on. Collectives before that number
// may still succeed for a while, as all ranks made those calls alike. The first cause is kept. It
// is written into the arena if there is one. Otherwise it is sent to all ranks; in a large group
// along the control tree, bypassing ranks that have left or are lost, and each rank forwards it
// once.
//
// Thread contract: any thread, unless a function REQUIRES the I/O lock. The state is guarded by
// that lock; copies of it can be read without. Lifetime: owned by its group; attach()ed arenas
// outlive it.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "collectives/shm/arena.h"
#include "transport/mailbox.h"

namespace mycoll {

struct Group;

class Membership {
 public:
  // The group's membership and agreement are made later, and not used yet.
  explicit Membership(Group& group);

  // ---- has it failed?
  bool hasFailed() const { return hasFailed_.load(std::memory_order_acquire); }
  // Not ok once it has: the first cause.
  Status error() const { return hasFailed() ? cause_ : Status(); }
  // Whether the failure ends the collective of this number now.
  bool isOver(uint64_t number) const;
  // As isOver(), but checks the arena, too. For the thread that runs that collective and holds the
  // run lock; it must call propagate() afterwards.
  bool noticeFailure(uint64_t number);
  // As noticeFailure(), for a thread that runs no collective. True if the arena had a new failure.
  bool checkArena();
  // This rank has begun to leave.
  bool isLeaving() const { return isLeaving_.load(std::memory_order_acquire); }

  // ---- it fails
  // Fails the group and fills in the cause's group. Collectives before `from` may still succeed.
  // Ends operations, whose callbacks run here: the caller holds no lock.
  void fail(const Status& cause, bool notifiesOthers = true, uint64_t from = 0);
  // In two parts, for a caller that holds the run lock: propagate() follows when it has released
  // it. If memory runs out, all groups of the process fail.
  void failFirst(const Status& cause, bool notifiesOthers = true, uint64_t from = 0) noexcept;
  // Sends queued frames, completes the operations that have ended, and wakes waiting threads. Does
  // nothing unless failFirst() was called before.
  void propagate();
  void failLocked(const Status& cause, bool notifiesOthers, uint64_t from = 0) REQUIRES(ioRole);
  // fn is called once if the group fails, or has failed, other than by abort() or by being left. It
  // must not block.
  void whenFailed(std::function<void()> fn);

  // ---- ranks
  bool hasLeft(int rank) const {
    const Arena* arena = this->arena();
    return left_[rank].load(std::memory_order_acquire) || (arena && arena->hasLeft(rank));
  }
  // "rank 1 (node1:4712) has left the group", and the reason if it has sent one.
  std::string describeDeparture(int rank) const;
  // The status of operations that need a rank that has left.
  Status departed(int rank) const;

  // ---- the arena, for as long as the group lives
  void attach(Arena* arena) { arena_.store(arena, std::memory_order_release); }
  Arena* arena() const { return arena_.load(std::memory_order_acquire); }
  // All ranks have mapped the arena. They detect a failure there, so it need not be sent to them.
  void trustArena();
  // These ranks have made a call together in an arena of this host, without messages.
  void haveMet(const std::vector<int>& ranks);

  // ---- this rank leaves
  // False: it is leaving already.
  bool beginToLeave();
  // If collectives from this one on are not done: fails the group for the other ranks. Those of
  // this host may read this rank's tensors in place, which the program uses for something else
  // next. After sendGoodbye() only if there is an arena.
  void failFrom(uint64_t first);
  // Notifies the ranks that this one leaves. It makes no connection for that: a rank without one
  // may see the process end without knowing why; see onPeerLost(). Unsent messages end with
  // `cause`, as no part of a message may follow its sender's goodbye. reason: for ranks that still
  // need this one, like "its program ended with ..."; empty: none.
  void sendGoodbye(const Status& cause, const std::string& reason);
  // From then on calls end with this status.
  void endLeaving(const Status& cause);

  // ---- events
  void onAbort(int rank, const std::string& payload) REQUIRES(ioRole);
  void onGoodbye(int rank, const std::string& payload) REQUIRES(ioRole);
  void onLeft(int rank, const std::string& reason = {}) REQUIRES(ioRole);
  void onPeerLost(const std::string& uid, const Loss& loss, bool wasLinked) REQUIRES(ioRole);

 private:
  enum class State { kOpen, kFailed, kLeaving, kLeft };

  bool failAsArena();
  Status asCause(const Status& why) const;
  void moveTo(State next) REQUIRES(ioRole);
  void setGone(int rank, const Status& why, bool isFailure) REQUIRES(ioRole);
  void notifyOthers() REQUIRES(ioRole);
  std::string abortPayload() const REQUIRES(ioRole);
  std::string reasonOf(int rank) const EXCLUDES(reasonsMutex_);
  bool hasEnded(const PeerAddress& peer, const Loss& loss) const REQUIRES(ioRole);

  Group& group_;
  Mailbox& mailbox_;
  const bool isLarge_;
  std::atomic<Arena*> arena_{nullptr};

  State state_ GUARDED_BY(ioRole) = State::kOpen;
  // The first one. Written once, under the I/O lock and before hasFailed_, which threads without
  // that lock read first.
  Status cause_;
  uint64_t failedFrom_ GUARDED_BY(ioRole) = ~uint64_t{0};  // the first collective that it ends
  bool notifiesOthers_ GUARDED_BY(ioRole) = true;
  std::function<void()> whenFailed_ GUARDED_BY(ioRole);
  bool isForwarded_ GUARDED_BY(ioRole) = false;      // the failure is sent along the control tree
  std::set<int> lost_ GUARDED_BY(ioRole);            // lost ranks, which forward nothing
  std::set<int> failureSenders_ GUARDED_BY(ioRole);  // ranks that sent the failure to this one
  // By rank: the first collective that it knows to be ended by the failure.
  std::map<int, uint64_t> notified_ GUARDED_BY(ioRole);
  std::vector<bool> hasMet_ GUARDED_BY(ioRole);  // by rank

  // For readers without the I/O lock.
  std::vector<std::atomic<bool>> left_;  // its goodbye was received
  std::atomic<bool> isLeaving_{false};
  std::atomic<bool> hasFailed_{false};
  std::atomic<bool> mustPropagate_{false};  // for propagate()
  std::atomic<uint64_t> endsFrom_{0};
  std::atomic<std::chrono::steady_clock::time_point> failedAt_{};
  mutable Mutex reasonsMutex_;
  std::map<int, std::string> leaveReasons_ GUARDED_BY(reasonsMutex_);  // by rank that has left
};

}  // namespace mycoll
