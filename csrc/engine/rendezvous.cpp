#include "engine/rendezvous.h"

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/env.h"
#include "base/sanitize.h"
#include "base/sha256.h"
#include "base/text.h"
#include "base/topology.h"
#include "engine/card.h"
#include "engine/engine.h"
#include "engine/line.h"
#include "transport/lobby.h"

namespace mycoll {
namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

constexpr char kRoot[] = "root";
// Of a wait that a signal should be able to end.
constexpr auto kStep = Milliseconds(100);
constexpr auto kPollStep = Milliseconds(50);
// A rank asks the store the less often the longer it has waited, as thousands may be waiting: again
// after this part of the time so far.
constexpr int kPartOfWait = 20;
constexpr auto kLongestPause = Milliseconds(1000);
// For a rank that is gone to come again, and for rank 0 to say who is missing.
constexpr auto kAgain = Milliseconds(1000);
// Rank 0 looks whether somebody else has written root.
constexpr auto kLookAtRoot = Milliseconds(500);
constexpr auto kKnockTime = Milliseconds(5000);
// A process that hangs up is busy with others.
constexpr auto kBusyPause = Milliseconds(10);
constexpr int kMostHangUps = 200;
// Hosts whose first rank is connected to rank 0 itself.
constexpr size_t kChildren = 64;

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

bool isSameProcess(const PeerAddress& a, const PeerAddress& b) {
  return a.pidSpace == b.pidSpace && a.hostName == b.hostName && a.pid == b.pid &&
         a.startTicks == b.startTicks;
}

std::string afterKey(const Card& card) { return "after/" + card.nonce; }

// What both sides do. One thread, which blocks in run().
class Meeting {
 public:
  // engine: null where there is none, and the rank only comes to say why: giveUp().
  Meeting(const GroupOptions& options, Store& store, Engine* engine);
  virtual ~Meeting() { closeLobby(); }

  // To root, for who cannot be heard otherwise. Blocks for up to a second, until rank 0 has seen
  // it.
  void giveUp(const Status& why);
  // After run() has ended well.
  Status result(const std::string& meeting, GroupAddress* address) const;

 protected:
  Status prepare();
  std::unique_ptr<Lobby> lobbyOf(const std::string& meeting) const;
  // That of rank 0's process for ranks that know it: *rankZero, from a group in which all of this
  // one's are. Null: there is none.
  std::unique_ptr<Lobby> entrance(PeerAddress* rankZero) const;
  Status openLobby(const std::string& meeting);
  void closeLobby();
  std::string secretOf(const std::string& text) const;

  Status read(const std::string& key, bool* found, Card* card);
  // The card to root, and to where those wait that have read `before`.
  Status publish(const Card& card, const Card* before);

  // What has come on the lines is handled by these. False: the line is of no more use.
  virtual bool onNote(Line& line, Note note) = 0;
  virtual void onEnd(const Line& line) = 0;
  // Waits until something comes on a line, or somebody into the lobby.
  void step(Line* up = nullptr);
  void tellAll(const Note& note);
  // The last words: until the others have them, or nearly.
  void part(Line* up, Milliseconds atMost);

  bool isInterrupted() const { return options_.interrupted && options_.interrupted(); }
  // Whether its process can be looked at. Who shares no more than the host's name may be alive in
  // another pid namespace, or on a clone of this host.
  bool isVisible(const PeerAddress& peer) const {
    return !mine_.address.pidSpace.empty() && peer.pidSpace == mine_.address.pidSpace;
  }
  bool isAlive(const PeerAddress& peer) const {
    return isVisible(peer) && isLiving(lookAtProcess(peer.pid, peer.startTicks));
  }
  // Of what stood there when this rank came: not left over from earlier, as its process lives, or
  // is younger than this one, which has met nobody before.
  bool isOfNow(const PeerAddress& peer) const {
    return isAlive(peer) ||
           (isFirst_ && isVisible(peer) && peer.startTicks >= mine_.address.startTicks);
  }
  Status error(Code code, const std::string& text) const {
    return Status(code, "mycoll group '" + options_.name + "': " + text);
  }
  Status ended(int rank, const PeerAddress& peer) const;
  Status hasGivenUp(int rank, const PeerAddress& peer, const std::string& why) const;
  Status tooLate(int rank, const std::string& milliseconds, const std::vector<int>& missing) const;
  Status isLost(int rank, const std::string& why) const;
  Status isUnlike(const Card& rankZero, const Card& other) const;
  // Ranks of this group, by their numbers in it, that other groups of this process have lost.
  std::map<int, Engine::Loss> losses() const;

