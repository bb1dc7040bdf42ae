// The meeting's half about failures: what makes waiting pointless, and who is told of it.
#include <algorithm>
#include <thread>

#include "base/sanitize.h"
#include "base/topology.h"
#include "engine/meeting.h"
#include "transport/bell.h"

namespace mycoll {
namespace {

// A card of a process that cannot be looked at (on another host) counts as that of a living one
// when it has stood for so long.
constexpr auto kSettled = std::chrono::milliseconds(1000);
// Before the number of a card whose owner has given up.
constexpr char kGaveUp[] = "gave up: ";

bool isSameProcess(const PeerAddress& a, const PeerAddress& b) {
  return a.pidSpace == b.pidSpace && a.hostName == b.hostName && a.pid == b.pid &&
         a.startTicks == b.startTicks;
}

}  // namespace

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
                "group '" + options_.name + "': rank " + std::to_string(options_.rank) +
                    " is taken by " + other.address.describe() + ", and this is " +
                    mine_.address.describe() + ". Two processes were started with one rank.");
}

// This meeting cannot succeed: whoever takes part in it should hear why, and not wait. Told under
// the numbers of their cards, which no other meeting has: rank 0 tells all, the others tell rank
// 0 (unless they heard it from there), and a rank that is there twice tells its double.
void Meeting::tellOthers(const Status& status) {
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
void Meeting::markCard(const Status& status) {
  std::string text;
  if (!get(key("card", options_.rank), &text).ok() || text != cardText_) return;
  Card marked = mine_;
  marked.nonce = kGaveUp + mine_.nonce;
  if (!store_.set("why/" + marked.nonce, status.message()).ok()) return;
  (void)store_.set(key("card", options_.rank), marked.encode());
}

// There is no endpoint, so this rank cannot take part. It says so on a card that looks as if it had
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
                "group '" + options_.name + "': rank " + std::to_string(options_.rank) +
                    " was started with " + std::to_string(options_.ranks) + " ranks, rank " +
                    std::to_string(rank) + " (" + other.address.describe() + ") with " +
                    std::to_string(other.ranks) + ": the world sizes must be equal");
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
  if (life.card.nonce.starts_with(kGaveUp)) {
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
  return Status(Code::kPeerLost, "group '" + options_.name + "': rank " + std::to_string(rank) +
                                     " (" + life.card.address.describe() +
                                     ") has ended before the group was made; see its log");
}

Status Meeting::hasGivenUp(int rank, const Card& card) {
  std::string why;
  MYCOLL_RETURN_IF_ERROR(get("why/" + card.nonce, &why));
  return Status(Code::kStore, "group '" + options_.name + "': rank " + std::to_string(rank) + " (" +
                                  card.address.describe() + ") has given up: " + sanitized(why));
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
  // Rank 0 sees all cards as they stand now; the others its own, and otherwise those of the roster.
  if (!isLeader()) {
    MYCOLL_RETURN_IF_ERROR(get(key("card", 0), &text));
    MYCOLL_RETURN_IF_ERROR(checkOther(0, text));
  }
  const std::vector<std::string>& seen = isLeader() ? cards_ : roster_;
  for (size_t rank = 1; rank < seen.size(); ++rank) {
    if (static_cast<int>(rank) == options_.rank) continue;
    MYCOLL_RETURN_IF_ERROR(checkOther(static_cast<int>(rank), seen[rank]));
  }
  return checkLosses();
}

// Ranks that were lost to another group, unless another process has come in their place.
Status Meeting::checkLosses() {
  const std::map<int64_t, Engine::Loss> losses = engine_->losses();
  for (int rank = 0; rank < options_.ranks && !losses.empty(); ++rank) {
    const auto loss = losses.find(options_.globalRanks.empty() ? rank : options_.globalRanks[rank]);
    if (rank == options_.rank || loss == losses.end()) continue;
    std::string text;
    MYCOLL_RETURN_IF_ERROR(get(key("card", rank), &text));
    Card card;
    if (Card::decode(text, &card).ok() && card.address.uid != loss->second.uid) continue;
    return Status(Code::kPeerLost, "group '" + options_.name + "' cannot be made with rank " +
                                       std::to_string(rank) + ": " + loss->second.cause.message());
  }
  return Status();
}

Status Meeting::tooLate() {
  std::string missing;
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
    missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
  }
  return Status(Code::kTimeout,
                "group '" + options_.name + "': rank " + std::to_string(options_.rank) +
                    " waited " + std::to_string(options_.timeout.count()) +
                    " ms for the other ranks of " + std::to_string(options_.ranks) +
                    (missing.empty() ? "" : "; missing: " + missing) +
                    ". Were they all started, with the same world size and the same store?");
}

}  // namespace mycoll
