#include "engine/group.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>

#include "base/log.h"
#include "observe/metrics.h"
#include "observe/trace_file.h"

namespace mycoll {
namespace {

using Clock = std::chrono::steady_clock;

// While waiting in the kernel: how often signals, deadlines and peers are looked at.
constexpr auto kTick = std::chrono::milliseconds(50);
constexpr int kSpinBatch = 64;
// Ranks that wait as this one does give the core back soon when it yields to them. Whoever keeps it
// for longer computes something else, and is given a slice of milliseconds by every yield, while a
// thread that sleeps is put before it when it wakes. So for a while this group sleeps at once.
constexpr auto kYieldTooLong = std::chrono::milliseconds(1);
constexpr auto kCrowdedTime = std::chrono::milliseconds(200);

int localRanks(const Engine& engine, const GroupAddress& address) {
  const Endpoint& endpoint = *engine.endpoint();
  return static_cast<int>(std::count_if(
      address.peers.begin(), address.peers.end(),
      [&](const PeerAddress& peer) { return peer.hostName == endpoint.address().hostName; }));
}

Operation toOperation(const CollectiveOp& op) {
  if (!op.external) return Operation::of(op.call, op.sequence(), op.composite ? kIsComposite : 0);
  return Operation::of(op.signature, op.sequence(), kIsOnDevice);
}

}  // namespace

Group::Group(GroupOptions options, std::shared_ptr<Engine> engine, GroupAddress address)
    : options_(std::move(options)),
      engine_(std::move(engine)),
      record_({options_.name + (options_.isExternal ? ":device" : ""), address.context,
               options_.rank, options_.ranks, options_.globalRanks}),
      spinPolicy_(choose(localRanks(*engine_, address))),
      timeout_(options_.timeout.count()),
      left_(address.peers.size()),
      mailbox_(engine_->endpoint(), address, this) {}

Group::~Group() {
  close(Deadline::after(Milliseconds(0)));
  mailbox_.detach();  // before anything that its listener needs is gone
}

// ---- submitting --------------------------------------------------------------------------------

Deadline Group::deadlineFor(Milliseconds timeout) const {
  return Deadline::after(timeout.count() > 0 ? timeout : Milliseconds(timeout_.load()));
}

OpPtr Group::failedOp(OpKind kind, Status status) const {
  auto op = std::make_shared<CollectiveOp>(kind, 0);
  op->finish(std::move(status));
  return op;
}

// That this rank has come, too, is worth remembering.
void Group::recordLate(const Operation& operation) {
  const int64_t now = steadyNanos();
  OpRecord record = record_.enqueue(operation, now, true);
  if (options_.callSite) record.setSite(options_.callSite());
  record.finish(false, now);
  TraceFile::writeWanted();
}

std::string Group::checkCall(const Call& call) const {
  const auto ranks = static_cast<size_t>(options_.ranks);
  const bool isRoot = call.root == options_.rank;
  size_t in = 1, out = 1;
  bool isRooted = false, reduces = false;
  switch (call.kind) {
    case OpKind::kBarrier:
    case OpKind::kMonitoredBarrier: in = out = 0; break;
    case OpKind::kBroadcast:
      isRooted = true;
      in = call.in.size() <= 1 ? call.in.size() : 0;
      break;
    case OpKind::kAllReduce: reduces = true; break;
    case OpKind::kReduce:
      isRooted = reduces = true;
      out = isRoot ? 1 : call.out.size();
      break;
    case OpKind::kAllGather: out = ranks; break;
    case OpKind::kGather:
      isRooted = true;
      out = isRoot ? ranks : 0;
      break;
    case OpKind::kScatter:
      isRooted = true;
      in = isRoot ? ranks : 0;
      break;
    case OpKind::kReduceScatter:
      reduces = true;
      in = ranks;
      break;
    case OpKind::kAllToAll: in = out = ranks; break;
    default: return "not a collective";
  }
  const std::string what = name(call.kind);
  if (call.in.size() != in || call.out.size() != out) {
    return what + " takes " + std::to_string(in) + " inputs and " + std::to_string(out) +
           " outputs on this rank, not " + std::to_string(call.in.size()) + " and " +
           std::to_string(call.out.size());
  }
  if (isRooted && (call.root < 0 || call.root >= options_.ranks)) {
    return what + ": root " + std::to_string(call.root) + " is out of range in a group of " +
           std::to_string(options_.ranks);
  }
  if (reduces && !isSupported(call.dtype, call.reduceOp)) {
    return what + ": " + name(call.reduceOp) + " has no meaning for " + name(call.dtype);
  }
  auto isWhole = [&](const Span& span) { return span.bytes % call.elementBytes == 0; };
  if (call.elementBytes == 0 || !std::all_of(call.in.begin(), call.in.end(), isWhole) ||
      !std::all_of(call.out.begin(), call.out.end(), isWhole)) {
    return what + ": memory is not a whole number of elements";
  }
  size_t expected = 0;
  switch (call.kind) {
    case OpKind::kReduce:
      if (!isRoot) return "";
      [[fallthrough]];
    case OpKind::kAllReduce: expected = call.in[0].bytes; break;
    case OpKind::kReduceScatter: expected = call.in[options_.rank].bytes; break;
    case OpKind::kAllGather:
      return call.out[options_.rank].bytes == call.in[0].bytes
                 ? ""
                 : what + ": this rank's output differs in size from its input";
    default: return "";
  }
  return call.out[0].bytes == expected ? "" : what + ": output and input differ in size";
}

OpPtr Group::submit(Call call, Composite composite, std::shared_ptr<void> keepAlive, bool willWait,
                    Milliseconds timeout) {
  noteCaller();
  if (isOver(started_.load(std::memory_order_relaxed))) {
    recordLate(Operation::of(call, sequence(), composite ? kIsComposite : 0));
    return failedOp(call.kind, calledLate(call.kind));
  }
  if (!composite) {
    std::string wrong = checkCall(call);
    if (!wrong.empty()) return failedOp(call.kind, Status(Code::kInvalidArgument, wrong));
  }
  auto op = std::make_shared<CollectiveOp>(call.kind, 0);
  op->call = std::move(call);
  op->composite = std::move(composite);
  op->keepAlive = std::move(keepAlive);
  op->deadline = deadlineFor(timeout);
  const bool isFirst = enqueue(op);
  if (!willWait) {
    // As far as it goes at once: often that is the whole of this rank's part.
    if (isFirst) run(0);
    if (!op->done()) engine_->poke();
  }
  return op;
}

bool Group::enqueue(std::shared_ptr<CollectiveOp> op) {
  std::lock_guard<std::mutex> lock(queueLock_);
  op->setSequence(submitted_.fetch_add(1, std::memory_order_relaxed));
  op->setRecord(record_.enqueue(toOperation(*op), op->submitted.time_since_epoch().count(),
                                /*isStarted=*/queue_.empty()));
  record_.setSubmitted(op->sequence() + 1);
  queue_.push_back(std::move(op));
  queued_.fetch_add(1, std::memory_order_seq_cst);
  return queue_.size() == 1;
}

OpPtr Group::submitExternal(const Signature& signature, std::shared_ptr<External> external,
                            Milliseconds timeout) {
  noteCaller();
  if (hasFailed()) return failedOp(signature.kind, calledLate(signature.kind));
  auto op = std::make_shared<CollectiveOp>(signature.kind, 0);
  op->signature = signature;
  op->external = std::move(external);
  op->deadline = deadlineFor(timeout);
  if (enqueue(op)) run(0);
  return op;
}

OpPtr Group::message(bool isSend, Span data, int rank, uint64_t tag, DType dtype,
                     uint8_t opaqueType, std::shared_ptr<void> keepAlive, bool willWait,
                     Milliseconds timeout) {
  noteCaller();
  const OpKind kind = isSend ? OpKind::kSend : OpKind::kRecv;
  if (hasFailed()) return failedOp(kind, calledLate(kind));
  Signature signature;
  signature.kind = kind;
  signature.dtype = dtype;
  signature.opaqueType = opaqueType;
  signature.bytes = data.bytes;
  auto op = std::make_shared<MessageOp>(kind, messages_.fetch_add(1, std::memory_order_relaxed));
  op->keepAlive = std::move(keepAlive);
  op->deadline = deadlineFor(timeout);
  op->ownRank = options_.rank;
  op->tag = tag;
  op->rank = rank;
  const bool isAnyone = !isSend && rank == kAnySource;
  if (!isAnyone && (rank < 0 || rank >= options_.ranks || rank == options_.rank)) {
    return failedOp(
        kind, Status(Code::kInvalidArgument,
                     std::string(name(kind)) + ": rank " + std::to_string(rank) +
                         (rank == options_.rank ? " is this rank itself" : " is out of range") +
                         " in a group of " + std::to_string(options_.ranks)));
  }
  Operation operation;
  operation.kind = kind;
  operation.dtype = dtype;
  operation.opaqueType = opaqueType;
  operation.peer = rank;
  operation.elementBytes = static_cast<uint32_t>(elementSize(dtype));
  operation.sequence = op->sequence();
  operation.tag = tag;
  (isSend ? operation.inBytes : operation.outBytes) = data.bytes;
  op->setRecord(record_.enqueue(operation, op->submitted.time_since_epoch().count(), true));
  op->self = op;
  if (isSend) {
    sending_->fetch_add(1, std::memory_order_relaxed);
    op->onDone([sending = sending_] { sending->fetch_sub(1, std::memory_order_relaxed); });
    mailbox_.send(*op, rank, MessageClass::kPointToPoint, tag, signature, data);
  } else {
    mailbox_.receive(*op, isAnyone ? kFromAnyone : rank, MessageClass::kPointToPoint, tag,
                     signature, data);
  }
  engine_->endpoint()->progress();
  if (!willWait && !op->done()) {
    if (data.bytes <= engine_->endpoint()->options().eagerBytes) {
      engine_->nudge();
    } else {
      engine_->poke();
    }
  }
  return op;
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
    Waiting(Group& owner, bool isCollective) : group(owner), counts(isCollective) {
      group.engine_->beginWait();
      if (counts) group.waiters_.fetch_add(1, std::memory_order_seq_cst);
    }
    ~Waiting() {
      if (counts) group.waiters_.fetch_sub(1, std::memory_order_seq_cst);
      group.engine_->endWait();
      // What this thread worked on beside its own operation goes on without it.
      if (group.queued_.load(std::memory_order_seq_cst) > 0 ||
          group.engine_->endpoint()->hasPending()) {
        group.engine_->poke();
      }
    }
  };
  constexpr auto relaxed = std::memory_order_relaxed;
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
      const bool isCrowded = now.time_since_epoch().count() < crowdedUntil_.load(relaxed);
      if (!isCrowded && idle < std::chrono::microseconds(spinPolicy_.spinMicros)) {
        // Over messages nothing changes unless the endpoint makes progress.
        spins = sharedArena_.load(std::memory_order_relaxed) ? kSpinBatch : 0;
        if (isMessage) cpuRelax();
      } else if (!isCrowded && idle < std::chrono::microseconds(spinPolicy_.yieldMicros)) {
        spins = 0;
        sched_yield();
        if (const auto back = Clock::now(); back - now > kYieldTooLong) {
          crowdedUntil_.store((back + kCrowdedTime).time_since_epoch().count(), relaxed);
        }
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
      isInterrupted = options_.interrupted && options_.interrupted();
      noteCallSite(*op);
      if (isInterrupted || deadline.expired()) break;
    }
  }
  if (op->done()) return outcomeOf(*op);
  if (isInterrupted) return Status(Code::kInterrupted, "interrupted by a signal");
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
  const uint64_t generation = endpoint.sleeper().generation();
  endpoint.setAsleep(true);
  setAsleep(true);
  // Once more, now that peers would ring.
  bool moved = !isMessage && run(0);
  moved |= endpoint.progress();
  if (!moved && !op.done()) {
    endpoint.sleeper().sleep(generation, earlier(deadline, Deadline::after(kTick)));
  }
  setAsleep(false);
  endpoint.setAsleep(false);
}

