// The group's half that takes calls: checks them, numbers them, and queues them.
#include <algorithm>

#include "engine/group.h"
#include "observe/trace_file.h"

namespace mycoll {
namespace {

Operation toOperation(const CollectiveOp& op) {
  if (!op.external) return Operation::of(op.call, op.sequence(), op.composite ? kIsComposite : 0);
  return Operation::of(op.signature, op.sequence(), kIsOnDevice);
}

Operation toOperation(const ExternalMessage& message, uint64_t sequence) {
  Operation operation;
  operation.signature.kind = message.isSend ? OpKind::kSend : OpKind::kRecv;
  operation.signature.dtype = message.dtype;
  operation.signature.opaqueType = message.opaqueType;
  operation.signature.bytes = message.bytes;
  operation.peer = message.peer;
  operation.sequence = sequence;
  operation.tag = message.tag;
  (message.isSend ? operation.inBytes : operation.outBytes) = message.bytes;
  return operation;
}

}  // namespace

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

OpRecord Group::recordMessage(const ExternalMessage& message, uint32_t site) {
  Operation operation = toOperation(message, messages_.fetch_add(1, std::memory_order_relaxed));
  operation.flags = kIsOnDevice;
  operation.site = site;
  return record_.enqueue(operation, steadyNanos(), /*isStarted=*/true);
}

OpPtr Group::message(bool isSend, Span data, int rank, uint64_t tag, DType dtype,
                     uint8_t opaqueType, std::shared_ptr<void> keepAlive, bool willWait,
                     Milliseconds timeout, uint64_t wholeBytes) {
  noteCaller();
  const OpKind kind = isSend ? OpKind::kSend : OpKind::kRecv;
  if (hasFailed()) return failedOp(kind, calledLate(kind));
  Signature signature;
  signature.kind = kind;
  signature.dtype = dtype;
  signature.opaqueType = opaqueType;
  signature.bytes = wholeBytes ? wholeBytes : data.bytes;
  auto op = std::make_shared<MessageOp>(kind, messages_.fetch_add(1, std::memory_order_relaxed));
  op->keepAlive = std::move(keepAlive);
  op->deadline = deadlineFor(timeout);
  op->ownRank = options_.rank;
  op->tag = tag;
  op->rank = rank;
  const bool isAnyone = !isSend && rank == kAnySource;
  if (!isAnyone && (rank < 0 || rank >= options_.ranks)) {
    return failedOp(kind,
                    Status(Code::kInvalidArgument,
                           std::string(name(kind)) + ": rank " + std::to_string(rank) +
                               " is out of range in a group of " + std::to_string(options_.ranks)));
  }
  const Operation operation =
      toOperation({rank, isSend, 0, dtype, opaqueType, data.bytes, tag}, op->sequence());
  op->setRecord(record_.enqueue(operation, op->submitted.time_since_epoch().count(), true));
  op->self = op;
  if (isSend) {
    if (rank != options_.rank) {  // nobody will take what a rank that leaves has sent to itself
      sending_->fetch_add(1, std::memory_order_relaxed);
      op->atEnd([sending = sending_] { sending->fetch_sub(1, std::memory_order_relaxed); });
    }
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

}  // namespace mycoll
