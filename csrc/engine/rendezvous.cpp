#include "engine/rendezvous.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "base/deadline.h"
#include "base/env.h"
#include "base/sanitize.h"
#include "base/sha256.h"
#include "base/text.h"
#include "base/topology.h"
#include "engine/card.h"
#include "engine/engine.h"
#include "transport/bell.h"

namespace mycoll {
namespace {

// Between two looks at the store of one rank that waits long: all of them together are not to ask
// one server more than it can answer.
std::chrono::microseconds longestPause(int ranks) {
  return std::max(std::chrono::microseconds(10'000), ranks * std::chrono::microseconds(100));
}

// Between looks at the store: none at first, as a look at a server takes as long as the shortest
// sleep; then longer and longer ones.
class Pauses {
 public:
  explicit Pauses(int ranks) : longest_(longestPause(ranks)) {}
  void take() {
    if (looks_++ < kLooksWithout) return;
    std::this_thread::sleep_for(pause_);
    pause_ = std::min(pause_ * 2, longest_);
  }

 private:
  static constexpr int kLooksWithout = 4;
  std::chrono::microseconds longest_;
  int looks_ = 0;
  std::chrono::microseconds pause_{25};
};

Status readSecretFile(std::string* secret) {
  MYCOLL_RETURN_IF_ERROR(Env::check());
  const Env& env = Env::process();
  if (env.secretFile.empty()) return Status();
  std::ifstream file(env.secretFile, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (text.size() < 16) {
    return Status(Code::kInvalidArgument, "MYCOLL_SECRET_FILE: '" + env.secretFile +
                                              "' cannot be read, or is shorter than 16 bytes");
  }
  *secret = text;
  return Status();
}

bool isFirstMeeting() {
  static std::atomic<bool> wasThereOne{false};
  return !wasThereOne.exchange(true, std::memory_order_relaxed);
}

// A card of a process that cannot be looked at (on another host) counts as that of a living one
// when it has stood for so long.
constexpr auto kSettled = std::chrono::milliseconds(1000);
// In groups of more ranks those that come too late hear from rank 0 who is missing.
constexpr int kMostThatLook = 64;

bool isSameProcess(const PeerAddress& a, const PeerAddress& b) {
  return a.pidSpace == b.pidSpace && a.hostName == b.hostName && a.pid == b.pid &&
         a.startTicks == b.startTicks;
}

// One rank's part in the making of a group. One thread, which blocks in run().
class Meeting {
 public:
  // engine: null where there is none, and the rank only comes to say why: giveUp().
  Meeting(const GroupOptions& options, Store& store, Engine* engine);

  Status run();
  void giveUp(const Status& why);
  // After run() has ended well.
  Status result(GroupAddress* address);

 private:
  using Clock = std::chrono::steady_clock;

  bool isLeader() const { return options_.rank == 0; }
  bool isLarge() const { return options_.ranks > kMostThatLook; }
  static std::string key(const char* what, int rank) {
    return std::string(what) + "/" + std::to_string(rank);
  }
  // Empty: not there.
  Status get(const std::string& name, std::string* value);

  // ---- the protocol
  Status putCard();
  Status meetOthers();
  Status lead(bool* moved, bool* isOver);
  Status readCards(bool* moved);
  Status decodeRosterCards();
  Status follow(bool* moved, bool* isOver);
  Status waitForTheOthers();

  // ---- failures
  Status lookAround();
  Status checkEarlierSelf();
  Status checkRefusal();
  Status checkOther(int rank, const std::string& text);
  Status checkLosses();
  Status takenBy(const Card& other);
  Status differentWorlds(int rank, const Card& other) const;
  Status checkSettings() const;
  Status hasGivenUp(int rank, const Card& card) const;
  Status tooLate();
  void tellOthers(const Status& status);
  void markCard(const Status& status);
  bool isAliveHere(const Card& card) const;
  // Whether its process can be looked at. Who shares no more than the host's name may be alive in
  // another pid namespace, or on a clone of this host.
  bool isVisible(const Card& card) const {
    return !mine_.address.pidSpace.empty() && card.address.pidSpace == mine_.address.pidSpace;
  }

  const GroupOptions& options_;
  Store& store_;
  Engine* const engine_;
  const Deadline deadline_;
  std::string fileSecret_;
  Card mine_;
  std::string cardText_;
  // Rank 0
  std::vector<std::string> cards_;
  int confirmations_ = 1;  // ranks before this one have confirmed the roster; rank 0 is not asked
  Clock::time_point cardsRead_;
  // Everybody
  std::string number_;  // of the roster that was confirmed last, by rank 0 as it makes it
  std::vector<std::string> roster_;
  std::vector<Card> known_;      // the roster's
  std::vector<int> neighbours_;  // whose processes can be looked at, where this is not rank 0
  std::string notOurs_;          // the number of a roster without this rank's card
  // What is known of another rank's card.
  struct Life {
    std::string text;  // empty: there was none yet
    Card card;
    Clock::time_point since;  // the card was first seen
    bool isOfNow = false;     // its process takes part in this meeting, or did
    Clock::time_point lastAlive;
  };
  std::map<int, Life> lives_;
  std::vector<std::string> concerned_;  // numbers of cards whose owners should hear of a failure
  bool isToldByLeader_ = false;
  const bool isFirst_;
  Clock::time_point lastLook_ = Clock::now();
};

// ---- the protocol

Meeting::Meeting(const GroupOptions& options, Store& store, Engine* engine)
    : options_(options),
      store_(store),
      engine_(engine),
      deadline_(Deadline::after(options.timeout)),
      isFirst_(isFirstMeeting()) {
  mine_.ranks = options.ranks;
  mine_.settings = Card::settingsHere();
  cards_.resize(options.ranks);
}

Status Meeting::run() {
  const Status status = meetOthers();
  if (status.code() == Code::kInvalidArgument) {
    giveUp(status);
  } else if (!status.ok()) {
    tellOthers(status);
  }
  return status;
}

Status Meeting::putCard() {
  mine_.address = engine_->mesh()->address();
  MYCOLL_RETURN_IF_ERROR(readSecretFile(&fileSecret_));
  MYCOLL_RETURN_IF_ERROR(checkEarlierSelf());
  MYCOLL_RETURN_IF_ERROR(Card::freshNonce(&mine_.nonce));
  cardText_ = mine_.encode();
  return store_.set(key("card", options_.rank), cardText_);
}

Status Meeting::meetOthers() {
  MYCOLL_RETURN_IF_ERROR(putCard());
  Pauses pauses(options_.ranks);
  for (;;) {
    bool moved = false, isOver = false;
    MYCOLL_RETURN_IF_ERROR(isLeader() ? lead(&moved, &isOver) : follow(&moved, &isOver));
    if (isOver) break;
    MYCOLL_RETURN_IF_ERROR(lookAround());
    if (moved) pauses = Pauses(options_.ranks);
    pauses.take();
  }
  MYCOLL_RETURN_IF_ERROR(store_.set(key("done", options_.rank), number_ + mine_.nonce));
  return isLeader() ? waitForTheOthers() : Status();
}

Status Meeting::result(GroupAddress* address) {
  if (isLeader()) MYCOLL_RETURN_IF_ERROR(decodeRosterCards());
  MYCOLL_RETURN_IF_ERROR(checkSettings());
  const std::string shared = known_[0].nonce + number_;
  Digest digest = fileSecret_.empty() ? sha256(shared) : hmacSha256(fileSecret_, shared);
  address->secret.assign(reinterpret_cast<const char*>(digest.data()), digest.size());
  address->name = options_.name;
  setContext(address);
  address->rank = options_.rank;
  address->peers.reserve(known_.size());
  for (Card& card : known_) address->peers.push_back(std::move(card.address));
  return Status();
}

Status Meeting::decodeRosterCards() {
  known_.assign(roster_.size(), Card());
  neighbours_.clear();
  for (size_t rank = 0; rank < roster_.size(); ++rank) {
    MYCOLL_RETURN_IF_ERROR(Card::decode(roster_[rank], &known_[rank]));
    if (isVisible(known_[rank])) neighbours_.push_back(static_cast<int>(rank));
  }
  return Status();
}

Status Meeting::get(const std::string& name, std::string* value) {
  bool found = false;
  MYCOLL_RETURN_IF_ERROR(store_.tryGet(name, &found, value));
  if (!found) value->clear();
  return Status();
}

Status Meeting::readCards(bool* moved) {
  bool isComplete = true, isNew = false;
  for (int rank = 0; rank < options_.ranks; ++rank) {
    std::string text = cardText_;
    if (rank != 0) MYCOLL_RETURN_IF_ERROR(get(key("card", rank), &text));
    isNew |= text != cards_[rank];
    isComplete &= !text.empty();
    cards_[rank] = std::move(text);
  }
  if (!isComplete || !isNew) return Status();
  std::string nonce;
  MYCOLL_RETURN_IF_ERROR(Card::freshNonce(&nonce));
  number_ = nonce.substr(0, 16);
  roster_ = cards_;
  confirmations_ = 1;
  *moved = true;
  MYCOLL_RETURN_IF_ERROR(store_.set("roster", encodeRoster(number_, roster_)));
  MYCOLL_RETURN_IF_ERROR(store_.set("latest", number_));
  return store_.set(key("ack", options_.rank), number_);
}

// Rank 0: cards -> roster, confirmations -> commit. It need not read what it has written: where
// there are two of them, one is left waiting for the others to be done, and finds that its card has
// been taken.
Status Meeting::lead(bool* moved, bool* isOver) {
  // Those of a roster that waits to be confirmed rarely change.
  const auto now = Clock::now();
  if (number_.empty() || now - cardsRead_ >= longestPause(options_.ranks)) {
    MYCOLL_RETURN_IF_ERROR(readCards(moved));
    cardsRead_ = now;
  }
  if (number_.empty()) return Status();
  for (; confirmations_ < options_.ranks; ++confirmations_) {
    std::string ack;
    MYCOLL_RETURN_IF_ERROR(get(key("ack", confirmations_), &ack));
    if (ack != number_) return Status();
  }
  *isOver = true;
  return store_.set("commit", number_);
}

// The others: confirm the roster that holds the own card; over when it is committed.
Status Meeting::follow(bool* moved, bool* isOver) {
  if (!number_.empty()) {
    std::string commit;
    MYCOLL_RETURN_IF_ERROR(get("commit", &commit));
    *isOver = commit == number_;
    if (*isOver) return Status();
  }
  // The roster is long in a large job: it is read once.
  std::string number;
  MYCOLL_RETURN_IF_ERROR(get("latest", &number));
  if (number.empty() || number == number_ || number == notOurs_) return Status();
  std::string text;
  MYCOLL_RETURN_IF_ERROR(get("roster", &text));
  std::vector<std::string> roster;
  const bool isOne = decodeRoster(text, cards_.size(), &number, &roster);
  if (!isOne || roster[options_.rank] != cardText_) {
    notOurs_ = number;
    return Status();
  }
  if (number == number_) return Status();
  number_ = std::move(number);
  roster_ = std::move(roster);
  MYCOLL_RETURN_IF_ERROR(decodeRosterCards());
  *moved = true;
  return store_.set(key("ack", options_.rank), number_);
}

Status Meeting::waitForTheOthers() {
  Pauses pauses(options_.ranks);
  for (int rank = 1; rank < options_.ranks; ++rank) {
    for (;;) {
      std::string done;
      MYCOLL_RETURN_IF_ERROR(get(key("done", rank), &done));
      if (done.starts_with(number_)) break;
      MYCOLL_RETURN_IF_ERROR(lookAround());
      pauses.take();
    }
  }
  return Status();
}

// ---- failures: what makes waiting pointless, and who is told of it

bool Meeting::isAliveHere(const Card& card) const {
  return isVisible(card) && isLiving(lookAtProcess(card.address.pid, card.address.startTicks));
}

// Another living process has our rank.
Status Meeting::checkEarlierSelf() {
  std::string text;
  MYCOLL_RETURN_IF_ERROR(get(key("card", options_.rank), &text));
  if (text.empty()) return Status();
  Card card;
  MYCOLL_RETURN_IF_ERROR(Card::decode(text, &card));
  if (isSameProcess(card.address, mine_.address)) return Status();
  // A process that has left its groups, as all of them do before they meet anew, may come back as
  // another rank.
  const Deadline settled = earlier(deadline_, Deadline::after(kSettled));
  while (isAliveHere(card) && BellSocket::isThere(card.address.uid)) {
    if (settled.expired()) return takenBy(card);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return Status();
}

Status Meeting::takenBy(const Card& other) {
  concerned_.push_back(other.nonce);
  return Status(Code::kStore,
                "mycoll group '" + options_.name + "': rank " + std::to_string(options_.rank) +
                    " is taken by " + other.address.describe() + ", and this is " +
                    mine_.address.describe() + ". Two processes were started with one rank.");
}

// This meeting cannot succeed: whoever takes part in it should hear why, and not wait. Told under
// the numbers of their cards, which no other meeting has: rank 0 tells all, the others tell rank
// 0 (unless they heard it from there), and a rank that is there twice tells its double.
void Meeting::tellOthers(const Status& status) {
  const bool isTooLate = status.code() == Code::kTimeout && isLeader() && isLarge();
  if (status.code() != Code::kStore && status.code() != Code::kPeerLost && !isTooLate) return;
  if (!isLeader()) markCard(status);
  if (!isToldByLeader_) {
    std::vector<std::string> leader(1);
    if (!isLeader() && !get(key("card", 0), &leader[0]).ok()) return;
    for (const std::string& text : isLeader() ? cards_ : leader) {
      Card card;
      if (!text.empty() && Card::decode(text, &card).ok()) concerned_.push_back(card.nonce);
    }
  }
  const std::string text = std::string(isLeader() ? "l" : "-") +
                           static_cast<char>('a' + static_cast<int>(status.code())) +
                           status.message();
  for (const std::string& nonce : concerned_) {
    // The store may be what has failed: then they find out by themselves.
    if (nonce != mine_.nonce && !store_.set("refused/" + nonce, text).ok()) return;
  }
}

// For a rank 0 that comes later. Who tries again replaces the card.
void Meeting::markCard(const Status& status) {
  std::string text;
  if (!get(key("card", options_.rank), &text).ok() || text != cardText_) return;
  Card marked = mine_;
  marked.why = status.message();
  (void)store_.set(key("card", options_.rank), marked.encode());
}

// There is no mesh, so this rank cannot take part. It says so on a card that looks as if it had
// been in the meeting and had left, unless a living process has the rank.
void Meeting::giveUp(const Status& why) {
  mine_.address.uid.assign(PeerAddress::kUidLength, '0');  // nobody's
  mine_.address.hostIdentity = "none";
  mine_.address.pidSpace = pidSpace();
  mine_.address.hostName = hostName();
  mine_.address.pid = processId();
  mine_.address.startTicks = processStartTicks(mine_.address.pid);
  if (!checkEarlierSelf().ok() || !Card::freshNonce(&mine_.nonce).ok()) return;
  if (!get(key("card", options_.rank), &cardText_).ok()) return;
  markCard(why);
}

Status Meeting::checkRefusal() {
  std::string text;
  MYCOLL_RETURN_IF_ERROR(get("refused/" + mine_.nonce, &text));
  if (text.size() < 3) return Status();
  isToldByLeader_ = text[0] == 'l';
  return statusFromPeer(text[1] - 'a', text.substr(2));
}

Status Meeting::differentWorlds(int rank, const Card& other) const {
  return Status(Code::kStore,
                "mycoll group '" + options_.name + "': rank " + std::to_string(options_.rank) +
                    " was started with " + std::to_string(options_.ranks) + " ranks, rank " +
                    std::to_string(rank) + " (" + other.address.describe() + ") with " +
                    std::to_string(other.ranks) + ": the world sizes must be equal");
}

// All ranks have the same roster, so all find the same.
Status Meeting::checkSettings() const {
  const Card& first = known_[0];
  for (size_t rank = 1; rank < known_.size(); ++rank) {
    const Card& other = known_[rank];
    if (other.settings == first.settings) continue;
    return Status(Code::kInvalidArgument, "mycoll group '" + options_.name + "': rank 0 (" +
                                              first.address.describe() + ") has " + first.settings +
                                              ", rank " + std::to_string(rank) + " (" +
                                              other.address.describe() + ") " + other.settings +
                                              ": it must be the same on all ranks");
  }
  return Status();
}

// Another's card: how it looks by now.
Status Meeting::checkOther(int rank, const std::string& text) {
  const auto [at, isFirstLook] = lives_.try_emplace(rank);
  Life& life = at->second;
  if (text != life.text) {
    Card card;
    if (text.empty() || !Card::decode(text, &card).ok()) return Status();
    // Not left over from earlier, to be replaced: its card came after this meeting had begun, or,
    // in this process's first meeting, it is younger than this process.
    const bool isOfNow = !isFirstLook || (isFirst_ && isVisible(card) &&
                                          card.address.startTicks >= mine_.address.startTicks);
    life = Life{text, std::move(card), Clock::now(), isOfNow, Clock::now()};
  }
  if (life.text.empty()) return Status();
  const bool isAlive = isAliveHere(life.card);
  if (isAlive) life.isOfNow = true, life.lastAlive = Clock::now();
  const bool isSettled = Clock::now() - life.since > kSettled;
  if (!life.card.why.empty()) {
    // It has had the time to try again.
    return life.isOfNow && isSettled ? hasGivenUp(rank, life.card) : Status();
  }
  if (life.card.ranks != options_.ranks && (isAlive || (!isVisible(life.card) && isSettled))) {
    std::string done;
    MYCOLL_RETURN_IF_ERROR(get(key("done", rank), &done));
    // It has been in another group of this name, and may yet come to this one.
    return done.ends_with(life.card.nonce) ? Status() : differentWorlds(rank, life.card);
  }
  if (!isVisible(life.card) || !life.isOfNow || Clock::now() - life.lastAlive < kSettled) {
    return Status();
  }
  return Status(Code::kPeerLost, "mycoll group '" + options_.name + "': rank " +
                                     std::to_string(rank) + " (" + life.card.address.describe() +
                                     ") ended before its first call, while the group was made; "
                                     "see its log");
}

Status Meeting::hasGivenUp(int rank, const Card& card) const {
  return Status(Code::kStore, "mycoll group '" + options_.name + "': rank " + std::to_string(rank) +
                                  " (" + card.address.describe() +
                                  ") has given up: " + sanitized(card.why));
}

// Now and then: signals, the deadline, and what makes waiting pointless.
Status Meeting::lookAround() {
  if (deadline_.expired()) return tooLate();
  const auto now = Clock::now();
  if (now - lastLook_ < std::chrono::milliseconds(50)) return Status();
  lastLook_ = now;
  if (options_.interrupted && options_.interrupted()) {
    return interrupted();
  }
  MYCOLL_RETURN_IF_ERROR(checkRefusal());
  std::string text;
  MYCOLL_RETURN_IF_ERROR(get(key("card", options_.rank), &text));
  Card card;
  if (text != cardText_ && Card::decode(text, &card).ok()) return takenBy(card);
  // Rank 0 sees all cards as they stand now; the others its own, and those in the roster of whom
  // they can see the process.
  if (isLeader()) {
    for (int rank = 1; rank < options_.ranks; ++rank) {
      MYCOLL_RETURN_IF_ERROR(checkOther(rank, cards_[rank]));
    }
    return checkLosses();
  }
  MYCOLL_RETURN_IF_ERROR(get(key("card", 0), &text));
  MYCOLL_RETURN_IF_ERROR(checkOther(0, text));
  for (const int rank : neighbours_) {
    if (rank == 0 || rank == options_.rank) continue;
    MYCOLL_RETURN_IF_ERROR(checkOther(rank, roster_[rank]));
  }
  return checkLosses();
}

// Ranks that were lost to another group, unless another process has come in their place.
Status Meeting::checkLosses() {
  if (!options_.isOfJob) return Status();
  const std::map<int64_t, Engine::Loss> losses = engine_->losses();
  for (int rank = 0; rank < options_.ranks && !losses.empty(); ++rank) {
    const auto loss = losses.find(options_.globalRanks.empty() ? rank : options_.globalRanks[rank]);
    if (rank == options_.rank || loss == losses.end()) continue;
    std::string text;
    MYCOLL_RETURN_IF_ERROR(get(key("card", rank), &text));
    Card card;
    if (Card::decode(text, &card).ok() && card.address.uid != loss->second.uid) continue;
    return Status(Code::kPeerLost, "mycoll group '" + options_.name +
                                       "': the group cannot be made with rank " +
                                       std::to_string(rank) + ": " + loss->second.cause.message());
  }
  return Status();
}

Status Meeting::tooLate() {
  // Rank 0 looks at the cards and tells the others, who in a large group are not all to look, too.
  if (!isLeader() && isLarge()) {
    for (const Deadline word = Deadline::after(std::chrono::seconds(1)); !word.expired();) {
      MYCOLL_RETURN_IF_ERROR(checkRefusal());
      std::this_thread::sleep_for(longestPause(options_.ranks));
    }
  }
  std::vector<int> missing;
  for (int rank = 0; rank < options_.ranks; ++rank) {
    if (rank == options_.rank) continue;
    std::string card, ack;
    MYCOLL_RETURN_IF_ERROR(get(key("card", rank), &card));
    MYCOLL_RETURN_IF_ERROR(get(key("ack", rank), &ack));
    Card known;
    const bool isDead =
        !card.empty() && Card::decode(card, &known).ok() && isVisible(known) && !isAliveHere(known);
    // Without a roster nobody could confirm anything.
    if (!card.empty() && !isDead && (number_.empty() || ack == number_)) continue;
    missing.push_back(rank);
  }
  return Status(Code::kTimeout,
                "mycoll group '" + options_.name + "': timeout after " +
                    std::to_string(options_.timeout.count()) + "ms: rank " +
                    std::to_string(options_.rank) + " waited for the other ranks of " +
                    std::to_string(options_.ranks) +
                    (missing.empty() ? "" : "; missing: " + listNumbers(missing)) +
                    ". Were they all started, with the same world size and the same store?");
}

}  // namespace

Status meet(const GroupOptions& options, Store& store, Engine& engine, GroupAddress* result) {
  Meeting meeting(options, store, &engine);
  MYCOLL_RETURN_IF_ERROR(meeting.run());
  return meeting.result(result);
}

void stayAway(const GroupOptions& options, Store& store, const Status& why) {
  Meeting(options, store, nullptr).giveUp(why);
}

void setContext(GroupAddress* address) {
  const Digest digest = hmacSha256(address->secret, "mycoll context " + address->name);
  std::memcpy(&address->context, digest.data(), sizeof(address->context));
}

}  // namespace mycoll
