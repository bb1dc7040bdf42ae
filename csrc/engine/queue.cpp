#include "engine/queue.h"

#include <sched.h>

#include <cassert>
#include <new>
#include <utility>

#include "engine/diagnosis.h"
#include "engine/engine.h"
#include "engine/group.h"
#include "engine/runner.h"
#include "observe/trace_file.h"

namespace mycoll {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSpinBatch = 64;
// A thread that runs a collective which never has to wait still checks for signals and deadlines:
// after so many steps of it, and when it has advanced so many times since the last look.
constexpr int kMostSteps = 16;
constexpr uint32_t kMovesPerLook = 16;

}  // namespace

Queue::Queue(Group& group, Runner& runner, Diagnosis& diagnosis, int localRanks)
    : group_(group),
      runner_(runner),
      diagnosis_(diagnosis),
      spinPolicy_(choose(localRanks)),
      contention_(spinPolicy_.longYields) {}

bool Queue::push(const std::shared_ptr<CollectiveOp>& op, bool* isFirst) {
  MutexLock lock(queueMutex_);
  if (isClosed_) return false;
  op->setSequence(submitted());
  submitted_.store(op->sequence() + 1, std::memory_order_relaxed);
  op->setRecord(group_.record.enqueue(op->description(), op->submitted.time_since_epoch().count(),
                                      /*isStarted=*/ops_.empty()));
  group_.record.setSubmitted(op->sequence() + 1);
  ops_.push_back(op);
  *isFirst = ops_.size() == 1;
  if (*isFirst) head_.store(op.get(), std::memory_order_seq_cst);
  return true;
}

bool Queue::close() {
  MutexLock lock(queueMutex_);
  isClosed_ = true;
  return ops_.empty();
}

size_t Queue::size() const {
  MutexLock lock(queueMutex_);
  return ops_.size();
}

bool Queue::isUnattended() const {
  return !group_.options.isExternal && !isEmpty() && !hasWaiters();
}

Queue::Position Queue::position() const {
  MutexLock lock(queueMutex_);
  Position position{submitted(), last_, std::nullopt};
  if (!ops_.empty()) position.head = ops_.front()->sequence();
  return position;
}

bool Queue::inspectHead(const Inspect& fn) {
  CollectiveOp* op;
  {
    if (!runMutex_.tryLock()) return false;
    MutexLock running(runMutex_, std::adopt_lock);
    op = head_.load(std::memory_order_acquire);
    std::vector<int> missing;
    const bool isWaiting = op && op->task.valid() && !op->task.finished() && op->task.waitingFor();
    if (isWaiting && !op->task.waitingFor()->ready()) missing = op->task.waitingFor()->missing();
    if (op) fn(*op, std::move(missing));
  }
  // Either this sees the flag, or the thread that sets it finds the run lock free: see sleepFor().
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (isLookMissed_.exchange(false)) group_.engine->mesh()->sleeper().wakeAll();
  return op != nullptr;
}

// ---- running -----------------------------------------------------------------------------------

bool Queue::step(CollectiveOp& op, int spins, std::optional<Status>* outcome) {
  if (!op.task.valid()) {
    if (group_.membership.noticeFailure(runner_.begun())) {
      *outcome = group_.membership.error();
      return true;
    }
    if (!op.record().isStarted()) op.record().start(steadyNanos());
    try {
      op.task = runner_.start(op);
    } catch (const std::bad_alloc&) {
      // The collective may have begun, and cannot begin again.
      *outcome = detail::outOfMemory();
      group_.membership.failFirst(**outcome);
      return true;
    }
  } else {
    Condition* condition = op.task.waitingFor();
    assert(condition != nullptr);
    bool ready = condition->ready();
    for (int spin = 0; spin < spins && !ready; ++spin) {
      cpuRelax();
      ready = condition->ready();
    }
    if (!ready) {
      if (!group_.membership.noticeFailure(runner_.current())) return false;
      op.task.reset();
      *outcome = group_.membership.error();
      return true;
    }
  }
  op.task.resume();
  if (!op.task.finished()) return true;
  const Status ended = op.task.result();
  op.task.reset();
  // A failure that is already known must not fail earlier collectives. A mismatch must not fail
  // earlier collectives that other ranks still run.
  if (!ended.ok() && !group_.membership.hasFailed()) {
    const uint64_t from = ended.code() == Code::kMismatch ? runner_.current() : 0;
    group_.membership.failFirst(ended, /*notifiesOthers=*/true, from);
  }
  *outcome = ended;
  return true;
}

bool Queue::run(int spins) {
  bool moved = false;
  int steps = 0;
  for (;;) {
    std::shared_ptr<CollectiveOp> ended;
    std::optional<Status> outcome;
    bool isLast = false;
    {
      if (!runMutex_.tryLock()) return moved;
      MutexLock running(runMutex_, std::adopt_lock);
      if (isLookMissed_.load(std::memory_order_relaxed)) isLookMissed_.store(false);
      CollectiveOp* const op = head_.load(std::memory_order_acquire);
      if (!op) return moved;
      if (!step(*op, spins, &outcome)) return moved;
      moved = true;
      if (!outcome) {
        if (++steps == kMostSteps) return true;
        continue;
      }
      if (!outcome->ok()) outcome = diagnosis_.inContext(group_.membership.error(), *op);
      MutexLock lock(queueMutex_);
      last_ = Finished{op->kind(), op->sequence(), op->submitted};
      ended = std::move(ops_.front());
      ops_.pop_front();
      isLast = ops_.empty();
      head_.store(isLast ? nullptr : ops_.front().get(), std::memory_order_release);
    }
    if (!outcome->ok()) group_.membership.propagate();
    try {
      ended->finish(std::move(*outcome));
    } catch (const std::bad_alloc&) {
      group_.membership.fail(detail::outOfMemory());
    }
    group_.engine->mesh()->sleeper().wakeSleepers();
    if (isLast) return true;
  }
}

