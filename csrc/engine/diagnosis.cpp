#include "engine/diagnosis.h"

#include <algorithm>
#include <optional>

#include "base/log.h"
#include "base/text.h"
#include "base/topology.h"
#include "base/wait.h"
#include "engine/agreement.h"
#include "engine/communicator.h"
#include "engine/engine.h"
#include "engine/membership.h"
#include "engine/questions.h"
#include "engine/queue.h"
#include "engine/runner.h"
#include "observe/trace_file.h"

namespace mycoll {
namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

// A collective that has waited for so long tells the others, again and again.
constexpr auto kAnnounceEvery = Milliseconds(250);
// One that has waited for so long says so in the log.
constexpr auto kWarnAfter = Milliseconds(1000);
// A rank that has left cannot come any more. It said so after all that it had to say, which this
// rank may not have looked at yet.
constexpr auto kLeftGrace = Milliseconds(500);
// At most this many missing ranks are described by what they do.
constexpr size_t kMostDescribed = 16;
// By how much the root of a monitored barrier is let go first with its verdict.
constexpr auto kRootGrace = Milliseconds(1000);

std::string traceHint() {
  const std::string command = TraceFile::command();
  return command.empty() ? "" : "\n  Trace: " + command;
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

int64_t millisecondsSince(Clock::time_point when) {
  return std::chrono::duration_cast<Milliseconds>(Clock::now() - when).count();
}

bool contains(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

// Where plans pass things on, a rank may wait for others that wait themselves. Of those that it
// waits for: the ones that have not been heard to come; else all that have not. Only where nobody
// ends before all have come: elsewhere a rank that is not heard of may have been long since.
std::vector<int> causeOfWait(OpKind kind, const std::vector<int>& missing,
                             const std::vector<int>& behind) {
  const bool needsAll = kind == OpKind::kAllReduce || kind == OpKind::kReduceScatter ||
                        kind == OpKind::kAllGather || kind == OpKind::kAllToAll ||
                        kind == OpKind::kBarrier || kind == OpKind::kMonitoredBarrier;
  if (!needsAll || missing.empty() || behind.empty()) return missing;
  if (kind == OpKind::kMonitoredBarrier) return behind;  // it is asked for all of them
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

Diagnosis::Diagnosis(const GroupOptions& options, Engine& engine, Mailbox& mailbox,
                     Membership& membership, Agreement& agreement, Runner& runner, Queue& queue,
                     Questions& questions, GroupRecord& record)
    : options_(options),
      engine_(engine),
      mailbox_(mailbox),
      membership_(membership),
      agreement_(agreement),
      runner_(runner),
      queue_(queue),
      questions_(questions),
      record_(record) {}

// ---- texts -------------------------------------------------------------------------------------

Status Diagnosis::calledLate(OpKind kind) const {
  const Status cause = membership_.error();
  return cause.withMessage(cause.message() + onThisRank(options_.rank) + name(kind) +
                           " was called after the group had failed" + traceHint());
}

Status Diagnosis::inContext(const Status& cause, const CollectiveOp& op) const {
  std::string here = onThisRank(options_.rank) + op.describe() + " " + numberOf(op);
  if (op.kind() == OpKind::kMonitoredBarrier && options_.rank != 0) {
    // As gloo says it.
    here += "\n  Rank " + std::to_string(options_.rank) +
            " successfully reached monitoredBarrier, but received errors while waiting for "
            "send/recv from rank 0. Please check rank 0 logs for faulty rank.";
  }
  return cause.withMessage(cause.message() + here + traceHint());
}

// "rank 2 (node1:4712), which is stopped": what can be seen of it from here. Of many only the
// numbers.
std::string Diagnosis::listRanks(const std::vector<int>& ranks) const {
  if (ranks.size() > kMostDescribed) return "ranks " + listNumbers(ranks);
  std::string text;
  for (int rank : ranks) {
    text += (text.empty() ? "" : ", ") + mailbox_.describeRank(rank);
    // What a rank that has gone did before is no longer of use.
    if (membership_.departureOf(rank) == Departure::kLeft) continue;
    const PeerAddress& peer = mailbox_.group().peers[rank];
    Mesh& mesh = *engine_.mesh();
    if (mesh.isVisible(peer)) text += describe(mesh.lookAt(peer));
    text += questions_.lastAnswer(rank);
  }
  return text;
}

// All but this rank and those that are missing, or not known to have come.
std::string Diagnosis::listArrived(const std::vector<int>& missing,
                                   const std::vector<int>& behind) const {
  std::vector<int> arrived;
  for (int rank = 0; rank < options_.ranks; ++rank) {
    if (rank != options_.rank && !contains(missing, rank) && !contains(behind, rank)) {
      arrived.push_back(rank);
    }
  }
  return arrived.empty() ? "nobody else" : listNumbers(arrived);
}

Status Diagnosis::timeoutStatus(const CollectiveOp& op, const std::vector<int>& missing,
                                const std::vector<int>& behind) const {
  const auto waited = std::to_string(millisecondsSince(op.submitted));
  // The prefix that all errors of a group have.
  std::string text =
      "mycoll group '" + options_.name + "': [Rank " + std::to_string(options_.rank) + "]: ";
  const std::string call = numberOf(op);
  if (op.kind() == OpKind::kMonitoredBarrier && !missing.empty()) {
    // In the words that people search for.
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
  // gloo's words, which programs look for.
  const auto patience =
      std::chrono::duration_cast<Milliseconds>(op.deadline.when() - op.submitted).count();
  text += " Timed out waiting " + std::to_string(patience) + "ms for ";
  if (missing.empty()) return Status(Code::kTimeout, text + "its end.", causeOf(op, missing));
  text += listRanks(missing) + ".\n  Arrived: " + listArrived(missing, behind) + ".";
  return Status(Code::kTimeout, text, causeOf(op, missing));
}

Status Diagnosis::hasLeft(const CollectiveOp& op, const std::vector<int>& gone) const {
  std::string text = "mycoll group '" + options_.name + "': Connection closed by peer: ";
  for (int rank : gone) text += membership_.describeDeparture(rank) + "; ";
  text += "this rank (" + std::to_string(options_.rank) + ") still waits for " +
          (gone.size() == 1 ? "it" : "them") + " in " + op.describe() + " " + numberOf(op) +
          ".\n  Every rank must make the same calls before it destroys the group or ends.";
  return Status(Code::kPeerLost, text, causeOf(op, gone));
}

// ---- checks ------------------------------------------------------------------------------------

// Of a monitored barrier rank 0 is to tell, as with gloo: over messages the others let it time out
// first.
bool Diagnosis::isLate(const CollectiveOp& op) const {
  const bool yields =
      op.kind() == OpKind::kMonitoredBarrier && options_.rank != 0 && !membership_.arena();
  return op.deadline.expired() && (!yields || Clock::now() - op.deadline.when() > kRootGrace);
}

void Diagnosis::checkHealth() {
  std::optional<Block> block;
  uint32_t rounds = 0;
  queue_.inspectHead([&](CollectiveOp& op, std::vector<int> missing) {
    if (membership_.noticeFailure(runner_.current())) return;
    const bool isWorthAsking = !missing.empty();
    check(op, missing);
    if (!isWorthAsking || membership_.hasFailed()) return;
    if (!questions_.isTimeToAsk(op, op.waitsSince())) return;
    block = questions_.blockOf(op, std::move(missing));
    rounds = op.rounds;
  });
  membership_.spread();
  if (block) questions_.ask(*block, rounds);
}

void Diagnosis::check(CollectiveOp& op, std::vector<int> missing) {
  const auto now = Clock::now();
  record_.waitsFor(op.sequence(), missing);
  if (isLate(op)) {
    const std::vector<int> behind =
        membership_.arena() ? missing : agreement_.behind(runner_.current());
    return membership_.failFirst(
        timeoutStatus(op, causeOfWait(op.kind(), missing, behind), behind));
  }
  const auto announced = op.announced != Clock::time_point{} ? op.announced : op.waitsSince();
  // A monitored barrier lives by it, and may have little time.
  const bool isAtOnce =
      op.kind() == OpKind::kMonitoredBarrier && op.announced == Clock::time_point{};
  if (!membership_.arena() && (isAtOnce || now - announced > kAnnounceEvery)) {
    op.announced = now;
    // Whom an external one waits for is only known by what the others tell.
    agreement_.tellArrived(op.external ? std::vector<int>() : missing);
  }
  if (!op.hasWarned && !missing.empty() && now - op.waitsSince() > kWarnAfter) {
    op.hasWarned = true;
    MYCOLL_LOG_WARN("group '%s': %s (call #%llu) has waited %lld ms for %s", options_.name.c_str(),
                    op.describe().c_str(), static_cast<unsigned long long>(op.sequence()),
                    static_cast<long long>(millisecondsSince(op.waitsSince())),
                    listRanks(missing).c_str());
  }
  std::vector<int> gone;
  for (int rank : missing) {
    if (membership_.departureOf(rank) == Departure::kLeft) gone.push_back(rank);
  }
  if (gone.empty()) {
    leftSince_ = {};
  } else if (leftSince_ == Clock::time_point{}) {
    leftSince_ = now;
  } else if (now - leftSince_ > kLeftGrace) {
    membership_.failFirst(hasLeft(op, gone));
  }
}

void Diagnosis::checkMessage(MessageOp& op) {
  if (op.done() || membership_.lookIntoArena()) return;
  if (!op.deadline.expired()) {
    if (!questions_.isTimeToAsk(op, op.submitted)) return;
    if (const auto block = questions_.blockOf(op)) questions_.ask(*block, op.rounds);
    return;
  }
  const bool isAnyone = op.rank == kFromAnyone;
  Cause fields;
  fields.rank = isAnyone ? -1 : op.rank;
  membership_.fail(
      Status(Code::kTimeout,
             "mycoll group '" + options_.name + "': [Rank " + std::to_string(options_.rank) +
                 "]: " + op.describe(isAnyone ? "any rank" : mailbox_.describeRank(op.rank)) +
                 " timed out after " + std::to_string(millisecondsSince(op.submitted)) +
                 " ms. Timed out waiting for the other side, which never came" +
                 (isAnyone ? "" : questions_.lastAnswer(op.rank)) + ".",
             fields));
}

void Diagnosis::checkFutures() {
  if (membership_.hasFailed()) return;
  std::shared_ptr<MessageOp> late;
  mailbox_.forEachMessage([&late](Transfer& message) {
    const auto& op = static_cast<const MessageOp&>(message);
    if (!late && op.isAwaited() && op.deadline.expired()) late = op.self;
  });
  if (late) checkMessage(*late);
}

}  // namespace mycoll
