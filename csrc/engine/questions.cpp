#include "engine/questions.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <sstream>
#include <thread>

#include "base/hash.h"
#include "base/sanitize.h"
#include "engine/communicator.h"
#include "engine/engine.h"
#include "engine/queue.h"
#include "transport/mesh.h"

namespace mycoll {
namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

constexpr size_t kMaxQuestion = 12 * 1024;  // below kMaxControlBytes
constexpr size_t kMaxAnswer = 1024;
constexpr size_t kMaxIncoming = 1024;
constexpr size_t kMaxPassedOn = 256;
constexpr size_t kMaxAsked = 64;  // ranks per question
constexpr int kLooks = 20;        // attempts to inspect a queue that a thread runs

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

std::vector<std::string> splitLines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

// The processes on the way of a question, in order: "uid:wait;uid:wait;".
std::vector<std::pair<std::string, uint64_t>> decodeWay(const std::string& text) {
  std::vector<std::pair<std::string, uint64_t>> way;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ';');) {
    const size_t colon = part.find(':');
    if (colon == part.npos) return {};
    way.emplace_back(part.substr(0, colon), std::strtoull(part.c_str() + colon + 1, nullptr, 16));
  }
  return way;
}

std::string encodeStep(const std::string& uid, uint64_t wait) {
  char number[32];
  std::snprintf(number, sizeof(number), ":%" PRIx64 ";", wait);
  return uid + number;
}

}  // namespace

// Encoded with one field per line: round, 'c' or 'm', number, way, then one line for each wait.
struct Questions::Question {
  uint32_t round = 0;
  bool isMessage = false;  // it is about a send or a receive; else the collective `number`
  uint64_t number = 0;
  std::string way;
  std::vector<std::string> waits;

  std::string encode() const {
    std::string text = std::to_string(round) + "\n" + (isMessage ? "m" : "c") + "\n" +
                       std::to_string(number) + "\n" + way + "\n";
    for (const std::string& line : waits) text += line + "\n";
    return text;
  }
  static bool decode(const std::string& text, Question* question) {
    std::vector<std::string> lines = splitLines(text);
    if (lines.size() < 5) return false;
    question->round = static_cast<uint32_t>(std::strtoul(lines[0].c_str(), nullptr, 10));
    question->isMessage = lines[1] == "m";
    question->number = std::strtoull(lines[2].c_str(), nullptr, 10);
    question->way = lines[3];
    question->waits.assign(lines.begin() + 4, lines.end());
    return true;
  }
};

Questions::Questions(Group& group, Communicator& self, Queue& queue)
    : group_(group), self_(self), queue_(queue) {}

// ---- from which thread the group is called -----------------------------------------------------

void Questions::noteCaller() {
  if (caller_.note()) group_.engine->caller().note();
}

void Questions::enter(std::optional<WaitBoard::Entry>* entry, const OpPtr& op,
                      Clock::time_point since) {
  entry->emplace(group_.engine->waits(), Wait{threadNumber(), self_.weak_from_this(), op, since});
}

// The thread that should make this group's next call.
uint64_t Questions::callingThread() const {
  return caller_.thread() == 0 ? creator_ : caller_.thread();
}

// ---- what this rank is doing -------------------------------------------------------------------

uint64_t Questions::identityOf(bool isMessage, uint64_t number) const {
  uint64_t mixed = (number * 2 + (isMessage ? 1 : 0) + 1) * 0x9e3779b97f4a7c15ULL;
  return group_.mailbox.group().context ^ mixed ^ (mixed >> 29);
}

std::optional<Block> Questions::blockedHead() {
  std::optional<Block> block;
  for (int look = 0; look < kLooks && !queue_.isEmpty(); ++look, std::this_thread::yield()) {
    const bool isSeen = queue_.inspectHead([&](CollectiveOp& op, std::vector<int> missing) {
      block = blockOf(op, std::move(missing));
    });
    if (isSeen) break;  // else another thread runs the queue
  }
  return block;
}

std::optional<Block> Questions::blockOf(const CollectiveOp& op, std::vector<int> missing) {
  if (missing.empty()) return std::nullopt;
  Block block;
  block.group = self_.shared_from_this();
  block.number = op.sequence();
  block.identity = identityOf(false, block.number);
  block.ranks = std::move(missing);
  block.text = op.describe() + " (call #" + std::to_string(op.sequence()) + ") of group '" +
               group_.options.name + "', for " + seconds(Clock::now() - op.waitsSince()) +
               ", waits for " + listNames(block.ranks);
  return block;
}

