// The group's half for collectives that run elsewhere: their turn in the queue, and the comparing
// of notes that finds ranks which were called differently.
#include "engine/group.h"

namespace mycoll {
namespace {

using Clock = std::chrono::steady_clock;

// Ranks that differ must be found before anybody uses the numbers for long; a message to one rank
// now and then costs nothing beside a device's work.
constexpr auto kCompareEvery = std::chrono::milliseconds(100);

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

bool Group::watchExternal() {
  run(0);
  bool hasMoreToTell = true;
  {
    std::unique_lock<std::mutex> running(runLock_, std::try_to_lock);
    const auto now = Clock::now();
    const bool isDue = running.owns_lock() && compared_ < started_ &&
                       (isClosed_.load() || now - comparedAt_ > kCompareEvery);
    if (isDue && options_.ranks > 1) {
      compared_ = started_;
      comparedAt_ = now;
      running.unlock();
      // Every rank to the next: who differs is found by one of its neighbours.
      mailbox_.compareWith((options_.rank + 1) % options_.ranks);
      hasMoreToTell = false;
    } else if (running.owns_lock()) {
      hasMoreToTell = compared_ < started_ && options_.ranks > 1;
    }
  }
  engine_->endpoint()->checkProcesses();
  engine_->hear();
  checkHealth();
  // A failure ends the operations here and now, not with the next call.
  if (hasFailed()) {
    run(0);
    return false;
  }
  return hasMoreToTell;
}

}  // namespace mycoll
