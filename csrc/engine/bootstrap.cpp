#include "engine/bootstrap.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <thread>
#include <vector>

#include "base/env.h"
#include "base/sha256.h"
#include "base/told.h"
#include "base/topology.h"
#include "engine/card.h"
#include "engine/engine.h"

namespace mycoll {
namespace {

using Clock = std::chrono::steady_clock;

// A card of a process that cannot be looked at (on another host) counts as that of a living one
// when it has stood for so long.
constexpr auto kSettled = std::chrono::milliseconds(1000);
constexpr auto kLongestPause = std::chrono::microseconds(10'000);
// Before the number of a card whose owner has given up.
constexpr char kGaveUp[] = "gave up: ";

bool isSameProcess(const PeerAddress& a, const PeerAddress& b) {
  return a.hostName == b.hostName && a.pid == b.pid && a.startTicks == b.startTicks;
}

bool isAliveHere(const PeerAddress& other, const PeerAddress& self) {
  return other.hostName == self.hostName && isLiving(lookAtProcess(other.pid, other.startTicks));
}

Status readSecretFile(std::string* secret) {
  Env env;
  MYCOLL_RETURN_IF_ERROR(Env::load(&env));
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

Status freshNonce(std::string* nonce) {
  unsigned char random[32];
  MYCOLL_RETURN_IF_ERROR(randomBytes(random, sizeof(random)));
  *nonce = toHex(random, sizeof(random));
  return Status();
}

bool isFirstMeeting() {
  static std::atomic<bool> wasThereOne{false};
  return !wasThereOne.exchange(true, std::memory_order_relaxed);
}

class Meeting {
 public:
  Meeting(const GroupOptions& options, Store& store, Engine& engine)
      : options_(options),
        store_(store),
        engine_(engine),
        deadline_(Deadline::after(options.timeout)) {
    mine_.ranks = options.ranks;
    mine_.address = engine.endpoint()->address();
    cards_.resize(options.ranks);
    changed_.resize(options.ranks);
  }

  Status run() {
    const Status status = meetOthers();
    if (!status.ok()) tellOthers(status);
    return status;
  }

  Status meetOthers() {
    MYCOLL_RETURN_IF_ERROR(readSecretFile(&fileSecret_));
    MYCOLL_RETURN_IF_ERROR(checkEarlierSelf());
    MYCOLL_RETURN_IF_ERROR(freshNonce(&mine_.nonce));
    cardText_ = mine_.encode();
    MYCOLL_RETURN_IF_ERROR(store_.set(key("card", options_.rank), cardText_));
    bool isOver = false;
    auto pause = std::chrono::microseconds(100);
    while (!isOver) {
      bool moved = false;
      if (isLeader()) MYCOLL_RETURN_IF_ERROR(lead(&moved));
      MYCOLL_RETURN_IF_ERROR(follow(&moved, &isOver));
      if (isOver) break;
      MYCOLL_RETURN_IF_ERROR(lookAround());
      pause = moved ? std::chrono::microseconds(100) : std::min(pause * 2, kLongestPause);
      std::this_thread::sleep_for(pause);
    }
    MYCOLL_RETURN_IF_ERROR(store_.set(key("done", options_.rank), number_));
    return isLeader() ? waitForTheOthers() : Status();
  }

  Status result(GroupAddress* address) const {
    std::vector<Card> cards(cards_.size());
    for (size_t rank = 0; rank < cards.size(); ++rank) {
      MYCOLL_RETURN_IF_ERROR(Card::decode(roster_[rank], &cards[rank]));
    }
    const std::string shared = cards[0].nonce + number_;
    Digest digest = fileSecret_.empty() ? sha256(shared) : hmacSha256(fileSecret_, shared);
    address->secret.assign(reinterpret_cast<const char*>(digest.data()), digest.size());
    address->name = options_.name;
    setContext(address);
    address->rank = options_.rank;
    for (Card& card : cards) address->peers.push_back(std::move(card.address));
    return Status();
  }

 private:
  bool isLeader() const { return options_.rank == 0; }
  static std::string key(const char* what, int rank) {
    return std::string(what) + "/" + std::to_string(rank);
  }
  Status get(const std::string& name, std::string* value) {
    bool found = false;
    MYCOLL_RETURN_IF_ERROR(store_.tryGet(name, &found, value));
    if (!found) value->clear();
    return Status();
  }

  // Another living process has our rank.
  Status checkEarlierSelf() {
    std::string text;
    MYCOLL_RETURN_IF_ERROR(get(key("card", options_.rank), &text));
    if (text.empty()) return Status();
    Card card;
    MYCOLL_RETURN_IF_ERROR(Card::decode(text, &card));
    if (isSameProcess(card.address, mine_.address) || !isAliveHere(card.address, mine_.address)) {
      return Status();
    }
    return takenBy(card);
  }

  Status takenBy(const Card& other) {
    concerned_.push_back(other.nonce);
    return Status(Code::kStore,
                  "group '" + options_.name + "': rank " + std::to_string(options_.rank) +
                      " is taken by " + other.address.describe() + ", and this is " +
                      mine_.address.describe() + ". Two processes were started with one rank.");
  }

  // This meeting cannot succeed: whoever takes part in it should hear why, and not wait. Told under
  // the numbers of their cards, which no other meeting has: rank 0 tells all, the others tell rank
  // 0 (unless they heard it from there), and a rank that is there twice tells its double.
  void tellOthers(const Status& status) {
    if (status.code() != Code::kStore && status.code() != Code::kPeerLost) return;
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
  void markCard(const Status& status) {
    std::string text;
    if (!get(key("card", options_.rank), &text).ok() || text != cardText_) return;
    Card marked = mine_;
    marked.nonce = kGaveUp + mine_.nonce;
    if (!store_.set("why/" + marked.nonce, status.message()).ok()) return;
    (void)store_.set(key("card", options_.rank), marked.encode());
  }

  Status checkRefusal() {
    std::string text;
    MYCOLL_RETURN_IF_ERROR(get("refused/" + mine_.nonce, &text));
    if (text.size() < 3) return Status();
    isToldByLeader_ = text[0] == 'l';
    return toldStatus(text[1] - 'a', text.substr(2));
  }

  // Rank 0: cards -> roster, confirmations -> commit.
  Status lead(bool* moved) {
    bool isComplete = true, isNew = false;
    for (int rank = 0; rank < options_.ranks; ++rank) {
      std::string text = cardText_;
      if (rank != 0) MYCOLL_RETURN_IF_ERROR(get(key("card", rank), &text));
      if (text != cards_[rank]) {
        cards_[rank] = text;
        changed_[rank] = Clock::now();
        isNew = true;
      }
      isComplete &= !text.empty();
      if (!text.empty()) MYCOLL_RETURN_IF_ERROR(checkWorld(rank));
    }
    if (isComplete && isNew) {
      std::string nonce;
      MYCOLL_RETURN_IF_ERROR(freshNonce(&nonce));
      standing_ = nonce.substr(0, 16);
      MYCOLL_RETURN_IF_ERROR(store_.set("roster", encodeRoster(standing_, cards_)));
      *moved = true;
    }
    if (standing_.empty() || !isComplete || isCommitted_) return Status();
    for (int rank = 1; rank < options_.ranks; ++rank) {
      std::string ack;
      MYCOLL_RETURN_IF_ERROR(get(key("ack", rank), &ack));
      if (ack != standing_) return Status();
    }
    isCommitted_ = true;
    *moved = true;
    return store_.set("commit", standing_);
  }

  // Everybody: confirm the roster that holds the own card; over when it is committed.
  Status follow(bool* moved, bool* isOver) {
    std::string text;
    MYCOLL_RETURN_IF_ERROR(get("roster", &text));
    std::string number;
    std::vector<std::string> roster;
    if (!decodeRoster(text, cards_.size(), &number, &roster) ||
        roster[options_.rank] != cardText_) {
      return Status();
    }
    if (number != number_) {
      number_ = number;
      roster_ = roster;
      *moved = true;
      MYCOLL_RETURN_IF_ERROR(store_.set(key("ack", options_.rank), number_));
    }
    std::string commit;
    MYCOLL_RETURN_IF_ERROR(get("commit", &commit));
    *isOver = commit == number_;
    return Status();
  }

  Status waitForTheOthers() {
    for (int rank = 1; rank < options_.ranks; ++rank) {
      for (;;) {
        std::string done;
        MYCOLL_RETURN_IF_ERROR(get(key("done", rank), &done));
        if (done == number_) break;
        MYCOLL_RETURN_IF_ERROR(lookAround());
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
    }
    return Status();
  }

  bool isCurrent(const Card& card, Clock::time_point since) const {
    return isAliveHere(card.address, mine_.address) ||
           (card.address.hostName != mine_.address.hostName && Clock::now() - since > kSettled);
  }

  // Rank 0, about another's card.
  Status checkWorld(int rank) {
    Card card;
    MYCOLL_RETURN_IF_ERROR(Card::decode(cards_[rank], &card));
    if (card.nonce.starts_with(kGaveUp)) return checkGivenUp(rank, card);
    if (card.ranks == options_.ranks || !isCurrent(card, changed_[rank])) return Status();
    return differentWorlds(rank, card);
  }

  // Its process lives, and has had the time to try again.
  Status checkGivenUp(int rank, const Card& card) {
    if (Clock::now() - changed_[rank] < kSettled || !isAliveHere(card.address, mine_.address)) {
      return Status();
    }
    std::string why;
    MYCOLL_RETURN_IF_ERROR(get("why/" + card.nonce, &why));
    return Status(Code::kStore, "group '" + options_.name + "': rank " + std::to_string(rank) +
                                    " (" + card.address.describe() +
                                    ") has given up before this rank came: " + readable(why));
  }

  Status differentWorlds(int rank, const Card& other) const {
    return Status(Code::kStore,
                  "group '" + options_.name + "': rank " + std::to_string(options_.rank) +
                      " was started with " + std::to_string(options_.ranks) + " ranks, rank " +
                      std::to_string(rank) + " (" + other.address.describe() + ") with " +
                      std::to_string(other.ranks) + ": the world sizes must be equal");
  }

  // Now and then: signals, the deadline, and what makes waiting pointless.
  Status lookAround() {
    if (deadline_.expired()) return tooLate();
    const auto now = Clock::now();
    if (now - lastLook_ < std::chrono::milliseconds(50)) return Status();
    lastLook_ = now;
    if (options_.interrupted && options_.interrupted()) {
      return Status(Code::kInterrupted, "interrupted by a signal");
    }
    MYCOLL_RETURN_IF_ERROR(checkRefusal());
    std::string text;
    MYCOLL_RETURN_IF_ERROR(get(key("card", options_.rank), &text));
    Card card;
    if (text != cardText_ && Card::decode(text, &card).ok()) return takenBy(card);
    // Rank 0 sees all cards as they stand now; the others those of the roster.
    const std::vector<std::string>& seen = isLeader() ? cards_ : roster_;
    for (size_t rank = 0; rank < seen.size(); ++rank) {
      MYCOLL_RETURN_IF_ERROR(checkAlive(static_cast<int>(rank), seen[rank]));
    }
    for (int rank = 0; rank < options_.ranks; ++rank) MYCOLL_RETURN_IF_ERROR(checkLoss(rank));
    if (isLeader()) return Status();
    MYCOLL_RETURN_IF_ERROR(get(key("card", 0), &text));
    if (text != leaderCard_) leaderCard_ = text, leaderSince_ = now;
    MYCOLL_RETURN_IF_ERROR(checkAlive(0, text));
    if (Card::decode(text, &card).ok() && card.ranks != options_.ranks &&
        isCurrent(card, leaderSince_)) {
      return differentWorlds(0, card);
    }
    return Status();
  }

  // A rank that was alive in this meeting, and has died before the group was made. (Else its card
  // is left over from earlier, and will be replaced.) It was, if it has been seen; if its card came
  // after this meeting had begun; and, in this process's first meeting, if it is younger than this
  // process.
  Status checkAlive(int rank, const std::string& text) {
    Card card;
    if (rank == options_.rank) return Status();
    Life& life = lives_[rank];
    if (text.empty() || !Card::decode(text, &card).ok()) {
      life.wasEmpty = true;
      return Status();
    }
    if (card.address.hostName != mine_.address.hostName) return Status();
    if (life.nonce != card.nonce) {
      const bool isNew = life.wasEmpty || !life.nonce.empty() ||
                         (isFirst_ && card.address.startTicks >= mine_.address.startTicks);
      life = Life{card.nonce, true, isNew, Clock::now()};
    }
    if (isAliveHere(card.address, mine_.address)) {
      life.wasAlive = true;
      life.lastAlive = Clock::now();
      return Status();
    }
    if (!life.wasAlive || Clock::now() - life.lastAlive < kSettled) return Status();
    return Status(Code::kPeerLost, "group '" + options_.name + "': rank " + std::to_string(rank) +
                                       " (" + card.address.describe() +
                                       ") has ended before the group was made; see its log");
  }

  // A rank that was lost to another group, unless another process has come in its place.
  Status checkLoss(int rank) {
    if (rank == options_.rank) return Status();
    const auto loss =
        engine_.lossOf(options_.globalRanks.empty() ? rank : options_.globalRanks[rank]);
    if (!loss) return Status();
    std::string text;
    MYCOLL_RETURN_IF_ERROR(get(key("card", rank), &text));
    Card card;
    if (Card::decode(text, &card).ok() && card.address.uid != loss->uid) return Status();
    return Status(Code::kPeerLost, "group '" + options_.name + "' cannot be made with rank " +
                                       std::to_string(rank) + ": " + loss->cause.message());
  }

  Status tooLate() {
    std::string missing;
    for (int rank = 0; rank < options_.ranks; ++rank) {
      if (rank == options_.rank) continue;
      std::string card, ack;
      MYCOLL_RETURN_IF_ERROR(get(key("card", rank), &card));
      MYCOLL_RETURN_IF_ERROR(get(key("ack", rank), &ack));
      Card known;
      const bool isDead = !card.empty() && Card::decode(card, &known).ok() &&
                          known.address.hostName == mine_.address.hostName &&
                          !isAliveHere(known.address, mine_.address);
      // Without a roster nobody could confirm anything.
      if (!card.empty() && !isDead && (number_.empty() || ack == number_)) continue;
      missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
    }
    return Status(Code::kTimeout,
                  "group '" + options_.name + "': rank " + std::to_string(options_.rank) +
                      " waited " + std::to_string(options_.timeout.count()) +
                      " ms for the other ranks of " + std::to_string(options_.ranks) +
                      (missing.empty() ? "" : "; missing: " + missing) +
                      ". Were they all started, with the same world size and the same store?");
  }

  const GroupOptions& options_;
  Store& store_;
  Engine& engine_;
  const Deadline deadline_;
  std::string fileSecret_;
  Card mine_;
  std::string cardText_;
  // Rank 0
  std::vector<std::string> cards_;
  std::vector<Clock::time_point> changed_;
  std::string standing_;  // number of the roster in the store
  bool isCommitted_ = false;
  // Everybody
  std::string number_;  // of the roster that was confirmed last
  std::vector<std::string> roster_;
  struct Life {
    std::string nonce;
    bool wasEmpty = false;  // there was no card at first
    bool wasAlive = false;
    Clock::time_point lastAlive;
  };
  std::map<int, Life> lives_;
  std::vector<std::string> concerned_;  // numbers of cards whose owners should hear of a failure
  bool isToldByLeader_ = false;
  const bool isFirst_ = isFirstMeeting();
  std::string leaderCard_;
  Clock::time_point leaderSince_ = Clock::now();
  Clock::time_point lastLook_ = Clock::now();
};

}  // namespace

Status meet(const GroupOptions& options, Store& store, Engine& engine, GroupAddress* result) {
  Meeting meeting(options, store, engine);
  MYCOLL_RETURN_IF_ERROR(meeting.run());
  return meeting.result(result);
}

void setContext(GroupAddress* address) {
  const Digest digest = hmacSha256(address->secret, "mycoll context " + address->name);
  std::memcpy(&address->context, digest.data(), sizeof(address->context));
}

}  // namespace mycoll
