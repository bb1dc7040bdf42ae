#include "engine/agreement.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/membership.h"
#include "transport/mesh.h"

namespace mycoll {
namespace {

// What a kProbe frame's payload is made of.
struct Note {
  uint64_t sequence = 0;
  Signature signature;
};
static_assert(256 * sizeof(Note) <= kMaxControlBytes);  // all that is remembered, at once

// Ranks that differ must be found before anybody uses the numbers for long; a message to one rank
// now and then costs nothing beside a device's work.
constexpr auto kCompareEvery = std::chrono::milliseconds(100);

bool isCollective(const FrameHeader& came) {
  return came.messageClass == MessageClass::kCollective;
}

uint64_t sequenceOf(const FrameHeader& came) { return came.tag >> kStepBits; }

}  // namespace

Agreement::Agreement(Mailbox& mailbox, Membership& membership)
    : mailbox_(mailbox),
      membership_(membership),
      remembered_(kRemembered),
      reached_(mailbox.group().peers.size()) {}

void Agreement::fail(const Signature& mine, int source, const Signature& theirs,
                     const std::string& where, uint64_t from, uint64_t sequence) {
  Cause fields;
  fields.sequence = sequence;
  const std::string text =
      mismatchText(mailbox_.group().name, where, mailbox_.describeRank(mailbox_.rank()), mine,
                   mailbox_.describeRank(source), theirs);
  membership_.failLocked(Status(Code::kMismatch, text, fields), /*tellsOthers=*/true, from);
}

bool Agreement::signaturesAgree(const Signature& mine, const FrameHeader& came) {
  const Signature& theirs = came.signature;
  if (isCollective(came)) {
    if (mine == theirs) return true;
    const uint64_t sequence = sequenceOf(came);
    fail(mine, came.source, theirs, "collective #" + std::to_string(sequence), sequence, sequence);
    return false;
  }
  const bool isMessage = came.messageClass == MessageClass::kPointToPoint;
  const bool agree = isMessage
                         ? mine.dtype == theirs.dtype && mine.opaqueType == theirs.opaqueType &&
                               mine.bytes == theirs.bytes
                         : mine == theirs;
  if (agree) return true;
  fail(mine, came.source, theirs, "tag " + std::to_string(came.tag), 0, Cause::kNoSequence);
  return false;
}

// The signature, and the size where it leaves that open (all_to_all with splits, and the like).
bool Agreement::agrees(const Transfer& request, const FrameHeader& came) {
  if (!signaturesAgree(request.signature(), came)) return false;
  if (came.messageBytes == request.bytes()) return true;
  const std::string text =
      "mycoll group '" + mailbox_.group().name + "': MISMATCH of sizes\n  " +
      mailbox_.describeRank(mailbox_.rank()) + ": expects " + std::to_string(request.bytes()) +
      " bytes from the other in " + request.signature().describe() + "\n  " +
      mailbox_.describeRank(came.source) + ": sends " + std::to_string(came.messageBytes) +
      " bytes in " + came.signature.describe() +
      "\n  Each pair of ranks must agree on the size of what one sends to the other.";
  Cause fields;
  if (isCollective(came)) fields.sequence = sequenceOf(came);
  membership_.failLocked(Status(Code::kMismatch, text, fields), /*tellsOthers=*/true,
                         isCollective(came) ? sequenceOf(came) : 0);
  return false;
}

bool Agreement::expects(const FrameHeader& came) {
  if (!isCollective(came)) return true;
  compare(came.source, sequenceOf(came), came.signature);
  return membership_.failureOf(came.messageClass, came.tag).ok();
}

void Agreement::begin(uint64_t sequence, const Signature& signature) {
  IoLock lock(mailbox_.ioMutex());
  current_ = sequence;
  hasBegun_ = true;
  remembered_[sequence % kRemembered] = signature;
  // Copied, as a mismatch drops messages.
  std::vector<FrameHeader> early;
  mailbox_.forEachEarly([&](const FrameHeader& came) {
    if (isCollective(came) && sequenceOf(came) == sequence) early.push_back(came);
  });
  for (const FrameHeader& came : early) {
    if (!signaturesAgree(signature, came)) return;
  }
  if (probes_.empty()) return;
  std::vector<Probe> probes;
  probes.swap(probes_);
  for (Probe& probe : probes) {
    if (probe.sequence > sequence) {
      probes_.push_back(probe);
    } else {
      compare(probe.rank, probe.sequence, probe.signature);
    }
  }
}

void Agreement::compare(int source, uint64_t sequence, const Signature& theirs) {
  if (!hasBegun_ || sequence > current_ || current_ - sequence >= kRemembered) return;
  const Signature& mine = remembered_[sequence % kRemembered];
  if (mine == theirs) return;
  fail(mine, source, theirs, "collective #" + std::to_string(sequence), sequence, sequence);
}

std::string Agreement::notesSince(uint64_t first) const {
  std::string notes;
  for (uint64_t sequence = first; sequence <= current_; ++sequence) {
    const Note note{sequence, remembered_[sequence % kRemembered]};
    notes.append(reinterpret_cast<const char*>(&note), sizeof(note));
  }
  return notes;
}

bool Agreement::mayTell(int rank) {
  return hasBegun_ && !membership_.hasFailed() && !membership_.hasLeft(rank);
}

void Agreement::probe() {
  {
    IoLock lock(mailbox_.ioMutex());
    const std::string note = notesSince(current_);
    for (int rank = 0; rank < mailbox_.ranks(); ++rank) {
      if (rank == mailbox_.rank() || !mayTell(rank)) continue;
      mailbox_.sendControl(rank, FrameKind::kProbe, note);
    }
  }
  mailbox_.mesh().progress();
}

bool Agreement::compareWithNext(bool atOnce) {
  {
    IoLock lock(mailbox_.ioMutex());
    const int next = (mailbox_.rank() + 1) % mailbox_.ranks();
    if (next == mailbox_.rank() || !mayTell(next) || comparedUpTo_ > current_) return false;
    const auto now = std::chrono::steady_clock::now();
    if (!atOnce && now - comparedAt_ < kCompareEvery) return true;
    const uint64_t oldest = current_ < kRemembered ? 0 : current_ - kRemembered + 1;
    const std::string notes = notesSince(std::max(comparedUpTo_, oldest));
    comparedUpTo_ = current_ + 1;
    comparedAt_ = now;
    mailbox_.sendControl(next, FrameKind::kProbe, notes);
  }
  mailbox_.mesh().progress();
  return false;
}

std::vector<int> Agreement::behind(uint64_t sequence) {
  IoLock lock(mailbox_.ioMutex());
  std::vector<int> ranks;
  for (int rank = 0; rank < mailbox_.ranks(); ++rank) {
    if (rank != mailbox_.rank() && reached_[rank] <= sequence) ranks.push_back(rank);
  }
  return ranks;
}

void Agreement::onProbe(int source, const std::string& payload) {
  if (payload.empty() || payload.size() % sizeof(Note) != 0) return;
  Note note;
  bool isAhead = false;
  for (size_t at = 0; at < payload.size(); at += sizeof(Note)) {
    std::memcpy(&note, payload.data() + at, sizeof(note));
    if (hasBegun_ && note.sequence <= current_) {
      compare(source, note.sequence, note.signature);
    } else {
      isAhead = true;
      if (probes_.size() < kRemembered) probes_.push_back({source, note.sequence, note.signature});
    }
  }
  reached_[source] = std::max(reached_[source], note.sequence + 1);
  if (!isAhead || membership_.hasFailed() || membership_.hasLeft(source)) return;
  const uint64_t begun = hasBegun_ ? current_ + 1 : 0;
  mailbox_.sendControl(source, FrameKind::kPosition,
                       std::string(reinterpret_cast<const char*>(&begun), sizeof(begun)));
}

void Agreement::onPosition(int source, const std::string& payload) {
  uint64_t begun = 0;
  if (payload.size() != sizeof(begun)) return;
  std::memcpy(&begun, payload.data(), sizeof(begun));
  reached_[source] = std::max(reached_[source], begun);
}

}  // namespace mycoll
