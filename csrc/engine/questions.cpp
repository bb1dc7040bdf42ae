// The group's half that finds out why a rank does not come. Whoever has waited long asks those that
// it waits for, process to process. Each answers what it is at; and when it is itself stuck,
// because the thread that should make the call waits in another one, it passes the question on to
// those that it waits for in turn. A question that comes back to its asker has gone round a
// deadlock:
//
//   rank 0, in a call of A  -> asks rank 1 -> whose thread is in a call of B, waits for rank 0
//   rank 0, for B           <- is asked        ^ the same wait that asked: a circle
//
// Every rank of the circle waits for all of the next ones to come, and none can come before it has
// been served; so no false alarm is possible as long as "the thread that should make the call" is
// right. It is known for a group that has only ever been called from one thread, in a process that
// has no other that could (GroupOptions::mayBeCalled); others are never accused. A circle is
// believed when it is found twice in the same shape, half a second apart.
//
// Nothing of this happens before a wait has lasted for a second.
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <sstream>
#include <thread>

#include "engine/group.h"

namespace mycoll {
namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

constexpr size_t kMaxQuestion = 12 * 1024;  // below kMaxControlBytes
constexpr size_t kMaxAnswer = 1024;
constexpr size_t kMaxWords = 1024;
constexpr size_t kMaxRemembered = 256;
constexpr size_t kMaxAsked = 64;  // ranks at a time

std::string seconds(Clock::duration time) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", std::chrono::duration<double>(time).count());
  return text;
}

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

// The processes of a way, in order: "uid:wait;uid:wait;".
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

// As it travels, one field a line: round, 'c' or 'm', number, way, then one line for each wait.
struct Group::Question {
  uint32_t round = 0;
  bool isMessage = false;  // a send or a receive is waited for; else the collective `number`
  uint64_t number = 0;
  std::string way;
  std::vector<std::string> story;

  std::string encode() const {
    std::string text = std::to_string(round) + "\n" + (isMessage ? "m" : "c") + "\n" +
                       std::to_string(number) + "\n" + way + "\n";
    for (const std::string& line : story) text += line + "\n";
    return text;
  }
  static bool decode(const std::string& text, Question* question) {
    std::vector<std::string> lines = splitLines(text);
    if (lines.size() < 5) return false;
    question->round = static_cast<uint32_t>(std::strtoul(lines[0].c_str(), nullptr, 10));
    question->isMessage = lines[1] == "m";
    question->number = std::strtoull(lines[2].c_str(), nullptr, 10);
    question->way = lines[3];
    question->story.assign(lines.begin() + 4, lines.end());
    return true;
  }
};

// ---- what this rank is at ----------------------------------------------------------------------

uint64_t Group::identityOf(bool isMessage, uint64_t number) const {
  uint64_t mixed = (number * 2 + (isMessage ? 1 : 0) + 1) * 0x9e3779b97f4a7c15ULL;
  return mailbox_.group().context ^ mixed ^ (mixed >> 29);
}

std::optional<Block> Group::blockedHead() {
  for (int attempt = 0; attempt < 20; ++attempt, std::this_thread::yield()) {
    std::unique_lock<std::mutex> running(runLock_, std::try_to_lock);
    if (!running.owns_lock()) continue;  // somebody looks whether it can go on
    std::shared_ptr<CollectiveOp> op;
    {
      std::lock_guard<std::mutex> lock(queueLock_);
      if (queue_.empty()) return std::nullopt;
      op = queue_.front();
    }
    if (!op->task.valid() || op->task.finished() || !op->task.waitingFor()) return std::nullopt;
    if (op->task.waitingFor()->ready()) return std::nullopt;
    return blockOf(*op, op->task.waitingFor()->missing());
  }
  return std::nullopt;
}

std::optional<Block> Group::blockOf(const CollectiveOp& op, std::vector<int> missing) {
  if (missing.empty()) return std::nullopt;
  Block block;
  block.group = shared_from_this();
  block.number = op.sequence();
  block.identity = identityOf(false, block.number);
  block.ranks = std::move(missing);
  const auto since = op.external ? op.begun : op.submitted;
  block.text = nameOf(op) + " (call #" + std::to_string(op.sequence()) + ") of group '" +
               options_.name + "', for " + seconds(Clock::now() - since) + ", waits for " +
               listNames(block.ranks);
  return block;
}

std::optional<Block> Group::blockOf(MessageOp& op) {
  if (op.done() || op.rank == kAnySource || !mailbox_.isUnmatched(op)) return std::nullopt;
  Block block;
  block.group = shared_from_this();
  block.isMessage = true;
  block.number = op.sequence();
  block.identity = identityOf(true, op.sequence());
  block.ranks = {op.rank};
  block.text =
      op.what() + ", of group '" + options_.name + "', for " + seconds(Clock::now() - op.submitted);
  return block;
}

