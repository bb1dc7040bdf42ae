#include "engine/round.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/bytes.h"
#include "base/secret.h"
#include "base/text.h"
#include "kernels/reduce.h"
#include "transport/mesh.h"

namespace mycoll {
namespace {

// How often a rank that has nothing to send asks whether its parent is still in the round: a parent
// that has left answers so. What it sent when it left may be lost.
constexpr auto kAskEvery = grace(1000);

std::string encode(const Round::Report& report) {
  std::string payload;
  append(&payload, report.rank);
  append(&payload, report.kind);
  append(&payload, report.loss);
  return payload + encode(report.why, kMaxControlBytes - payload.size());
}

bool decode(const std::string& payload, int ranks, Round::Report* report) {
  Reader reader(payload);
  report->rank = reader.value<int>();
  report->kind = reader.value<Round::Report::Kind>();
  report->loss = reader.value<LossReason>();
  return decodeFailure(reader.rest(), &report->why) && report->rank >= 0 && report->rank < ranks &&
         report->kind <= Round::Report::kLost;
}

}  // namespace

Round::Round(std::shared_ptr<Mesh> mesh, GroupAddress address, InvitationMessage message,
             Roster roster, Wakeup& wakeup)
    : mesh_(std::move(mesh)),
      message_(std::move(message)),
      roster_(std::move(roster)),
      mailbox_(mesh_, std::move(address), this),
      wakeup_(wakeup) {
  state_.joined.resize(roster_.members.size());
  const int self = mailbox_.rank();
  const Shape shape(hostsOf(mailbox_.group()), sumTree());
  const ControlTree tree(shape);
  const auto isAside = [this](int rank) {
    const Roster::Member& member = roster_.members[rank];
    return member.isAbsent() || member.isSlow;
  };
  if (isAside(self)) {
    parent_ = 0;
    return;
  }
  parent_ = tree.parentOf(self, isAside);
  children_ = tree.childrenOf(self, isAside);
  for (int rank = 1; self == 0 && rank < mailbox_.ranks(); ++rank) {
    if (!roster_.members[rank].isAbsent() && isAside(rank)) children_.push_back(rank);
  }
}

Status Round::open(std::shared_ptr<Mesh> mesh, const std::string& name, int rank,
                   InvitationMessage message, Roster roster, Wakeup& wakeup,
                   std::unique_ptr<Round>* result, bool isToJoin) {
  GroupAddress address;
  address.name = name;
  address.rank = rank;
  address.peers = roster.peers;
  MYCOLL_RETURN_IF_ERROR(secretOf("mycoll round " + toHex(message.digest), &address.secret));
  setContext(&address);
  result->reset(new Round(std::move(mesh), std::move(address), std::move(message),
                          std::move(roster), wakeup));
  Round& round = **result;
  // The invitations come first: a connection to a child is authenticated by the oldest group that
  // it is in, and the child does not know this round yet.
  if (!isToJoin) round.children_.clear();
  MYCOLL_RETURN_IF_ERROR(round.inviteChildren());
  round.mailbox_.open();
  if (isToJoin) {
    IoLock lock(round.mailbox_.ioMutex());
    round.join();
  }
  round.mesh_->progress();
  return Status();
}

Round::~Round() {
  invitations_.clear();  // they call this round
  mailbox_.detach();
}

Status Round::inviteChildren() {
  for (const int child : children_) {
    const Roster::Member& member = roster_.members[child];
    const auto refused = [this, child]()
                             REQUIRES(ioRole) { onLost(child, LossReason::kLeft, "has given up"); };
    MYCOLL_RETURN_IF_ERROR(
        Invitation::send(mesh_, {roster_.peers[child], member.nonce, member.isPublished}, message_,
                         refused, &invitations_.emplace_back()));
  }
  return Status();
}

Status Round::result(GroupAddress* address) const {
  *address = mailbox_.group();
  MYCOLL_RETURN_IF_ERROR(secretOf("mycoll group " + toHex(message_.digest), &address->secret));
  setContext(address);
  return Status();
}

// ---- joining -----------------------------------------------------------------------------------

void Round::join() {
  const int self = mailbox_.rank();
  state_.joined[self] = true;
  unsent_.push_back(self);
  if (children_.empty()) sendUp(/*isWhole=*/true);
}

void Round::sendUp(bool isWhole) {
  if (parent_ >= 0) {
    std::string payload;
    append(&payload, isWhole);
    for (const int rank : std::exchange(unsent_, {})) append(&payload, rank);
    nextAsk_ = Deadline::after(kAskEvery);
    mailbox_.sendControl(parent_, FrameKind::kJoined, payload);
  } else if (isWhole && roster_.isComplete() && state_.failure.ok()) {
    state_.isFormed = true;
    toChildren(FrameKind::kFormed, "");
  }
}

void Round::onJoined(int child, const std::string& payload) {
  if (!isChild(child)) return;
  Reader reader(payload);
  const bool isWhole = reader.value<char>() != 0;
  while (reader.hasMore()) {
    const int rank = reader.value<int>();
    if (reader.hasFailed() || rank < 0 || rank >= mailbox_.ranks() || state_.joined[rank]) continue;
    state_.joined[rank] = true;
    unsent_.push_back(rank);
  }
  if (!isWhole || !wholeChildren_.insert(child).second) return;
  if (wholeChildren_.size() == children_.size()) sendUp(/*isWhole=*/true);
}

void Round::forward() {
  {
    IoLock lock(mailbox_.ioMutex());
    const bool isDue = !unsent_.empty() || nextAsk_.expired();
    if (parent_ < 0 || state_.parent != Parent::kHere || !isDue) return;
    sendUp(/*isWhole=*/false);
  }
  mesh_->progress();
}

void Round::toChildren(FrameKind kind, const std::string& payload) {
  wakeup_.notify();
  for (const int child : children_) {
    if (mailbox_.isPresent(child)) mailbox_.sendControl(child, kind, payload);
  }
}

// ---- reports and failures ----------------------------------------------------------------------

void Round::handle(const Event& event) {
  if (const auto* const frame = std::get_if<ControlFrame>(&event)) {
    const int source = frame->header.source;
    switch (frame->header.kind) {
      case FrameKind::kJoined: return onJoined(source, frame->payload);
      case FrameKind::kAbort: return onAbort(source, frame->payload);
      case FrameKind::kFormed:
        if (source != parent_ || state_.isFormed || !state_.failure.ok()) return;
        state_.isFormed = true;
        return toChildren(FrameKind::kFormed, "");
      case FrameKind::kGoodbye: return onLeft(source);
      default: return;
    }
  }
  if (const auto* const left = std::get_if<RankLeft>(&event)) return onLeft(left->rank);
  const auto* const lost = std::get_if<PeerLost>(&event);
  if (!lost) return;
  for (int rank = 0; rank < mailbox_.ranks(); ++rank) {
    if (rank == mailbox_.rank() || !mailbox_.isOf(rank, lost->uid)) continue;
    onLost(rank, lost->loss.reason, lost->loss.describe());
  }
}

void Round::onLeft(int rank) {
  mailbox_.setAbsent(rank, Status(Code::kPeerLost, "it has left the round"), /*isFailure=*/false);
  if (rank != parent_ || state_.parent != Parent::kHere) return;
  state_.parent = Parent::kLeft;
  wakeup_.notify();
}

// Rank 0 acts on every loss that it detects, the others only on those of their parents and
// children.
void Round::onLost(int rank, LossReason reason, const std::string& why) {
  if (!mailbox_.isPresent(rank) && rank != parent_) return;
  mailbox_.setAbsent(rank, Status(Code::kPeerLost, why), /*isFailure=*/false);
  const std::string words = mailbox_.describeRank(rank) + " " + why + " (seen by rank " +
                            std::to_string(mailbox_.rank()) + ")";
  const Report loss{rank, Report::kLost, Status(Code::kNetwork, words), reason};
  if (rank == parent_) {
    state_.parent = Parent::kLost;
    state_.parentLoss = loss;
    wakeup_.notify();
  } else if (isChild(rank) || mailbox_.rank() == 0) {
    pass(loss);
  }
}

void Round::pass(const Report& report) {
  wakeup_.notify();
  if (mailbox_.rank() == 0) return state_.reports.push_back(report);
  if (mailbox_.isPresent(parent_)) mailbox_.sendControl(parent_, FrameKind::kAbort, encode(report));
}

void Round::onAbort(int source, const std::string& payload) {
  Report report;
  if (!decode(payload, mailbox_.ranks(), &report)) return;
  if (source != parent_) return pass(report);
  if (!state_.failure.ok() || state_.isFormed) return;
  state_.failure = report.why;
  toChildren(FrameKind::kAbort, payload);
}

void Round::report(const Report& report) {
  {
    IoLock lock(mailbox_.ioMutex());
    pass(report);
  }
  mesh_->progress();
}

bool Round::fail(const Status& why) {
  {
    IoLock lock(mailbox_.ioMutex());
    if (state_.isFormed) return false;
    if (!state_.failure.ok()) return true;
    state_.failure = why;
    toChildren(FrameKind::kAbort, encode({mailbox_.rank(), Report::kGaveUp, why}));
    // What else is sent to these ranks is not to wait until they have joined.
    for (int rank = 0; rank < mailbox_.ranks(); ++rank) {
      if (!state_.joined[rank]) mailbox_.setAbsent(rank, why, /*isFailure=*/false);
    }
  }
  mesh_->progress();
  return true;
}

bool Round::end() {
  IoLock lock(mailbox_.ioMutex());
  if (state_.isFormed) return false;
  state_.failure = Status(Code::kAborted, "rank 0 makes another round");
  for (const int child : children_) {
    const bool isHere = state_.joined[child] && mailbox_.isPresent(child);
    if (isHere) mailbox_.sendControl(child, FrameKind::kGoodbye, "");
  }
  return true;
}

void Round::leave() {
  GroupAddress address;
  if (!roster_.isComplete() || !result(&address).ok()) return;
  struct Ignores final : EventHandler {
    void handle(const Event& /*event*/) override {}
  } handler;
  Mailbox mailbox(mesh_, std::move(address), &handler);
  mailbox.open();
}

Round::State Round::state() {
  IoLock lock(mailbox_.ioMutex());
  State now = state_;
  state_.reports.clear();
  return now;
}

}  // namespace mycoll