  const GroupOptions& options_;
  Store& store_;
  Engine* const engine_;
  Deadline deadline_;
  const bool isFirst_;
  std::string fileSecret_;
  Card mine_;
  std::unique_ptr<Lobby> lobby_;
  std::unique_ptr<Lobby> entrance_;           // rank 0's; open as long as lobby_
  std::vector<std::unique_ptr<Line>> lines_;  // away from rank 0
  std::string roster_;
};

Meeting::Meeting(const GroupOptions& options, Store& store, Engine* engine)
    : options_(options),
      store_(store),
      engine_(engine),
      deadline_(Deadline::after(options.timeout)),
      isFirst_(isFirstMeeting()) {
  mine_.rank = options.rank;
  mine_.ranks = options.ranks;
  mine_.settings = Card::settingsHere();
  if (engine) {
    mine_.address = engine->mesh()->address();
    return;
  }
  PeerAddress& address = mine_.address;
  address.uid.assign(PeerAddress::kUidLength, '0');  // nobody's
  address.hostIdentity = "none";
  address.pidSpace = pidSpace();
  address.hostName = hostName();
  address.pid = processId();
  address.startTicks = processStartTicks(address.pid);
}

Status Meeting::prepare() {
  MYCOLL_RETURN_IF_ERROR(readSecretFile(&fileSecret_));
  return Card::freshNonce(&mine_.nonce);
}

std::string Meeting::secretOf(const std::string& text) const {
  const Digest digest = fileSecret_.empty() ? sha256(text) : hmacSha256(fileSecret_, text);
  return std::string(reinterpret_cast<const char*>(digest.data()), digest.size());
}

std::unique_ptr<Lobby> Meeting::lobbyOf(const std::string& meeting) const {
  uint64_t number;
  const Digest digest = sha256("mycoll meeting " + meeting);
  std::memcpy(&number, digest.data(), sizeof(number));
  return std::make_unique<Lobby>(number, secretOf(meeting));
}

Status Meeting::openLobby(const std::string& meeting) {
  closeLobby();
  lobby_ = lobbyOf(meeting);
  MYCOLL_RETURN_IF_ERROR(lobby_->open());
  engine_->mesh()->openLobby(lobby_.get());
  return Status();
}

std::unique_ptr<Lobby> Meeting::entrance(PeerAddress* rankZero) const {
  if (!options_.isOfJob || options_.globalRanks.empty()) return nullptr;
  const std::shared_ptr<Communicator> group = engine_->groupWith(options_.globalRanks);
  if (!group) return nullptr;
  const std::vector<int64_t> ranks = jobRanks(group->options());
  const auto found = std::find(ranks.begin(), ranks.end(), options_.globalRanks[0]);
  const GroupAddress& known = group->address();
  *rankZero = known.peers[found - ranks.begin()];
  const Digest secret = hmacSha256(known.secret, "mycoll entrance " + options_.name);
  const Digest name = hmacSha256(known.secret, "mycoll entrance number " + options_.name);
  uint64_t number;
  std::memcpy(&number, name.data(), sizeof(number));
  return std::make_unique<Lobby>(
      number, std::string(reinterpret_cast<const char*>(secret.data()), secret.size()));
}

void Meeting::closeLobby() {
  for (std::unique_ptr<Lobby>* lobby : {&entrance_, &lobby_}) {
    if (*lobby) engine_->mesh()->closeLobby(**lobby);
    lobby->reset();
  }
}

Status Meeting::result(const std::string& meeting, GroupAddress* address) const {
  std::string number;
  MYCOLL_RETURN_IF_ERROR(decodeRoster(roster_, options_.ranks, &number, &address->peers));
  address->secret = secretOf(meeting + number);
  address->name = options_.name;
  address->rank = options_.rank;
  setContext(address);
  return Status();
}

// ---- the store

Status Meeting::read(const std::string& key, bool* found, Card* card) {
  std::string text;
  MYCOLL_RETURN_IF_ERROR(store_.tryGet(key, found, &text));
  return *found ? Card::decode(text, card) : Status();
}

Status Meeting::publish(const Card& card, const Card* before) {
  const std::string text = card.encode();
  MYCOLL_RETURN_IF_ERROR(store_.set(kRoot, text));
  return before ? store_.set(afterKey(*before), text) : Status();
}

void Meeting::giveUp(const Status& why) {
  Card last = mine_, there;
  last.why = why.message();
  last.hasLost = why.code() == Code::kPeerLost;
  if (!Card::freshNonce(&last.nonce).ok()) return;
  // Rank 0 may write at the same moment: then this is lost, unless it is written again. Once rank 0
  // has seen it, something comes after it. The store may be what has failed: then the others find
  // out by themselves.
  const Deadline until = Deadline::after(options_.rank == 0 ? Milliseconds(0) : kAgain);
  for (bool found = false, isSeen = false;;) {
    if (!read(kRoot, &found, &there).ok()) return;
    const bool isThere = found && there.nonce == last.nonce;
    if (!isThere && !publish(last, found ? &there : nullptr).ok()) return;
    // Some may have heard of this meeting, and not from the store.
    if (entrance_ && !store_.set(afterKey(mine_), last.encode()).ok()) return;
    if (until.expired() || !store_.wait(afterKey(last), kPollStep, &isSeen).ok() || isSeen) return;
  }
}

// ---- the lines

void Meeting::step(Line* up) {
  std::vector<pollfd> entries;
  entries.reserve(lines_.size() + 3);
  entries.push_back({lobby_ ? lobby_->fd() : -1, POLLIN, 0});
  entries.push_back({entrance_ ? entrance_->fd() : -1, POLLIN, 0});
  const auto watch = [&entries](const Line* line) {
    const int events = line && !line->isFlushed() ? POLLIN | POLLOUT : POLLIN;
    entries.push_back({line ? line->fd() : -1, static_cast<short>(events), 0});
  };
  watch(up);
  for (const auto& line : lines_) watch(line.get());
  if (poll(entries.data(), entries.size(), static_cast<int>(kPollStep.count())) <= 0) return;
  const auto serve = [](Line& line, short events) {
    if (events & POLLOUT) line.flush();
    if (events & (POLLIN | POLLHUP | POLLERR)) line.read();
  };
  if (up) serve(*up, entries[2].revents);
  for (size_t i = 0; i < lines_.size(); ++i) serve(*lines_[i], entries[i + 3].revents);
  if (entries[0].revents) {
    for (Fd& socket : lobby_->takeAll()) {
      lines_.push_back(std::make_unique<Line>(std::move(socket)));
      lines_.back()->read();
    }
  }
  if (entries[1].revents) {
    for (Fd& socket : entrance_->takeAll()) {
      lines_.push_back(std::make_unique<Line>(std::move(socket)));
      lines_.back()->send({Note::kRoot, 0, mine_.encode()});
    }
  }
  std::vector<const Line*> over;
  for (const auto& line : lines_) {
    bool isOver = false;
    for (Note note; !isOver && line->take(&note);) isOver = !onNote(*line, std::move(note));
    if (!isOver && line->hasEnded()) onEnd(*line);
    if (isOver || line->hasEnded()) over.push_back(line.get());
  }
  for (const Line* each : over) {
    std::erase_if(lines_, [each](const auto& line) { return line.get() == each; });
  }
}

void Meeting::tellAll(const Note& note) {
  for (const auto& line : lines_) line->send(note);
}

void Meeting::part(Line* up, Milliseconds atMost) {
  closeLobby();
  std::vector<Line*> lines;
  for (const auto& line : lines_) lines.push_back(line.get());
  if (up) lines.push_back(up);
  std::vector<bool> hasSaid(lines.size());
  for (const Deadline limit = Deadline::after(atMost); !limit.expired();) {
    std::vector<pollfd> entries;
    for (size_t i = 0; i < lines.size(); ++i) {
      lines[i]->flush();
      if (lines[i]->isFlushed() && !hasSaid[i]) hasSaid[i] = true, lines[i]->sayNoMore();
      const int events = hasSaid[i] ? POLLIN : POLLIN | POLLOUT;
      if (!lines[i]->hasEnded()) {
        entries.push_back({lines[i]->fd(), static_cast<short>(events), 0});
      }
    }
    if (entries.empty()) return;
    (void)poll(entries.data(), entries.size(), limit.pollMilliseconds());
    for (Line* line : lines) line->read();
  }
}

// ---- words

Status Meeting::ended(int rank, const PeerAddress& peer) const {
  return error(Code::kPeerLost, "rank " + std::to_string(rank) + " (" + peer.describe() +
                                    ") ended before its first call, while the group was made; "
                                    "see its log");
}

Status Meeting::hasGivenUp(int rank, const PeerAddress& peer, const std::string& why) const {
  return error(Code::kStore, "rank " + std::to_string(rank) + " (" + peer.describe() +
                                 ") has given up: " + sanitized(why));
}

Status Meeting::isLost(int rank, const std::string& why) const {
  return error(Code::kPeerLost,
               "the group cannot be made with rank " + std::to_string(rank) + ": " + why);
}

Status Meeting::isUnlike(const Card& rankZero, const Card& other) const {
  return error(Code::kInvalidArgument,
               "rank 0 (" + rankZero.address.describe() + ") has '" + sanitized(rankZero.settings) +
                   "', rank " + std::to_string(other.rank) + " (" + other.address.describe() +
                   ") '" + sanitized(other.settings) + "': it must be the same on all ranks");
}

Status Meeting::tooLate(int rank, const std::string& milliseconds,
                        const std::vector<int>& missing) const {
  return error(Code::kTimeout,
               "timeout after " + milliseconds + "ms: rank " + std::to_string(rank) +
                   " waited for the other ranks of " + std::to_string(options_.ranks) +
                   (missing.empty() ? "" : "; missing: " + listNumbers(missing)) +
                   ". Were they all started, with the same world size and the same store?");
}

std::map<int, Engine::Loss> Meeting::losses() const {
  std::map<int, Engine::Loss> found;
  if (!options_.isOfJob) return found;
  const std::map<int64_t, Engine::Loss> known = engine_->losses();
  for (int rank = 0; rank < options_.ranks && !known.empty(); ++rank) {
    const auto loss = known.find(options_.globalRanks.empty() ? rank : options_.globalRanks[rank]);
    if (rank != options_.rank && loss != known.end()) found.emplace(rank, loss->second);
  }
  return found;
}

// ---- rank 0 ------------------------------------------------------------------------------------

class Host final : public Meeting {
 public:
  Host(const GroupOptions& options, Store& store, Engine* engine)
      : Meeting(options, store, engine), members_(options.ranks) {}

