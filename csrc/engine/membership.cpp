#include "engine/membership.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "base/bytes.h"
#include "base/log.h"
#include "base/text.h"
#include "base/topology.h"
#include "engine/group.h"
#include "transport/mesh.h"

namespace mycoll {
namespace {

using Clock = std::chrono::steady_clock;

// How long collectives before the failed one may still succeed after the failure.
constexpr auto kCompletionGrace = grace(1000);

// The same number on all ranks that lose this process.
uint64_t incidentOf(const std::string& uid) {
  return std::strtoull(uid.substr(0, 16).c_str(), nullptr, 16);
}

}  // namespace

Membership::Membership(Group& group)
    : group_(group),
      mailbox_(group.mailbox),
      isLarge_(mailbox_.ranks() > group.options.mostNotifiedDirectly),
      hasMet_(mailbox_.ranks()),
      left_(mailbox_.ranks()) {}

void Membership::moveTo(State next) {
  assert((state_ == State::kOpen && (next == State::kFailed || next == State::kLeaving)) ||
         (state_ == State::kFailed && next == State::kLeaving) ||
         (state_ == State::kLeaving && next == State::kLeft));
  state_ = next;
}

// ---- failure -----------------------------------------------------------------------------------

bool Membership::isOver(uint64_t number) const {
  if (!hasFailed()) return false;
  if (number >= endsFrom_.load(std::memory_order_relaxed)) return true;
  return Clock::now() - failedAt_.load(std::memory_order_relaxed) > kCompletionGrace;
}

bool Membership::noticeFailure(uint64_t number) {
  if (hasFailed()) return isOver(number);
  return failAsArena();
}

bool Membership::failAsArena() {
  const Arena* arena = this->arena();
  if (hasFailed() || !arena || !arena->hasFailed()) return false;
  failFirst(arena->failure(), /*notifiesOthers=*/false);
  return true;
}

bool Membership::checkArena() {
  if (!failAsArena()) return false;
  propagate();
  return true;
}

void Membership::fail(const Status& cause, bool notifiesOthers, uint64_t from) {
  const LogDelay othersFirst;
  failFirst(cause, notifiesOthers, from);
  propagate();
}

void Membership::failFirst(const Status& cause, bool notifiesOthers, uint64_t from) noexcept {
  IoLock lock(mailbox_.ioMutex());
  try {
    failLocked(cause, notifiesOthers, from);
  } catch (const std::bad_alloc&) {
    mailbox_.mesh().runOut();
  }
  mustPropagate_ = true;
}

void Membership::whenFailed(std::function<void()> fn) {
  {
    IoLock lock(mailbox_.ioMutex());
    if (cause_.ok()) whenFailed_ = std::move(fn);
    if (cause_.ok() || cause_.code() == Code::kAborted) return;
  }
  fn();
}

void Membership::propagate() {
  if (!mustPropagate_.load(std::memory_order_relaxed)) return;
  mustPropagate_ = false;
  mailbox_.mesh().progress();
  mailbox_.mesh().sleeper().wakeAll();
}

Status Membership::asCause(const Status& why) const {
  Cause fields = why.cause();
  if (fields.group == 0) fields.group = mailbox_.group().context;
  try {
    return inGroup(mailbox_.group().name, Status(why.code(), why.message(), fields));
  } catch (const std::bad_alloc&) {
    return why;
  }
}

// If memory runs out, the group has failed on this rank. The mesh then fails all groups of the
// process, and breaks its connections, so that the other ranks detect it.
void Membership::failLocked(const Status& why, bool notifiesOthers, uint64_t from) {
  if (!cause_.ok()) {
    if (from >= failedFrom_) return;
    failedFrom_ = from;
    if (!group_.options.isExternal) endsFrom_.store(from, std::memory_order_relaxed);
    mailbox_.failFrom(failedFrom_, cause_);
    if (isForwarded_) this->notifyOthers();
    return;
  }
  cause_ = asCause(why);
  failedFrom_ = from;
  if (state_ == State::kOpen) moveTo(State::kFailed);
  endsFrom_.store(group_.options.isExternal ? 0 : from, std::memory_order_relaxed);
  failedAt_.store(Clock::now(), std::memory_order_relaxed);
  // If this rank has only left, the group lives on for the others. Precedes hasFailed_: a thread
  // that sees that ends its call, and may write to tensors that other ranks still read
  // (ReadInTime).
  if (Arena* arena = this->arena(); arena && state_ != State::kLeft) arena->fail(cause_);
  hasFailed_.store(true, std::memory_order_release);
  group_.record.fail(cause_);
  mailbox_.failFrom(failedFrom_, cause_);
  // A departure without a failure is not logged.
  if (cause_.code() != Code::kAborted) {
    logFailure(cause_.message());
    if (whenFailed_) callAfterDelay(std::exchange(whenFailed_, nullptr));
  } else if (notifiesOthers) {
    MYCOLL_LOG_ERROR("%s", cause_.message().c_str());
  }
  if (!notifiesOthers || !notifiesOthers_) return;
  isForwarded_ = isLarge_;
  this->notifyOthers();
}

void Membership::notifyOthers() {
  const int self = mailbox_.rank();
  std::set<int> ranks;
  auto addNeighbours = [&](const ControlTree::HasLeft& isAbsent) {
    const std::vector<int> children = group_.tree.childrenOf(self, isAbsent);
    ranks.insert(children.begin(), children.end());
    ranks.insert(group_.tree.parentOf(self, isAbsent));
  };
  if (isLarge_) {
    // A lost rank forwards nothing. The rank that the cause names may be stopped, lost or alive: it
    // is notified, but also bypassed.
    const int named = cause_.cause().rank;
    auto hasLeft = [&](int rank) { return this->hasLeft(rank); };
    addNeighbours(hasLeft);
    addNeighbours([&](int rank) REQUIRES(ioRole) {
      return hasLeft(rank) || lost_.contains(rank) || rank == named;
    });
  }
  for (int rank = 0; rank < mailbox_.ranks() && !isLarge_; ++rank) ranks.insert(rank);
  const std::string payload = abortPayload();
  for (const int rank : ranks) {
    if (rank < 0 || rank == self || hasLeft(rank) || lost_.contains(rank)) continue;
    uint64_t& from = notified_.try_emplace(rank, ~uint64_t{0}).first->second;
    if (from <= failedFrom_) continue;
    from = failedFrom_;
    mailbox_.sendControl(rank, FrameKind::kAbort, payload);
  }
}

std::string Membership::abortPayload() const {
  std::string payload;
  append(&payload, failedFrom_);
  return payload + encode(cause_, kMaxControlBytes - payload.size());
}

void Membership::onAbort(int rank, const std::string& payload) {
  Reader reader(payload);
  const auto from = reader.value<uint64_t>();
  Status cause;
  if (!decodeFailure(reader.rest(), &cause)) return;
  uint64_t& known = notified_.try_emplace(rank, from).first->second;
  known = std::min(known, from);
  failureSenders_.insert(rank);
  failLocked(cause, /*notifiesOthers=*/isLarge_, from);
}

// ---- ranks that leave or are lost --------------------------------------------------------------

std::string Membership::reasonOf(int rank) const {
  {
    MutexLock lock(reasonsMutex_);
    if (auto found = leaveReasons_.find(rank); found != leaveReasons_.end()) return found->second;
  }
  const Arena* arena = this->arena();
  return arena ? arena->reasonOf(rank) : std::string();
}

std::string Membership::describeDeparture(int rank) const {
  const std::string reason = reasonOf(rank);
  return mailbox_.describeRank(rank) + " has left the group" +
         (reason.empty() ? "" : ": " + reason + " (see its log)");
}

Status Membership::departed(int rank) const {
  Cause fields;
  fields.rank = rank;
  return group_.error(Code::kPeerLost, "Connection closed by peer: " + describeDeparture(rank),
                      fields);
}

void Membership::onLeft(int rank, const std::string& reason) {
  if (left_[rank].load(std::memory_order_relaxed)) return;
  if (!reason.empty()) {
    MutexLock lock(reasonsMutex_);
    leaveReasons_.emplace(rank, reason);
  }
  setGone(rank, departed(rank), /*isFailure=*/false);
}

void Membership::setGone(int rank, const Status& why, bool isFailure) {
  left_[rank].store(true, std::memory_order_release);
  mailbox_.setAbsent(rank, why, isFailure);
  // A rank that leaves after a failure writes the cause into the arena first.
  if (const Arena* arena = this->arena(); arena && !isLeaving()) {
    if (const Status known = arena->failure(); !known.ok()) {
      return failLocked(known, /*notifiesOthers=*/false);
    }
  }
  mailbox_.endMessagesOf(rank, why);
  // It may have left before it received the failure: bypass it.
  if (isForwarded_ && !failureSenders_.contains(rank)) this->notifyOthers();
}

// The goodbye is the last frame of this group on its connection, so that open receives end here.
// The arena also reports that a rank has left, maybe before messages that are still on the
// connection.
void Membership::onGoodbye(int rank, const std::string& payload) {
  onLeft(rank, sanitized(payload));
  mailbox_.endReceivesFrom(rank, departed(rank));
}

// Whether that process is known to have ended.
bool Membership::hasEnded(const PeerAddress& peer, const Loss& loss) const {
  if (loss.reason == LossReason::kEnded) return true;
  return peer.isVisibleTo(mailbox_.mesh().address()) &&
         !isLiving(lookAtProcess(peer.pid, peer.startTicks));
}

// A rank without a connection to this one sends it no goodbye, so the end of its process alone is
// no failure. If it is one, the ranks that are connected to it detect it and notify this one; and a
// call that needs that rank, now or later, fails the group. Only the death of a rank without any
// connection remains undetected until the rank is needed.
void Membership::onPeerLost(const std::string& uid, const Loss& loss, bool wasLinked) {
  const GroupAddress& group = mailbox_.group();
  for (int rank = 0; rank < mailbox_.ranks(); ++rank) {
    if (group.peers[rank].uid != uid || rank == group.rank) continue;
    if (hasLeft(rank)) {  // its goodbye, if any, was lost
      onLeft(rank);
      mailbox_.endReceivesFrom(rank, departed(rank));
      continue;
    }
    // Without an arena or a connection, a departure and a death look alike.
    const bool isUnclear = !this->arena() && !wasLinked && !mailbox_.needs(rank);
    const bool wasThere = this->arena() || hasMet_[rank] || mailbox_.hasReceivedFrom(rank) ||
                          !hasEnded(group.peers[rank], loss);
    Cause fields;
    fields.incident = incidentOf(uid);
    fields.rank = rank;
    const Status why = group_.error(
        Code::kPeerLost,
        std::string(isUnclear || !loss.isClosed() ? "" : "Connection closed by peer: ") +
            mailbox_.describeRank(rank) + " " +
            (wasThere ? loss.describe(isUnclear)
                      : "ended before its first call, or before it sent this rank any data") +
            " (seen by rank " + std::to_string(group.rank) +
            ").\n  The group is dead; see that rank's log. To continue: destroy the "
            "group and make a new one, or restart the job (torchrun --max-restarts).",
        fields);
    if (!isUnclear) {
      lost_.insert(rank);
      failLocked(why, /*notifiesOthers=*/true);
      if (isForwarded_) this->notifyOthers();  // bypassing this rank, too
      return;
    }
    setGone(rank, why, /*isFailure=*/true);
  }
}

// ---- this rank leaves --------------------------------------------------------------------------

void Membership::haveMet(const std::vector<int>& ranks) {
  IoLock lock(mailbox_.ioMutex());
  for (const int rank : ranks) hasMet_[rank] = true;
}

void Membership::trustArena() {
  IoLock lock(mailbox_.ioMutex());
  notifiesOthers_ = false;
}

bool Membership::beginToLeave() {
  IoLock lock(mailbox_.ioMutex());
  if (isLeaving()) return false;
  moveTo(State::kLeaving);
  isLeaving_.store(true, std::memory_order_release);
  return true;
}

void Membership::failFrom(uint64_t first) {
  if (group_.options.isExternal) return;
  const Status cause = group_.error(
      Code::kPeerLost, describeDeparture(mailbox_.rank()) + " with operations that were not done");
  if (Arena* const arena = this->arena()) return arena->fail(cause);
  fail(cause, /*notifiesOthers=*/true, first);
}

void Membership::sendGoodbye(const Status& cause, const std::string& reason) {
  if (Arena* arena = this->arena()) arena->leave(reason);
  {
    IoLock lock(mailbox_.ioMutex());
    mailbox_.endSends(cause);
    // The other side must receive the cause before the departure.
    const std::string why = !cause_.ok() && notifiesOthers_ ? abortPayload() : "";
    for (int rank = 0; rank < mailbox_.ranks(); ++rank) {
      if (rank == mailbox_.rank()) continue;
      if (!why.empty()) mailbox_.sendControlIfConnected(rank, FrameKind::kAbort, why);
      mailbox_.sendControlIfConnected(rank, FrameKind::kGoodbye, reason);
    }
  }
  mailbox_.mesh().progress();
}

void Membership::endLeaving(const Status& cause) {
  {
    IoLock lock(mailbox_.ioMutex());
    moveTo(State::kLeft);
  }
  fail(cause, /*notifiesOthers=*/false);
}

}  // namespace mycoll
