#include "engine/agreement.h"

#include <algorithm>
#include <utility>

#include "base/bytes.h"
#include "engine/group.h"
#include "transport/mesh.h"

namespace mycoll {
namespace {

// After the note of a kArrived frame: ranks that have begun its collective.
struct RankRange {
  int32_t first = 0;
  int32_t last = 0;
};

// Notices are forwarded at most this often in each direction.
constexpr auto kForwardEvery = grace(20);
// At most this many of the awaited ranks are notified directly, the others along the tree.
constexpr size_t kMostAwaited = 64;

// A difference must be detected before a program uses wrong results for long. One message to one
// rank per interval is cheap compared with a device's work.
constexpr auto kCompareEvery = grace(100);
// Ranks that differ report it within this time: all have begun the collectives that ended here.
constexpr auto kAnswersWithin = grace(1000);

}  // namespace

Agreement::Agreement(Group& group)
    : group_(group),
      mailbox_(group.mailbox),
      membership_(group.membership),
      reached_(mailbox_.ranks()) {
  static_assert(CallLog::kRemembered * sizeof(Note) <= kMaxControlBytes);  // all in one frame
}

void Agreement::fail(const Signature& mine, int source, const Signature& theirs,
                     const std::string& where, uint64_t from, uint64_t sequence) {
  Cause fields;
  fields.sequence = sequence;
  const std::string text =
      mismatchText(mailbox_.group().name, where, mailbox_.describeRank(mailbox_.rank()), mine,
                   mailbox_.describeRank(source), theirs);
  membership_.failLocked(Status(Code::kMismatch, text, fields), /*notifiesOthers=*/true, from);
}

void Agreement::onDifference(const CallsDiffer& difference) {
  const FrameHeader& came = difference.came;
  const Signature& mine = difference.mine;
  const bool isCollective = came.isOfCollective();
  const uint64_t sequence = isCollective ? came.collective() : Cause::kNoSequence;
  const uint64_t from = isCollective ? sequence : 0;
  if (!agree(came.messageClass, mine, came.signature)) {
    const std::string where = isCollective ? "collective #" + std::to_string(sequence)
                                           : "tag " + std::to_string(came.tag);
    return fail(mine, came.source, came.signature, where, from, sequence);
  }
  const std::string text =
      "mycoll group '" + mailbox_.group().name + "': MISMATCH of sizes\n  " +
      mailbox_.describeRank(mailbox_.rank()) + ": expects " + std::to_string(difference.bytes) +
      " bytes from the other in " + mine.describe() + "\n  " + mailbox_.describeRank(came.source) +
      ": sends " + std::to_string(came.messageBytes) + " bytes in " + came.signature.describe() +
      "\n  Each pair of ranks must agree on the size of what one sends to the other." +
      (isCollective && !mailbox_.mesh().isLocal(mailbox_.group().peers[came.source])
           ? " From host to host, small blocks are counted together."
           : "");
  Cause fields;
  fields.sequence = sequence;
  membership_.failLocked(Status(Code::kMismatch, text, fields), /*notifiesOthers=*/true, from);
}

void Agreement::begin(uint64_t sequence, const Signature& signature) {
  IoLock lock(mailbox_.ioMutex());
  mailbox_.beginCollective(sequence, signature);
  noteArrived(mailbox_.rank(), sequence);
  std::vector<Note> notes;
  notes.swap(early_);
  for (const Note& note : notes) {
    if (note.sequence > sequence) {
      early_.push_back(note);
    } else {
      compare(note.rank, note.sequence, note.signature);
    }
  }
}

void Agreement::compare(int source, uint64_t sequence, const Signature& theirs) {
  const Signature* const mine = mailbox_.calls().find(sequence);
  if (mine == nullptr || *mine == theirs) return;
  fail(*mine, source, theirs, "collective #" + std::to_string(sequence), sequence, sequence);
}

std::string Agreement::notesSince(uint64_t first) const {
  std::string notes;
  const CallLog& calls = mailbox_.calls();
  for (uint64_t sequence = first; sequence <= calls.current(); ++sequence) {
    append(&notes, Note{sequence, *calls.find(sequence), mailbox_.rank(), 0});
  }
  return notes;
}

void Agreement::sendArrived(const std::vector<int>& awaited) {
  IoLock lock(mailbox_.ioMutex());
  if (!mailbox_.calls().hasBegun() || membership_.hasFailed()) return;
  const uint64_t current = mailbox_.calls().current();
  const Note note{current, *mailbox_.calls().find(current), mailbox_.rank(), 0};
  const int up = parent();
  if (up >= 0) {
    sendArrived(up, note);
  } else {
    forward(mailbox_.rank(), note, updateLatest(note));
  }
  for (size_t i = 0; i < std::min(awaited.size(), kMostAwaited); ++i) {
    if (awaited[i] != up) sendArrived(awaited[i], note);
  }
}

int Agreement::parent() const {
  return group_.tree.parentOf(mailbox_.rank(),
                              [this](int rank) { return membership_.hasLeft(rank); });
}

void Agreement::sendArrived(int rank, const Note& note) {
  if (rank == mailbox_.rank() || membership_.hasFailed() || membership_.hasLeft(rank)) return;
  std::string payload;
  append(&payload, note);
  for (int first = 0; first < mailbox_.ranks(); ++first) {
    if (reached_[first] <= note.sequence) continue;
    int last = first;
    while (last + 1 < mailbox_.ranks() && reached_[last + 1] > note.sequence) ++last;
    if (payload.size() + sizeof(RankRange) > kMaxControlBytes) break;
    append(&payload, RankRange{first, last});
    first = last;
  }
  mailbox_.sendControl(rank, FrameKind::kArrived, payload, note.sequence);
}

bool Agreement::isTimeFor(Direction& direction, bool isNew) const {
  if (!isNew && !direction.isPending) return false;
  const auto now = Clock::now();
  direction.isPending = now - direction.last < kForwardEvery;
  if (direction.isPending) return false;
  direction.last = now;
  return true;
}

// Forwards a note from below up to the root, and from the root, or a rank that acts as the root,
// down to all ranks.
void Agreement::forward(int source, const Note& note, bool isNew) {
  const int up = parent();
  if (up >= 0 && source != up) {
    if (isTimeFor(up_, isNew)) sendArrived(up, note);
    return;
  }
  if (!isTimeFor(down_, isNew)) return;
  const auto hasLeft = [this](int rank) { return membership_.hasLeft(rank); };
  for (const int child : group_.tree.childrenOf(mailbox_.rank(), hasLeft)) sendArrived(child, note);
}

bool Agreement::noteArrived(int rank, uint64_t sequence) {
  if (reached_[rank] > sequence) return false;
  reached_[rank] = sequence + 1;
  return true;
}

bool Agreement::compareWithNext(bool atOnce) {
  IoLock lock(mailbox_.ioMutex());
  const int next = (mailbox_.rank() + 1) % mailbox_.ranks();
  const CallLog& calls = mailbox_.calls();
  if (next == mailbox_.rank() || !calls.hasBegun()) return false;
  if (membership_.hasFailed() || membership_.hasLeft(next)) return false;
  const auto now = std::chrono::steady_clock::now();
  if (comparedUpTo_ > calls.current()) return now - comparedAt_ < kAnswersWithin;
  if (!atOnce && now - comparedAt_ < kCompareEvery) return true;
  const std::string notes = notesSince(std::max(comparedUpTo_, calls.oldest()));
  comparedUpTo_ = calls.current() + 1;
  comparedAt_ = now;
  mailbox_.sendControl(next, FrameKind::kProbe, notes);
  return true;
}

void Agreement::sendLast() {
  IoLock lock(mailbox_.ioMutex());
  if (!mailbox_.calls().hasBegun() || membership_.hasFailed()) return;
  const std::string note = notesSince(mailbox_.calls().current());
  for (int rank = 0; rank < mailbox_.ranks(); ++rank) {
    if (rank != mailbox_.rank()) {
      mailbox_.sendControlIfConnected(rank, FrameKind::kProbe, note);
    }
  }
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
  for (Reader reader(payload); reader.hasMore();) {
    note = reader.value<Note>();
    note.rank = source;
    take(note);
  }
  noteArrived(source, note.sequence);
}

// Whether the note is about a later collective than all notes before it, or about another call.
bool Agreement::updateLatest(const Note& note) {
  const bool isOld =
      latest_ && (note.sequence < latest_->sequence ||
                  (note.sequence == latest_->sequence && note.signature == latest_->signature));
  if (!isOld) latest_ = note;
  return !isOld;
}

// Compares the note with this rank's own call, now or when that call begins.
void Agreement::take(const Note& note) {
  if (mailbox_.calls().hasBegun() && note.sequence <= mailbox_.calls().current()) {
    compare(note.rank, note.sequence, note.signature);
    return;
  }
  auto isSame = [&](const Note& other) {
    return other.rank == note.rank && other.sequence == note.sequence;
  };
  if (early_.size() < CallLog::kRemembered && std::none_of(early_.begin(), early_.end(), isSame)) {
    early_.push_back(note);
  }
}

void Agreement::onArrived(int source, const std::string& payload) {
  Reader reader(payload);
  const auto note = reader.value<Note>();
  if (reader.hasFailed() || note.rank < 0 || note.rank >= mailbox_.ranks()) return;
  bool isNew = updateLatest(note), isKnownToCome = false;
  take(note);
  while (reader.hasMore()) {
    const auto range = reader.value<RankRange>();
    if (reader.hasFailed() || range.first < 0 || range.last >= mailbox_.ranks()) return;
    for (int rank = range.first; rank <= range.last; ++rank) {
      isKnownToCome |= rank == mailbox_.rank();
      if (rank != mailbox_.rank()) isNew |= noteArrived(rank, note.sequence);
    }
  }
  if (membership_.hasFailed()) return;
  forward(source, note, isNew);
  // The sender counts this rank as missing, although it has begun the collective: it has not waited
  // long enough to send a notice.
  const bool hasCome = reached_[mailbox_.rank()] > note.sequence;
  if (const int up = parent(); hasCome && !isKnownToCome && source == up) sendArrived(up, note);
}

}  // namespace mycoll
