#include "engine/bootstrap.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <iterator>
#include <thread>
#include <vector>

#include "base/env.h"
#include "base/sha256.h"
#include "engine/meeting.h"

namespace mycoll {
namespace {

constexpr auto kLongestPause = std::chrono::microseconds(10'000);

// Between looks at the store: none at first, as a look at a server takes as long as the shortest
// sleep; then longer and longer ones.
class Pauses {
 public:
  void take() {
    if (looks_++ < kLooksWithout) return;
    std::this_thread::sleep_for(pause_);
    pause_ = std::min(pause_ * 2, kLongestPause);
  }

 private:
  static constexpr int kLooksWithout = 4;
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

}  // namespace

Meeting::Meeting(const GroupOptions& options, Store& store, Engine* engine)
    : options_(options),
      store_(store),
      engine_(engine),
      deadline_(Deadline::after(options.timeout)),
      isFirst_(isFirstMeeting()) {
  mine_.ranks = options.ranks;
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
  mine_.address = engine_->endpoint()->address();
  MYCOLL_RETURN_IF_ERROR(readSecretFile(&fileSecret_));
  MYCOLL_RETURN_IF_ERROR(checkEarlierSelf());
  MYCOLL_RETURN_IF_ERROR(Card::freshNonce(&mine_.nonce));
  cardText_ = mine_.encode();
  return store_.set(key("card", options_.rank), cardText_);
}

Status Meeting::meetOthers() {
  MYCOLL_RETURN_IF_ERROR(putCard());
  Pauses pauses;
  for (;;) {
    bool moved = false, isOver = false;
    MYCOLL_RETURN_IF_ERROR(isLeader() ? lead(&moved, &isOver) : follow(&moved, &isOver));
    if (isOver) break;
    MYCOLL_RETURN_IF_ERROR(lookAround());
    if (moved) pauses = Pauses();
    pauses.take();
  }
  MYCOLL_RETURN_IF_ERROR(store_.set(key("done", options_.rank), number_ + mine_.nonce));
  return isLeader() ? waitForTheOthers() : Status();
}

Status Meeting::result(GroupAddress* address) const {
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
  return store_.set(key("ack", options_.rank), number_);
}

// Rank 0: cards -> roster, confirmations -> commit. It need not read what it has written: where
// there are two of them, one is left waiting for the others to be done, and finds that its card has
// been taken.
Status Meeting::lead(bool* moved, bool* isOver) {
  // Those of a roster that waits to be confirmed rarely change.
  const auto now = Clock::now();
  if (number_.empty() || now - cardsRead_ >= kLongestPause) {
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
  // Once it is confirmed the roster, which is long in a large job, rarely changes.
  const auto now = Clock::now();
  if (!number_.empty()) {
    std::string commit;
    MYCOLL_RETURN_IF_ERROR(get("commit", &commit));
    *isOver = commit == number_;
    if (*isOver || now - rosterRead_ < kLongestPause) return Status();
  }
  rosterRead_ = now;
  std::string text;
  MYCOLL_RETURN_IF_ERROR(get("roster", &text));
  std::string number;
  std::vector<std::string> roster;
  if (!decodeRoster(text, cards_.size(), &number, &roster) || roster[options_.rank] != cardText_) {
    return Status();
  }
  if (number == number_) return Status();
  number_ = number;
  roster_ = roster;
  *moved = true;
  return store_.set(key("ack", options_.rank), number_);
}

Status Meeting::waitForTheOthers() {
  Pauses pauses;
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