std::string Group::listNames(const std::vector<int>& ranks) const {
  constexpr size_t kShown = 4;
  std::string text;
  for (size_t i = 0; i < std::min(ranks.size(), kShown); ++i) {
    text += (i ? ", " : "") + mailbox_.describeRank(ranks[i]);
  }
  if (ranks.size() > kShown) text += " and " + std::to_string(ranks.size() - kShown) + " more";
  return text;
}

// Why this rank does not come to what is asked for, in words and, if it is stuck, what blocks it.
std::string Group::explain(const Question& question, std::optional<Block>* block) {
  std::string before = "has made no call yet";
  bool isAhead = false;
  {
    std::lock_guard<std::mutex> lock(queueLock_);
    const uint64_t submitted = submitted_.load(std::memory_order_relaxed);
    if (finished_) {
      before = std::string("last finished ") + name(finished_->kind) + " (call #" +
               std::to_string(finished_->sequence) + ", called " +
               seconds(Clock::now() - finished_->submitted) + " ago)";
    }
    if (!question.isMessage && submitted > question.number) {
      if (queue_.empty() || queue_.front()->sequence() > question.number) return before;
      isAhead = queue_.front()->sequence() < question.number;
      if (!isAhead) {
        before = "is in the same call, and " + before;
        *block = std::nullopt;
      }
    }
  }
  if (isAhead) {
    *block = blockedHead();
    return before + (*block ? "; before this call it is in " + (*block)->text : "");
  }
  if (!question.isMessage && submitted_.load(std::memory_order_relaxed) > question.number) {
    const std::optional<Block> own = blockedHead();
    return before + (own ? "; waits for " + listNames(own->ranks) : "");
  }
  if (options_.mayBeCalled && options_.mayBeCalled()) {
    return before + "; its program has other threads, or callbacks that are still to run";
  }
  const Caller& caller = caller_.thread() == 0 ? engine_->caller() : caller_;
  if (caller.isMany()) return before + "; it is called from several threads";
  const uint64_t thread = caller_.thread() == 0 ? creator_ : caller_.thread();
  const std::optional<Wait> wait = engine_->waits().of(thread);
  if (!wait) return before + "; since then its program has been in no call of mycoll";
  const std::shared_ptr<Group> other = wait->group.lock();
  if (!other || wait->op->done()) return before;
  const bool isMessage = wait->op->kind() == OpKind::kSend || wait->op->kind() == OpKind::kRecv;
  *block = isMessage ? other->blockOf(static_cast<MessageOp&>(*wait->op)) : other->blockedHead();
  return before + (*block ? "; now it is in " + (*block)->text : "");
}

// ---- asking ------------------------------------------------------------------------------------

bool Group::isTimeToAsk(BasicOp& op, Clock::time_point since) {
  std::lock_guard<std::mutex> lock(wordLock_);  // two threads may wait for one op
  constexpr Milliseconds kPauses[] = {Milliseconds(1000), Milliseconds(500), Milliseconds(500),
                                      Milliseconds(1000), Milliseconds(2000)};
  const auto now = Clock::now();
  if (op.asked == Clock::time_point{}) op.asked = since;
  const bool isFirst = op.rounds == 0;
  const Milliseconds pause =
      op.rounds < std::size(kPauses) ? kPauses[op.rounds] : Milliseconds(5000);
  // Once more before the end, so that the story told then is fresh.
  const bool isLast = !op.deadline.isNever() &&
                      now - op.asked > Milliseconds(isFirst ? 300 : 600) &&
                      op.deadline.when() - now < Milliseconds(250);
  if (now - op.asked < pause && !isLast) return false;
  op.asked = now;
  ++op.rounds;
  return true;
}

void Group::ask(const BasicOp& op, const std::optional<Block>& block) {
  if (!block) return;
  Question question;
  question.round = op.rounds;
  passOn(question, *block);
}

void Group::passOn(Question question, const Block& block) {
  question.isMessage = block.isMessage;
  question.number = block.number;
  question.way += encodeStep(engine_->endpoint()->address().uid, block.identity);
  const Mailbox& mailbox = block.group->mailbox_;
  question.story.push_back(oneLine(mailbox.describeRank(mailbox.rank()) + ": " + block.text));
  const std::string text = question.encode();
  if (text.size() > kMaxQuestion) return;
  for (size_t i = 0; i < std::min(block.ranks.size(), kMaxAsked); ++i) {
    block.group->mailbox_.tell(block.ranks[i], FrameKind::kQuestion, text);
  }
}

// ---- hearing -----------------------------------------------------------------------------------

