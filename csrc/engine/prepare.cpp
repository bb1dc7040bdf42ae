// The group's half that finds out how it communicates (once, with its first collective), and that
// starts collectives accordingly.
#include <cstring>
#include <memory>
#include <mutex>

#include "base/log.h"
#include "base/sha256.h"
#include "collectives/net/batch.h"
#include "collectives/net/collectives.h"
#include "collectives/shm/collectives.h"
#include "engine/group.h"
#include "kernels/copy.h"
#include "kernels/reduce.h"
#include "transport/shm/link.h"

namespace mycoll {
namespace {

// The leader's offer of shared memory to the other ranks of the host.
struct Offer {
  uint64_t smallBytes = 0;
  uint64_t chunkBytes = 0;
  uint64_t areas = 0;
  uint64_t isOffered = 0;
  char cookie[kCookieBytes] = {};
};

enum Step : uint64_t { kOfferStep = 1, kSentStep, kAnswerStep, kVerdictStep };

Signature groupSignature() { return Signature(); }

template <typename T>
Span spanOf(T& value) {
  return {&value, sizeof(value)};
}

}  // namespace

Task Group::start(const Call& call) {
  if (!isPrepared_) return startUnprepared(call);
  const uint64_t sequence = beginNumber();
  if (options_.ranks == 1) return runAlone(call);
  if (arena_) return shmCollective(ShmGroup{*arena_, mailbox_, sequence}, call);
  mailbox_.beginCollective(sequence, call.signature());
  return netCollective(NetGroup{mailbox_, sequence}, call);
}

Task Group::startUnprepared(const Call& call) {
  MYCOLL_CO_RETURN_IF_ERROR(co_await prepare());
  Status status = co_await start(call);
  co_return status;
}

Task Group::run(Call call) {
  Status status = co_await start(call);
  co_return status;
}

Task Group::runComposite(const Composite& composite) {
  Status status = co_await composite(*this);
  co_return status;
}

Task Group::runAlone(const Call& call) {
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

// ---- shared memory -----------------------------------------------------------------------------

bool Group::mayShareMemory() const {
  if (options_.isExternal) return false;
  const Endpoint& endpoint = *engine_->endpoint();
  for (const PeerAddress& peer : mailbox_.group().peers) {
    if (!endpoint.isLocal(peer)) return false;
  }
  return endpoint.options().transport != TransportChoice::kTcp;
}

namespace {

// Most of what a job reduces goes through its first group, so that one gets the best number of
// areas; groups may be many, and have fewer.
constexpr uint64_t kManyAreas = ArenaShape().areas;
constexpr uint64_t kFewAreas = 3;

std::mutex largeArena;
std::weak_ptr<Segment> largeSegment;  // of this process

uint64_t chooseAreas() {
  const std::lock_guard<std::mutex> lock(largeArena);
  return largeSegment.expired() ? kManyAreas : kFewAreas;
}

void noteAreas(const std::shared_ptr<Segment>& segment, uint64_t areas) {
  const std::lock_guard<std::mutex> lock(largeArena);
  if (areas >= kManyAreas) largeSegment = segment;
}

}  // namespace

void Group::adopt(std::shared_ptr<Segment> segment, const ArenaShape& shape,
                  DistanceChoice distance) {
  noteAreas(segment, shape.areas);
  std::vector<Bell> bells;
  for (const PeerAddress& peer : mailbox_.group().peers) {
    bells.push_back(engine_->endpoint()->bellOf(peer));
  }
  arena_ =
      std::make_unique<Arena>(std::move(segment), shape, options_.rank, std::move(bells), distance);
  sharedArena_.store(arena_.get(), std::memory_order_release);
}

Task Group::prepare() {
  bool isShared = false;
  if (options_.ranks > 1 && mayShareMemory()) {
    if (options_.rank == 0) {
      MYCOLL_CO_RETURN_IF_ERROR(co_await prepareAsLeader(&isShared));
    } else {
      MYCOLL_CO_RETURN_IF_ERROR(co_await prepareAsMember(&isShared));
    }
    if (!isShared) {
      MYCOLL_LOG_WARN("group '%s' runs without an arena in shared memory", options_.name.c_str());
    }
  }
  isPrepared_ = true;
  record_.setTransport(transport());
  MYCOLL_LOG_INFO("group '%s' of %d ranks communicates over %s", options_.name.c_str(),
                  options_.ranks, transport().c_str());
  co_return Status();
}

Task Group::prepareAsLeader(bool* isShared) {
  const Signature signature = groupSignature();
  const int ranks = options_.ranks;
  const Env& env = Env::process();
  ArenaShape shape;
  shape.ranks = ranks;
  shape.smallBytes = env.smallBytes;
  if (env.chunkBytes > 0) shape.chunkBytes = env.chunkBytes;
  shape.areas = chooseAreas();
  shape = shape.enlarged();
  std::shared_ptr<Segment> segment;
  Status made = Segment::create(shape.totalBytes(), &segment);
  if (!made.ok()) MYCOLL_LOG_WARN("%s", made.message().c_str());
  Offer offer;
  offer.smallBytes = shape.smallBytes;
  offer.chunkBytes = shape.chunkBytes;
  offer.areas = shape.areas;
  offer.isOffered = made.ok();
  MYCOLL_CO_RETURN_IF_ERROR(randomBytes(offer.cookie, sizeof(offer.cookie)));
  const std::string prefix = mailbox_.fdPrefix();
  std::memcpy(offer.cookie, prefix.data(), prefix.size());

  Batch offers(mailbox_, signature);
  for (int rank = 1; rank < ranks; ++rank) offers.send(rank, spanOf(offer), kOfferStep);
  co_await offers;
  MYCOLL_CO_RETURN_IF_ERROR(offers.status());
  if (!offer.isOffered) co_return Status();

  // The offers have left, so there is a connection to each.
  std::vector<uint64_t> flags(ranks);
  const std::string cookie(offer.cookie, sizeof(offer.cookie));
  Batch sent(mailbox_, signature);
  for (int rank = 1; rank < ranks; ++rank) {
    flags[rank] = mailbox_.sendFd(rank, segment->fd(), cookie);
    sent.send(rank, spanOf(flags[rank]), kSentStep);
  }
  co_await sent;
  MYCOLL_CO_RETURN_IF_ERROR(sent.status());
  Batch answers(mailbox_, signature);
  for (int rank = 1; rank < ranks; ++rank) answers.receive(rank, spanOf(flags[rank]), kAnswerStep);
  co_await answers;
  MYCOLL_CO_RETURN_IF_ERROR(answers.status());
  segment->closeFd();
  uint64_t verdict = 1;
  for (int rank = 1; rank < ranks; ++rank) verdict &= flags[rank];
  // Adopted before anybody hears of it: a failure is then seen by all on the same road.
  if (verdict) adopt(std::move(segment), shape, env.distance);
  Batch verdicts(mailbox_, signature);
  for (int rank = 1; rank < ranks; ++rank) verdicts.send(rank, spanOf(verdict), kVerdictStep);
  co_await verdicts;
  // Until then somebody may not have it yet, and hears of a failure by a message only.
  MYCOLL_CO_RETURN_IF_ERROR(verdicts.status());
  if (verdict) mailbox_.setTellsOthers(false);
  *isShared = verdict != 0;
  co_return Status();
}

Task Group::prepareAsMember(bool* isShared) {
  const Signature signature = groupSignature();
  Offer offer;
  Batch offers(mailbox_, signature);
  offers.receive(0, spanOf(offer), kOfferStep);
  co_await offers;
  MYCOLL_CO_RETURN_IF_ERROR(offers.status());
  if (!offer.isOffered) co_return Status();
  uint64_t flag = 0;
  Batch sent(mailbox_, signature);
  sent.receive(0, spanOf(flag), kSentStep);
  co_await sent;
  MYCOLL_CO_RETURN_IF_ERROR(sent.status());

  ArenaShape shape;
  shape.ranks = options_.ranks;
  shape.smallBytes = offer.smallBytes;
  shape.chunkBytes = offer.chunkBytes;
  shape.areas = offer.areas;
  std::shared_ptr<Segment> segment;
  if (flag && !shape.isUsable()) {
    MYCOLL_LOG_WARN("%s offers shared memory that cannot be used",
                    mailbox_.describeRank(0).c_str());
    flag = 0;
  }
  if (flag) {
    Fd memory = mailbox_.takeFd(0, std::string(offer.cookie, sizeof(offer.cookie)));
    Status adopted = memory.isOpen()
                         ? Segment::adopt(std::move(memory), shape.totalBytes(), &segment)
                         : Status(Code::kNetwork, "shared memory did not come");
    if (!adopted.ok()) MYCOLL_LOG_WARN("%s", adopted.message().c_str());
    flag = adopted.ok();
  }
  Batch answer(mailbox_, signature);
  answer.send(0, spanOf(flag), kAnswerStep);
  co_await answer;
  MYCOLL_CO_RETURN_IF_ERROR(answer.status());
  uint64_t verdict = 0;
  Batch verdicts(mailbox_, signature);
  verdicts.receive(0, spanOf(verdict), kVerdictStep);
  co_await verdicts;
  MYCOLL_CO_RETURN_IF_ERROR(verdicts.status());
  if (verdict) {
    adopt(std::move(segment), shape, DistanceChoice::kMeasured);
    mailbox_.setTellsOthers(false);
  }
  *isShared = verdict != 0;
  co_return Status();
}

std::string Group::transport() const {
  if (options_.ranks == 1) return "self";
  if (sharedArena_.load(std::memory_order_acquire)) return "shm";
  const Endpoint& endpoint = *engine_->endpoint();
  int local = 0;
  for (const PeerAddress& peer : mailbox_.group().peers) local += endpoint.isLocal(peer);
  if (local == options_.ranks) return "shm";
  return local > 1 ? "shm+tcp" : "tcp";
}

}  // namespace mycoll
