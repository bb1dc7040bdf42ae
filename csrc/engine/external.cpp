// The group's half for what runs elsewhere: the collectives' turn in the queue, and the comparing
// of notes that finds ranks which were called differently.
#include "engine/group.h"

namespace mycoll {
namespace {

using Clock = std::chrono::steady_clock;

// Ranks that differ must be found before anybody uses the numbers for long; a message to one rank
// now and then costs nothing beside a device's work.
constexpr auto kCompareEvery = std::chrono::milliseconds(100);
// What is to be told to a rank that this one has no connection with waits so long: a group that
// does not last that long needs none.
constexpr auto kMeetAfter = std::chrono::milliseconds(500);

// The end of an external collective, as its task awaits it.
class ExternalEnd final : public Condition {
 public:
  ExternalEnd(const External& external, Mailbox& mailbox, uint64_t sequence)
      : external_(external), mailbox_(mailbox), sequence_(sequence) {}
  bool ready() override { return external_.isOver(); }
  std::vector<int> missing() const override { return mailbox_.behind(sequence_); }

 private:
  const External& external_;
  Mailbox& mailbox_;
  const uint64_t sequence_;
};

}  // namespace

// The barrier finds who is absent, and says so to all.
Status Group::meetNeighbours() {
  Call barrier;
  barrier.kind = OpKind::kMonitoredBarrier;
  barrier.waitAllRanks = true;
  const Milliseconds groupsTimeout(-1);
  MYCOLL_RETURN_IF_ERROR(
      wait(submit(std::move(barrier), {}, nullptr, true, groupsTimeout), Deadline::never()));
  if (options_.ranks < 2) return Status();
  char sent = 0, got = 0;
  const int next = (options_.rank + 1) % options_.ranks;
  const int previous = (options_.rank + options_.ranks - 1) % options_.ranks;
  const OpPtr sending =
      message(true, {&sent, 1}, next, 0, DType::kUInt8, 0, nullptr, true, groupsTimeout);
  const OpPtr receiving =
      message(false, {&got, 1}, previous, 0, DType::kUInt8, 0, nullptr, true, groupsTimeout);
  MYCOLL_RETURN_IF_ERROR(wait(receiving, Deadline::never()));
  return wait(sending, Deadline::never());
}

Task Group::runExternal(CollectiveOp& op) {
  const uint64_t sequence = beginNumber();
  op.begun = Clock::now();
  mailbox_.beginCollective(sequence, op.signature);
  ExternalEnd end(*op.external, mailbox_, sequence);
  co_await end;
  co_return op.external->status();
}

void Group::noteMessage(const ExternalMessage& message) {
  if (message.bytes != 0) messageNotes_.add(message);  // the others NCCL leaves out, on each side
}

void Group::noteReplayed(int peer, uint32_t lane) { messageNotes_.stopComparing(peer, lane); }

void Group::tellNews() {
  for (const auto& [rank, since] : messageNotes_.whoHasNews()) {
    const bool isSelf = rank == options_.rank;
    const bool mayMeet = !isClosed_.load() && Clock::now() - since > kMeetAfter;
    if (hasFailed() || !(isSelf || mayMeet || isConnectedTo(rank))) continue;
    for (const std::string& news : messageNotes_.takeNews(rank)) {
      if (isSelf) {
        messageNotes_.hear(rank, news);
      } else {
        mailbox_.tell(rank, FrameKind::kMessages, news);
      }
    }
  }
}

void Group::compareMessages() {
  const std::optional<MessageNotes::Difference> found = messageNotes_.compare();
  if (!found) return;
  auto describe = [](const MessageNotes::Run& run, bool isSend) {
    Signature signature;
    signature.kind = isSend ? OpKind::kSend : OpKind::kRecv;
    signature.dtype = run.dtype;
    signature.opaqueType = run.opaqueType;
    signature.bytes = run.bytes;
    return signature.describe() + " tag=" + std::to_string(run.tag);
  };
  const int sender = found->isSend ? options_.rank : found->peer;
  const int receiver = found->isSend ? found->peer : options_.rank;
  fail(Status(Code::kMismatch,
              "mycoll group '" + options_.name + "': MISMATCH at message #" +
                  std::to_string(found->number) + " from rank " + std::to_string(sender) +
                  " to rank " + std::to_string(receiver) + "\n  " + describeRank(options_.rank) +
                  ": " + describe(found->mine, found->isSend) + "\n  " + describeRank(found->peer) +
                  ": " + describe(found->theirs, !found->isSend) +
                  "\n  On devices a receive takes what is next from that rank, whatever its tag: "
                  "both ranks must call messages of the same dtype, size and tag in the same "
                  "order."));
}

bool Group::watchExternal() {
  run(0);
  bool hasMoreToTell = true;
  {
    std::unique_lock<std::mutex> running(runLock_, std::defer_lock);
    if (isClosed_.load()) running.lock();  // the last time: nothing may be left out
    if (running.owns_lock() || running.try_lock()) {
      const bool hasBegun = compared_ < started_ && options_.ranks > 1;
      hasMoreToTell = hasBegun || messageNotes_.hasNews();
      const auto now = Clock::now();
      if (hasMoreToTell && (isClosed_.load() || now - comparedAt_ > kCompareEvery)) {
        compared_ = started_;
        comparedAt_ = now;
        running.unlock();
        // Every rank to the next: who differs is found by one of its neighbours.
        if (hasBegun) mailbox_.compareWith((options_.rank + 1) % options_.ranks);
        tellNews();
        hasMoreToTell = messageNotes_.hasNews();
      }
    }
  }
  engine_->endpoint()->checkProcesses();
  engine_->hear();
  compareMessages();
  checkHealth();
  // A failure ends the operations here and now, not with the next call.
  if (hasFailed()) {
    run(0);
    return false;
  }
  return hasMoreToTell;
}

}  // namespace mycoll
