#include "engine/diagnosis.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <set>
#include <sstream>
#include <thread>

#include "base/bytes.h"
#include "base/log.h"
#include "base/text.h"
#include "base/topology.h"
#include "base/wait.h"
#include "engine/communicator.h"
#include "engine/engine.h"
#include "engine/queue.h"
#include "engine/runner.h"
#include "observe/black_box.h"
#include "observe/trace_file.h"
#include "transport/mesh.h"

namespace mycoll {
namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

// A collective that waits notifies the other ranks each time after this long.
constexpr auto kAnnounceEvery = grace(250);
// How long a collective waits for a missing rank after it has left, if it waits for messages: those
// that the rank sent before its goodbye may not have been processed here yet.
constexpr auto kLeftGrace = grace(500);
// If more ranks are missing, a message only lists their numbers.
constexpr size_t kMostDescribed = 16;
// In a monitored barrier the other ranks wait this much longer than rank 0, which reports first.
constexpr auto kRootGrace = grace(1000);

// Of questions.
constexpr size_t kMaxQuestion = 12 * 1024;  // below kMaxControlBytes
constexpr size_t kMaxAnswer = 1024;
constexpr size_t kMaxIncoming = 1024;
constexpr size_t kMaxPassedOn = 256;
constexpr size_t kMaxAsked = 64;  // ranks per question
constexpr int kLooks = 20;        // attempts to inspect a queue that a thread runs

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

std::string seconds(Clock::duration time) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", std::chrono::duration<double>(time).count());
  return text;
}

// The same number on all ranks that find this cycle.
uint64_t incidentOf(const std::string& way) { return fnv1a(way) | 1; }

std::string oneLine(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

std::vector<std::string> stepsOf(const std::string& way) {
  std::vector<std::string> steps;
  std::istringstream stream(way);
  for (std::string step; std::getline(stream, step, ';');) steps.push_back(step);
  return steps;
}

}  // namespace

struct Diagnosis::Question {
  uint32_t round = 0;
  bool isMessage = false;  // it is about a send or a receive; else the collective `number`
  uint64_t number = 0;
  std::string way{};    // the processes, and what each waits for: "uid:wait;uid:wait;"
  std::string waits{};  // the same in words: a line for each, with a line break before it

  std::string encode() const {
    return std::to_string(round) + (isMessage ? " m " : " c ") + std::to_string(number) + " " +
           way + waits;
  }
  static bool decode(const std::string& text, Question* question) {
    std::istringstream stream(text);
    char kind = 0;
    stream >> question->round >> kind >> question->number >> question->way;
    question->isMessage = kind == 'm';
    return static_cast<bool>(std::getline(stream, question->waits, '\0'));
  }
};

Diagnosis::Diagnosis(Communicator& self, Group& group, Runner& runner, Queue& queue)
    : self_(self), group_(group), runner_(runner), queue_(queue) {}

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

std::string Diagnosis::lastAnswer(int rank) const {
  MutexLock lock(mutex_);
  const auto answer = answers_.find(rank);
  if (answer == answers_.end()) return "";
  return " (" + seconds(Clock::now() - answer->second.when) +
         " ago it answered: " + answer->second.text + ")";
}

// In errors that programs look for, as in gloo.
std::string Diagnosis::rankPrefix() const {
  return "[Rank " + std::to_string(group_.options.rank) + "]: ";
}

// The state of the rank as this process knows it: ", which is stopped (0.4 s ago it answered:
// ...)".
std::string Diagnosis::stateOf(int rank) const {
  // The last answer of a rank that has left is of no use.
  if (group_.membership.hasLeft(rank)) return "";
  const PeerAddress& peer = group_.mailbox.group().peers[rank];
  const bool isVisible = peer.isVisibleTo(group_.engine->mesh()->address());
  return (isVisible ? describe(lookAtProcess(peer.pid, peer.startTicks)) : "") + lastAnswer(rank);
}