void Group::onWord(int source, FrameKind kind, const std::string& payload) {
  {
    std::lock_guard<std::mutex> lock(wordLock_);
    if (words_.size() >= kMaxWords) return;
    words_.push_back({source, kind, payload});
  }
  engine_->wordCame();
}

void Group::hearWords() {
  std::vector<Word> words;
  {
    std::lock_guard<std::mutex> lock(wordLock_);
    words.swap(words_);
  }
  for (Word& word : words) {
    if (word.kind == FrameKind::kQuestion) {
      onQuestion(word.source, word.payload);
    } else if (word.kind == FrameKind::kVerdict) {
      onVerdict(word.payload);
    } else if (word.kind == FrameKind::kMessages) {
      messageNotes_.hear(word.source, word.payload);
      compareMessages();
    } else {
      std::lock_guard<std::mutex> lock(wordLock_);
      heard_[word.source] = {oneLine(word.payload), Clock::now()};
    }
  }
}

void Group::onQuestion(int source, const std::string& text) {
  Question question;
  if (!Question::decode(text, &question)) return;
  std::optional<Block> block;
  const std::string answer = explain(question, &block);
  mailbox_.tell(source, FrameKind::kAnswer, answer.substr(0, kMaxAnswer));
  const auto way = decodeWay(question.way);
  if (!block || way.empty()) return;
  const std::string& self = engine_->endpoint()->address().uid;
  if (way.front().first == self) {
    if (way.front().second == block->identity) onCircle(question, *block);
    return;
  }
  // A circle that the asker is not part of: its members find it themselves.
  if (question.way.find(self + ":") != question.way.npos) return;
  {
    const std::string key = encodeStep(way.front().first, way.front().second) +
                            std::to_string(question.round) + encodeStep("", block->identity);
    std::lock_guard<std::mutex> lock(wordLock_);
    if (std::find(passed_.begin(), passed_.end(), key) != passed_.end()) return;
    passed_.push_back(key);
    if (passed_.size() > kMaxRemembered) passed_.pop_front();
  }
  passOn(std::move(question), *block);
}

void Group::onCircle(const Question& question, const Block& block) {
  {
    std::lock_guard<std::mutex> lock(block.group->wordLock_);
    Circle& known = block.group->circle_;
    if (known.way != question.way || known.round >= question.round) {
      known = {question.way, question.round};
      return;
    }
  }
  std::string text = question.story.size() == 1
                         ? "mycoll: DEADLOCK: this rank waits for a message of its own"
                         : "mycoll: DEADLOCK: these ranks wait for each other, each in another "
                           "call, and none can go on";
  for (const std::string& line : question.story) text += "\n  " + line;
  if (question.story.size() > 1) {
    text +=
        "\n  Ranks that share groups must call their operations in the same order; an operation "
        "with async_op=True holds up nothing until it is waited for.";
  }
  onVerdict(question.way + "\n" + text);
}

// Ends the wait of this process that is part of the circle, and tells the next one.
void Group::onVerdict(const std::string& payload) {
  const size_t end = payload.find('\n');
  if (end == payload.npos) return;
  const auto way = decodeWay(payload.substr(0, end));
  const std::string& self = engine_->endpoint()->address().uid;
  for (size_t i = 0; i < way.size(); ++i) {
    if (way[i].first != self) continue;
    for (const std::shared_ptr<Group>& group : engine_->groups()) {
      if (!group->isWaitingIn(way[i].second)) continue;
      const auto& peers = group->mailbox_.group().peers;
      for (size_t rank = 0; i + 1 < way.size() && rank < peers.size(); ++rank) {
        if (peers[rank].uid != way[i + 1].first) continue;
        group->mailbox_.tell(static_cast<int>(rank), FrameKind::kVerdict, payload);
      }
      group->fail(Status(Code::kDeadlock, payload.substr(end + 1)));
      return;
    }
  }
}

bool Group::isWaitingIn(uint64_t identity) {
  if (hasFailed()) return false;
  if (const auto block = blockedHead(); block && block->identity == identity) return true;
  const std::optional<Wait> wait =
      engine_->waits().of(caller_.thread() == 0 ? creator_ : caller_.thread());
  return wait && wait->group.lock().get() == this && !wait->op->done() &&
         identityOf(true, wait->op->sequence()) == identity;
}

// What a rank said last, for messages: "; 0.4 s ago it said: ...".
std::string Group::lastWord(int rank) const {
  std::lock_guard<std::mutex> lock(wordLock_);
  const auto heard = heard_.find(rank);
  if (heard == heard_.end()) return "";
  return " (" + seconds(Clock::now() - heard->second.when) + " ago it " + heard->second.text + ")";
}

}  // namespace mycoll
