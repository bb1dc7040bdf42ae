// The group's half that notices and tells what goes wrong: failures, timeouts, ranks that are
// missing or gone, and the texts about them.
#include <algorithm>
#include <cstdlib>

#include "base/env.h"
#include "base/log.h"
#include "base/topology.h"
#include "engine/group.h"
#include "observe/trace_file.h"

namespace mycoll {
namespace {

using Clock = std::chrono::steady_clock;

// A collective that has waited for so long asks the others what they are at.
constexpr auto kProbeAfter = std::chrono::milliseconds(250);
// One that has waited for so long says so in the log.
constexpr auto kWarnAfter = std::chrono::milliseconds(1000);
// A rank that has left cannot come any more. It said so after all that it had to say, which this
// rank may not have looked at yet.
constexpr auto kLeftGrace = std::chrono::milliseconds(500);
// Collectives before the one that failed may take so long to end well.
constexpr auto kCompletionGrace = std::chrono::milliseconds(1000);
// By how much the root of a monitored barrier is let go first with its verdict.
constexpr auto kRootGrace = std::chrono::milliseconds(1000);

std::string traceHint() {
  const std::string path = TraceFile::wantedPath();
  return path.empty() ? "" : "\n  Trace: " + path + " (mycoll trace compares those of all ranks)";
}

std::string describe(const CollectiveOp& op) {
  if (op.composite) return name(op.kind());
  return (op.external ? op.signature : op.call.signature()).describe();
}

// "(call #4)". Of what runs elsewhere with its place in the program: nobody need be there any more.
std::string numberOf(const CollectiveOp& op) {
  const std::string place = op.external ? op.record().place() : "";
  return "(call #" + std::to_string(op.sequence()) + (place.empty() ? "" : ", ") + place + ")";
}

const char* describe(ProcessLife life) {
  switch (life) {
    case ProcessLife::kAlive: return ", which is alive";
    case ProcessLife::kBusy: return ", which is busy";
    case ProcessLife::kStopped: return ", which is stopped (SIGSTOP or a debugger)";
    default: return ", which has ended";
  }
}

}  // namespace

Status Group::error() const {
  std::lock_guard<std::mutex> lock(failureLock_);
  return failure_;
}

void Group::onFailure(const Status& cause, uint64_t from) {
  {
    std::lock_guard<std::mutex> lock(failureLock_);
    // What runs elsewhere does not hear of a failure by itself.
    failedFrom_.store(options_.isExternal ? 0 : from, std::memory_order_relaxed);
    if (!failure_.ok()) return;
    failure_ = cause;
    failedAt_.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
    failed_.store(true, std::memory_order_release);
  }
  record_.fail(cause);
  // A group that is only being closed here lives on for the others.
  if (isClosed_.load()) return;
  if (Arena* arena = sharedArena_.load(std::memory_order_acquire)) arena->fail(cause);
}

Status Group::onGoodbye(int rank) {
  left_[rank].store(true);
  // Who leaves after a failure has written down its cause before.
  Arena* arena = sharedArena_.load(std::memory_order_acquire);
  return arena && !isClosed_.load() ? arena->failure() : Status();
}

Departure Group::departureOf(int rank) {
  if (left_[rank].load()) return Departure::kLeft;
  Arena* arena = sharedArena_.load(std::memory_order_acquire);
  if (!arena) return Departure::kUnknown;
  return arena->hasLeft(rank) ? Departure::kLeft : Departure::kStayed;
}

void Group::fail(const Status& cause) { mailbox_.fail(cause, true); }

bool Group::isOver(uint64_t number) const {
  if (!hasFailed()) return false;
  if (number >= failedFrom_.load(std::memory_order_relaxed)) return true;
  const Clock::time_point since{Clock::duration(failedAt_.load(std::memory_order_relaxed))};
  return Clock::now() - since > kCompletionGrace;
}

bool Group::noticeFailure(uint64_t number) {
  if (hasFailed()) return isOver(number);
  if (!arena_ || !arena_->hasFailed()) return false;
  mailbox_.fail(arena_->failure(), false);
  return true;
}

bool Group::lookForFailure() {
  if (waiters_.load() > 0 || hasFailed()) return false;
  const Arena* arena = sharedArena_.load(std::memory_order_acquire);
  if (!arena || !arena->hasFailed()) return false;
  mailbox_.fail(arena->failure(), false);
  return true;
}

Status Group::calledLate(OpKind kind) const {
  const Status cause = error();
  return Status(cause.code(), cause.message() + "\n  Here: rank " + std::to_string(options_.rank) +
                                  ", " + name(kind) + ", called after that" + traceHint());
}

Status Group::inContext(const Status& cause, const CollectiveOp& op) const {
  std::string text = cause.message() + "\n  Here: rank " + std::to_string(options_.rank) + ", " +
                     describe(op) + " " + numberOf(op);
  return Status(cause.code(), text + traceHint());
}

// "rank 2 (node1:4712), which is stopped": what can be seen of it from here.
std::string Group::listRanks(const std::vector<int>& ranks) const {
  std::string text;
  for (int rank : ranks) {
    text += (text.empty() ? "" : ", ") + mailbox_.describeRank(rank);
    const PeerAddress& peer = mailbox_.group().peers[rank];
    Endpoint& endpoint = *engine_->endpoint();
    if (endpoint.isVisible(peer)) text += describe(endpoint.lookAt(peer));
    text += lastWord(rank);
  }
  return text;
}

// All but this rank and those that are missing.
std::string Group::listArrived(const std::vector<int>& missing) const {
  std::string text;
  for (int rank = 0; rank < options_.ranks; ++rank) {
    if (rank == options_.rank || std::find(missing.begin(), missing.end(), rank) != missing.end()) {
      continue;
    }
    text += (text.empty() ? "" : ", ") + std::to_string(rank);
  }
  return text.empty() ? "nobody else" : text;
}

Status Group::timeoutStatus(const CollectiveOp& op, const std::vector<int>& missing) const {
  const auto waited = std::chrono::duration_cast<Milliseconds>(Clock::now() - op.submitted).count();
  const std::string here = "[Rank " + std::to_string(options_.rank) + "]: ";
  const std::string call = numberOf(op);
  std::string text;
  if (op.kind() == OpKind::kMonitoredBarrier && !missing.empty()) {
    // In the words that people search for.
    std::string numbers;
    for (int rank : missing) {
      numbers += (numbers.empty() ? "" : ", ") + std::to_string(rank);
      if (!op.call.waitAllRanks) break;
    }
    const bool isOne = numbers.find(',') == numbers.npos;
    text = here + (isOne ? "Rank " : "Ranks ") + numbers + " failed to pass monitoredBarrier in " +
           std::to_string(waited) + " ms, in mycoll group '" + options_.name + "' " + call + ".";
  } else {
    text = here + "mycoll group '" + options_.name + "': " + describe(op) + " " + call +
           " TIMED OUT after " + std::to_string(waited) + " ms.";
  }
  if (!missing.empty()) {
    text += " Arrived: " + listArrived(missing) + ". Waiting for " + listRanks(missing) + ".";
  }
  return Status(Code::kTimeout, text);
}

// Of a monitored barrier over messages rank 0 knows most: it is to be heard first.
bool Group::isLate(const CollectiveOp& op) const {
  const bool yields = op.kind() == OpKind::kMonitoredBarrier && options_.rank != 0 && !arena_;
  return op.deadline.expired() && (!yields || Clock::now() - op.deadline.when() > kRootGrace);
}

void Group::checkHealth() {
  std::unique_lock<std::mutex> running(runLock_, std::try_to_lock);
  if (!running.owns_lock() || noticeFailure(currentNumber())) return;
  std::shared_ptr<CollectiveOp> op;
  {
    std::lock_guard<std::mutex> lock(queueLock_);
    if (queue_.empty()) return;
    op = queue_.front();
  }
  std::vector<int> missing;
  if (op->task.valid() && op->task.waitingFor()) missing = op->task.waitingFor()->missing();
  const auto now = Clock::now();
  record_.waitsFor(op->sequence(), missing, now.time_since_epoch().count());
  if (isLate(*op)) return fail(timeoutStatus(*op, missing));
  // An external one is asked about again and again: nothing else tells who is behind.
  const auto asked = op->probed != Clock::time_point{} ? op->probed
                     : op->external                    ? op->begun
                                                       : op->submitted;
  const bool mayProbe = op->external || op->probed == Clock::time_point{};
  if (mayProbe && !arena_ && now - asked > kProbeAfter) {
    op->probed = now;
    mailbox_.probe();
  }
  const auto waitsSince = op->external ? op->begun : op->submitted;
  if (!op->hasWarned && !missing.empty() && now - waitsSince > kWarnAfter) {
    op->hasWarned = true;
    MYCOLL_LOG_WARN(
        "group '%s': %s (call #%llu) has waited %lld ms for %s", options_.name.c_str(),
        describe(*op).c_str(), static_cast<unsigned long long>(op->sequence()),
        static_cast<long long>(std::chrono::duration_cast<Milliseconds>(now - waitsSince).count()),
        listRanks(missing).c_str());
  }
  std::optional<Block> block;
  if (!missing.empty() && isTimeToAsk(*op, waitsSince)) block = blockOf(*op, missing);
  std::vector<int> gone;
  for (int rank : missing) {
    if (departureOf(rank) == Departure::kLeft) gone.push_back(rank);
  }
  if (gone.empty()) {
    leftSince_ = {};
  } else if (leftSince_ == Clock::time_point{}) {
    leftSince_ = now;
  } else if (now - leftSince_ > kLeftGrace) {
    return fail(Status(Code::kPeerLost, "mycoll group '" + options_.name + "': " + listRanks(gone) +
                                            ", left the group (destroy_process_group or end of the "
                                            "program) while others still wait for it in " +
                                            describe(*op)));
  }
  running.unlock();
  ask(*op, block);
}

std::string Group::nameOf(const CollectiveOp& op) { return describe(op); }

void Group::checkMessage(const Op& waitedFor) {
  const auto& op = static_cast<const MessageOp&>(waitedFor);
  if (op.done()) return;
  Arena* arena = sharedArena_.load(std::memory_order_acquire);
  if (arena && arena->hasFailed()) return mailbox_.fail(arena->failure(), false);
  if (!op.deadline.expired()) {
    auto& mine = const_cast<MessageOp&>(op);
    if (isTimeToAsk(mine, op.submitted)) ask(mine, blockOf(mine));
    return;
  }
  const auto waited = std::chrono::duration_cast<Milliseconds>(Clock::now() - op.submitted).count();
  const bool isSend = op.kind() == OpKind::kSend;
  fail(Status(Code::kTimeout,
              "[Rank " + std::to_string(options_.rank) + "]: mycoll group '" + options_.name +
                  "': " + (isSend ? "send to " : "recv from ") +
                  (op.rank == kAnySource ? "any rank" : mailbox_.describeRank(op.rank)) +
                  " with tag " + std::to_string(op.tag) + " TIMED OUT after " +
                  std::to_string(waited) + " ms: the other side never came" +
                  (op.rank == kAnySource ? "" : lastWord(op.rank)) + "."));
}

void Group::setChore(std::function<void()> chore) {
  std::lock_guard<std::mutex> lock(choreLock_);
  chore_ = std::move(chore);
}

void Group::doChore() {
  std::function<void()> chore;
  {
    std::lock_guard<std::mutex> lock(choreLock_);
    chore = chore_;
  }
  if (chore) chore();
}

void Group::checkFutures() {
  if (hasFailed()) return;
  std::shared_ptr<MessageOp> late;
  mailbox_.forEachMessage([&late](Transfer& message) {
    const auto& op = static_cast<const MessageOp&>(message);
    if (!late && op.isAwaited() && op.deadline.expired()) late = op.self;
  });
  if (late) checkMessage(*late);
}

void Group::abort(const std::string& reason) {
  fail(Status(Code::kAborted, "mycoll group '" + options_.name + "' was aborted on " +
                                  mailbox_.describeRank(options_.rank) + ": " + reason));
  run(0);
}

}  // namespace mycoll