// "rank 2 (node1:4712), rank 3 (node1:4713)". If the ranks are many, only their numbers.
std::string Diagnosis::listRanks(const std::vector<int>& ranks, bool withStates) const {
  if (ranks.size() > kMostDescribed) return "ranks " + listNumbers(ranks);
  std::string text;
  for (const int rank : ranks) {
    text += (text.empty() ? "" : ", ") + group_.mailbox.describeRank(rank);
    if (withStates) text += stateOf(rank);
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
  std::string text = rankPrefix();
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
  if (missing.empty()) return group_.error(Code::kTimeout, text + "its end.", causeOf(op, missing));
  text += listRanks(missing) + ".\n  Arrived: " + listArrived(missing, behind) + ".";
  return group_.error(Code::kTimeout, text, causeOf(op, missing));
}

Status Diagnosis::hasLeft(const CollectiveOp& op, const std::vector<int>& gone) const {
  std::string text = "Connection closed by peer: ";
  for (int rank : gone) text += group_.membership.describeDeparture(rank) + "; ";
  text += "this rank (" + std::to_string(group_.options.rank) + ") still waits for " +
          (gone.size() == 1 ? "it" : "them") + " in " + op.describe() + " " + numberOf(op) +
          ".\n  Every rank must make the same calls before it destroys the group or ends.";
  return group_.error(Code::kPeerLost, text, causeOf(op, gone));
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
  std::optional<uint32_t> round;
  queue_.inspectHead([&](CollectiveOp& op, std::vector<int> missing) {
    if (group_.membership.noticeFailure(runner_.current())) return;
    const bool isWorthAsking = !missing.empty();
    check(op, missing);
    if (!isWorthAsking || group_.membership.hasFailed()) return;
    round = nextRound(op, op.waitsSince(), op.deadline);
    if (round) block = blockOf(op, std::move(missing));
  });
  group_.membership.propagate();
  if (block) forward(Question{*round}, *block);
}

void Diagnosis::check(CollectiveOp& op, std::vector<int> missing) {
  const auto now = Clock::now();
  group_.record.waitsFor(op.sequence(), missing);
  if (isLate(op)) {
    const bool hasArena = group_.membership.arena() != nullptr;
    if (hasArena) missing = blamedFor(op, missing);
    const std::vector<int> behind = hasArena ? missing : group_.agreement.behind(runner_.current());
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
    group_.agreement.sendArrived(op.external ? std::vector<int>() : missing);
  }
  if (!op.hasWarned && !missing.empty() && now - op.waitsSince() > warnAfter()) {
    op.hasWarned = true;
    MYCOLL_LOG_WARN(
        "group '%s': %s (call #%llu) has waited %lld ms for %s", group_.options.name.c_str(),
        op.describe().c_str(), static_cast<unsigned long long>(op.sequence()),
        static_cast<long long>(millisecondsSince(op.waitsSince())), listRanks(missing).c_str());
  }
  std::vector<int> gone;
  for (int rank : missing) {
    if (group_.membership.hasLeft(rank)) gone.push_back(rank);
  }
  // Without memory that all share, a rank without a connection may have ended instead of left:
  // others know that.
  const bool isExact =
      !gone.empty() && group_.membership.arena() && op.task.waitingFor()->isExact();
  if (isExact) {
    // A rank may have arrived, or have failed the group, after the first look and before it left.
    if (group_.membership.noticeFailure(runner_.current())) return;
    missing = op.task.waitingFor()->missing();
    std::erase_if(gone, [&](int rank) { return !contains(missing, rank); });
  }
  if (gone.empty()) {
    op.leftSince = {};
  } else if (isExact) {
    group_.membership.failFirst(hasLeft(op, gone));
  } else if (op.leftSince == Clock::time_point{}) {
    op.leftSince = now;
  } else if (now - op.leftSince > kLeftGrace) {
    group_.membership.failFirst(hasLeft(op, gone));
  }
}

// In a collective that copies through an arena a rank may wait for one that itself waits for a
// third.
std::vector<int> Diagnosis::blamedFor(const CollectiveOp& op,
                                      const std::vector<int>& missing) const {
  constexpr auto kFresh = Milliseconds(1000);
  std::set<int> blamed;
  MutexLock lock(mutex_);
  for (const int rank : missing) {
    const auto found = answers_.find(rank);
    std::vector<int> others;
    if (found != answers_.end() && found->second.call == op.sequence() &&
        Clock::now() - found->second.when < kFresh) {
      others = found->second.waitsFor;
    }
    std::erase(others, group_.options.rank);
    if (others.empty()) others = {rank};
    blamed.insert(others.begin(), others.end());
  }
  return {blamed.begin(), blamed.end()};
}

void Diagnosis::checkMessage(MessageOp& op) {
  if (op.done() || group_.membership.checkArena()) return;
  const Deadline deadline = op.deadline();
  if (!deadline.expired()) {
    const std::optional<uint32_t> round = nextRound(op, op.submitted, deadline);
    if (round && op.rank == kFromAnyone) askOthers(op);
    if (const auto block = round ? blockOf(op) : std::nullopt) forward(Question{*round}, *block);
    return;
  }
  const bool isAnyone = op.rank == kFromAnyone;
  Cause fields;
  fields.rank = isAnyone ? -1 : op.rank;
  group_.membership.fail(group_.error(
      Code::kTimeout,
      rankPrefix() + op.describe(isAnyone ? "any rank" : group_.mailbox.describeRank(op.rank)) +
          " timed out after " + std::to_string(millisecondsSince(deadline.when() - op.timeout)) +
          " ms. Timed out waiting for the other side, which never came" +
          (isAnyone ? "" : lastAnswer(op.rank)) + ".",
      fields));
}

// A receive from any rank ends when all others have left. Those that have never been connected to
// this rank send it no goodbye, so once some have left, the others are sent a question that has no
// answer: a process that has left the group refuses it.
void Diagnosis::askOthers(const MessageOp& op) {
  std::vector<int> others;
  bool hasAnyLeft = false;
  for (int rank = 0; rank < group_.options.ranks; ++rank) {
    if (rank == group_.options.rank) continue;
    hasAnyLeft |= group_.membership.hasLeft(rank);
    if (!group_.mailbox.isConnectedTo(rank)) others.push_back(rank);
  }
  if (!hasAnyLeft || op.done()) return;
  for (size_t i = 0; i < std::min(others.size(), kMaxAsked); ++i) {
    group_.mailbox.notify(others[i], FrameKind::kQuestion, "");
  }
}

void Diagnosis::checkMessages() {
  if (group_.membership.hasFailed()) return;
  std::shared_ptr<MessageOp> late;
  group_.mailbox.forEachMessage([&late](Transfer& message) {
    const auto& op = static_cast<const MessageOp&>(message);
    if (!late && op.deadline().expired()) late = op.self;
  });
  if (late) checkMessage(*late);
}

// ---- from which thread the group is called -----------------------------------------------------

void Diagnosis::noteCaller() {
  if (caller_.note()) group_.engine->caller().note();
}

void Diagnosis::enter(std::optional<WaitBoard::Entry>* entry, const OpPtr& op) {
  entry->emplace(group_.engine->waits(), Wait{threadNumber(), self_.weak_from_this(), op});
}

// The thread that should make this group's next call.
uint64_t Diagnosis::callingThread() const {
  return caller_.thread() == 0 ? creator_ : caller_.thread();
}

// ---- what this rank is doing -------------------------------------------------------------------

std::string Diagnosis::identityOf(const Op& op) const {
  return toContext(group_.mailbox.group().context) + (op.isMessage() ? "m" : "c") +
         std::to_string(op.sequence());
}

std::optional<Diagnosis::Block> Diagnosis::blockedHead() {
  std::optional<Block> block;
  for (int look = 0; look < kLooks && !queue_.isEmpty(); ++look, std::this_thread::yield()) {
    const bool isSeen = queue_.inspectHead([&](CollectiveOp& op, std::vector<int> missing) {
      block = blockOf(op, std::move(missing));
    });
    if (isSeen) break;  // else another thread runs the queue
  }
  return block;
}

std::optional<Diagnosis::Block> Diagnosis::blockBy(const Op& op, const std::string& call,
                                                   Clock::time_point since,
                                                   std::vector<int> ranks) {
  std::shared_ptr<Communicator> self = self_.weak_from_this().lock();
  if (!self) return std::nullopt;  // it is being destroyed
  const std::string text =
      call + " of group '" + group_.options.name + "', for " + seconds(Clock::now() - since);
  return Block{std::move(self), identityOf(op), text,
               op.isMessage(),  op.sequence(),  std::move(ranks)};
}

std::optional<Diagnosis::Block> Diagnosis::blockOf(const CollectiveOp& op,
                                                   std::vector<int> missing) {
  if (missing.empty()) return std::nullopt;
  auto block = blockBy(op, op.describe() + " (call #" + std::to_string(op.sequence()) + ")",
                       op.waitsSince(), std::move(missing));
  if (block) block->text += ", waits for " + listRanks(block->ranks, /*withStates=*/false);
  return block;
}

std::optional<Diagnosis::Block> Diagnosis::blockOf(MessageOp& op) {
  if (op.done() || op.rank == kFromAnyone || !group_.mailbox.isUnmatched(op)) return std::nullopt;
  return blockBy(op, op.describe() + ",", op.submitted, {op.rank});
}

// Explains why this rank has not made the call or sent the message in question and, if it is
// blocked, what blocks it.
std::string Diagnosis::explain(const Question& question, std::optional<Block>* block,
                               std::vector<int>* waitsFor) {
  const Queue::Position position = queue_.position();
  std::string before = "it has made no call yet";
  if (position.last) {
    before = std::string("the last call that it finished is ") + name(position.last->kind) +
             " (call #" + std::to_string(position.last->sequence) + ", made " +
             seconds(Clock::now() - position.last->submitted) + " ago)";
  }
  if (question.isMessage || position.submitted <= question.number) {
    return before + explainMissingCall(block);
  }
  if (!position.head || *position.head > question.number) return before;
  const std::optional<Block> own = blockedHead();
  if (*position.head == question.number) {
    if (own) *waitsFor = own->ranks;
    return "it is in the same call, and " + before +
           (own ? "; it waits for " + listRanks(own->ranks, /*withStates=*/false) : "");
  }
  *block = own;
  return before + (own ? "; before this call it is in " + own->text : "");
}

// The call was not made: explains what the thread that should make it is doing.
std::string Diagnosis::explainMissingCall(std::optional<Block>* block) {
  if (group_.options.mayBeCalled && group_.options.mayBeCalled()) {
    return "; its program has other threads, or callbacks that are still to run";
  }
  const Caller& caller = caller_.thread() == 0 ? group_.engine->caller() : caller_;
  if (caller.isMany()) return "; it is called from several threads";
  const std::optional<Wait> wait = group_.engine->waits().of(callingThread());
  if (!wait) return "; since then its program has been in no call of mycoll";
  const std::shared_ptr<Communicator> other = wait->group.lock();
  if (!other || wait->op->done()) return "";
  Diagnosis& theirs = other->diagnosis();
  *block = wait->op->isMessage() ? theirs.blockOf(static_cast<MessageOp&>(*wait->op))
                                 : theirs.blockedHead();
  return *block ? "; now it is in " + (*block)->text : "";
}

// ---- asking ------------------------------------------------------------------------------------

std::optional<uint32_t> Diagnosis::nextRound(Op& op, Clock::time_point since, Deadline deadline) {
  MutexLock lock(mutex_);                         // two threads may wait for one op
  constexpr int kHalves[] = {2, 1, 1, 2, 4, 10};  // of warnAfter()
  const auto now = Clock::now();
  if (op.asked == Clock::time_point{}) op.asked = since;
  const bool isFirst = op.rounds == 0;
  const Milliseconds pause =
      kHalves[std::min<size_t>(op.rounds, std::size(kHalves) - 1)] * warnAfter() / 2;
  // Ask once more before the deadline, so that the answers in the error are fresh.
  const bool isLast = !deadline.isNever() && now - op.asked > Milliseconds(isFirst ? 300 : 600) &&
                      deadline.when() - now < Milliseconds(250);
  if (now - op.asked < pause && !isLast) return std::nullopt;
  op.asked = now;
  return ++op.rounds;
}

void Diagnosis::forward(Question question, const Block& block) {
  question.isMessage = block.isMessage;
  question.number = block.number;
  question.way += group_.engine->mesh()->address().uid + ":" + block.identity + ";";
  Mailbox& mailbox = block.group->mailbox();
  question.waits += "\n  " + oneLine(mailbox.describeRank(mailbox.rank()) + ": " + block.text);
  const std::string text = question.encode();
  if (text.size() > kMaxQuestion) return;
  for (size_t i = 0; i < std::min(block.ranks.size(), kMaxAsked); ++i) {
    mailbox.notify(block.ranks[i], FrameKind::kQuestion, text, fnv1a(question.way));
  }
}

// ---- receiving ---------------------------------------------------------------------------------

void Diagnosis::onMessage(int source, FrameKind kind, const std::string& payload) {
  {
    MutexLock lock(mutex_);
    if (incoming_.size() >= kMaxIncoming) return;
    incoming_.push_back({source, kind, payload});
  }
  group_.engine->messageCame();
}

void Diagnosis::handleMessages() {
  std::vector<Incoming> incoming;
  {
    MutexLock lock(mutex_);
    incoming.swap(incoming_);
  }
  for (Incoming& message : incoming) {
    if (message.kind == FrameKind::kQuestion) {
      onQuestion(message.source, message.payload);
    } else if (message.kind == FrameKind::kDeadlock) {
      onDeadlock(message.payload);
    } else {
      onAnswer(message.source, message.payload);
    }
  }
}

void Diagnosis::onAnswer(int source, const std::string& payload) {
  Reader reader(payload);
  Answer answer{{}, Clock::now(), reader.value<uint64_t>()};
  answer.waitsFor.resize(std::min<size_t>(reader.value<uint32_t>(), kMostDescribed));
  for (int& rank : answer.waitsFor) rank = reader.value<int>();
  answer.text = sanitized(oneLine(std::string(reader.rest())));
  const auto isNone = [&](int rank) { return rank < 0 || rank >= group_.options.ranks; };
  if (reader.hasFailed() || std::any_of(answer.waitsFor.begin(), answer.waitsFor.end(), isNone)) {
    return;
  }
  MutexLock lock(mutex_);
  answers_[source] = std::move(answer);
}

void Diagnosis::onQuestion(int source, const std::string& payload) {
  Question question;
  if (!Question::decode(payload, &question)) return;
  std::optional<Block> block;
  std::vector<int> waitsFor;
  const std::string text = explain(question, &block, &waitsFor);
  waitsFor.resize(std::min(waitsFor.size(), kMostDescribed));
  std::string answer;
  append(&answer, question.number);
  append(&answer, static_cast<uint32_t>(waitsFor.size()));
  for (const int rank : waitsFor) append(&answer, rank);
  group_.mailbox.notify(source, FrameKind::kAnswer, answer + text.substr(0, kMaxAnswer));
  if (!block) return;
  const std::string self = group_.engine->mesh()->address().uid + ":";
  if (question.way.starts_with(self)) {
    if (question.way.starts_with(self + block->identity + ";")) onCycle(question, *block);
    return;
  }
  // This cycle does not contain the sender of the question: its members find it themselves.
  if (question.way.find(self) != question.way.npos) return;
  {
    const std::string key = question.way.substr(0, question.way.find(';') + 1) +
                            std::to_string(question.round) + ":" + block->identity;
    MutexLock lock(mutex_);
    if (std::find(passedOn_.begin(), passedOn_.end(), key) != passedOn_.end()) return;
    passedOn_.push_back(key);
    if (passedOn_.size() > kMaxPassedOn) passedOn_.pop_front();
  }
  forward(std::move(question), *block);
}

// Whether an earlier round of questions found the same cycle.
bool Diagnosis::wasSeenBefore(const Question& question) {
  MutexLock lock(mutex_);
  if (cycle_.first == question.way && cycle_.second < question.round) return true;
  cycle_ = {question.way, question.round};
  return false;
}

void Diagnosis::onCycle(const Question& question, const Block& block) {
  if (!block.group->diagnosis().wasSeenBefore(question)) return;
  const bool isAlone = stepsOf(question.way).size() == 1;
  std::string text = isAlone ? "mycoll: DEADLOCK: this rank waits for a message of its own"
                             : "mycoll: DEADLOCK: these ranks wait for each other, each in another "
                               "call, and none can go on";
  text += question.waits;
  if (!isAlone) {
    text +=
        "\n  Ranks that share groups must call their operations in the same order; an operation "
        "with async_op=True holds up nothing until it is waited for.";
  }
  onDeadlock(question.way + "\n" + text);
}

// Fails the group of this process's wait that is part of the cycle, and notifies the next process.
void Diagnosis::onDeadlock(const std::string& payload) {
  const size_t end = payload.find('\n');
  if (end == payload.npos) return;
  const std::string cycle = payload.substr(0, end);
  const std::vector<std::string> way = stepsOf(cycle);
  const std::string self = group_.engine->mesh()->address().uid + ":";
  for (size_t i = 0; i < way.size(); ++i) {
    if (!way[i].starts_with(self)) continue;
    for (const std::shared_ptr<Communicator>& group : group_.engine->groups()) {
      if (!group->diagnosis().isWaitingIn(way[i].substr(self.size()))) continue;
      const auto& peers = group->mailbox().group().peers;
      for (size_t rank = 0; i + 1 < way.size() && rank < peers.size(); ++rank) {
        if (!way[i + 1].starts_with(peers[rank].uid + ":")) continue;
        group->mailbox().notify(static_cast<int>(rank), FrameKind::kDeadlock, payload);
      }
      Cause fields;
      fields.incident = incidentOf(cycle);
      group->membership().fail(Status(Code::kDeadlock, sanitized(payload.substr(end + 1)), fields));
      return;
    }
  }
}

bool Diagnosis::isWaitingIn(const std::string& identity) {
  if (group_.membership.hasFailed()) return false;
  if (const auto block = blockedHead(); block && block->identity == identity) return true;
  const std::optional<Wait> wait = group_.engine->waits().of(callingThread());
  return wait && wait->group.lock().get() == &self_ && !wait->op->done() && wait->op->isMessage() &&
         identityOf(*wait->op) == identity;
}

}  // namespace mycoll
