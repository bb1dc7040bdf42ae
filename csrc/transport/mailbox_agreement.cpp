// The mailbox's half that holds ranks to the same calls: signatures, sizes, and probes by those who
// have waited long.
#include <algorithm>
#include <cstring>
#include <utility>

#include "transport/endpoint.h"
#include "transport/mailbox.h"

namespace mycoll {
namespace {

// What a kProbe frame's payload is made of.
struct Note {
  uint64_t sequence = 0;
  Signature signature;
};
static_assert(256 * sizeof(Note) <= kMaxControlBytes);  // all that is remembered, at once

bool pointToPointAgrees(const Signature& a, const Signature& b) {
  return a.dtype == b.dtype && a.opaqueType == b.opaqueType && a.bytes == b.bytes;
}

}  // namespace

bool Mailbox::signaturesAgree(const Signature& mine, const FrameHeader& came) {
  bool agree = came.messageClass == MessageClass::kPointToPoint
                   ? pointToPointAgrees(mine, came.signature)
                   : mine == came.signature;
  if (agree) return true;
  std::string where = came.messageClass == MessageClass::kCollective
                          ? "collective #" + std::to_string(came.tag >> kStepBits)
                          : "tag " + std::to_string(came.tag);
  const bool isCollective = came.messageClass == MessageClass::kCollective;
  reportMismatch(mine, came.source, came.signature, where,
                 isCollective ? came.tag >> kStepBits : 0);
  return false;
}

void Mailbox::reportMismatch(const Signature& mine, int source, const Signature& theirs,
                             const std::string& where, uint64_t from) {
  failLocked(Status(Code::kMismatch,
                    "mycoll group '" + group_.name + "': MISMATCH at " + where + "\n  " +
                        describeRank(group_.rank) + ": " + mine.describe() + "\n  " +
                        describeRank(source) + ": " + theirs.describe() +
                        "\n  All ranks must call the same operations in the same order, with the "
                        "same dtype, size, reduce op and root."),
             true, from);
}

// The signature, and the size where it leaves that open (all_to_all with splits, and the like).
bool Mailbox::agrees(const Transfer& request, const FrameHeader& came) {
  if (!signaturesAgree(request.signature_, came)) return false;
  if (came.messageBytes == request.data_.bytes) return true;
  failLocked(
      Status(Code::kMismatch,
             "mycoll group '" + group_.name + "': MISMATCH of sizes\n  " +
                 describeRank(group_.rank) + ": expects " + std::to_string(request.data_.bytes) +
                 " bytes from the other in " + request.signature_.describe() + "\n  " +
                 describeRank(came.source) + ": sends " + std::to_string(came.messageBytes) +
                 " bytes in " + came.signature.describe() +
                 "\n  Each pair of ranks must agree on the size of what one sends to the "
                 "other."),
      true, came.messageClass == MessageClass::kCollective ? came.tag >> kStepBits : 0);
  return false;
}

void Mailbox::beginCollective(uint64_t sequence, const Signature& signature) {
  std::lock_guard<std::mutex> lock(endpoint_->ioMutex());
  currentSequence_ = sequence;
  hasBegun_ = true;
  remembered_[sequence % kRemembered] = signature;
  for (const Unexpected& message : unexpected_) {
    if (message.header.messageClass == MessageClass::kCollective &&
        message.header.tag >> kStepBits == sequence &&
        !signaturesAgree(signature, message.header)) {
      return;
    }
  }
  if (probes_.empty()) return;
  std::vector<Probe> probes;
  probes.swap(probes_);
  for (Probe& probe : probes) {
    if (probe.sequence > sequence) {
      probes_.push_back(probe);
    } else {
      checkAgainstCollectives(probe.rank, probe.sequence, probe.signature);
    }
  }
}

void Mailbox::checkAgainstCollectives(int source, uint64_t sequence, const Signature& theirs) {
  if (!hasBegun_ || sequence > currentSequence_ || currentSequence_ - sequence >= kRemembered) {
    return;
  }
  const Signature& mine = remembered_[sequence % kRemembered];
  if (!(mine == theirs)) {
    reportMismatch(mine, source, theirs, "collective #" + std::to_string(sequence), sequence);
  }
}

std::string Mailbox::notesSince(uint64_t first) const {
  std::string notes;
  for (uint64_t sequence = first; sequence <= currentSequence_; ++sequence) {
    const Note note{sequence, remembered_[sequence % kRemembered]};
    notes.append(reinterpret_cast<const char*>(&note), sizeof(note));
  }
  return notes;
}

void Mailbox::onProbe(int source, const std::string& payload) {
  if (payload.empty() || payload.size() % sizeof(Note) != 0) return;
  Note note;
  bool isAhead = false;
  for (size_t at = 0; at < payload.size(); at += sizeof(Note)) {
    std::memcpy(&note, payload.data() + at, sizeof(note));
    if (hasBegun_ && note.sequence <= currentSequence_) {
      checkAgainstCollectives(source, note.sequence, note.signature);
    } else {
      isAhead = true;
      if (probes_.size() < kRemembered) probes_.push_back({source, note.sequence, note.signature});
    }
  }
  reached_[source] = std::max(reached_[source], note.sequence + 1);
  if (!isAhead || !failure_.ok() || left_[source]) return;
  const uint64_t begun = hasBegun_ ? currentSequence_ + 1 : 0;
  queueControl(source, FrameKind::kPosition,
               std::string(reinterpret_cast<const char*>(&begun), sizeof(begun)));
}

void Mailbox::probe() {
  {
    std::lock_guard<std::mutex> lock(endpoint_->ioMutex());
    if (!hasBegun_ || !failure_.ok()) return;
    const std::string note = notesSince(currentSequence_);
    for (int rank = 0; rank < ranks(); ++rank) {
      if (rank != group_.rank && !left_[rank]) queueControl(rank, FrameKind::kProbe, note);
    }
  }
  endpoint_->progress();
}

void Mailbox::compareWith(int rank) {
  {
    std::lock_guard<std::mutex> lock(endpoint_->ioMutex());
    if (!hasBegun_ || !failure_.ok() || left_[rank]) return;
    const uint64_t oldest = currentSequence_ < kRemembered ? 0 : currentSequence_ - kRemembered + 1;
    const std::string notes = notesSince(std::max(told_, oldest));
    if (notes.empty()) return;
    told_ = currentSequence_ + 1;
    queueControl(rank, FrameKind::kProbe, notes);
  }
  endpoint_->progress();
}

std::vector<int> Mailbox::behind(uint64_t sequence) {
  std::lock_guard<std::mutex> lock(endpoint_->ioMutex());
  std::vector<int> ranks;
  for (int rank = 0; rank < this->ranks(); ++rank) {
    if (rank != group_.rank && reached_[rank] <= sequence) ranks.push_back(rank);
  }
  return ranks;
}

void Mailbox::tell(int rank, FrameKind kind, const std::string& payload) {
  {
    std::lock_guard<std::mutex> lock(endpoint_->ioMutex());
    if (left_[rank] || isDetached_) return;
    queueControl(rank, kind, payload);
  }
  // A process that is idle has not asked to be rung for what comes over a ring.
  const PeerAddress& peer = group_.peers[rank];
  if (endpoint_->isLocal(peer)) endpoint_->bellOf(peer).ring();
  endpoint_->progress();
}

bool Mailbox::isUnmatched(const Transfer& request) {
  std::lock_guard<std::mutex> lock(endpoint_->ioMutex());
  if (!request.isPosted_) return false;
  if (request.isReceive_) {
    return std::find(posted_.begin(), posted_.end(), &request) != posted_.end();
  }
  return request.id_ != 0 && inFlight_.count(request.id_) > 0;
}

}  // namespace mycoll
