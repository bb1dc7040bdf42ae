#include "engine/diagnosis.h"

#include <algorithm>
#include <optional>

#include "base/log.h"
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

// A collective that has waited for so long asks the others what they are at.
constexpr auto kProbeAfter = Milliseconds(250);
// One that has waited for so long says so in the log.
constexpr auto kWarnAfter = Milliseconds(1000);
// A rank that has left cannot come any more. It said so after all that it had to say, which this
// rank may not have looked at yet.
constexpr auto kLeftGrace = Milliseconds(500);
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

// ---- words -------------------------------------------------------------------------------------

Status Diagnosis::calledLate(OpKind kind) const {
  const Status cause = membership_.error();
  return cause.withMessage(cause.message() + "\n  On this rank (" + std::to_string(options_.rank) +
                           "): " + name(kind) + " was called after the group had failed" +
                           traceHint());
}

Status Diagnosis::inContext(const Status& cause, const CollectiveOp& op) const {
  return cause.withMessage(cause.message() + "\n  On this rank (" + std::to_string(options_.rank) +
                           "): " + op.describe() + " " + numberOf(op) + traceHint());
}

// "rank 2 (node1:4712), which is stopped": what can be seen of it from here.
std::string Diagnosis::listRanks(const std::vector<int>& ranks) const {
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

// All but this rank and those that are missing.
std::string Diagnosis::listArrived(const std::vector<int>& missing) const {
  std::string text;
  for (int rank = 0; rank < options_.ranks; ++rank) {
    if (rank == options_.rank || std::find(missing.begin(), missing.end(), rank) != missing.end()) {
      continue;
    }
    text += (text.empty() ? "" : ", ") + std::to_string(rank);
  }
  return text.empty() ? "nobody else" : text;
}

Status Diagnosis::timeoutStatus(const CollectiveOp& op, const std::vector<int>& missing) const {
  const auto waited = std::to_string(millisecondsSince(op.submitted));
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
           waited + " ms, in mycoll group '" + options_.name + "' " + call + ".";
  } else {
    text = here + "mycoll group '" + options_.name + "': " + op.describe() + " " + call +
           " TIMED OUT after " + waited + " ms.";
  }
  if (!missing.empty()) {
    text += " Arrived: " + listArrived(missing) + ". Waiting for " + listRanks(missing) + ".";
  }
  return Status(Code::kTimeout, text, causeOf(op, missing));
}

Status Diagnosis::hasLeft(const CollectiveOp& op, const std::vector<int>& gone) const {
  std::string text = "mycoll group '" + options_.name + "': ";
  for (int rank : gone) text += membership_.describeDeparture(rank) + "; ";
  text += "this rank (" + std::to_string(options_.rank) + ") still waits for " +
          (gone.size() == 1 ? "it" : "them") + " in " + op.describe() + " " + numberOf(op) +
          ". Every rank must make the same calls before it destroys the group or ends.";
  return Status(Code::kPeerLost, text, causeOf(op, gone));
}

// ---- checks ------------------------------------------------------------------------------------

// Of a monitored barrier over messages rank 0 knows most: it is to be heard first.
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
  if (block) questions_.ask(*block, rounds);
}

void Diagnosis::check(CollectiveOp& op, std::vector<int> missing) {
  const auto now = Clock::now();
  record_.waitsFor(op.sequence(), missing);
  if (isLate(op)) return membership_.fail(timeoutStatus(op, missing));
  // An external one is asked about again and again: nothing else tells which rank is behind.
  const auto asked = op.probed != Clock::time_point{} ? op.probed : op.waitsSince();
  const bool mayProbe = op.external || op.probed == Clock::time_point{};
  if (mayProbe && !membership_.arena() && now - asked > kProbeAfter) {
    op.probed = now;
    agreement_.probe();
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
    membership_.fail(hasLeft(op, gone));
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
  membership_.fail(Status(
      Code::kTimeout,
      "[Rank " + std::to_string(options_.rank) + "]: mycoll group '" + options_.name +
          "': " + (op.kind() == OpKind::kSend ? "send to " : "recv from ") +
          (isAnyone ? "any rank" : mailbox_.describeRank(op.rank)) + " with tag " +
          std::to_string(op.tag) + " TIMED OUT after " +
          std::to_string(millisecondsSince(op.submitted)) + " ms: the other side never came" +
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
