#include "engine/share.h"

#include <cstring>

#include "base/env.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/sha256.h"
#include "collectives/run/batch.h"
#include "engine/membership.h"
#include "transport/mesh.h"
#include "transport/shm/link.h"

namespace mycoll {
namespace {

// Rank 0's offer of shared memory to the other ranks.
struct Offer {
  uint64_t smallBytes = 0;
  uint64_t chunkBytes = 0;
  uint64_t areas = 0;
  uint64_t isOffered = 0;
  char cookie[kCookieBytes] = {};

  std::string cookieText() const { return std::string(cookie, sizeof(cookie)); }
};

enum Step : uint64_t { kOfferStep = 1, kSentStep, kAnswerStep, kVerdictStep };

template <typename T>
Span spanOf(T& value) {
  return {&value, sizeof(value)};
}

// Most of what a job reduces goes through its first group, so that one gets the best number of
// areas; groups may be many, and have fewer.
constexpr uint64_t kManyAreas = ArenaShape().areas;
constexpr uint64_t kFewAreas = 3;

Mutex largeArena;
std::weak_ptr<Segment> largeSegment GUARDED_BY(largeArena);  // of this process

uint64_t chooseAreas() {
  const MutexLock lock(largeArena);
  return largeSegment.expired() ? kManyAreas : kFewAreas;
}

void noteAreas(const std::shared_ptr<Segment>& segment, uint64_t areas) {
  const MutexLock lock(largeArena);
  if (areas >= kManyAreas) largeSegment = segment;
}

std::unique_ptr<Arena> makeArena(const Mailbox& mailbox, std::shared_ptr<Segment> segment,
                                 const ArenaShape& shape, DistanceChoice distance) {
  noteAreas(segment, shape.areas);
  std::vector<Bell> bells;
  for (const PeerAddress& peer : mailbox.group().peers) {
    bells.push_back(mailbox.mesh().bellOf(peer));
  }
  return std::make_unique<Arena>(std::move(segment), shape, mailbox.rank(), std::move(bells),
                                 distance);
}

Status makeOffer(const Mailbox& mailbox, const Env& env, ArenaShape* shape,
                 std::shared_ptr<Segment>* segment, Offer* offer) {
  shape->ranks = mailbox.ranks();
  shape->smallBytes = env.smallBytes;
  if (env.chunkBytes > 0) shape->chunkBytes = env.chunkBytes;
  shape->areas = chooseAreas();
  *shape = shape->enlarged();
  const Status made = Segment::create(shape->totalBytes(), segment);
  if (!made.ok()) MYCOLL_LOG_WARN("%s", made.message().c_str());
  offer->smallBytes = shape->smallBytes;
  offer->chunkBytes = shape->chunkBytes;
  offer->areas = shape->areas;
  offer->isOffered = made.ok();
  MYCOLL_RETURN_IF_ERROR(randomBytes(offer->cookie, sizeof(offer->cookie)));
  const std::string prefix = mailbox.fdPrefix();
  std::memcpy(offer->cookie, prefix.data(), prefix.size());
  return Status();
}

Task offerArena(Mailbox& mailbox, Membership& membership, std::unique_ptr<Arena>* arena) {
  const Signature signature;
  const int ranks = mailbox.ranks();
  const Env& env = Env::process();
  ArenaShape shape;
  std::shared_ptr<Segment> segment;
  Offer offer;
  MYCOLL_CO_RETURN_IF_ERROR(makeOffer(mailbox, env, &shape, &segment, &offer));

  Batch offers(mailbox, signature);
  for (int rank = 1; rank < ranks; ++rank) offers.send(rank, spanOf(offer), kOfferStep);
  co_await offers;
  MYCOLL_CO_RETURN_IF_ERROR(offers.status());
  if (!offer.isOffered) co_return Status();

  // The offers have left, so there is a connection to each.
  std::vector<uint64_t> flags(ranks);
  Batch sent(mailbox, signature);
  for (int rank = 1; rank < ranks; ++rank) {
    flags[rank] = mailbox.sendFd(rank, segment->fd(), offer.cookieText());
    sent.send(rank, spanOf(flags[rank]), kSentStep);
  }
  co_await sent;
  MYCOLL_CO_RETURN_IF_ERROR(sent.status());
  Batch answers(mailbox, signature);
  for (int rank = 1; rank < ranks; ++rank) answers.receive(rank, spanOf(flags[rank]), kAnswerStep);
  co_await answers;
  MYCOLL_CO_RETURN_IF_ERROR(answers.status());
  segment->closeFd();
  uint64_t verdict = 1;
  for (int rank = 1; rank < ranks; ++rank) verdict &= flags[rank];
  // Known here before anybody hears of it: a failure is then written where all will look.
  if (verdict) {
    *arena = makeArena(mailbox, std::move(segment), shape, env.distance);
    membership.attach(arena->get());
  }
  Batch verdicts(mailbox, signature);
  for (int rank = 1; rank < ranks; ++rank) verdicts.send(rank, spanOf(verdict), kVerdictStep);
  co_await verdicts;
  // Until then some rank may not have it yet, and hears of a failure by a message only.
  MYCOLL_CO_RETURN_IF_ERROR(verdicts.status());
  if (verdict) membership.trustArena();
  co_return Status();
}

Status takeSegment(Mailbox& mailbox, const Offer& offer, const ArenaShape& shape,
                   std::shared_ptr<Segment>* segment) {
  if (!shape.isUsable()) {
    return Status(Code::kNetwork,
                  mailbox.describeRank(0) + " offers shared memory that cannot be used");
  }
  Fd memory = mailbox.takeFd(0, offer.cookieText());
  if (!memory.isOpen()) return Status(Code::kNetwork, "shared memory did not come");
  return Segment::adopt(std::move(memory), shape.totalBytes(), segment);
}

Task acceptArena(Mailbox& mailbox, Membership& membership, std::unique_ptr<Arena>* arena) {
  const Signature signature;
  Offer offer;
  Batch offers(mailbox, signature);
  offers.receive(0, spanOf(offer), kOfferStep);
  co_await offers;
  MYCOLL_CO_RETURN_IF_ERROR(offers.status());
  if (!offer.isOffered) co_return Status();
  uint64_t flag = 0;
  Batch sent(mailbox, signature);
  sent.receive(0, spanOf(flag), kSentStep);
  co_await sent;
  MYCOLL_CO_RETURN_IF_ERROR(sent.status());

  ArenaShape shape;
  shape.ranks = mailbox.ranks();
  shape.smallBytes = offer.smallBytes;
  shape.chunkBytes = offer.chunkBytes;
  shape.areas = offer.areas;
  std::shared_ptr<Segment> segment;
  if (flag) {
    const Status taken = takeSegment(mailbox, offer, shape, &segment);
    if (!taken.ok()) MYCOLL_LOG_WARN("%s", taken.message().c_str());
    flag = taken.ok();
  }
  Batch answer(mailbox, signature);
  answer.send(0, spanOf(flag), kAnswerStep);
  co_await answer;
  MYCOLL_CO_RETURN_IF_ERROR(answer.status());
  uint64_t verdict = 0;
  Batch verdicts(mailbox, signature);
  verdicts.receive(0, spanOf(verdict), kVerdictStep);
  co_await verdicts;
  MYCOLL_CO_RETURN_IF_ERROR(verdicts.status());
  if (!verdict) co_return Status();
  *arena = makeArena(mailbox, std::move(segment), shape, DistanceChoice::kMeasured);
  membership.attach(arena->get());
  membership.trustArena();
  co_return Status();
}

}  // namespace

Task shareArena(Mailbox& mailbox, Membership& membership, std::unique_ptr<Arena>* arena) {
  return mailbox.rank() == 0 ? offerArena(mailbox, membership, arena)
                             : acceptArena(mailbox, membership, arena);
}

}  // namespace mycoll
