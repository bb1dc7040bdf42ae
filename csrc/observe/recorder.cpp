#include "observe/recorder.h"

#include <algorithm>
#include <cstring>

#include "base/sanitize.h"
#include "observe/trace_file.h"

namespace mycoll {
namespace {

// Keeps the last byte zero.
template <size_t kBytes>
void copyText(char (&target)[kBytes], const std::string& text) {
  const std::string_view shown = beginning(text, kBytes - 1);
  std::memcpy(target, shown.data(), shown.size());
}

// How many entries of operations under way a new one leaves alone before it takes one of them.
constexpr int kMaxLeft = 16;

uint64_t total(const std::vector<Span>& spans) {
  uint64_t bytes = 0;
  for (const Span& span : spans) bytes += span.bytes;
  return bytes;
}

}  // namespace

Operation Operation::of(const Call& call, uint64_t sequence, uint8_t flags) {
  Operation result;
  result.kind = call.kind;
  result.dtype = call.dtype;
  result.opaqueType = call.opaqueType;
  result.reduceOp = call.kind == OpKind::kAllReduce || call.kind == OpKind::kReduce ||
                            call.kind == OpKind::kReduceScatter
                        ? call.reduceOp
                        : ReduceOp::kCount;
  result.flags = flags;
  result.peer = call.root;
  result.elementBytes = static_cast<uint32_t>(call.elementBytes);
  result.sequence = sequence;
  result.inBytes = total(call.in);
  result.outBytes = total(call.out);
  return result;
}

Operation Operation::of(const Signature& signature, uint64_t sequence, uint8_t flags) {
  Operation result;
  result.kind = signature.kind;
  result.dtype = signature.dtype;
  result.opaqueType = signature.opaqueType;
  result.reduceOp = signature.reduceOp;
  result.flags = flags;
  result.peer = signature.root;
  result.elementBytes = std::max<uint32_t>(1, static_cast<uint32_t>(elementSize(signature.dtype)));
  result.sequence = sequence;
  // What all ranks know alike: of an all_gather all of it, of a reduce_scatter as well.
  result.inBytes = result.outBytes = signature.bytes;
  return result;
}

void OpRecord::start(int64_t now) const {
  if (!isCurrent() || get(entry_->started) != 0) return;
  put(entry_->started, now);
  put(entry_->state, static_cast<uint8_t>(OpState::kStarted));
}

void OpRecord::setPeer(int rank) const {
  if (isCurrent()) put(entry_->peer, static_cast<int32_t>(rank));
}

void OpRecord::setSite(uint32_t site) const {
  if (isCurrent()) put(entry_->site, site);
}

std::string OpRecord::place() const {
  return isCurrent() ? BlackBox::process().placeOf(get(entry_->site)).describe() : "";
}

void OpRecord::finish(bool isOk, int64_t now) const {
  if (isCurrent()) {
    if (get(entry_->started) == 0) put(entry_->started, now);
    put(entry_->ended, now);
    put(entry_->state, static_cast<uint8_t>(isOk ? OpState::kDone : OpState::kFailed));
  }
  if (!group_ || get(group_->life) != life_) return;
  Tally& tally = group_->tallies[static_cast<int>(kind_)];
  // Messages end on any thread, so these add; collectives would not need it.
  (isOk ? tally.done : tally.failed).fetch_add(1, std::memory_order_relaxed);
  tally.bytes.fetch_add(bytes_, std::memory_order_relaxed);
  tally.nanos.fetch_add(static_cast<uint64_t>(now - enqueued_), std::memory_order_relaxed);
  if (kind_ != OpKind::kSend && kind_ != OpKind::kRecv) put(group_->finished, sequence_ + 1);
}

GroupRecord::GroupRecord(const GroupIdentity& identity)
    : box_(BlackBox::process()), state_(box_.take()) {
  put(state_->context, identity.context);
  put(state_->rank, static_cast<int32_t>(identity.rank));
  put(state_->ranks, static_cast<int32_t>(identity.ranks));
  put(state_->created, steadyNanos());
  for (int i = 0; i < GroupState::kShownRanks; ++i) {
    const int64_t rank = i >= identity.ranks            ? -1
                         : identity.globalRanks.empty() ? i
                                                        : identity.globalRanks[i];
    put(state_->globalRanks[i], static_cast<int32_t>(rank));
  }
  copyText(state_->name, identity.name);
  box_.join(identity.context, identity.globalRanks.empty()
                                  ? identity.rank
                                  : static_cast<int>(identity.globalRanks[identity.rank]));
  put(state_->phase, static_cast<uint32_t>(GroupPhase::kOpen));
}

GroupRecord::~GroupRecord() { close(); }

// What has not ended is what anybody will ask for: newer ones leave it, as long as these are few.
Entry& GroupRecord::nextEntry() {
  Entry* const entries = box_.entriesOf(state_);
  for (int tries = 0;; ++tries) {
    const uint64_t number = state_->written.fetch_add(1, std::memory_order_relaxed);
    Entry& entry = entries[number & (box_.capacity() - 1)];
    // Later than in the first round, an empty one is being written by somebody else.
    const bool isFree = number < box_.capacity() || (get(entry.id) != 0 && isOver(entry));
    if (isFree || tries == kMaxLeft) return entry;
  }
}

OpRecord GroupRecord::enqueue(const Operation& operation, int64_t now, bool isStarted) {
  OpRecord record;
  if (isClosed_.load(std::memory_order_relaxed)) return record;
  record.group_ = state_;
  record.life_ = get(state_->life);
  record.kind_ = operation.kind;
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
  put(entry.peer, static_cast<int32_t>(operation.peer));
  put(entry.elementBytes, operation.elementBytes);
  put(entry.site, operation.site);
  put(entry.kind, static_cast<uint8_t>(operation.kind));
  put(entry.dtype, static_cast<uint8_t>(operation.dtype));
  put(entry.opaqueType, operation.opaqueType);
  put(entry.reduceOp, static_cast<uint8_t>(operation.reduceOp));
  put(entry.state, static_cast<uint8_t>(isStarted ? OpState::kStarted : OpState::kQueued));
  put(entry.flags, operation.flags);
  put(entry.id, id);
  return record;
}

void GroupRecord::waitsFor(uint64_t sequence, const std::vector<int>& ranks, int64_t now) {
  if (isClosed_.load()) return;  // the area may be another group's by now; so below
  const uint32_t version = state_->waitVersion.load(std::memory_order_relaxed);
  put(state_->waitVersion, version + 1);
  put(state_->waitLooked, now);
  put(state_->waitSequence, sequence);
  put(state_->waitCount, static_cast<int32_t>(ranks.size()));
  const size_t shown = std::min<size_t>(ranks.size(), GroupState::kShownWaits);
  for (size_t i = 0; i < shown; ++i) put(state_->waitRanks[i], static_cast<int32_t>(ranks[i]));
  put(state_->waitVersion, version + 2);
}

void GroupRecord::setTransport(const std::string& name) {
  if (!isClosed_.load()) copyText(state_->transport, name);
}

void GroupRecord::describe(const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (isClosed_.load() || get(state_->isDescribed)) return;
  copyText(state_->description, text);
  put(state_->isDescribed, uint32_t{1});
}

void GroupRecord::fail(const Status& cause) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (isClosed_.load() || get(state_->phase) != static_cast<uint32_t>(GroupPhase::kOpen)) return;
  copyText(state_->failure, cause.message());
  put(state_->phase, static_cast<uint32_t>(GroupPhase::kFailed));
  if (cause.code() != Code::kAborted) TraceFile::want();
}

void GroupRecord::close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (isClosed_.exchange(true)) return;
    put(state_->phase, static_cast<uint32_t>(GroupPhase::kClosed));
  }
  box_.giveBack(state_);
}

}  // namespace mycoll