std::optional<Block> Questions::blockOf(MessageOp& op) {
  if (op.done() || op.rank == kFromAnyone || !group_.mailbox.isUnmatched(op)) return std::nullopt;
  Block block;
  block.group = self_.shared_from_this();
  block.isMessage = true;
  block.number = op.sequence();
  block.identity = identityOf(true, op.sequence());
  block.ranks = {op.rank};
  block.text = op.describe() + ", of group '" + group_.options.name + "', for " +
               seconds(Clock::now() - op.submitted);
  return block;
}

std::string Questions::listNames(const std::vector<int>& ranks) const {
  constexpr size_t kShown = 4;
  std::string text;
  for (size_t i = 0; i < std::min(ranks.size(), kShown); ++i) {
    text += (i ? ", " : "") + group_.mailbox.describeRank(ranks[i]);
  }
  if (ranks.size() > kShown) text += " and " + std::to_string(ranks.size() - kShown) + " more";
  return text;
}

// Explains why this rank has not made the call or sent the message in question and, if it is
// blocked, what blocks it.
std::string Questions::explain(const Question& question, std::optional<Block>* block) {
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
    return "it is in the same call, and " + before +
           (own ? "; it waits for " + listNames(own->ranks) : "");
  }
  *block = own;
  return before + (own ? "; before this call it is in " + own->text : "");
}

// The call was not made: explains what the thread that should make it is doing.
std::string Questions::explainMissingCall(std::optional<Block>* block) {
  if (group_.options.mayBeCalled && group_.options.mayBeCalled()) {
    return "; its program has other threads, or callbacks that are still to run";
  }
  const Caller& caller = caller_.thread() == 0 ? group_.engine->caller() : caller_;
  if (caller.isMany()) return "; it is called from several threads";
  const std::optional<Wait> wait = group_.engine->waits().of(callingThread());
  if (!wait) return "; since then its program has been in no call of mycoll";
  const std::shared_ptr<Communicator> other = wait->group.lock();
  if (!other || wait->op->done()) return "";
  Questions& questions = other->questions();
  *block = wait->op->isMessage() ? questions.blockOf(static_cast<MessageOp&>(*wait->op))
                                 : questions.blockedHead();
  return *block ? "; now it is in " + (*block)->text : "";
}

// ---- asking ------------------------------------------------------------------------------------

bool Questions::isTimeToAsk(Op& op, Clock::time_point since) {
  MutexLock lock(mutex_);  // two threads may wait for one op
  constexpr Milliseconds kPauses[] = {Milliseconds(1000), Milliseconds(500), Milliseconds(500),
                                      Milliseconds(1000), Milliseconds(2000)};
  const auto now = Clock::now();
  if (op.asked == Clock::time_point{}) op.asked = since;
  const bool isFirst = op.rounds == 0;
  const Milliseconds pause =
      op.rounds < std::size(kPauses) ? kPauses[op.rounds] : Milliseconds(5000);
  // Ask once more before the deadline, so that the answers in the error are fresh.
  const bool isLast = !op.deadline.isNever() &&
                      now - op.asked > Milliseconds(isFirst ? 300 : 600) &&
                      op.deadline.when() - now < Milliseconds(250);
  if (now - op.asked < pause && !isLast) return false;
  op.asked = now;
  ++op.rounds;
  return true;
}

void Questions::ask(const Block& block, uint32_t round) {
  Question question;
  question.round = round;
  passOn(question, block);
}

void Questions::passOn(Question question, const Block& block) {
  question.isMessage = block.isMessage;
  question.number = block.number;
  question.way += encodeStep(group_.engine->mesh()->address().uid, block.identity);
  Mailbox& mailbox = block.group->mailbox();
  question.waits.push_back(oneLine(mailbox.describeRank(mailbox.rank()) + ": " + block.text));
  const std::string text = question.encode();
  if (text.size() > kMaxQuestion) return;
  for (size_t i = 0; i < std::min(block.ranks.size(), kMaxAsked); ++i) {
    mailbox.notify(block.ranks[i], FrameKind::kQuestion, text, fnv1a(question.way));
  }
}

