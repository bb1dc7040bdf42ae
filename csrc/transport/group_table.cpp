#include "transport/group_table.h"

#include "transport/mailbox.h"

namespace mycoll {
namespace {

// The approximate memory of a frame beside its payload.
constexpr size_t kFrameOverhead = 256;
constexpr size_t kMostOverflown = 4096;

size_t sizeOf(const WholeFrame& frame) { return frame.payload.size() + kFrameOverhead; }

// Whether a waiting rank sends such frames repeatedly: see frame.h.
bool isRepeated(const FrameHeader& header) {
  return header.kind == FrameKind::kArrived || header.kind == FrameKind::kQuestion ||
         header.kind == FrameKind::kInvitation;
}

}  // namespace

std::vector<const PeerAddress*> GroupTable::add(Mailbox* mailbox) {
  const GroupAddress& group = mailbox->group();
  mailboxes_[{group.context, group.rank}] = mailbox;
  byAge_.push_back(mailbox);
  std::vector<const PeerAddress*> added;
  for (const PeerAddress& peer : group.peers) {
    if (!peer.uid.empty() && memberships_[peer.uid]++ == 0) added.push_back(&peer);
  }
  return added;
}

void GroupTable::remove(Mailbox* mailbox) {
  const GroupAddress& group = mailbox->group();
  const Key key{group.context, group.rank};
  if (group.isInvitation && !group.isOnce) {
    mailboxes_.erase(key);
  } else {
    mailboxes_.find(key)->second = nullptr;
    const auto oldest = mailboxes_.find(std::exchange(left_[oldestLeft_], key));
    oldestLeft_ = (oldestLeft_ + 1) % kMostLeft;
    // The group may have been made again.
    if (oldest != mailboxes_.end() && oldest->second == nullptr) mailboxes_.erase(oldest);
  }
  std::erase(byAge_, mailbox);
  // A peer that makes its groups again has another uid each time, so entries must not accumulate.
  for (const PeerAddress& peer : group.peers) {
    if (peer.uid.empty()) continue;
    const auto membership = memberships_.find(peer.uid);
    if (--membership->second == 0) memberships_.erase(membership);
  }
}

Mailbox* GroupTable::find(uint64_t context, int rank) const {
  const auto found = mailboxes_.find({context, rank});
  return found == mailboxes_.end() ? nullptr : found->second;
}

Outcome GroupTable::standing(uint64_t context, int rank) const {
  const auto found = mailboxes_.find({context, rank});
  if (found == mailboxes_.end()) return Outcome::kNotYet;
  return found->second ? Outcome::kAccepted : Outcome::kGone;
}

std::vector<Mailbox*> GroupTable::commonWith(const std::string& uid) const {
  std::vector<Mailbox*> common;
  for (Mailbox* mailbox : byAge_) {
    if (mailbox->presentRank(uid) >= 0) common.push_back(mailbox);
  }
  return common;
}

void GroupTable::overflow(const Key& group) {
  // Limits the set: no job makes so many groups at a time.
  if (overflown_.size() >= kMostOverflown) overflown_.erase(overflown_.begin());
  overflown_.insert(group);
}

bool GroupTable::makeRoom(uint64_t context, int rank, size_t bytes) {
  const Key group{context, rank};
  if (bytes + kFrameOverhead > kMaxEarlyBytes) return overflow(group), false;
  while (earlyBytes_ + bytes + kFrameOverhead > kMaxEarlyBytes) {
    const FrameHeader& oldest = early_.front().header;
    const Key victim{oldest.context, oldest.destination};
    overflow(victim);
    if (victim == group) return false;
    std::erase_if(early_, [&](const WholeFrame& frame) REQUIRES(ioRole) {
      if (Key{frame.header.context, frame.header.destination} != victim) return false;
      earlyBytes_ -= sizeOf(frame);
      return true;
    });
  }
  return !overflown_.count(group);
}

void GroupTable::keep(WholeFrame frame) {
  const FrameHeader& header = frame.header;
  if (isRepeated(header)) {
    std::erase_if(early_, [&](const WholeFrame& other) REQUIRES(ioRole) {
      const bool isOlder =
          other.uid == frame.uid && other.header.kind == header.kind &&
          other.header.tag == header.tag && other.header.context == header.context &&
          other.header.source == header.source && other.header.destination == header.destination;
      if (isOlder) earlyBytes_ -= sizeOf(other);
      return isOlder;
    });
  }
  earlyBytes_ += sizeOf(frame);
  early_.push_back(std::move(frame));
}

std::vector<WholeFrame> GroupTable::takeEarly(uint64_t context, int rank, bool* isComplete) {
  *isComplete = overflown_.erase({context, rank}) == 0;
  std::vector<WholeFrame> all, taken;
  all.swap(early_);
  earlyBytes_ = 0;
  for (WholeFrame& frame : all) {
    if (frame.header.context == context && frame.header.destination == rank) {
      taken.push_back(std::move(frame));
    } else {
      earlyBytes_ += sizeOf(frame);
      early_.push_back(std::move(frame));
    }
  }
  return taken;
}

}  // namespace mycoll