void Group::setAsleep(bool asleep) {
  if (Arena* arena = sharedArena_.load(std::memory_order_acquire)) arena->setAsleep(asleep);
}

// ---- leaving -----------------------------------------------------------------------------------

void Group::close(Deadline deadline) {
  if (isClosed_.exchange(true)) return;
  Endpoint& endpoint = *engine_->endpoint();
  auto isBusy = [&] { return queued_.load() > 0 || sending_->load() > 0 || !mailbox_.isFlushed(); };
  engine_->beginWait();
  while (!hasFailed() && isBusy() && !deadline.expired()) {
    bool moved = run(0);
    moved |= endpoint.progress();
    if (!moved) usleep(200);
  }
  if (!hasFailed() && isBusy()) {
    MYCOLL_LOG_WARN("group '%s' is destroyed with operations that are not done; they are lost",
                    options_.name.c_str());
  }
  TraceFile::writeWanted();
  Metrics::writeNow();
  record_.close();
  if (Arena* arena = sharedArena_.load(std::memory_order_acquire)) arena->leave();
  if (options_.isExternal) watchExternal();
  mailbox_.sayGoodbye();
  while (!mailbox_.isFlushed() && !deadline.expired()) {
    if (!endpoint.progress()) usleep(50);
  }
  engine_->endWait();
  mailbox_.fail(Status(Code::kAborted, "mycoll group '" + options_.name +
                                           "' has been destroyed on this rank; nothing more can "
                                           "be called on it"),
                false);
  run(0);
  endpoint.progress();
}

}  // namespace mycoll
