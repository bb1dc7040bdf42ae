#include "engine/formation.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <numeric>
#include <optional>
#include <thread>
#include <utility>

#include "base/deadline.h"
#include "base/sha256.h"
#include "base/text.h"
#include "base/topology.h"
#include "engine/engine.h"
#include "engine/invitation.h"
#include "engine/roster.h"
#include "engine/round.h"
#include "transport/tcp/tls.h"

namespace mycoll {
namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

// The longest time between two checks for signals, losses and deadlines.
constexpr auto kTick = Milliseconds(50);
// Time for a rank that is gone to come again, and for rank 0 to report the missing ranks.
constexpr auto kAgain = grace(1000);
// Time for a rank that is in no round to receive rank 0's error, except at the deadline. If there
// is a store, it finds the error there.
constexpr auto kNotify = Milliseconds(3000);
// Rank 0 begins a round without the missing ranks when no rank has arrived for this time.
constexpr auto kPartial = grace(100);
// It begins one without the ranks that have ended when no other rank has changed for this time.
constexpr auto kUrgent = Milliseconds(5);
// How often rank 0 looks for newer handles of ranks that do not join, and the others for an error
// of rank 0.
constexpr auto kLookAgain = grace(500);
// ... and at first, if the store holds handles of an earlier group.
constexpr auto kLookSoon = Milliseconds(10);
// A rank is slow if it has not joined this long after the latest one that has, and not in this many
// times the time that the others took.
constexpr auto kSlow = grace(1000);
constexpr int kTimesSlower = 2;
// The longest time between two rounds, if there is no store.
constexpr auto kNextRound = grace(10'000);
constexpr auto kForward = grace(100);
// The longest wait for the answer of a process whose handle may be stale.
constexpr auto kProbe = Milliseconds(500);
// A rank polls a store less often the longer it has waited, as thousands may be waiting: again
// after this part of the time so far.
constexpr int kPartOfWait = 20;
constexpr auto kShortestPoll = Milliseconds(1);
constexpr auto kLongestPoll = Milliseconds(1000);
// Time for a rank that is being started to publish its handle after rank 0 has failed.
constexpr auto kArrival = Milliseconds(300);
// ... and for all to read why.
constexpr auto kReading = kLongestPoll + kForward;

bool isFirstFormation() {
  static std::atomic<bool> wasThereOne{false};
  return !wasThereOne.exchange(true, std::memory_order_relaxed);
}

std::string keyOf(int rank) { return "handle/" + std::to_string(rank); }

// By this key a rank that has given up confirms to the rank that has published the nonce that its
// last handle is of this group. A rank on another host cannot see whether it is of an earlier one.
std::string noticeTo(const std::string& nonce, const Handle& last) {
  return "failed/" + last.nonce + "/" + nonce;
}

// By this key a rank confirms that it has read that handle.
std::string receiptOf(int rank, const Handle& last) {
  return "read/" + last.nonce + "/" + std::to_string(rank);
}

std::string nonceOf(const KnownPeers& known, int rank) {
  if (!known.nonces.empty()) return known.nonces[rank];
  return toHex(hmacSha256(known.secret, std::to_string(rank)).data(), 16);
}

// Publishes why this rank gives up. If the store is what has failed, the other ranks find out by
// themselves.
Handle publishLast(Store& store, Handle last, const Status& why) {
  last.why = why.message();
  last.hasLost = why.code() == Code::kPeerLost;
  if (Handle::freshNonce(&last.nonce).ok()) (void)store.set(keyOf(last.rank), last.encode());
  return last;
}

Status read(Store& store, int rank, bool* found, Handle* handle) {
  std::string text;
  MYCOLL_RETURN_IF_ERROR(store.tryGet(keyOf(rank), found, &text));
  return *found ? Handle::decode(text, handle) : Status();
}

bool isInterrupted(const GroupOptions& options, const Store* store) {
  return (store && store->wasInterrupted()) || (options.interrupted && options.interrupted());
}

bool isAlive(const PeerAddress& peer) { return isLiving(lookAtProcess(peer.pid, peer.startTicks)); }

// Whether the rank waits, or may begin to wait, and has not read the last handle of another rank.
bool isToRead(Store& store, int rank, const Handle& last, Deadline arrival, std::string* notified) {
  bool isThere = false, hasRead = false;
  Handle handle;
  std::string receipt;
  if (!read(store, rank, &isThere, &handle).ok()) return false;
  if (!isThere) return !arrival.expired();
  const bool isDead = handle.address.isVisibleTo(last.address) && !isAlive(handle.address);
  if (!handle.why.empty() || isDead) return false;
  if (std::exchange(*notified, handle.nonce) != handle.nonce) {
    (void)store.set(noticeTo(handle.nonce, last), "1");
  }
  return store.tryGet(receiptOf(rank, last), &hasRead, &receipt).ok() && !hasRead;
}

// Notifies the ranks, which find the error in the store, and returns when they have read it. Those
// that have waited longest poll it least often. Not ok: this rank was interrupted.
Status awaitReaders(const GroupOptions& options, Store& store, const std::vector<int>& ranks,
                    const Handle& last, Deadline arrival, Deadline end) {
  std::map<int, std::string> readers;  // by rank: the nonce by which it has been notified
  for (const int rank : ranks) readers.emplace(rank, "");
  for (;;) {
    for (auto it = readers.begin(); it != readers.end();) {
      if (isInterrupted(options, &store)) return interrupted();
      if (end.expired()) return Status();
      const bool isWaiting = isToRead(store, it->first, last, arrival, &it->second);
      it = isWaiting ? std::next(it) : readers.erase(it);
    }
    if (readers.empty()) return store.wasInterrupted() ? interrupted() : Status();
    std::this_thread::sleep_for(kTick);
  }
}

// The part that rank 0 and the others have in common.
class Forming {
 public:
  Forming(const GroupOptions& options, Store* store, Engine& engine, KnownPeers known);
  virtual ~Forming() = default;

  Status run(GroupAddress* result);

 protected:
  // Returns when the group is formed.
  virtual Status awaitAll() = 0;
  // The formation has failed here. Notifies the other ranks. Returns false if they have made the
  // group, so that this rank is in it, too. A signal that arrives meanwhile replaces *why.
  virtual bool reportFailure(Status* why) = 0;

  Status openReception(const std::string& nonce, bool isOnce = false);
  Status publish();
  // Publishes why this rank gives up, and waits a short time until these ranks have read it.
  void giveUp(const std::vector<int>& readers, Status* why);
  // This rank's error as the other ranks receive it.
  Status forOthers(const Status& why) const;
  Status checkPredecessor(const Handle& there);
  // Not ok: another process with this rank has received the conflict, and has given up.
  Status checkRival();
  // Whether the rank that published the handle still waits. Blocks until that is known.
  Status isCurrent(const Handle& handle, bool* result);
  // Whether the store may be used: the other ranks are not known, or are late.
  bool usesStore() const { return store_ && (known_.peers.empty() || waited() > kAgain); }

  // Sends this rank's error to one that is in no round of this rank's. If it cannot be reached, it
  // waits until its own deadline.
  void notify(const Invitation::Receiver& receiver, const Status& why);

  // Returns when something may have happened, at the latest after this time.
  void pause(Milliseconds atMost);
  // Passes on what is queued for the other ranks, at most until the deadline.
  void flush(Deadline end);

  Clock::duration waited() const { return Clock::now() - began_; }
  Milliseconds pollPause(Milliseconds shortest) const {
    return std::clamp(std::chrono::duration_cast<Milliseconds>(waited() / kPartOfWait), shortest,
                      kLongestPoll);
  }
  bool isInterrupted() const { return mycoll::isInterrupted(options_, store_); }
  // Not ok: another process has this rank, or rank 0 has sent why the group cannot be made.
  Status sentError();
  bool isVisible(const PeerAddress& peer) const { return peer.isVisibleTo(mine_.address); }
  bool isAlive(const PeerAddress& peer) const { return isVisible(peer) && mycoll::isAlive(peer); }
  bool isDead(const PeerAddress& peer) const { return isVisible(peer) && !isAlive(peer); }
  // Whether a handle that was there when this rank came is of this group: its process lives, or is
  // younger than this one, which has been in no group before.
  bool isOfNow(const PeerAddress& peer) const {
    return isAlive(peer) ||
           (isFirst_ && isVisible(peer) && peer.startTicks >= mine_.address.startTicks);
  }

  // As above, for the last handle of a rank that has given up, which may have sent a notice. Notes
  // it if that is unclear.
  Status isOfNow(const Handle& last, bool* result);

  Status error(Code code, const std::string& text) const {
    return Status(code, "mycoll group '" + options_.name + "': " + text);
  }
  Status ended(int rank, const PeerAddress& peer) const;
  // ended(), or the lost connection if the process is alive.
  Status lost(const Round::Report& loss, const PeerAddress& peer) const;
  Status hasGivenUp(const Handle& handle) const;
  Status tooLate(int rank, const std::string& milliseconds, const std::vector<int>& missing) const;
  Status isLost(int rank, const std::string& why) const;
  // Not ok: the other rank was started for another group than this one.
  Status isUnlike(const Handle& other) const;
  // Ranks of this group, by their numbers in it, that other groups of this process have lost. None
  // without a store: the caller of shrink has chosen the ranks.
  std::map<int, Engine::Loss> losses() const;

  const GroupOptions& options_;
  Store* const store_;
  Engine& engine_;
  const KnownPeers known_;
  const Clock::time_point began_ = Clock::now();
  Deadline deadline_;
  const bool isFirst_;
  Handle mine_;
  bool isPublished_ = false;
  bool hasPredecessor_ = false;  // there was another handle of this rank
  // A process that may have been started with this rank, too, and is being notified of that.
  struct Rival {
    std::string uid;
    Status taken;
    std::unique_ptr<Invitation> conflict;
    Deadline nextLook;
  };
  std::optional<Rival> rival_;
  // By rank: why it has given up, in this group or in an earlier one.
  std::map<int, std::string> unclear_;
  Wakeup wakeup_;
  std::optional<Listening> listening_;
  std::vector<std::unique_ptr<Reception>> receptions_;
  std::unique_ptr<Round> round_;
  std::vector<std::unique_ptr<Invitation>> notices_;  // of this rank's error
};

Forming::Forming(const GroupOptions& options, Store* store, Engine& engine, KnownPeers known)
    : options_(options),
      store_(store),
      engine_(engine),
      known_(std::move(known)),
      deadline_(Deadline::after(options.timeout)),
      isFirst_(isFirstFormation()) {
  mine_.rank = options.rank;
  mine_.ranks = options.ranks;
  mine_.settings = Handle::settingsHere();
  mine_.address = engine.mesh()->address();
}

Status Forming::run(GroupAddress* result) {
  Status status = Handle::freshNonce(&mine_.nonce);
  if (status.ok() && !known_.peers.empty()) {
    status = openReception(nonceOf(known_, options_.rank), /*isOnce=*/!known_.nonces.empty());
  }
  if (status.ok()) status = awaitAll();
  if (status.ok() && store_ && store_->wasInterrupted()) status = interrupted();
  const bool isFormed = status.ok() || !reportFailure(&status);
  const Code code = status.code();
  const bool isShort = isFormed || code == Code::kTimeout || code == Code::kInterrupted;
  flush(Deadline::after(isShort || usesStore() ? kAgain : kNotify));
  // An interruption comes first: the signal was taken from the interpreter, which will not raise it
  // again.
  if (isFormed && code != Code::kInterrupted) return round_->result(result);
  if (round_) round_->leave();
  return status;
}

Status Forming::openReception(const std::string& nonce, bool isOnce) {
  if (!listening_) {
    listening_.emplace(*engine_.mesh());
    engine_.wake();
  }
  MYCOLL_RETURN_IF_ERROR(
      Reception::open(engine_.mesh(), nonce, wakeup_, &receptions_.emplace_back(), isOnce));
  engine_.mesh()->progress();  // raises events for the frames that arrived before
  return Status();
}

// ---- the store

Status Forming::publish() {
  MYCOLL_RETURN_IF_ERROR(openReception(mine_.nonce));
  const std::string text = mine_.encode();
  std::string expected, now;
  for (;;) {
    MYCOLL_RETURN_IF_ERROR(store_->compareSet(keyOf(options_.rank), expected, text, &now));
    if (now == text) break;
    hasPredecessor_ = true;
    Handle there;  // what cannot be decoded is overwritten
    if (Handle::decode(now, &there).ok()) MYCOLL_RETURN_IF_ERROR(checkPredecessor(there));
    expected = now;
  }
  isPublished_ = true;
  return Status();
}

void Forming::giveUp(const std::vector<int>& readers, Status* why) {
  const Handle last = publishLast(*store_, mine_, forOthers(*why));
  const bool isBrief = why->code() == Code::kTimeout || why->code() == Code::kInterrupted;
  const Status other = awaitReaders(options_, *store_, readers, last, Deadline::after(kArrival),
                                    Deadline::after(isBrief ? kTick : kReading));
  if (!other.ok()) *why = other;
}

// Another process may have been started with this rank. If it still waits, it receives the conflict
// and gives up; it may do so after this rank has overwritten its handle.
Status Forming::checkPredecessor(const Handle& there) {
  const bool isRival = rival_ && there.address.uid == rival_->uid;
  if (!there.why.empty()) return isRival ? rival_->taken : Status();
  if (isRival || there.address.uid == mine_.address.uid || isDead(there.address)) return Status();
  const Status taken =
      error(Code::kStore, "rank " + std::to_string(options_.rank) + " is taken by " +
                              there.address.describe() + " and by " + mine_.address.describe() +
                              ". Two processes were started with one rank.");
  rival_.emplace(Rival{there.address.uid, taken, nullptr, Deadline::never()});
  MYCOLL_RETURN_IF_ERROR(Invitation::send(engine_.mesh(), {there.address, there.nonce},
                                          InvitationMessage(taken), {}, &rival_->conflict));
  for (const Deadline end = Deadline::after(kProbe); rival_->conflict && !end.expired();) {
    pause(kLookSoon);
    rival_->nextLook = Deadline::after(Milliseconds(0));
    MYCOLL_RETURN_IF_ERROR(checkRival());
    if (isInterrupted()) return interrupted();
  }
  return Status();
}

Status Forming::checkRival() {
  if (!rival_ || !rival_->conflict || !rival_->nextLook.expired()) return Status();
  rival_->nextLook = Deadline::after(pollPause(kLookAgain));
  // It gives up in the store before it closes its reception.
  const bool isOver = rival_->conflict->hasFailed();
  Handle now;
  bool found = false;
  MYCOLL_RETURN_IF_ERROR(read(*store_, options_.rank, &found, &now));
  if (found && now.address.uid == rival_->uid && !now.why.empty()) return rival_->taken;
  if (isOver) rival_->conflict.reset();
  return Status();
}

Status Forming::isOfNow(const Handle& last, bool* result) {
  std::string notice;
  if (!*result) {
    MYCOLL_RETURN_IF_ERROR(store_->tryGet(noticeTo(mine_.nonce, last), result, &notice));
  }
  if (*result) {
    (void)store_->set(receiptOf(options_.rank, last), "1");
  } else {
    unclear_[last.rank] = hasGivenUp(last).message();
  }
  return Status();
}

Status Forming::isCurrent(const Handle& handle, bool* result) {
  const PeerAddress& address = handle.address;
  *result = !isDead(address);
  const bool canBeAsked = engine_.mesh()->isLocal(address) || !address.tcp.empty();
  if (!*result || !canBeAsked) return Status();
  std::unique_ptr<Invitation> probe;
  const auto refused = [this] { wakeup_.notify(); };
  MYCOLL_RETURN_IF_ERROR(Invitation::send(engine_.mesh(), {address, handle.nonce},
                                          {InvitationMessage::Content::kProbe, ""}, refused,
                                          &probe));
  for (const Deadline end = Deadline::after(kProbe); !probe->hasFailed() && !end.expired();) {
    if (isInterrupted()) return interrupted();
    pause(kTick);
  }
  *result = !probe->hasFailed();
  return Status();
}

// ---- waiting

// The engine's thread moves the bytes.
void Forming::pause(Milliseconds atMost) {
  wakeup_.wait(atMost);
  engine_.mesh()->progress();
  engine_.mesh()->checkProcesses();
}

void Forming::notify(const Invitation::Receiver& receiver, const Status& why) {
  (void)Invitation::send(engine_.mesh(), receiver, InvitationMessage(why), {},
                         &notices_.emplace_back());
}

void Forming::flush(Deadline end) {
  while (!end.expired()) {
    const auto isFlushed = [](const auto& notice) { return notice->isFlushed(); };
    if ((!round_ || round_->isFlushed()) &&
        std::all_of(notices_.begin(), notices_.end(), isFlushed)) {
      return;
    }
    pause(kShortestPoll);
  }
}

Status Forming::sentError() {
  for (const auto& reception : receptions_) MYCOLL_RETURN_IF_ERROR(reception->error());
  return Status();
}

// ---- texts

Status Forming::ended(int rank, const PeerAddress& peer) const {
  return error(Code::kPeerLost, "rank " + std::to_string(rank) + " (" + peer.describe() +
                                    ") ended before its first call, while the group was made; "
                                    "see its log");
}

Status Forming::lost(const Round::Report& loss, const PeerAddress& peer) const {
  if (!isAlive(peer)) return ended(loss.rank, peer);
  return error(Code::kPeerLost, sanitized(loss.why.message()) + " while the group was made");
}

Status Forming::hasGivenUp(const Handle& handle) const {
  return error(handle.hasLost ? Code::kPeerLost : Code::kStore,
               "rank " + std::to_string(handle.rank) + " (" + handle.address.describe() +
                   ") has given up: " + sanitized(handle.why));
}

Status Forming::forOthers(const Status& why) const {
  if (why.code() != Code::kInterrupted) return why;
  return error(Code::kAborted, "rank " + std::to_string(options_.rank) + " (" +
                                   mine_.address.describe() + ") was interrupted by a signal");
}

Status Forming::isLost(int rank, const std::string& why) const {
  return error(Code::kPeerLost,
               "the group cannot be made with rank " + std::to_string(rank) + ": " + why);
}

Status Forming::isUnlike(const Handle& other) const {
  const Handle& zero = options_.rank == 0 ? mine_ : other;
  const Handle& rank = options_.rank == 0 ? other : mine_;
  const std::string who = "rank " + std::to_string(rank.rank) + " (" + rank.address.describe();
  const std::string rankZero = "rank 0 (" + zero.address.describe() + ")";
  if (other.ranks != options_.ranks) {
    return error(Code::kStore, rankZero + " was started with " + std::to_string(zero.ranks) +
                                   " ranks, " + who + ") with " + std::to_string(rank.ranks) +
                                   ": the world sizes must be equal");
  }
  if (other.settings != mine_.settings) {
    return error(Code::kInvalidArgument, rankZero + " has '" + sanitized(zero.settings) + "', " +
                                             who + ") '" + sanitized(rank.settings) +
                                             "': it must be the same on all ranks");
  }
  const bool isLocal = engine_.mesh()->isLocal(other.address);
  if (!isLocal && (mine_.address.tcp.empty() || other.address.tcp.empty())) {
    return error(Code::kInvalidArgument,
                 "MYCOLL_TRANSPORT=shm on rank " +
                     std::to_string(mine_.address.tcp.empty() ? options_.rank : other.rank) +
                     ", but " + who + ") shares no memory with " + rankZero +
                     ": it is on another host");
  }
  return Status();
}

Status Forming::tooLate(int rank, const std::string& milliseconds,
                        const std::vector<int>& missing) const {
  std::string unclear;
  for (const int each : missing) {
    const auto found = unclear_.find(each);
    if (found == unclear_.end()) continue;
    unclear = " The store holds this, which may be of an earlier start: " + found->second;
    break;
  }
  return error(Code::kTimeout,
               "timeout after " + milliseconds + "ms: rank " + std::to_string(rank) +
                   " waited for the other ranks of " + std::to_string(options_.ranks) +
                   (missing.empty() ? "" : "; missing: " + listNumbers(missing)) +
                   (store_ ? ". Were they all started, with the same world size and the same "
                             "store, and have they all made the same groups in the same order?"
                           : ". Have they all called it, with the same ranks?") +
                   unclear);
}

std::map<int, Engine::Loss> Forming::losses() const {
  std::map<int, Engine::Loss> found;
  if (!options_.isOfJob || !store_) return found;
  const std::map<int64_t, Engine::Loss> known = engine_.losses();
  for (int rank = 0; rank < options_.ranks && !known.empty(); ++rank) {
    const auto loss = known.find(options_.globalRanks.empty() ? rank : options_.globalRanks[rank]);
    if (rank != options_.rank && loss != known.end()) found.emplace(rank, loss->second);
  }
  return found;
}

// ---- rank 0 ------------------------------------------------------------------------------------

class Root final : public Forming {
 public:
  Root(const GroupOptions& options, Store* store, Engine& engine, KnownPeers known)
      : Forming(options, store, engine, std::move(known)), candidates_(options.ranks) {}

 private:
  // Another rank, as far as it is known.
  struct Candidate {
    enum State {
      kUnknown,      // it has no handle
      kInvited,      // it is in the next round
      kStale,        // its handle is of an earlier time
      kUnreachable,  // it is invited again later
      kGone,         // it has ended or has given up
    };
    State state = kUnknown;
    Handle handle;
    bool isPublished = false;  // the handle is in the store
    bool isNew = false;        // ... and came after rank 0
    bool hasJoined = false;    // a round, by this handle
    bool isSlow = false;
    // kUnreachable, kGone: the formation fails if that lasts for longer than this. Kept while a
    // rank that was unreachable is invited again.
    Status why;
    Clock::time_point since;
    Clock::duration patience{};
    Deadline inviteAgain;

    bool isInvited() const { return state == kInvited; }
    // Begins to wait for the rank to come again.
    void wait(State next, const Status& reason, Clock::duration atMost) {
      if (next != kUnreachable || why.ok()) since = Clock::now();
      state = next;
      why = reason;
      patience = atMost;
    }
  };

  Status awaitAll() override;
  bool reportFailure(Status* why) override;

  void noteDepartures();
  Status check();
  Status lookAtStore();
  Status lookAt(int rank, bool* found);
  Status consider(int rank, Handle handle);
  int firstUnknown() const;
  Status handleReports();
  Status handleReport(const Round::Report& report);
  bool isRoundDue();
  Status startRound();
  std::vector<int> missing();

  std::vector<Candidate> candidates_;  // by rank
  bool hasLooked_ = false;             // at all handles once
  Deadline nextLook_;
  Milliseconds lookPause_ = kLookAgain;
  bool hasChanged_ = false;     // the ranks to be invited are not those of the round
  bool isRoundUrgent_ = false;  // ... as one of those has gone
  Clock::time_point lastChange_ = began_;
  uint64_t rounds_ = 0;
  std::vector<bool> joined_;
  bool isFormed_ = false;
  Clock::time_point roundBegan_, lastJoined_;
};

Status Root::awaitAll() {
  candidates_[0].state = Candidate::kInvited;
  candidates_[0].handle = mine_;
  for (int rank = 1; rank < options_.ranks && !known_.peers.empty(); ++rank) {
    Candidate& candidate = candidates_[rank];
    candidate.state = Candidate::kInvited;
    candidate.handle.nonce = nonceOf(known_, rank);
    candidate.handle.address = known_.peers[rank];
  }
  hasChanged_ = true;
  for (;;) {
    MYCOLL_RETURN_IF_ERROR(check());
    MYCOLL_RETURN_IF_ERROR(handleReports());
    if (isFormed_) return Status();
    MYCOLL_RETURN_IF_ERROR(lookAtStore());
    if (isRoundDue()) MYCOLL_RETURN_IF_ERROR(startRound());
    const int unknown = usesStore() ? firstUnknown() : 0;
    const Milliseconds next = unknown > 0 ? pollPause(kShortestPoll) : nextLook_.remaining();
    pause(std::clamp(next, kShortestPoll, kTick));
  }
}

bool Root::reportFailure(Status* why) {
  const Status text = forOthers(*why);
  if (round_ && !round_->fail(text)) return false;
  if (round_) joined_ = round_->state().joined;
  std::vector<int> others;  // in no round
  for (int rank = 1; rank < options_.ranks; ++rank) {
    if (!round_ || !joined_[rank]) others.push_back(rank);
  }
  if (usesStore()) {
    giveUp(others, why);  // they find the error in the store, which this process may be serving
    return true;
  }
  for (const int rank : others) {
    // The rank that was to invite it may be the one that is lost.
    const Candidate& candidate = candidates_[rank];
    const Handle& handle = candidate.handle;
    if (candidate.isInvited()) notify({handle.address, handle.nonce, candidate.isPublished}, text);
  }
  return true;
}

// Returns the error that makes further waiting pointless, if there is one.
Status Root::check() {
  const auto now = Clock::now();
  if (isInterrupted()) return interrupted();
  MYCOLL_RETURN_IF_ERROR(sentError());
  MYCOLL_RETURN_IF_ERROR(checkRival());
  noteDepartures();
  if (deadline_.expired()) {
    return tooLate(0, std::to_string(options_.timeout.count()), missing());
  }
  for (const auto& [rank, loss] : losses()) {
    const Candidate& candidate = candidates_[rank];
    const bool isReplaced = candidate.isInvited() && candidate.handle.address.uid != loss.uid;
    if (!isReplaced) return isLost(rank, loss.cause.message());
  }
  const Candidate* first = nullptr;
  for (const Candidate& each : candidates_) {
    const bool isOver = !each.isInvited() && !each.why.ok() && now - each.since > each.patience;
    if (isOver && (!first || each.since < first->since)) first = &each;
  }
  if (!first) return Status();
  bool isThere = false;  // it may have come just now
  const auto rank = static_cast<int>(first - candidates_.data());
  if (usesStore()) MYCOLL_RETURN_IF_ERROR(lookAt(rank, &isThere));
  if (first->isInvited()) return Status();
  const std::string departure = known_.departure ? known_.departure(rank, /*asks=*/false) : "";
  return departure.empty() ? first->why : isLost(rank, departure);
}

// A rank that has left the group from which it is known may still come, if there is a store.
void Root::noteDepartures() {
  const Milliseconds patience = store_ ? 2 * kAgain : Milliseconds(0);
  for (int rank = 1; rank < options_.ranks && known_.departure; ++rank) {
    Candidate& candidate = candidates_[rank];
    const bool hasCome = candidate.isPublished || (round_ && joined_[rank]);
    if ((candidate.isInvited() && hasCome) || candidate.state == Candidate::kGone) continue;
    const std::string departure = known_.departure(rank, /*asks=*/false);
    if (departure.empty()) continue;
    candidate.wait(Candidate::kGone, isLost(rank, departure), patience);
    hasChanged_ = isRoundUrgent_ = true;
    lastChange_ = Clock::now();
  }
}

// ---- handles

int Root::firstUnknown() const {
  for (int rank = 1; rank < options_.ranks; ++rank) {
    if (candidates_[rank].state == Candidate::kUnknown) return rank;
  }
  return 0;
}

Status Root::lookAtStore() {
  if (!usesStore()) return Status();
  if (!isPublished_) {
    MYCOLL_RETURN_IF_ERROR(publish());
    if (hasPredecessor_) lookPause_ = kLookSoon;
  }
  // The handles are read in order, up to the first that is missing; now and then, all of them.
  bool found = true;
  for (int rank = firstUnknown(); rank != 0 && found; rank = firstUnknown()) {
    MYCOLL_RETURN_IF_ERROR(lookAt(rank, &found));
  }
  if (nextLook_.isNever()) nextLook_ = Deadline::after(lookPause_);
  if (!nextLook_.expired()) return Status();
  for (int rank = 1; rank < options_.ranks; ++rank) {
    const Candidate& known = candidates_[rank];
    const bool mayHaveChanged = !known.isInvited() || (known.isSlow && !joined_[rank]);
    if (mayHaveChanged) MYCOLL_RETURN_IF_ERROR(lookAt(rank, &found));
  }
  hasLooked_ = true;
  lookPause_ = std::max(std::min(2 * lookPause_, kLookAgain), pollPause(kShortestPoll));
  nextLook_ = Deadline::after(lookPause_);
  return Status();
}

Status Root::lookAt(int rank, bool* found) {
  Handle handle;
  MYCOLL_RETURN_IF_ERROR(read(*store_, rank, found, &handle));
  if (!*found) return Status();
  const Candidate& candidate = candidates_[rank];
  // A notice may have come since.
  const bool isUnclear = candidate.state == Candidate::kStale && !handle.why.empty();
  if (handle.nonce == candidate.handle.nonce && !isUnclear) return Status();
  return consider(rank, std::move(handle));
}

// The rank has another handle than before, or one that was unclear.
Status Root::consider(int rank, Handle handle) {
  Candidate next;
  next.state = Candidate::kInvited;
  next.isPublished = true;
  const Candidate& before = candidates_[rank];
  next.isNew =
      handle.nonce == before.handle.nonce ? before.isNew : hasLooked_ || before.isPublished;
  bool isOfNow = next.isNew || this->isOfNow(handle.address);
  if (handle.rank != rank)
    return error(Code::kStore, "handle/" + std::to_string(rank) + " is of another rank");
  unclear_.erase(rank);
  if (!handle.why.empty()) {
    next.state = Candidate::kStale;
    MYCOLL_RETURN_IF_ERROR(this->isOfNow(handle, &isOfNow));
    if (isOfNow) next.wait(Candidate::kGone, hasGivenUp(handle), kAgain);
  } else if (isDead(handle.address)) {
    next.state = Candidate::kStale;
    if (isOfNow) next.wait(Candidate::kGone, ended(rank, handle.address), kAgain);
  } else {
    // A process that has ended may have published it for an earlier group.
    const bool hasGone =
        before.state == Candidate::kGone && handle.address.uid == before.handle.address.uid;
    const Status unlike = isUnlike(handle);
    bool isCurrent = true;
    if (hasGone || !unlike.ok()) MYCOLL_RETURN_IF_ERROR(this->isCurrent(handle, &isCurrent));
    if (isCurrent && !unlike.ok()) return unlike;
    if (!isCurrent && hasGone) return Status();
    if (!isCurrent) next.state = Candidate::kStale;
  }
  next.handle = std::move(handle);
  if (next.isInvited() || candidates_[rank].isInvited()) {
    hasChanged_ = true;
    lastChange_ = Clock::now();
  }
  candidates_[rank] = std::move(next);
  return Status();
}

// ---- rounds

Status Root::handleReports() {
  if (!round_) return Status();
  Round::State state = round_->state();
  isFormed_ = state.isFormed;
  for (const Round::Report& report : state.reports) MYCOLL_RETURN_IF_ERROR(handleReport(report));
  if (state.joined != joined_) {
    joined_ = std::move(state.joined);
    lastJoined_ = Clock::now();
  }
  for (int rank = 1; rank < options_.ranks; ++rank) {
    Candidate& candidate = candidates_[rank];
    if (!joined_[rank] || !candidate.isInvited()) continue;
    candidate.why = Status();
    candidate.hasJoined |= candidate.handle.nonce == round_->roster().members[rank].nonce;
  }
  return Status();
}

Status Root::handleReport(const Round::Report& report) {
  Candidate& candidate = candidates_[report.rank];
  const PeerAddress& address = candidate.handle.address;
  if (report.kind == Round::Report::kGaveUp) {
    return Status(report.why.code(), sanitized(report.why.message()));
  }
  if (report.kind == Round::Report::kLate) {
    return tooLate(report.rank, sanitized(report.why.message()), missing());
  }
  if (report.loss == LossReason::kUnauthenticated) {
    const Tls* const tls = engine_.mesh()->options().tls.get();
    return error(Code::kInvalidArgument,
                 report.why.message() +
                     (tls && tls->usesCertificates()
                          ? ": each rank needs a certificate by an authority that the others trust"
                          : ": MYCOLL_SECRET_FILE must be the same everywhere"));
  }
  // The rank has another handle since.
  if (candidate.handle.nonce != round_->roster().members[report.rank].nonce) return Status();
  const bool isRefused = report.loss == LossReason::kNotListening;
  hasChanged_ = isRoundUrgent_ = true;
  lastChange_ = Clock::now();
  nextLook_ = earlier(nextLook_, Deadline::after(kLookSoon));
  if (report.loss == LossReason::kUnreachable) {
    const std::chrono::seconds patience(engine_.mesh()->options().networkSeconds);
    candidate.wait(Candidate::kUnreachable, error(Code::kNetwork, report.why.message()), patience);
    candidate.inviteAgain = Deadline::after(kLookAgain);
  } else if (candidate.hasJoined || candidate.isNew || !store_ || !candidate.isPublished ||
             (!isRefused && report.loss != LossReason::kLeft) ||
             (isRefused && !isAlive(address) && isOfNow(address))) {
    // Without a store it cannot come again. A known rank listens as long as it is in that group.
    candidate.wait(Candidate::kGone, lost(report, address), store_ ? kAgain : Milliseconds(0));
  } else {
    candidate.state = Candidate::kStale;
    candidate.why = Status();
  }
  return Status();
}

// A round ends the one before. So that ranks that arrive or join slowly do not keep rank 0 from
// ever completing one, it begins a round with missing ranks only when the others have joined.
bool Root::isRoundDue() {
  const auto now = Clock::now();
  const bool isSlow =
      now - lastJoined_ > kSlow && now - lastJoined_ > kTimesSlower * (lastJoined_ - roundBegan_);
  bool isComplete = true, isSettled = true;
  int invited = 0;
  for (int rank = 0; rank < options_.ranks; ++rank) {
    Candidate& candidate = candidates_[rank];
    if (candidate.state == Candidate::kUnreachable && candidate.inviteAgain.expired()) {
      candidate.state = Candidate::kInvited;
      hasChanged_ = true;
    }
    isComplete &= candidate.isInvited();
    invited += candidate.isInvited();
    const bool isJoining = round_ && candidate.isInvited() && !joined_[rank] &&
                           !round_->roster().members[rank].isAbsent();
    if (!isJoining || candidate.isSlow) continue;
    isSettled = false;
    if (isSlow) candidate.isSlow = hasChanged_ = isRoundUrgent_ = true;
  }
  if (!hasChanged_) return false;
  if (isComplete) return true;
  const auto quiet = now - lastChange_;
  return isRoundUrgent_ ? quiet > kUrgent : invited > 1 && isSettled && quiet > kPartial;
}

Status Root::startRound() {
  if (round_ && !round_->end()) return Status();
  MYCOLL_RETURN_IF_ERROR(handleReports());  // the last ones
  Roster roster;
  MYCOLL_RETURN_IF_ERROR(Handle::freshNonce(&roster.number));
  // Larger than those of a process that was rank 0 before.
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  roster.round = std::max(rounds_ + 1, static_cast<uint64_t>(now / std::chrono::microseconds(1)));
  rounds_ = roster.round;
  std::vector<PeerAddress> peers(candidates_.size());
  for (const Candidate& candidate : candidates_) {
    Roster::Member& member = roster.members.emplace_back();
    if (!candidate.isInvited()) continue;
    member.nonce = candidate.handle.nonce;
    peers[roster.members.size() - 1] = candidate.handle.address;
    member.isSlow = candidate.isSlow;
    member.isPublished = candidate.isPublished || candidate.hasJoined;
  }
  roster.peers = std::move(peers);
  hasChanged_ = isRoundUrgent_ = false;
  roundBegan_ = lastJoined_ = Clock::now();
  joined_.assign(options_.ranks, false);
  InvitationMessage message(InvitationMessage::Content::kRoster, roster.encode());
  round_.reset();  // a connection to a rank that has not joined is not authenticated by it
  return Round::open(engine_.mesh(), options_.name, 0, std::move(message), std::move(roster),
                     wakeup_, &round_);
}

std::vector<int> Root::missing() {
  if (round_) joined_ = round_->state().joined;
  std::vector<int> found;
  for (int rank = 1; rank < options_.ranks; ++rank) {
    if (!candidates_[rank].isInvited() || (round_ && !joined_[rank])) found.push_back(rank);
  }
  return found;
}

// ---- the others --------------------------------------------------------------------------------

class Member final : public Forming {
 public:
  using Forming::Forming;

 private:
  Status awaitAll() override;
  bool reportFailure(Status* why) override;

  // If the ranks are known.
  Invitation::Receiver rankZero() const {
    return {known_.peers[0], nonceOf(known_, 0), /*isOpened=*/false};
  }
  // Whether this rank is in no round in which it would learn what becomes of the group.
  bool isAlone() const { return !round_ || lostParent_ != Clock::time_point(); }
  Status check();
  Status checkKnownPeers();
  Status compare(const Roster& roster) const;
  Status join();
  Status attendRound();
  Status lookForRankZero();
  Status lookAtStore(Status* missing);

  Deadline nextLook_;
  bool hasAsked_ = false;  // rank 0 whether it has left
  bool hasLooked_ = false;
  std::string firstNonce_;  // of rank 0's handle, when this rank looked first; empty: none
  Deadline rankZeroGone_ = Deadline::never();
  Clock::time_point lostParent_, lostKnownPeer_;
  Deadline nextForward_;
  bool hasReportedLate_ = false;
  bool isKnownToAll_ = false;  // the failure
  std::unique_ptr<Invitation> probe_;
};

Status Member::awaitAll() {
  if (usesStore()) MYCOLL_RETURN_IF_ERROR(publish());
  nextLook_ = Deadline::after(known_.peers.empty() ? kLookAgain : kAgain);
  for (;;) {
    MYCOLL_RETURN_IF_ERROR(check());
    MYCOLL_RETURN_IF_ERROR(join());
    if (round_) {
      MYCOLL_RETURN_IF_ERROR(attendRound());
      if (round_->state().isFormed && round_->roster().isComplete()) return Status();
    }
    if (isAlone() && nextLook_.expired()) MYCOLL_RETURN_IF_ERROR(lookForRankZero());
    pause(kTick);
  }
}

bool Member::reportFailure(Status* why) {
  const Status text = forOthers(*why);
  if (round_ && !isKnownToAll_) round_->report({round_->rank(), Round::Report::kGaveUp, text});
  // This rank leaves the round, so that it will not pass on what rank 0 sends to its subtree.
  if (round_ && !round_->fail(text)) return false;
  // The round may be over, and rank 0 would wait for this rank in a later one.
  if (!isKnownToAll_ && sentError().ok()) {
    if (!known_.peers.empty()) {
      const bool isThere = !known_.departure || known_.departure(0, /*asks=*/false).empty();
      if (isThere) notify(rankZero(), text);
    } else if (round_) {
      const Roster& roster = round_->roster();
      notify({roster.peers[0], roster.members[0].nonce}, text);
    }
  }
  if (usesStore() && !isKnownToAll_ && (isAlone() || !sentError().ok())) giveUp({0}, why);
  return true;
}

Status Member::check() {
  if (isInterrupted()) return interrupted();
  MYCOLL_RETURN_IF_ERROR(sentError());
  MYCOLL_RETURN_IF_ERROR(checkRival());
  if (deadline_.expired()) {
    const std::string timeout = std::to_string(options_.timeout.count());
    if (!round_ || std::exchange(hasReportedLate_, true)) {
      return tooLate(options_.rank, timeout, {0});
    }
    round_->report({options_.rank, Round::Report::kLate, Status(Code::kTimeout, timeout)});
    deadline_ = Deadline::after(kAgain);
  }
  for (const auto& [rank, loss] : losses()) {
    const bool isInvited = round_ && !round_->roster().members[rank].isAbsent();
    const bool isReplaced = isInvited && round_->roster().peers[rank].uid != loss.uid;
    if (!isReplaced) return isLost(rank, loss.cause.message());
  }
  return !isAlone() || store_ ? Status() : checkKnownPeers();
}

// Without a store, a rank that is not invited learns only from its own connections why. With a
// store, rank 0 detects the other losses.
Status Member::checkKnownPeers() {
  for (const PeerLost& lost : receptions_[0]->losses()) {
    for (int rank = 0; rank < options_.ranks; ++rank) {
      const PeerAddress& peer = known_.peers[rank];
      if (peer.uid != lost.uid) continue;
      if (lostKnownPeer_ == Clock::time_point()) lostKnownPeer_ = Clock::now();
      // Rank 0 may notify, or may be the reason.
      if (rank != 0 && (store_ || Clock::now() - lostKnownPeer_ < 2 * kAgain)) continue;
      const std::string words = "rank " + std::to_string(rank) + " (" + peer.describe() + ") " +
                                lost.loss.describe() + " (seen by rank " +
                                std::to_string(options_.rank) + ")";
      return this->lost(
          {rank, Round::Report::kLost, Status(Code::kNetwork, words), lost.loss.reason}, peer);
    }
  }
  if (!probe_ || !probe_->hasFailed()) return Status();
  return error(Code::kPeerLost, "rank 0 (" + known_.peers[0].describe() + ") " + probe_->failure() +
                                    " while the group was made");
}

// Not ok: the roster is not that of the group that this rank was called for.
Status Member::compare(const Roster& roster) const {
  const auto ranks = static_cast<int>(roster.members.size());
  const std::string self =
      "rank " + std::to_string(options_.rank) + " (" + mine_.address.describe() + ")";
  bool isEqual = ranks == options_.ranks && roster.peers[options_.rank].uid == mine_.address.uid;
  if (known_.nonces.empty()) {
    return isEqual ? Status()
                   : error(Code::kStore, "rank 0 was started with " + std::to_string(ranks) +
                                             " ranks, " + self + " with " +
                                             std::to_string(options_.ranks) +
                                             ": the world sizes must be equal");
  }
  for (int rank = 0; rank < ranks && isEqual; ++rank) {
    isEqual = roster.members[rank].isAbsent() || roster.peers[rank].uid == known_.peers[rank].uid;
  }
  return isEqual ? Status()
                 : error(Code::kInvalidArgument, "rank 0 and " + self +
                                                     " were called with different handles, or in "
                                                     "different orders");
}

// Joins the latest round that this rank is invited to, if it is later than the current one. If the
// round is of another group, this rank joins only to report that.
Status Member::join() {
  std::optional<InvitationMessage> latest;
  Roster roster;
  if (round_) roster.round = round_->roster().round;
  for (const auto& reception : receptions_) {
    for (InvitationMessage& message : reception->takeMessages()) {
      Roster next;
      MYCOLL_RETURN_IF_ERROR(Roster::decode(message.text, &next));
      if (next.round <= roster.round) continue;
      roster = std::move(next);
      latest = std::move(message);
    }
  }
  if (!latest) return Status();
  const Status difference = compare(roster);
  const auto isThis = [this](const PeerAddress& peer) { return peer.uid == mine_.address.uid; };
  const auto self = std::find_if(roster.peers.begin(), roster.peers.end(), isThis);
  if (self == roster.peers.end()) return difference;
  const auto rank = static_cast<int>(self - roster.peers.begin());
  if (round_) (void)round_->end();
  round_.reset();
  lostParent_ = {};
  MYCOLL_RETURN_IF_ERROR(Round::open(engine_.mesh(), options_.name, rank, std::move(*latest),
                                     std::move(roster), wakeup_, &round_,
                                     /*isToJoin=*/difference.ok()));
  return difference;
}

Status Member::attendRound() {
  const Round::State state = round_->state();
  if (!state.failure.ok()) {
    isKnownToAll_ = true;
    return state.failure;
  }
  if (state.isFormed) return Status();
  if (state.parent != Round::Parent::kHere) {
    if (lostParent_ == Clock::time_point()) {
      lostParent_ = Clock::now();
      nextLook_ = Deadline::after(kLookAgain);
    }
    const int parent = round_->parent();
    const bool isRankZero = parent == 0 && !store_;  // no other rank begins a round
    const bool hasLeft = state.parent == Round::Parent::kLeft;
    const Milliseconds grace = hasLeft ? kNextRound : isRankZero ? Milliseconds(0) : kAgain;
    // If the parent has left, rank 0 begins another round, or writes its error to the store.
    if (Clock::now() - lostParent_ >= grace && !(hasLeft && store_)) {
      const PeerAddress& address = round_->roster().peers[parent];
      return hasLeft ? ended(parent, address) : lost(state.parentLoss, address);
    }
  }
  if (nextForward_.isNever() || nextForward_.expired()) {
    if (!nextForward_.isNever()) round_->forward();
    nextForward_ = Deadline::after(kForward);
  }
  return Status();
}

// Rank 0 may have left the group from which it is known, and may still come if there is a store. If
// it is known by its handle, it may have given up.
Status Member::lookForRankZero() {
  nextLook_ = Deadline::after(pollPause(kLookAgain));
  if (!known_.nonces.empty()) {
    if (!probe_) MYCOLL_RETURN_IF_ERROR(Invitation::open(engine_.mesh(), rankZero(), {}, &probe_));
    probe_->send({InvitationMessage::Content::kProbe, ""});
  }
  Status missing;
  if (known_.departure) {
    const std::string departure = known_.departure(0, !std::exchange(hasAsked_, true));
    missing = departure.empty() ? checkKnownPeers() : isLost(0, departure);
  }
  if (store_ && waited() < 2 * kAgain) missing = Status();
  if (store_) MYCOLL_RETURN_IF_ERROR(lookAtStore(&missing));
  return missing;
}

// Rank 0 may have given up, or may have been started for another group. missing: set to ok if rank
// 0 is there.
Status Member::lookAtStore(Status* missing) {
  if (!isPublished_) MYCOLL_RETURN_IF_ERROR(publish());
  Handle zero;
  bool found = false;
  MYCOLL_RETURN_IF_ERROR(read(*store_, 0, &found, &zero));
  if (!std::exchange(hasLooked_, true)) firstNonce_ = zero.nonce;
  if (!found) return Status();
  unclear_.erase(0);
  const PeerList& peers = round_ ? round_->roster().peers : known_.peers;
  const bool isKnown = !peers.empty() && peers[0].uid == zero.address.uid;
  bool isOfNow = isKnown || zero.nonce != firstNonce_ || this->isOfNow(zero.address);
  if (!zero.why.empty()) {
    MYCOLL_RETURN_IF_ERROR(this->isOfNow(zero, &isOfNow));
    isKnownToAll_ = isOfNow;
    return isOfNow ? hasGivenUp(zero) : Status();
  }
  if (isOfNow && isDead(zero.address)) {
    if (rankZeroGone_.isNever()) rankZeroGone_ = Deadline::after(kAgain);
    return rankZeroGone_.expired() ? ended(0, zero.address) : Status();
  }
  const Status unlike = isUnlike(zero);
  if (unlike.ok() && missing->ok()) return Status();
  bool isCurrent = false;
  MYCOLL_RETURN_IF_ERROR(this->isCurrent(zero, &isCurrent));
  if (isCurrent) *missing = Status();
  return isCurrent ? unlike : Status();
}

}  // namespace

KnownPeers KnownPeers::from(const GroupAddress& group, const std::vector<int>& members,
                            const std::string& name) {
  KnownPeers known;
  known.secret = asText(hmacSha256(group.secret, "mycoll formation " + name));
  std::vector<PeerAddress> peers;
  for (const int member : members) peers.push_back(group.peers[member]);
  known.peers = std::move(peers);
  return known;
}

Status formGroup(const GroupOptions& options, Store* store, Engine& engine, KnownPeers known,
                 std::shared_ptr<void>* connections, GroupAddress* result) {
  std::shared_ptr<Forming> forming;
  if (options.rank == 0) {
    forming = std::make_shared<Root>(options, store, engine, std::move(known));
  } else {
    forming = std::make_shared<Member>(options, store, engine, std::move(known));
  }
  *connections = forming;
  return forming->run(result);
}

Status reportAbsence(const GroupOptions& options, Store& store, const Status& why) {
  Handle last;
  last.rank = options.rank;
  last.ranks = options.ranks;
  last.settings = Handle::settingsHere();
  PeerAddress& address = last.address;
  address.uid.assign(PeerAddress::kUidLength, '0');  // of no process
  address.hostIdentity = "none";
  address.pidSpace = pidSpace();
  address.hostName = hostName();
  address.pid = processId();
  address.startTicks = processStartTicks(address.pid);
  last = publishLast(store, std::move(last), why);
  // Only rank 0 reads the others' handles.
  std::vector<int> readers(options.rank == 0 ? options.ranks : 1);
  std::iota(readers.begin(), readers.end(), 0);
  if (options.rank == 0) readers.erase(readers.begin());
  const Deadline end = Deadline::after(kReading);
  const Status other = awaitReaders(options, store, readers, last, end, end);
  return other.ok() ? why : other;
}

}  // namespace mycoll