  Status run(GroupAddress* address);

 private:
  struct Member {
    enum class State { kAbsent, kMoving, kHere } state = State::kAbsent;
    PeerAddress address;
    int via = 0;  // the rank that it is connected to
    bool hasConfirmed = false;
    // It was here. Until it comes again:
    bool isGone = false;
    Clock::time_point since;
    std::string why;  // in its own words; empty: it has ended
  };

  Status meetOthers();
  Status open();
  Status takeRoot();
  Status lookAtRoot();
  Status check();
  void makeRoster();
  bool isConfirmed() const;
  std::vector<int> missing() const;

  bool onNote(Line& line, Note note) override;
  void onEnd(const Line& line) override;
  bool onCard(Line& line, const std::string& text);
  Status refuse(const Card& card) const;
  int placeFor(int rank);
  void keep(Line& line, int rank);
  void onGone(int rank, std::string why);

  std::vector<Member> members_;
  std::map<std::string, int> leaders_;  // by host: the rank that its others are sent to
  std::vector<int> direct_;             // those of them that are connected to rank 0
  size_t next_ = 0;                     // of these, for a host beyond kChildren
  std::map<int, std::pair<std::string, std::string>> lost_;  // rank -> uid, cause
  std::string number_;                                       // of the roster that stands
  Status failure_;
  const Clock::time_point began_ = Clock::now();
  bool hasRoot_ = false;
  Clock::time_point lookedAtRoot_;
};

Status Host::run(GroupAddress* address) {
  Status status = prepare();
  if (status.ok()) status = meetOthers();
  if (!status.ok()) {
    tellAll({Note::kFailed, 0,
             static_cast<char>('a' + static_cast<int>(status.code())) + status.message()});
    giveUp(status);
    part(nullptr, status.code() == Code::kInterrupted ? kPollStep : kAgain);
    return status;
  }
  closeLobby();  // before anybody can begin with the next meeting of this name
  tellAll({Note::kCommit, 0, number_});
  // Whatever this rank does next (make the group anew, or end, and take the store with it), nobody
  // still needs it.
  part(nullptr, kAgain);
  return result(mine_.nonce, address);
}

Status Host::meetOthers() {
  MYCOLL_RETURN_IF_ERROR(open());
  while (failure_.ok()) {
    if (number_.empty()) makeRoster();
    if (isConfirmed()) return Status();
    step();
    if (failure_.ok()) failure_ = check();
  }
  return failure_;
}

Status Host::open() {
  members_[0].state = Member::State::kHere;
  members_[0].address = mine_.address;
  leaders_[mine_.address.hostIdentity] = 0;
  MYCOLL_RETURN_IF_ERROR(openLobby(mine_.nonce));
  PeerAddress self;
  entrance_ = entrance(&self);
  if (entrance_) {
    MYCOLL_RETURN_IF_ERROR(entrance_->open());
    engine_->mesh()->openLobby(entrance_.get());
    return Status();
  }
  return takeRoot();
}

// Writes root, after a look at what stands there.
Status Host::takeRoot() {
  Card before;
  bool found = false;
  const Status read = this->read(kRoot, &found, &before);
  if (!found) MYCOLL_RETURN_IF_ERROR(read);
  found &= read.ok();  // what nobody can read is overwritten
  if (found && !before.why.empty() && before.rank > 0 && before.rank < options_.ranks &&
      isOfNow(before.address)) {
    members_[before.rank].address = before.address;
    onGone(before.rank, before.why);
  }
  if (found && before.why.empty() && isAlive(before.address) &&
      !isSameProcess(before.address, mine_.address)) {
    // Another rank 0 may be waiting there. A process that has left its groups, as all of them do
    // before they meet anew, may come back as another rank.
    const std::unique_ptr<Lobby> there = lobbyOf(before.nonce);
    Answer answer;
    Fd socket;
    std::string why;
    MYCOLL_RETURN_IF_ERROR(knock(
        *engine_->mesh(), before.address, *there, Deadline::after(kKnockTime),
        [this] { return isInterrupted() ? interrupted() : Status(); }, &answer, &socket, &why));
    if (answer == Answer::kIn) {
      lines_.push_back(std::make_unique<Line>(std::move(socket)));
      lines_.back()->send({Note::kCard, 0, mine_.encode()});
      return error(Code::kStore, "rank 0 is taken by " + before.address.describe() + " and by " +
                                     mine_.address.describe() +
                                     ". Two processes were started with one rank.");
    }
  }
  hasRoot_ = true;
  lookedAtRoot_ = Clock::now();
  return publish(mine_, found ? &before : nullptr);
}

// Somebody who could not be heard otherwise may have written there, or another rank 0.
Status Host::lookAtRoot() {
  // Those that know the way come at once, if they are not late.
  if (!hasRoot_) return Clock::now() - began_ < kAgain ? Status() : takeRoot();
  if (Clock::now() - lookedAtRoot_ < kLookAtRoot) return Status();
  lookedAtRoot_ = Clock::now();
  Card there;
  bool found = false;
  MYCOLL_RETURN_IF_ERROR(read(kRoot, &found, &there));
  if (!found || there.nonce == mine_.nonce) return Status();
  if (there.rank <= 0 || there.rank >= options_.ranks) {
    return error(Code::kStore, "rank 0 is taken by " + there.address.describe() + " and by " +
                                   mine_.address.describe() +
                                   ". Two processes were started with one rank.");
  }
  Member& member = members_[there.rank];
  if (member.state == Member::State::kAbsent) {
    member.address = there.address;
    onGone(there.rank, there.why);
  }
  return publish(mine_, &there);
}

// What makes waiting pointless.
Status Host::check() {
  if (isInterrupted()) return interrupted();
  if (deadline_.expired()) {
    return tooLate(0, std::to_string(options_.timeout.count()), missing());
  }
  MYCOLL_RETURN_IF_ERROR(lookAtRoot());
  for (const auto& [rank, loss] : losses()) lost_.try_emplace(rank, loss.uid, loss.cause.message());
  for (const auto& [rank, loss] : lost_) {
    const Member& member = members_[rank];
    // Another process may have come in its place.
    const bool isReplaced =
        member.state != Member::State::kAbsent && member.address.uid != loss.first;
    if (!isReplaced) return isLost(rank, loss.second);
  }
  int first = -1;
  for (int rank = 1; rank < options_.ranks; ++rank) {
    const Member& member = members_[rank];
    if (member.isGone && (first < 0 || member.since < members_[first].since)) first = rank;
  }
  if (first < 0 || Clock::now() - members_[first].since < kAgain) return Status();
  const Member& gone = members_[first];
  return gone.why.empty() ? ended(first, gone.address) : hasGivenUp(first, gone.address, gone.why);
}

void Host::makeRoster() {
  std::vector<std::string> addresses;
  for (Member& member : members_) {
    if (member.state != Member::State::kHere) return;
    addresses.push_back(member.address.encode());
    member.hasConfirmed = false;
  }
  std::string nonce;
  failure_ = Card::freshNonce(&nonce);
  if (!failure_.ok()) return;
  number_ = nonce.substr(0, 16);
  roster_ = encodeRoster(number_, addresses);
  members_[0].hasConfirmed = true;
  tellAll({Note::kRoster, 0, roster_});
}

bool Host::isConfirmed() const {
  return !number_.empty() && std::all_of(members_.begin(), members_.end(),
                                         [](const auto& member) { return member.hasConfirmed; });
}

std::vector<int> Host::missing() const {
  std::vector<int> found;
  for (int rank = 1; rank < options_.ranks; ++rank) {
    const Member& member = members_[rank];
    const bool isThere = member.state == Member::State::kHere;
    if (!isThere || (!number_.empty() && !member.hasConfirmed)) found.push_back(rank);
  }
  return found;
}

bool Host::onNote(Line& line, Note note) {
  if (note.kind == Note::kCard) return onCard(line, note.contents);
  if (note.rank <= 0 || note.rank >= options_.ranks) return false;
  Member& member = members_[note.rank];
  switch (note.kind) {
    case Note::kMoved:
      if (line.rank == note.rank) member.state = Member::State::kHere;
      return false;
    case Note::kStuck:
      if (line.rank == note.rank) keep(line, note.rank);
      return true;
    case Note::kConfirm: member.hasConfirmed |= note.contents == number_; return true;
    case Note::kGone: {
      // Who says it stands before its words; where another has taken its place, it knows nothing.
      const size_t end = std::min(note.contents.find('\n'), note.contents.size() - 1);
      const std::string by = note.contents.substr(0, end);
      if (by == std::to_string(note.rank) || by == std::to_string(member.via)) {
        onGone(note.rank, note.contents.substr(end + 1));
      }
      return true;
    }
    case Note::kLoss: {
      const size_t end = std::min(note.contents.find('\n'), note.contents.size() - 1);
      lost_.try_emplace(note.rank, note.contents.substr(0, end),
                        sanitized(note.contents.substr(end + 1)));
      return true;
    }
    case Note::kLate:
      if (failure_.ok()) failure_ = tooLate(note.rank, sanitized(note.contents), missing());
      return true;
    default: return false;
  }
}

void Host::onEnd(const Line& line) {
  if (line.rank > 0) onGone(line.rank, "");
}

Status Host::refuse(const Card& card) const {
  if (card.ranks != options_.ranks) {
    return error(Code::kStore, "rank 0 (" + mine_.address.describe() + ") was started with " +
                                   std::to_string(options_.ranks) + " ranks, rank " +
                                   std::to_string(card.rank) + " (" + card.address.describe() +
                                   ") with " + std::to_string(card.ranks) +
                                   ": the world sizes must be equal");
  }
  if (card.settings != mine_.settings) return isUnlike(mine_, card);
  const Member& member = members_[card.rank];
  const bool isDead = isVisible(member.address) && !isAlive(member.address);
  if (member.state == Member::State::kAbsent || member.address.uid == card.address.uid || isDead) {
    return Status();
  }
  return error(Code::kStore, "rank " + std::to_string(card.rank) + " is taken by " +
                                 member.address.describe() + " and by " + card.address.describe() +
                                 ". Two processes were started with one rank.");
}

bool Host::onCard(Line& line, const std::string& text) {
  Card card;
  if (!Card::decode(text, &card).ok() || card.rank < 0) return false;
  const Status refused = card.rank < options_.ranks || card.ranks != options_.ranks
                             ? refuse(card)
                             : error(Code::kStore, "there is no rank " + std::to_string(card.rank));
  if (!refused.ok()) {
    if (failure_.ok()) failure_ = refused;
    return true;
  }
  for (const auto& other : lines_) {
    if (other->rank == card.rank) other->rank = -1;  // it has lost that one, and comes anew
  }
  line.rank = card.rank;
  number_.clear();
  Member& member = members_[card.rank];
  member = Member();
  member.address = std::move(card.address);
  const int place = placeFor(card.rank);
  if (place == 0) {
    keep(line, card.rank);
    return true;
  }
  member.state = Member::State::kMoving;
  member.via = place;
  line.send({Note::kGoTo, place, members_[place].address.encode()});
  return true;
}

int Host::placeFor(int rank) {
  const auto [at, isFirst] = leaders_.try_emplace(members_[rank].address.hostIdentity, rank);
  const Member& leader = members_[at->second];
  if (at->second != rank && leader.state == Member::State::kHere) return at->second;
  if (at->second != rank && leader.state == Member::State::kMoving) return leader.via;
  at->second = rank;
  if (direct_.size() >= kChildren) return direct_[next_++ % direct_.size()];
  direct_.push_back(rank);
  return 0;
}

void Host::keep(Line& line, int rank) {
  members_[rank].state = Member::State::kHere;
  members_[rank].via = 0;
  line.send({Note::kStay, rank, ""});
}

void Host::onGone(int rank, std::string why) {
  Member& member = members_[rank];
  if (member.isGone) return;
  member.state = Member::State::kAbsent;
  member.isGone = true;
  member.since = Clock::now();
  member.why = std::move(why);
  number_.clear();
  std::erase(direct_, rank);
  // Those below it come again at once, if they live.
  for (int other = 1; other < options_.ranks; ++other) {
    if (members_[other].via == rank && members_[other].state == Member::State::kHere) {
      onGone(other, "");
    }
  }
}

// ---- the others --------------------------------------------------------------------------------

class Guest final : public Meeting {
 public:
  using Meeting::Meeting;