// ---- waiting -----------------------------------------------------------------------------------

void Queue::Waiting::begin() {
  isCounted_ = true;
  queue_.group_.engine->beginWait();
  if (isInQueue_) queue_.waiters_.fetch_add(1, std::memory_order_seq_cst);
}

void Queue::Waiting::end() {
  if (!std::exchange(isCounted_, false)) return;
  if (isInQueue_) queue_.waiters_.fetch_sub(1, std::memory_order_seq_cst);
  queue_.group_.engine->endWait();
  queue_.handOver();
}

void Queue::handOver() const {
  if (!isEmpty() || group_.engine->mesh()->hasPending()) group_.engine->wake();
}

Status Queue::wait(const OpPtr& op, Deadline deadline) {
  if (op->done()) return outcomeOf(*op);
  // The other ranks may be there already: then this thread need not count as one that waits.
  if (!op->isMessage() && run(spinPolicy_.pauses) && op->done()) {
    handOver();
    return outcomeOf(*op);
  }
  // A wait without a deadline reads the clock only after its first look at the queue.
  auto began = deadline.isNever() ? Clock::time_point::min() : Clock::now();
  auto lastTick = began;
  const bool isMessage = op->isMessage();
  Mesh& mesh = *group_.engine->mesh();
  bool isInterrupted = false;
  {
    Waiting waiting(*this, /*isInQueue=*/!isMessage);
    std::optional<WaitBoard::Entry> entry;
    Backoff backoff(spinPolicy_, contention_);
    int spins = 0;
    uint32_t moves = 0;
    while (!op->done()) {
      const bool advanced = !isMessage && run(spins);
      bool moved = advanced, inHost = false;
      if (op->done()) break;
      if (isMessage || !group_.membership.arena() || mesh.hasPending())
        moved |= mesh.progress(&inHost);
      if (advanced || inHost) {
        backoff.advanced();
      } else if (moved) {
        backoff.moved();
      }
      if (moved && ++moves % kMovesPerLook != 0) continue;
      auto now = Clock::now();
      if (began == Clock::time_point::min()) began = lastTick = now;
      spins = 0;
      if (!moved) {
        switch (backoff.next(now, isMessage || group_.membership.arena())) {
          case Backoff::Pause::kSpin:
            if (isMessage) cpuRelax();
            if (!isMessage) spins = kSpinBatch;
            break;
          case Backoff::Pause::kYield: backoff.yield(now); break;
          case Backoff::Pause::kSleep:
            if (sleepFor(*op, deadline)) backoff.advanced();
            now = Clock::now();
            break;
        }
      }
      if (now - lastTick < kWaitTick) continue;
      lastTick = now;
      // Only a wait without a deadline blocks its thread: one that polls is not stuck.
      if (!entry && deadline.isNever()) diagnosis_.enter(&entry, op);
      checkState(*op);
      if (op->done()) break;
      // Both calls may wait for the interpreter, which another thread may hold for long: meanwhile
      // the engine's thread works.
      waiting.end();
      isInterrupted = group_.options.interrupted && group_.options.interrupted();
      noteCallSite(*op);
      waiting.begin();
      if (isInterrupted || deadline.expired()) break;
    }
  }
  // This comes first: the signal was taken from the interpreter, which will not raise it again.
  if (isInterrupted) return interrupted();
  if (op->done()) return outcomeOf(*op);
  const auto waited = std::chrono::ceil<std::chrono::milliseconds>(deadline.when() - began);
  return group_.error(Code::kTimeout, std::string("wait() for ") + name(op->kind()) +
                                          " timed out: Timed out waiting " +
                                          std::to_string(waited.count()) +
                                          "ms; the operation is still running");
}

// Called by a waiting thread every kWaitTick.
void Queue::checkState(Op& op) {
  group_.engine->mesh()->checkProcesses();
  group_.engine->handleMessages();
  if (op.isMessage()) {
    diagnosis_.checkMessage(static_cast<MessageOp&>(op));
  } else {
    diagnosis_.checkHealth();
  }
}

bool Queue::sleepFor(const Op& op, Deadline deadline) {
  Mesh& mesh = *group_.engine->mesh();
  Arena* const arena = runner_.arena();
  Sleeper::Nap nap(mesh.sleeper(), mesh.sleeper().generation());
  const Asleep asleep(mesh, {&arena, arena ? 1u : 0u});
  // Look once more: from here on peers ring, and threads of this process wake this one. If another
  // thread is inspecting the queue, it wakes this one afterwards.
  isLookMissed_.store(true);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // a failed tryLock() orders nothing
  const bool advanced = !op.isMessage() && run(0);
  const bool moved = mesh.progress();
  if (!advanced && !moved && !op.done()) {
    nap.sleep(earlier(deadline, Deadline::after(kWaitTick)));
  }
  return advanced;
}

Status Queue::outcomeOf(const Op& op) {
  if (!op.status().ok()) {
    noteCallSite(op);
    TraceFile::writeWanted();
  }
  return op.status();
}

void Queue::noteCallSite(const Op& op) {
  if (group_.options.callSite && !op.record().hasSite())
    op.record().setSite(group_.options.callSite());
}

}  // namespace mycoll
