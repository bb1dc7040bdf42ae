#include "engine/runner.h"

#include <vector>

#include "base/env.h"
#include "base/log.h"
#include "collectives/run/run.h"
#include "collectives/shm/collectives.h"
#include "engine/group.h"
#include "engine/share.h"
#include "kernels/copy.h"
#include "kernels/reduce.h"
#include "transport/mesh.h"

namespace mycoll {
namespace {

// The end of an external collective, which its task awaits.
class ExternalEnd final : public Condition {
 public:
  ExternalEnd(const External& external, Agreement& agreement, uint64_t sequence)
      : external_(external), agreement_(agreement), sequence_(sequence) {}
  bool ready() override { return external_.isOver(); }
  std::vector<int> missing() const override { return agreement_.behind(sequence_); }

 private:
  const External& external_;
  Agreement& agreement_;
  const uint64_t sequence_;
};

}  // namespace

Runner::Runner(Group& group)
    : group_(group),
      memory_(group.options.rank, Env::process().singleCopy),
      plans_(std::make_unique<PlanCache>()) {}

Runner::~Runner() = default;

uint64_t Runner::nextNumber() {
  const uint64_t number = begun();
  begun_.store(number + 1, std::memory_order_relaxed);
  return number;
}

Task Runner::start(CollectiveOp& op) {
  if (op.external) return awaitExternal(op);
  if (op.composite) return op.composite(*this);
  return carryOut(op.call, op.signature);
}

Task Runner::run(Call call) {
  const Signature signature = call.signature();
  Status status = co_await carryOut(call, signature);
  co_return status;
}

Task Runner::awaitExternal(CollectiveOp& op) {
  const uint64_t sequence = nextNumber();
  op.begun = std::chrono::steady_clock::now();
  group_.agreement.begin(sequence, op.signature);
  ExternalEnd end(*op.external, group_.agreement, sequence);
  co_await end;
  co_return op.external->status();
}

Task Runner::carryOut(const Call& call, const Signature& signature) {
  if (!isPrepared_) return carryOutFirst(call, signature);
  const uint64_t sequence = nextNumber();
  if (group_.options.ranks == 1) return carryOutAlone(call);
  const CallContext context{group_.mailbox, sequence, signature};
  if (group_.membership.arena()) return shmCollective({context, *arena_, memory_}, call);
  group_.agreement.begin(sequence, signature);
  return netCollective({context, group_.shape, *plans_, arena_.get()}, call);
}

Task Runner::carryOutAlone(const Call& call) {
  if (call.kind == OpKind::kBarrier || call.kind == OpKind::kMonitoredBarrier) co_return Status();
  if (call.in.empty() || call.out.empty() || call.out[0].bytes == 0) co_return Status();
  const Span in = call.in[0], out = call.out[0];
  const bool reduces = call.kind == OpKind::kAllReduce || call.kind == OpKind::kReduce ||
                       call.kind == OpKind::kReduceScatter;
  if (in.bytes != out.bytes) {
    co_return Status(Code::kMismatch, "this rank sends itself " + std::to_string(in.bytes) +
                                          " bytes and expects " + std::to_string(out.bytes));
  }
  if (reduces) {
    const void* inputs[1] = {in.data};
    reduce(call.dtype, call.reduceOp, out.data, inputs, 1, in.bytes / call.elementBytes, 1, false);
  } else if (in.data != out.data) {
    copy(out.data, in.data, in.bytes);
  }
  co_return Status();
}

// If all ranks are on this host, the arena runs everything; otherwise plans use it.
Task Runner::carryOutFirst(const Call& call, const Signature& signature) {
  // The collective begins now: a rank that waits here for others of its host can then notify all.
  if (group_.options.ranks > 1) group_.agreement.begin(begun(), signature);
  const std::vector<int>& members = group_.hostRanks();
  if (!group_.options.isExternal && members.size() > 1) {
    Sharing sharing{group_.mailbox, &group_.membership, members, {}};
    if (group_.shape.hosts() > 1) {
      sharing.membership = nullptr;
      sharing.shape.smallBytes = blobBytes(group_.shape);
      sharing.shape.chunkBytes = areaBytes(group_.shape);
      sharing.shape.areas = areaCount(group_.shape);
    }
    MYCOLL_CO_RETURN_IF_ERROR(co_await shareArena(std::move(sharing), &arena_));
    if (!arena_) {
      MYCOLL_LOG_WARN("group '%s' runs without an arena in shared memory",
                      group_.options.name.c_str());
    } else if (group_.shape.hosts() > 1) {
      group_.membership.haveMet(members);
    }
  }
  sharedArena_.store(arena_.get(), std::memory_order_release);
  isPrepared_ = true;
  group_.record.setTransport(transport(), encryption());
  MYCOLL_LOG_INFO("group '%s' of %d ranks communicates over %s", group_.options.name.c_str(),
                  group_.options.ranks, transport().c_str());
  Status status = co_await carryOut(call, signature);
  co_return status;
}

std::string Runner::encryption() const {
  const std::shared_ptr<const Tls>& tls = group_.mailbox.mesh().options().tls;
  return tls && group_.shape.hosts() > 1 ? tls->describe() : "";
}

std::string Runner::transport() const {
  if (group_.options.ranks == 1) return "self";
  if (group_.shape.hosts() == 1) return "shm";
  return group_.hostRanks().size() > 1 ? "shm+tcp" : "tcp";
}

}  // namespace mycoll
