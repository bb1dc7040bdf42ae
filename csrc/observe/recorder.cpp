#include "observe/recorder.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/text.h"
#include "observe/trace_file.h"

namespace mycoll {
namespace {

// Keeps the last byte zero. Copies byte by byte: a concurrent reader sees a shorter text.
template <size_t kBytes>
void copyText(char (&target)[kBytes], const std::string& text) {
  const std::string_view shown = beginning(text, kBytes - 1);
  for (size_t i = 0; i < shown.size(); ++i) {
    __atomic_store_n(&target[i], shown[i], __ATOMIC_RELAXED);
  }
}

// How many entries of unfinished operations a new one skips before it overwrites one.
constexpr int kMaxLeft = 16;

}  // namespace

Operation Operation::ofMessage(const Signature& signature, int peer, uint64_t tag, uint64_t bytes) {
  Operation result;
  result.signature = signature;
  result.peer = peer;
  result.tag = tag;
  const bool leaves = signature.kind == OpKind::kSend || signature.kind == OpKind::kPut;
  (leaves ? result.inBytes : result.outBytes) = bytes;
  return result;
}

void OpRecord::start(int64_t now) const {
  if (!isCurrent() || get(entry_->started) != 0) return;
  put(entry_->started, now);
  put(entry_->state, OpState::kStarted);
}

void OpRecord::setPeer(int rank) const {
  if (isCurrent()) put(entry_->peer, static_cast<int32_t>(rank));
}

void OpRecord::setSite(uint32_t site) const {
  if (isCurrent()) put(entry_->site, site);
}

std::string OpRecord::place() const {
  return isCurrent() ? BlackBox::process().placeOf(get(entry_->site)) : "";
}

void OpRecord::finish(bool isOk, int64_t now) const {
  if (isCurrent()) {
    if (get(entry_->started) == 0) put(entry_->started, now);
    put(entry_->ended, now);
    put(entry_->state, isOk ? OpState::kDone : OpState::kFailed);
  }
  if (!group_) return;
  const bool isClosed =
      get(group_->context) != context_ || get(group_->phase) == GroupPhase::kClosed;
  Tally& tally =
      isClosed ? BlackBox::process().ended(kind_) : group_->tallies[static_cast<int>(kind_)];
  // Messages end on any thread, so the tallies are added to atomically.
  (isOk ? tally.done : tally.failed).fetch_add(1, std::memory_order_relaxed);
  tally.bytes.fetch_add(bytes_, std::memory_order_relaxed);
  tally.nanos.fetch_add(static_cast<uint64_t>(now - enqueued_), std::memory_order_relaxed);
  if (isClosed || isMessage(kind_)) return;
  put(group_->finished, sequence_ + 1);
}

GroupRecord::GroupRecord(const std::string& name, uint64_t context, int rank, int ranks,
                         const std::vector<int64_t>& globalRanks)
    : box_(BlackBox::process()), state_(box_.take()) {
  put(state_->context, context);
  put(state_->rank, static_cast<int32_t>(rank));
  put(state_->ranks, static_cast<int32_t>(ranks));
  const auto inJob = [&](int each) {
    return globalRanks.empty() ? each : static_cast<int32_t>(globalRanks[each]);
  };
  for (int i = 0; i < GroupState::kShownRanks; ++i) {
    put(state_->globalRanks[i], i < ranks ? inJob(i) : -1);
  }
  copyText(state_->name, name);
  box_.join(context, inJob(rank));
  put(state_->phase, GroupPhase::kOpen);
}

GroupRecord::~GroupRecord() { close(); }

// Skips operations that have not ended, as long as they are few: users look for these first.
Entry& GroupRecord::nextEntry() {
  Entry* const entries = box_.entriesOf(state_);
  for (int tries = 0;; ++tries) {
    const uint64_t number = state_->written.fetch_add(1, std::memory_order_relaxed);
    Entry& entry = entries[number & (box_.capacity() - 1)];
    // After the first round, an empty entry is being written by another thread.
    const bool isFree =
        number < box_.capacity() || (get(entry.id) != 0 && isOver(get(entry.state)));
    if (isFree || tries == kMaxLeft) return entry;
  }
}

OpRecord GroupRecord::enqueue(const Operation& operation, int64_t now, bool isStarted) {
  OpRecord record;
  if (isClosed_.load(std::memory_order_relaxed)) return record;
  record.group_ = state_;
  record.context_ = get(state_->context);
  record.kind_ = operation.signature.kind;
  record.sequence_ = operation.sequence;
  record.bytes_ = std::max(operation.inBytes, operation.outBytes);
  record.enqueued_ = now;
  if (!box_.isOn()) return record;
  Entry& entry = nextEntry();
  const uint64_t id = record.id_ = box_.nextId();
  record.entry_ = &entry;
  put(entry.id, uint64_t{0});
  put(entry.sequence, operation.sequence);
  put(entry.enqueued, now);
  put(entry.started, isStarted ? now : int64_t{0});
  put(entry.ended, int64_t{0});
  put(entry.inBytes, operation.inBytes);
  put(entry.outBytes, operation.outBytes);
  put(entry.tag, operation.tag);
  std::array<uint64_t, 3> words;
  std::memcpy(words.data(), &operation.signature, sizeof(words));
  for (size_t i = 0; i < words.size(); ++i) put(entry.signature[i], words[i]);
  put(entry.peer, static_cast<int32_t>(operation.peer));
  put(entry.site, operation.site);
  put(entry.state, isStarted ? OpState::kStarted : OpState::kQueued);
  put(entry.flags, operation.flags);
  put(entry.id, id);
  return record;
}

void GroupRecord::waitsFor(uint64_t sequence, const std::vector<int>& ranks) {
  if (isClosed_.load()) return;  // the area may be another group's by now; so below
  const uint32_t version = state_->waitVersion.load(std::memory_order_relaxed);
  put(state_->waitVersion, version + 1);
  put(state_->waitSequence, sequence);
  put(state_->waitCount, static_cast<int32_t>(ranks.size()));
  const size_t shown = std::min<size_t>(ranks.size(), GroupState::kShownWaits);
  for (size_t i = 0; i < shown; ++i) put(state_->waitRanks[i], static_cast<int32_t>(ranks[i]));
  put(state_->waitVersion, version + 2);
}

void GroupRecord::setTransport(const std::string& name, const std::string& encryption) {
  if (isClosed_.load()) return;
  copyText(state_->transport, name);
  copyText(state_->encryption, encryption);
}

void GroupRecord::describe(const std::string& text) {
  MutexLock lock(mutex_);
  if (!isClosed_.load() && !state_->description[0]) copyText(state_->description, text);
}

void GroupRecord::fail(const Status& cause) {
  MutexLock lock(mutex_);
  if (isClosed_.load() || get(state_->phase) != GroupPhase::kOpen) return;
  copyText(state_->failure, cause.message());
  put(state_->phase, GroupPhase::kFailed);
  if (cause.code() != Code::kAborted) TraceFile::want();
}

void GroupRecord::close() {
  {
    MutexLock lock(mutex_);
    if (isClosed_.exchange(true)) return;
    put(state_->phase, GroupPhase::kClosed);
  }
  box_.giveBack(state_);
}

}  // namespace mycoll