std::string Questions::lastAnswer(int rank) const {
  MutexLock lock(mutex_);
  const auto answer = answers_.find(rank);
  if (answer == answers_.end()) return "";
  return " (" + seconds(Clock::now() - answer->second.when) +
         " ago it answered: " + answer->second.text + ")";
}

// ---- receiving ---------------------------------------------------------------------------------

void Questions::onMessage(int source, FrameKind kind, const std::string& payload) {
  {
    MutexLock lock(mutex_);
    if (incoming_.size() >= kMaxIncoming) return;
    incoming_.push_back({source, kind, payload});
  }
  group_.engine->messageCame();
}

void Questions::handleMessages() {
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
      MutexLock lock(mutex_);
      answers_[message.source] = {sanitized(oneLine(message.payload)), Clock::now()};
    }
  }
}

void Questions::onQuestion(int source, const std::string& text) {
  Question question;
  if (!Question::decode(text, &question)) return;
  std::optional<Block> block;
  const std::string answer = explain(question, &block);
  group_.mailbox.notify(source, FrameKind::kAnswer, answer.substr(0, kMaxAnswer));
  const auto way = decodeWay(question.way);
  if (!block || way.empty()) return;
  const std::string& self = group_.engine->mesh()->address().uid;
  if (way.front().first == self) {
    if (way.front().second == block->identity) onCycle(question, *block);
    return;
  }
  // This cycle does not contain the sender of the question: its members find it themselves.
  if (question.way.find(self + ":") != question.way.npos) return;
  {
    const std::string key = encodeStep(way.front().first, way.front().second) +
                            std::to_string(question.round) + encodeStep("", block->identity);
    MutexLock lock(mutex_);
    if (std::find(passedOn_.begin(), passedOn_.end(), key) != passedOn_.end()) return;
    passedOn_.push_back(key);
    if (passedOn_.size() > kMaxPassedOn) passedOn_.pop_front();
  }
  passOn(std::move(question), *block);
}

// Whether an earlier round of questions found the same cycle.
bool Questions::wasSeenBefore(const Question& question) {
  MutexLock lock(mutex_);
  if (cycle_.way == question.way && cycle_.round < question.round) return true;
  cycle_ = {question.way, question.round};
  return false;
}

void Questions::onCycle(const Question& question, const Block& block) {
  if (!block.group->questions().wasSeenBefore(question)) return;
  std::string text = question.waits.size() == 1
                         ? "mycoll: DEADLOCK: this rank waits for a message of its own"
                         : "mycoll: DEADLOCK: these ranks wait for each other, each in another "
                           "call, and none can go on";
  for (const std::string& line : question.waits) text += "\n  " + line;
  if (question.waits.size() > 1) {
    text +=
        "\n  Ranks that share groups must call their operations in the same order; an operation "
        "with async_op=True holds up nothing until it is waited for.";
  }
  onDeadlock(question.way + "\n" + text);
}

// Fails the group of this process's wait that is part of the cycle, and notifies the next process.
void Questions::onDeadlock(const std::string& payload) {
  const size_t end = payload.find('\n');
  if (end == payload.npos) return;
  const std::string cycle = payload.substr(0, end);
  const auto way = decodeWay(cycle);
  const std::string& self = group_.engine->mesh()->address().uid;
  for (size_t i = 0; i < way.size(); ++i) {
    if (way[i].first != self) continue;
    for (const std::shared_ptr<Communicator>& group : group_.engine->groups()) {
      if (!group->questions().isWaitingIn(way[i].second)) continue;
      const auto& peers = group->mailbox().group().peers;
      for (size_t rank = 0; i + 1 < way.size() && rank < peers.size(); ++rank) {
        if (peers[rank].uid != way[i + 1].first) continue;
        group->mailbox().notify(static_cast<int>(rank), FrameKind::kDeadlock, payload);
      }
      Cause fields;
      fields.incident = incidentOf(cycle);
      group->membership().fail(Status(Code::kDeadlock, sanitized(payload.substr(end + 1)), fields));
      return;
    }
  }
}

bool Questions::isWaitingIn(uint64_t identity) {
  if (group_.membership.hasFailed()) return false;
  if (const auto block = blockedHead(); block && block->identity == identity) return true;
  const std::optional<Wait> wait = group_.engine->waits().of(callingThread());
  return wait && wait->group.lock().get() == &self_ && !wait->op->done() &&
         identityOf(true, wait->op->sequence()) == identity;
}

}  // namespace mycoll
