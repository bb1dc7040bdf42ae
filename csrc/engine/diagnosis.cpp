#include "engine/diagnosis.h"

#include <algorithm>
#include <optional>

#include "base/log.h"
#include "base/text.h"
#include "base/topology.h"
#include "base/wait.h"
#include "engine/engine.h"
#include "engine/group.h"
#include "engine/questions.h"
#include "engine/queue.h"
#include "engine/runner.h"
#include "observe/trace_file.h"

namespace mycoll {
namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

// A collective that waits notifies the other ranks each time after this long.
constexpr auto kAnnounceEvery = Milliseconds(250);
// A collective that has waited for this long logs a warning.
constexpr auto kWarnAfter = Milliseconds(1000);
// How long a collective waits for a missing rank after it has left. The messages that the rank sent
// before its goodbye may not have been processed here yet.
constexpr auto kLeftGrace = Milliseconds(500);
// If more ranks are missing, a message only lists their numbers.
constexpr size_t kMostDescribed = 16;
// In a monitored barrier the other ranks wait this much longer than rank 0, which reports first.
constexpr auto kRootGrace = Milliseconds(1000);

std::string traceHint() {
  const std::string command = TraceFile::command();
  return command.empty() ? "" : "\n  Trace: " + command;
}

// "(call #4)". An external operation adds the place of the call, as its caller may have returned.
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

int64_t millisecondsSince(Clock::time_point when) {
  return std::chrono::duration_cast<Milliseconds>(Clock::now() - when).count();
}

bool contains(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

// The ranks that cause the wait. Plans forward data, so a rank may wait for others that wait
// themselves. If no rank can finish the collective before all have begun it, the cause is those of
// the missing ranks that are not known to have begun; if there are none, all ranks that are not. In
// other collectives a rank that is not known to have begun may have begun long ago, so the cause is
// the missing ranks.
std::vector<int> causeOfWait(OpKind kind, const std::vector<int>& missing,
                             const std::vector<int>& behind) {
  const bool needsAll = kind == OpKind::kAllReduce || kind == OpKind::kReduceScatter ||
                        kind == OpKind::kAllGather || kind == OpKind::kAllToAll ||
                        kind == OpKind::kBarrier || kind == OpKind::kMonitoredBarrier;
  if (!needsAll || missing.empty() || behind.empty()) return missing;
  if (kind == OpKind::kMonitoredBarrier) return behind;  // its error must name all of them
  std::vector<int> both;
  for (const int rank : missing) {
    if (contains(behind, rank)) both.push_back(rank);
  }
  return both.empty() ? behind : both;
}

Cause causeOf(const CollectiveOp& op, const std::vector<int>& ranks) {
  Cause fields;
  fields.sequence = op.sequence();
  if (ranks.size() == 1) fields.rank = ranks[0];
  return fields;
}

}  // namespace

Diagnosis::Diagnosis(Group& group, Runner& runner, Queue& queue, Questions& questions)
    : group_(group), runner_(runner), queue_(queue), questions_(questions) {}

// ---- texts -------------------------------------------------------------------------------------

Status Diagnosis::calledLate(OpKind kind) const {
  const Status cause = group_.membership.error();
  return cause.withMessage(cause.message() + onThisRank(group_.options.rank) + name(kind) +
                           " was called after the group had failed" + traceHint());
}

Status Diagnosis::inContext(const Status& cause, const CollectiveOp& op) const {
  std::string here = onThisRank(group_.options.rank) + op.describe() + " " + numberOf(op);
  if (op.kind() == OpKind::kMonitoredBarrier && group_.options.rank != 0) {
    // Worded as in gloo.
    here += "\n  Rank " + std::to_string(group_.options.rank) +
            " successfully reached monitoredBarrier, but received errors while waiting for "
            "send/recv from rank 0. Please check rank 0 logs for faulty rank.";
  }
  return cause.withMessage(cause.message() + here + traceHint());
}

// "rank 2 (node1:4712), which is stopped": the ranks with what this process can detect of their
// state. If they are many, only their numbers.
std::string Diagnosis::listRanks(const std::vector<int>& ranks) const {
  if (ranks.size() > kMostDescribed) return "ranks " + listNumbers(ranks);
  std::string text;
  for (int rank : ranks) {
    text += (text.empty() ? "" : ", ") + group_.mailbox.describeRank(rank);
    // The last answer of a rank that has left is of no use.
    if (group_.membership.departureOf(rank) == Departure::kLeft) continue;
    const PeerAddress& peer = group_.mailbox.group().peers[rank];
    Mesh& mesh = *group_.engine->mesh();
    if (mesh.isVisible(peer)) text += describe(mesh.lookAt(peer));
    text += questions_.lastAnswer(rank);
  }
  return text;
}

// All ranks except this one, the missing ones and those that are not known to have begun.
std::string Diagnosis::listArrived(const std::vector<int>& missing,
                                   const std::vector<int>& behind) const {
  std::vector<int> arrived;
  for (int rank = 0; rank < group_.options.ranks; ++rank) {
    if (rank != group_.options.rank && !contains(missing, rank) && !contains(behind, rank)) {
      arrived.push_back(rank);
    }
  }
  return arrived.empty() ? "nobody else" : listNumbers(arrived);
}

Status Diagnosis::timeoutStatus(const CollectiveOp& op, const std::vector<int>& missing,
                                const std::vector<int>& behind) const {
  const auto waited = std::to_string(millisecondsSince(op.submitted));
  // All errors of a group have this prefix.
  std::string text = "mycoll group '" + group_.options.name + "': [Rank " +
                     std::to_string(group_.options.rank) + "]: ";
  const std::string call = numberOf(op);
  if (op.kind() == OpKind::kMonitoredBarrier && !missing.empty()) {
    // Worded as in gloo: users search for it.
    std::string numbers;
    for (int rank : missing) {
      numbers += (numbers.empty() ? "" : ", ") + std::to_string(rank);
      if (!op.call.waitAllRanks) break;
    }
    text += (op.call.waitAllRanks ? "Ranks " : "Rank ") + numbers +
            " failed to pass monitoredBarrier in " + waited + " ms " + call + ".";
  } else {
    text += op.describe() + " " + call + " timed out after " + waited + " ms.";
  }
  // Worded as in gloo: programs look for it.
  const auto patience =
      std::chrono::duration_cast<Milliseconds>(op.deadline.when() - op.submitted).count();
  text += " Timed out waiting " + std::to_string(patience) + "ms for ";
  if (missing.empty()) return Status(Code::kTimeout, text + "its end.", causeOf(op, missing));
  text += listRanks(missing) + ".\n  Arrived: " + listArrived(missing, behind) + ".";
  return Status(Code::kTimeout, text, causeOf(op, missing));
}

Status Diagnosis::hasLeft(const CollectiveOp& op, const std::vector<int>& gone) const {
  std::string text = "mycoll group '" + group_.options.name + "': Connection closed by peer: ";
  for (int rank : gone) text += group_.membership.describeDeparture(rank) + "; ";
  text += "this rank (" + std::to_string(group_.options.rank) + ") still waits for " +
          (gone.size() == 1 ? "it" : "them") + " in " + op.describe() + " " + numberOf(op) +
          ".\n  Every rank must make the same calls before it destroys the group or ends.";
  return Status(Code::kPeerLost, text, causeOf(op, gone));
}

// ---- checks ------------------------------------------------------------------------------------

// In a monitored barrier rank 0 reports the timeout, as in gloo: without an arena the other ranks
// let rank 0 time out first.
bool Diagnosis::isLate(const CollectiveOp& op) const {
  const bool yields = op.kind() == OpKind::kMonitoredBarrier && group_.options.rank != 0 &&
                      !group_.membership.arena();
  return op.deadline.expired() && (!yields || Clock::now() - op.deadline.when() > kRootGrace);
}

void Diagnosis::checkHealth() {
  std::optional<Block> block;
  uint32_t rounds = 0;
  queue_.inspectHead([&](CollectiveOp& op, std::vector<int> missing) {
    if (group_.membership.noticeFailure(runner_.current())) return;
    const bool isWorthAsking = !missing.empty();
    check(op, missing);
    if (!isWorthAsking || group_.membership.hasFailed()) return;
    if (!questions_.isTimeToAsk(op, op.waitsSince())) return;
    block = questions_.blockOf(op, std::move(missing));
    rounds = op.rounds;
  });
  group_.membership.spread();
  if (block) questions_.ask(*block, rounds);
}

void Diagnosis::check(CollectiveOp& op, std::vector<int> missing) {
  const auto now = Clock::now();
  group_.record.waitsFor(op.sequence(), missing);
  if (isLate(op)) {
    const std::vector<int> behind =
        group_.membership.arena() ? missing : group_.agreement.behind(runner_.current());
    return group_.membership.failFirst(
        timeoutStatus(op, causeOfWait(op.kind(), missing, behind), behind));
  }
  const auto announced = op.announced != Clock::time_point{} ? op.announced : op.waitsSince();
  // A monitored barrier depends on these notices, and may have a short timeout.
  const bool isAtOnce =
      op.kind() == OpKind::kMonitoredBarrier && op.announced == Clock::time_point{};
  if (!group_.membership.arena() && (isAtOnce || now - announced > kAnnounceEvery)) {
    op.announced = now;
    // The ranks that an external collective waits for are only known from the others' notices.
    group_.agreement.tellArrived(op.external ? std::vector<int>() : missing);
  }
  if (!op.hasWarned && !missing.empty() && now - op.waitsSince() > kWarnAfter) {
    op.hasWarned = true;
    MYCOLL_LOG_WARN(
        "group '%s': %s (call #%llu) has waited %lld ms for %s", group_.options.name.c_str(),
        op.describe().c_str(), static_cast<unsigned long long>(op.sequence()),
        static_cast<long long>(millisecondsSince(op.waitsSince())), listRanks(missing).c_str());
  }
  std::vector<int> gone;
  for (int rank : missing) {
    if (group_.membership.departureOf(rank) == Departure::kLeft) gone.push_back(rank);
  }
  if (gone.empty()) {
    leftSince_ = {};
  } else if (leftSince_ == Clock::time_point{}) {
    leftSince_ = now;
  } else if (now - leftSince_ > kLeftGrace) {
    group_.membership.failFirst(hasLeft(op, gone));
  }
}

void Diagnosis::checkMessage(MessageOp& op) {
  if (op.done() || group_.membership.lookIntoArena()) return;
  if (!op.deadline.expired()) {
    if (!questions_.isTimeToAsk(op, op.submitted)) return;
    if (const auto block = questions_.blockOf(op)) questions_.ask(*block, op.rounds);
    return;
  }
  const bool isAnyone = op.rank == kFromAnyone;
  Cause fields;
  fields.rank = isAnyone ? -1 : op.rank;
  group_.membership.fail(Status(
      Code::kTimeout,
      "mycoll group '" + group_.options.name + "': [Rank " + std::to_string(group_.options.rank) +
          "]: " + op.describe(isAnyone ? "any rank" : group_.mailbox.describeRank(op.rank)) +
          " timed out after " + std::to_string(millisecondsSince(op.submitted)) +
          " ms. Timed out waiting for the other side, which never came" +
          (isAnyone ? "" : questions_.lastAnswer(op.rank)) + ".",
      fields));
}

void Diagnosis::checkFutures() {
  if (group_.membership.hasFailed()) return;
  std::shared_ptr<MessageOp> late;
  group_.mailbox.forEachMessage([&late](Transfer& message) {
    const auto& op = static_cast<const MessageOp&>(message);
    if (!late && op.isAwaited() && op.deadline.expired()) late = op.self;
  });
  if (late) checkMessage(*late);
}

}  // namespace mycoll