  Status run(GroupAddress* address);

 private:
  Status meetOthers();
  Status await(const std::string& key, Deadline until, Card* card, bool* found);
  Status look();
  // Without the store, where this rank knows rank 0 from another group. *isIn: root_ and up_ are
  // there. False: the store says more.
  Status enter(bool* isIn);
  Status hearRoot(bool* isIn);
  // At rank 0's place. *story: why it is no use to try again, unless somebody takes that place.
  Status takePart(bool* isOver, Status* story);
  Status goToRoot(bool wasThere, Status* story);
  Status knockAt(const PeerAddress& peer, Answer* answer, Fd* socket);
  Status settle(bool* isSettled);
  Status attend(bool* isOver);
  Status onWord(Note note, bool* isOver);

  bool onNote(Line& line, Note note) override;
  void onEnd(const Line& line) override;

  Card root_;             // whose meeting this is
  bool hasRoot_ = false;  // it has been read
  bool isOfNow_ = false;  // it was not left there by an earlier meeting
  std::unique_ptr<Line> up_;
  int parent_ = 0;
  PeerAddress parentAddress_;
  bool hasRoster_ = false;
  bool isTold_ = false;  // by rank 0: nobody else need be told of the failure
  bool hasAsked_ = false;
  std::string whyNot_;  // rank 0 could not be reached
  Deadline reachable_ = Deadline::never();
  std::map<int, std::string> told_;  // losses that rank 0 has been told of: rank -> uid
  Clock::time_point looked_;
};

Status Guest::run(GroupAddress* address) {
  Status status = prepare();
  if (status.ok()) status = meetOthers();
  if (status.ok()) {
    part(nullptr, kAgain);
    return result(root_.nonce, address);
  }
  if (up_ && !isTold_) {
    up_->send(
        {Note::kGone, options_.rank, std::to_string(options_.rank) + "\n" + status.message()});
  } else if (!up_ && !isTold_ &&
             (status.code() == Code::kInvalidArgument || status.code() == Code::kNetwork)) {
    giveUp(status);
  }
  // What rank 0 has said is passed on; otherwise those below come to it themselves.
  if (!isTold_) lines_.clear();
  part(up_.get(), isTold_ ? kAgain : kPollStep);
  return status;
}

Status Guest::look() {
  if (isInterrupted()) return interrupted();
  if (deadline_.expired()) {
    const std::string timeout = std::to_string(options_.timeout.count());
    if (!up_ || std::exchange(hasAsked_, true)) return tooLate(options_.rank, timeout, {0});
    up_->send({Note::kLate, options_.rank, timeout});
    deadline_ = Deadline::after(kAgain);
  }
  if (Clock::now() - looked_ < kPollStep) return Status();
  looked_ = Clock::now();
  for (const auto& [rank, loss] : losses()) {
    if (rank == 0 && (!hasRoot_ || root_.address.uid == loss.uid)) {
      return isLost(0, loss.cause.message());
    }
    if (!up_ || rank == 0 || told_[rank] == loss.uid) continue;
    told_[rank] = loss.uid;
    up_->send({Note::kLoss, rank, loss.uid + "\n" + loss.cause.message()});
  }
  return Status();
}

Status Guest::await(const std::string& key, Deadline until, Card* card, bool* found) {
  const auto began = Clock::now();
  for (auto asksAt = began;;) {
    if (store_.waitsItself() || asksAt <= Clock::now()) {
      MYCOLL_RETURN_IF_ERROR(store_.wait(key, kStep, found));
      if (*found) MYCOLL_RETURN_IF_ERROR(read(key, found, card));
      if (*found) return Status();
      if (!hasRoot_) isOfNow_ = true;  // what comes now is no leftover
      const auto now = Clock::now();
      asksAt = now + std::min<Clock::duration>((now - began) / kPartOfWait, kLongestPause);
    } else {
      std::this_thread::sleep_for(std::min<Clock::duration>(asksAt - Clock::now(), kStep));
    }
    MYCOLL_RETURN_IF_ERROR(look());
    if (until.expired()) return Status();
  }
}

Status Guest::meetOthers() {
  bool isThere = false;
  MYCOLL_RETURN_IF_ERROR(enter(&isThere));
  if (!isThere) MYCOLL_RETURN_IF_ERROR(await(kRoot, Deadline::never(), &root_, &isThere));
  hasRoot_ = true;
  isOfNow_ |= isOfNow(root_.address);
  for (;;) {
    Status story;
    bool isOver = false;
    if (root_.why.empty()) {
      MYCOLL_RETURN_IF_ERROR(takePart(&isOver, &story));
      if (isOver) return Status();
    } else if (isOfNow_) {
      story = hasGivenUp(root_.rank, root_.address, root_.why);
      if (root_.hasLost) story = Status(Code::kPeerLost, story.message());
    }
    Card next;
    const Status waited = await(afterKey(root_), Deadline::after(kAgain), &next, &isThere);
    isTold_ = !story.ok() && !isThere;
    if (isTold_) return story;  // also where rank 0 has taken the store along
    MYCOLL_RETURN_IF_ERROR(waited);
    if (!isThere) continue;
    root_ = std::move(next);
    isOfNow_ = true;
    reachable_ = Deadline::never();
  }
}

Status Guest::knockAt(const PeerAddress& peer, Answer* answer, Fd* socket) {
  const auto look = [this] { return this->look(); };
  for (int hangUps = 0;; ++hangUps) {
    MYCOLL_RETURN_IF_ERROR(knock(*engine_->mesh(), peer, *lobby_, Deadline::after(kKnockTime), look,
                                 answer, socket, &whyNot_));
    if (*answer != Answer::kHungUp || hangUps == kMostHangUps) return Status();
    std::this_thread::sleep_for(kBusyPause);
  }
}

Status Guest::enter(bool* isIn) {
  PeerAddress rankZero;
  const std::unique_ptr<Lobby> entrance = this->entrance(&rankZero);
  if (!entrance) return Status();
  for (bool isInStore = false; !isInStore;) {
    Answer answer;
    Fd socket;
    MYCOLL_RETURN_IF_ERROR(knock(
        *engine_->mesh(), rankZero, *entrance, Deadline::after(kKnockTime),
        [this] { return look(); }, &answer, &socket, &whyNot_, /*waits=*/true));
    if (answer == Answer::kIn) {
      up_ = std::make_unique<Line>(std::move(socket));
      MYCOLL_RETURN_IF_ERROR(hearRoot(isIn));
      if (!*isIn) up_.reset();
    } else if (answer != Answer::kHungUp) {
      return Status();
    }
    if (*isIn) return Status();
    // Rank 0 may know of no such group, or may have given up.
    MYCOLL_RETURN_IF_ERROR(store_.wait(kRoot, kBusyPause, &isInStore));
    if (!isInStore) isOfNow_ = true;  // what comes now is no leftover
  }
  return Status();
}

Status Guest::hearRoot(bool* isIn) {
  while (!up_->hasEnded()) {
    step(up_.get());
    Note note;
    if (up_->take(&note)) {
      *isIn = note.kind == Note::kRoot && Card::decode(note.contents, &root_).ok();
      return Status();
    }
    MYCOLL_RETURN_IF_ERROR(look());
  }
  return Status();
}

// Connects to rank 0; up_ is null where that fails. wasThere: it has been connected before.
Status Guest::goToRoot(bool wasThere, Status* story) {
  // Nobody is let in before rank 0 has: what is read may be what this process has left itself.
  closeLobby();
  lobby_ = lobbyOf(root_.nonce);
  Answer answer;
  Fd socket;
  MYCOLL_RETURN_IF_ERROR(knockAt(root_.address, &answer, &socket));
  switch (answer) {
    case Answer::kIn: up_ = std::make_unique<Line>(std::move(socket)); return Status();
    case Answer::kDistrusted:
      return error(Code::kInvalidArgument, "rank 0 (" + root_.address.describe() + ") " + whyNot_ +
                                               ": MYCOLL_SECRET_FILE must be the same everywhere");
    case Answer::kHungUp:
    case Answer::kUnreachable:
      if (reachable_.isNever()) {
        reachable_ =
            Deadline::after(std::chrono::seconds(engine_->mesh()->options().networkSeconds));
      }
      if (!reachable_.expired()) return Status();
      if (root_.settings != mine_.settings) return isUnlike(root_, mine_);
      return error(Code::kNetwork, "rank " + std::to_string(options_.rank) +
                                       " cannot reach rank 0 (" + root_.address.describe() +
                                       "): " + whyNot_);
    case Answer::kNobody: {
      const bool isDead = isOfNow_ && isVisible(root_.address) && !isAlive(root_.address);
      if (wasThere) *story = ended(parent_, parentAddress_);
      if (isDead) *story = ended(0, root_.address);
      return Status();
    }
  }
  return Status();
}

Status Guest::takePart(bool* isOver, Status* story) {
  // A rank 0 whose version has another handshake would hang up without a word.
  if (isOfNow_ && root_.settings != mine_.settings) return isUnlike(root_, mine_);
  const Mesh& mesh = *engine_->mesh();
  if (mesh.options().transport == TransportChoice::kShm && !mesh.isLocal(root_.address)) {
    return error(Code::kInvalidArgument,
                 "MYCOLL_TRANSPORT=shm on rank " + std::to_string(options_.rank) + " (" +
                     mine_.address.describe() + "), but rank 0 (" + root_.address.describe() +
                     ") shares no memory with it: it is on another host");
  }
  bool wasThere = false;
  for (;;) {
    if (!up_) MYCOLL_RETURN_IF_ERROR(goToRoot(wasThere, story));
    if (!up_) return Status();
    MYCOLL_RETURN_IF_ERROR(openLobby(root_.nonce));
    wasThere = isOfNow_ = true;
    reachable_ = Deadline::never();
    parent_ = 0;
    parentAddress_ = root_.address;
    hasRoster_ = false;
    up_->send({Note::kCard, options_.rank, mine_.encode()});
    bool isSettled = false;
    MYCOLL_RETURN_IF_ERROR(settle(&isSettled));
    if (isSettled) MYCOLL_RETURN_IF_ERROR(attend(isOver));
    if (*isOver) return Status();
    // Its place is no more. Those below it come to rank 0, too.
    up_.reset();
    lines_.clear();
  }
}

// Until rank 0 has said where this rank's place is.
Status Guest::settle(bool* isSettled) {
  while (!up_->hasEnded()) {
    step(up_.get());
    Note note;
    while (!*isSettled && up_->take(&note)) {
      if (note.kind == Note::kStay) {
        *isSettled = true;
        return Status();
      }
      if (note.kind != Note::kGoTo) {
        bool isOver = false;
        MYCOLL_RETURN_IF_ERROR(onWord(std::move(note), &isOver));
        continue;
      }
      PeerAddress parent;
      MYCOLL_RETURN_IF_ERROR(PeerAddress::decode(note.contents, &parent));
      Answer answer;
      Fd socket;
      MYCOLL_RETURN_IF_ERROR(knockAt(parent, &answer, &socket));
      if (answer != Answer::kIn) {
        up_->send({Note::kStuck, options_.rank, ""});
        continue;
      }
      // In this order: one of the two always has a connection to it, and knows its rank.
      auto line = std::make_unique<Line>(std::move(socket));
      line->send({Note::kHere, options_.rank, ""});
      up_->send({Note::kMoved, options_.rank, ""});
      up_ = std::move(line);
      parent_ = note.rank;
      parentAddress_ = std::move(parent);
      *isSettled = true;
      return Status();
    }
    MYCOLL_RETURN_IF_ERROR(look());
  }
  return Status();
}

// Passes on what is said, until the group is made or this place is no more.
Status Guest::attend(bool* isOver) {
  for (;;) {
    Note note;
    while (up_->take(&note)) {
      MYCOLL_RETURN_IF_ERROR(onWord(std::move(note), isOver));
      if (*isOver) return Status();
    }
    if (up_->hasEnded()) return Status();
    step(up_.get());
    MYCOLL_RETURN_IF_ERROR(look());
  }
}

Status Guest::onWord(Note note, bool* isOver) {
  switch (note.kind) {
    case Note::kRoster:
      tellAll(note);
      roster_ = std::move(note.contents);
      hasRoster_ = true;
      up_->send({Note::kConfirm, options_.rank, roster_.substr(0, 16)});
      return Status();
    case Note::kCommit:
      if (!hasRoster_) return Status();
      closeLobby();
      tellAll(note);
      *isOver = true;
      return Status();
    case Note::kFailed:
      tellAll(note);
      isTold_ = true;
      return note.contents.empty()
                 ? statusFromPeer(-1, "")
                 : statusFromPeer(note.contents[0] - 'a', note.contents.substr(1));
    default: return Status();
  }
}

bool Guest::onNote(Line& line, Note note) {
  if (note.kind == Note::kHere) {
    line.rank = note.rank;
    // It may have come while the roster did.
    if (hasRoster_) line.send({Note::kRoster, 0, roster_});
  } else if (line.rank >= 0 && up_) {
    up_->send(note);
  }
  return true;
}

void Guest::onEnd(const Line& line) {
  if (line.rank < 0 || !up_) return;
  up_->send({Note::kGone, line.rank, std::to_string(options_.rank) + "\n"});
}

}  // namespace

Status meet(const GroupOptions& options, Store& store, Engine& engine, GroupAddress* result) {
  if (options.rank == 0) return Host(options, store, &engine).run(result);
  return Guest(options, store, &engine).run(result);
}

void stayAway(const GroupOptions& options, Store& store, const Status& why) {
  Guest(options, store, nullptr).giveUp(why);
}

void setContext(GroupAddress* address) {
  const Digest digest = hmacSha256(address->secret, "mycoll context " + address->name);
  std::memcpy(&address->context, digest.data(), sizeof(address->context));
}

}  // namespace mycoll
