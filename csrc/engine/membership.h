// Membership: who is in the group. It knows which ranks are here, have left or are lost, whether
// the group has failed and by what first cause, and it is the only place where a group fails,
// whatever the sign of it: a lost process, another rank's word, the arena, a device, or a call of
// this rank.
//
//   own state   kOpen -> kFailed -> kLeaving -> kLeft
//               kOpen ------------> kLeaving
//
// A failure ends the collectives from a number on, and all messages; those before that number may
// still end well for a while, as all ranks were called for them alike. The first cause wins. It is
// written into the arena where there is one. Otherwise it is sent to all ranks; in a large group
// along the control tree, past those that have left or are lost, and each passes it on, once.
//
// Thread contract: any thread, unless a function REQUIRES the I/O lock. The state is guarded by
// that lock; copies of it can be read without. Lifetime: owned by its communicator, as is the
// mailbox; attach()ed arenas outlive it.
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
#include "engine/control_tree.h"
#include "observe/recorder.h"
#include "transport/mailbox.h"

namespace mycoll {

// Where another rank is, as far as this one knows. Unknown: nothing tells a departure from a death.
enum class Departure { kLeft, kStayed, kUnknown };

class Membership {
 public:
  // isExternal: its operations run elsewhere, and do not hear of a failure by themselves.
  Membership(Mailbox& mailbox, const ControlTree& tree, GroupRecord& record, bool isExternal,
             int mostToldDirectly);

  // ---- has it failed?
  bool hasFailed() const { return hasFailed_.load(std::memory_order_acquire); }
  // Not ok once it has: the first cause.
  Status error() const EXCLUDES(failureMutex_);
  // The failure ends the collective of this number, now.
  bool isOver(uint64_t number) const;
  // The same; looks into the arena, too, for whoever runs that collective, and holds the run lock:
  // spread() is to follow.
  bool noticeFailure(uint64_t number);
  // The same for whoever is in no collective. True when the arena had news.
  bool lookIntoArena();
  // This rank has begun to leave.
  bool isLeaving() const { return isLeaving_.load(std::memory_order_acquire); }

  // ---- it fails
  // The cause's group is filled in. Collectives before `from` may still end well. Ends operations,
  // whose callbacks run here: no lock is held.
  void fail(const Status& cause, bool tellsOthers = true, uint64_t from = 0);
  // In two parts, for a caller that holds the run lock: spread() follows when it has released it.
  void failFirst(const Status& cause, bool tellsOthers = true, uint64_t from = 0);
  // Sends what is queued, completes the operations that have ended, and wakes the threads that
  // wait. Does nothing unless failFirst() came before.
  void spread();
  void failLocked(const Status& cause, bool tellsOthers, uint64_t from = 0) REQUIRES(ioRole);

  // ---- ranks
  Departure departureOf(int rank) const;
  bool hasLeft(int rank) const { return left_[rank].load(std::memory_order_acquire); }
  // "rank 1 (node1:4712) has left the group", and why if it has said so.
  std::string describeDeparture(int rank) const;
  // What needs such a rank ends with this.
  Status departed(int rank) const;

  // ---- the arena, for as long as the group lives
  void attach(Arena* arena) { arena_.store(arena, std::memory_order_release); }
  Arena* arena() const { return arena_.load(std::memory_order_acquire); }
  // All ranks have it: who looks into it hears of a failure, and need not be told.
  void trustArena();
  // These ranks have made a call together, though not by messages: an arena of this host.
  void haveMet(const std::vector<int>& ranks);

  // ---- this rank leaves
  // False: it is leaving already.
  bool beginToLeave();
  // Tells the ranks that this one leaves. No connection is made for that: a rank without one may
  // see the process end and not know why; see onPeerLost(). What is still to be sent ends with
  // `cause`, as nothing of a message follows its sender's goodbye.
  // The reason is for those that still need this rank: "its program ended with ..."; empty: none.
  void sayGoodbye(const Status& cause, const std::string& reason);
  // Afterwards calls end with this.
  void endLeaving(const Status& cause);

  // ---- events
  void onAbort(int rank, const std::string& payload) REQUIRES(ioRole);
  void onGoodbye(int rank, const std::string& payload) REQUIRES(ioRole);
  void onLeft(int rank, const std::string& reason = {}) REQUIRES(ioRole);
  void onPeerLost(const std::string& uid, const Loss& loss, bool wasLinked) REQUIRES(ioRole);

 private:
  enum class State { kOpen, kFailed, kLeaving, kLeft };

  bool failAsArena();
  void moveTo(State next) REQUIRES(ioRole);
  void isGone(int rank, const Status& story, bool isFailure) REQUIRES(ioRole);
  void tellOthers() REQUIRES(ioRole);
  std::string abortPayload() const REQUIRES(ioRole);
  std::string reasonOf(int rank) const EXCLUDES(failureMutex_);
  bool hasEnded(const PeerAddress& peer, const Loss& loss) const REQUIRES(ioRole);

  Mailbox& mailbox_;
  const ControlTree& tree_;
  GroupRecord& record_;
  const bool isExternal_;
  const bool isLarge_;
  std::atomic<Arena*> arena_{nullptr};

  State state_ GUARDED_BY(ioRole) = State::kOpen;
  Status cause_ GUARDED_BY(ioRole);                        // the first one
  uint64_t failedFrom_ GUARDED_BY(ioRole) = ~uint64_t{0};  // the first collective that it ends
  bool tellsOthers_ GUARDED_BY(ioRole) = true;
  bool isPassedOn_ GUARDED_BY(ioRole) = false;  // the failure, along the control tree
  std::set<int> lost_ GUARDED_BY(ioRole);       // ranks that pass nothing on
  std::set<int> tellers_ GUARDED_BY(ioRole);    // ranks that have told this one, and so others
  // By rank: from which collective on it knows the group to have failed.
  std::map<int, uint64_t> informed_ GUARDED_BY(ioRole);
  std::vector<bool> hasMet_ GUARDED_BY(ioRole);  // by rank

  // For readers without the I/O lock.
  std::vector<std::atomic<bool>> left_;
  std::atomic<bool> isLeaving_{false};
  std::atomic<bool> hasFailed_{false};
  std::atomic<bool> hasNews_{false};  // for spread()
  std::atomic<uint64_t> endsFrom_{0};
  std::atomic<std::chrono::steady_clock::time_point> failedAt_{};
  mutable Mutex failureMutex_;
  Status failure_ GUARDED_BY(failureMutex_);
  std::map<int, std::string> saidWhy_ GUARDED_BY(failureMutex_);  // ranks that have left
};

}  // namespace mycoll
