#include "engine/group.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>

#include "base/log.h"
#include "observe/trace_file.h"

namespace mycoll {
namespace {

using Clock = std::chrono::steady_clock;

// While waiting in the kernel: how often signals, deadlines and peers are looked at.
constexpr auto kTick = std::chrono::milliseconds(50);
constexpr int kSpinBatch = 64;
// How long a group that is being destroyed offers its receives to those who are about to send.
constexpr auto kUnsentGrace = std::chrono::milliseconds(500);
// For the rank of leaveAfter().
constexpr auto kLastGrace = std::chrono::milliseconds(800);

int localRanks(const Engine& engine, const GroupAddress& address) {
  const Endpoint& endpoint = *engine.endpoint();
  return static_cast<int>(std::count_if(
      address.peers.begin(), address.peers.end(),
      [&](const PeerAddress& peer) { return peer.hostName == endpoint.address().hostName; }));
}

}  // namespace

Group::Group(GroupOptions options, std::shared_ptr<Engine> engine, GroupAddress address)
    : options_(std::move(options)),
      engine_(std::move(engine)),
      record_(
          {options_.name, address.context, options_.rank, options_.ranks, options_.globalRanks}),
      spinPolicy_(choose(localRanks(*engine_, address))),
      crowd_(spinPolicy_.longYields),
      timeout_(options_.timeout.count()),
      left_(address.peers.size()),
      messageNotes_(options_.rank, options_.ranks),
      mailbox_(engine_->endpoint(), address, this) {}

Group::~Group() {
  close(Deadline::after(Milliseconds(0)));
  mailbox_.detach();  // before anything that its listener needs is gone
}

// ---- running -----------------------------------------------------------------------------------

bool Group::run(int spins) {
  bool moved = false;
  for (;;) {
    std::shared_ptr<CollectiveOp> op;
    Status outcome;
    bool isLast = false;
    {
      std::unique_lock<std::mutex> running(runLock_, std::try_to_lock);
      if (!running.owns_lock()) return moved;
      {
        std::lock_guard<std::mutex> lock(queueLock_);
        if (queue_.empty()) return moved;
        op = queue_.front();
      }
      if (!op->task.valid()) {
        if (!noticeFailure(started_.load(std::memory_order_relaxed))) {
          if (!op->record().isStarted()) op->record().start(steadyNanos());
          op->task = op->external    ? runExternal(*op)
                     : op->composite ? runComposite(op->composite)
                                     : start(op->call);
          op->task.resume();
          moved = true;
        }
      } else {
        Condition* condition = op->task.waitingFor();
        bool ready = condition->ready();
        for (int spin = 0; spin < spins && !ready; ++spin) {
          cpuRelax();
          ready = condition->ready();
        }
        if (ready) {
          op->task.resume();
          moved = true;
        } else if (noticeFailure(currentNumber())) {
          op->task.reset();
        } else {
          return moved;
        }
      }
      if (op->task.valid()) {
        if (!op->task.finished()) continue;
        outcome = op->task.result();
        // An echo of what is known already must not take earlier collectives down with it.
        if (!outcome.ok() && !hasFailed()) fail(outcome);
        op->task.reset();
      } else {
        outcome = error();
      }
      if (!outcome.ok()) outcome = inContext(error(), *op);
      std::lock_guard<std::mutex> lock(queueLock_);
      finished_ = Finished{op->kind(), op->sequence(), op->submitted};
      queue_.pop_front();
      isLast = queue_.empty();
      queued_.fetch_sub(1, std::memory_order_seq_cst);
    }
    op->finish(std::move(outcome));
    engine_->endpoint()->sleeper().wakeSleepers();
    if (isLast) return true;
    moved = true;
  }
}

Status Group::wait(const OpPtr& op, Deadline deadline) {
  if (op->done()) return outcomeOf(*op);
  const bool isMessage = op->kind() == OpKind::kSend || op->kind() == OpKind::kRecv;
  Endpoint& endpoint = *engine_->endpoint();
  struct Waiting {
    Group& group;
    const bool counts;
    Waiting(Group& owner, bool isCollective) : group(owner), counts(isCollective) { begin(); }
    ~Waiting() { end(); }
    void begin() {
      group.engine_->beginWait();
      if (counts) group.waiters_.fetch_add(1, std::memory_order_seq_cst);
    }
    void end() {
      if (counts) group.waiters_.fetch_sub(1, std::memory_order_seq_cst);
      group.engine_->endWait();
      // What this thread worked on goes on without it.
      if (group.queued_.load(std::memory_order_seq_cst) > 0 ||
          group.engine_->endpoint()->hasPending()) {
        group.engine_->poke();
      }
    }
  };
  bool isInterrupted = false;
  {
    Waiting waiting(*this, !isMessage);
    auto idleSince = Clock::time_point::min();
    auto lastTick = Clock::now();
    const auto began = lastTick;
    std::optional<WaitBoard::Entry> entry;
    int spins = spinPolicy_.pauses;
    while (!op->done()) {
      bool moved = !isMessage && run(spins);
      if (op->done()) break;
      if (isMessage || !sharedArena_.load(std::memory_order_relaxed) || endpoint.hasPending()) {
        moved |= endpoint.progress();
      }
      if (moved) {
        idleSince = Clock::time_point::min();
        continue;
      }
      const auto now = Clock::now();
      if (idleSince == Clock::time_point::min()) idleSince = now;
      const auto idle = now - idleSince;
      const bool isCrowded = crowd_.isHere(now);
      if (!isCrowded && idle < std::chrono::microseconds(spinPolicy_.spinMicros)) {
        // Over messages nothing changes unless the endpoint makes progress.
        spins = sharedArena_.load(std::memory_order_relaxed) ? kSpinBatch : 0;
        if (isMessage) cpuRelax();
      } else if (!isCrowded && idle < std::chrono::microseconds(spinPolicy_.yieldMicros)) {
        spins = 0;
        sched_yield();
        crowd_.yielded(now, Clock::now());
      } else {
        spins = 0;
        sleepFor(*op, isMessage, deadline);
      }
      if (now - lastTick < kTick) continue;
      lastTick = now;
      if (!entry && deadline.isNever()) {
        entry.emplace(engine_->waits(), Wait{threadNumber(), weak_from_this(), op, began});
      }
      endpoint.checkProcesses();
      engine_->hear();
      if (isMessage) {
        checkMessage(*op);
      } else {
        checkHealth();
      }
      if (op->done()) break;
      // Both may wait for the interpreter, which another thread may hold for long: meanwhile the
      // engine's thread works.
      waiting.end();
      isInterrupted = options_.interrupted && options_.interrupted();
      noteCallSite(*op);
      waiting.begin();
      if (isInterrupted || deadline.expired()) break;
    }
  }
  if (op->done()) return outcomeOf(*op);
  if (isInterrupted) return interrupted();
  return Status(Code::kTimeout, "mycoll group '" + options_.name + "': wait() for " +
                                    name(op->kind()) +
                                    " timed out; the operation is still running");
}

Status Group::outcomeOf(const Op& op) {
  if (!op.status().ok()) {
    noteCallSite(op);
    TraceFile::writeWanted();
  }
  return op.status();
}

void Group::noteCallSite(const Op& op) {
  if (options_.callSite && !op.record().hasSite()) op.record().setSite(options_.callSite());
}

void Group::sleepFor(const Op& op, bool isMessage, Deadline deadline) {
  Endpoint& endpoint = *engine_->endpoint();
  Sleeper::Nap nap(endpoint.sleeper(), endpoint.sleeper().generation());
  endpoint.setAsleep(true);
  setAsleep(true);
  // Once more, now that peers would ring, and threads of this process wake this one.
  bool moved = !isMessage && run(0);
  moved |= endpoint.progress();
  if (!moved && !op.done()) {
    nap.sleep(earlier(deadline, Deadline::after(kTick)));
  }
  setAsleep(false);
  endpoint.setAsleep(false);
}

void Group::setAsleep(bool asleep) {
  if (Arena* arena = sharedArena_.load(std::memory_order_acquire)) arena->setAsleep(asleep);
}

bool Group::isConnectedTo(int rank) {
  Endpoint& endpoint = *engine_->endpoint();
  std::lock_guard<std::mutex> lock(endpoint.ioMutex());
  return endpoint.hasLinkTo(address().peers[rank]);
}

// ---- leaving -----------------------------------------------------------------------------------

void Group::close(Deadline deadline) {
  if (isClosed_.exchange(true)) return;
  Endpoint& endpoint = *engine_->endpoint();
  // What nobody has begun to send may never be sent.
  const Deadline unsent = earlier(deadline, Deadline::after(kUnsentGrace));
  auto isBusy = [&] {
    return queued_.load() > 0 || sending_->load() > 0 || !mailbox_.isFlushed() ||
           mailbox_.isReceiving(!unsent.expired());
  };
  engine_->beginWait();
  while (!hasFailed() && isBusy() && !deadline.expired()) {
    bool moved = run(0);
    moved |= endpoint.progress();
    if (!moved) usleep(200);
  }
  if (!hasFailed() && isBusy()) {
    logFailure("mycoll group '" + options_.name +
               "': destroyed on this rank with operations that are not done (collectives: " +
               std::to_string(queued_.load()) + ", sends: " + std::to_string(sending_->load()) +
               "). They are lost: wait() for every operation before destroy_process_group()");
  }
  TraceFile::writeWanted();
  record_.close();
  if (Arena* arena = sharedArena_.load(std::memory_order_acquire)) arena->leave();
  if (options_.isExternal) watchExternal();
  const Status destroyed(Code::kAborted, "mycoll group '" + options_.name +
                                             "' has been destroyed on this rank; nothing more can "
                                             "be called on it");
  mailbox_.sayGoodbye(destroyed);
  const int last = leavesAfter_.load();
  const bool isMet = last >= 0 && (departureOf(last) != Departure::kUnknown || isConnectedTo(last));
  const Deadline patience = earlier(deadline, Deadline::after(kLastGrace));
  auto isDone = [&] {
    if (deadline.expired()) return true;
    return mailbox_.isFlushed() &&
           (!isMet || departureOf(last) == Departure::kLeft || patience.expired());
  };
  while (!isDone()) {
    if (!endpoint.progress()) usleep(50);
  }
  engine_->endWait();
  mailbox_.fail(destroyed, false);
  run(0);
  endpoint.progress();
}

}  // namespace mycoll
