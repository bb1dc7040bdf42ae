#include "engine/share.h"

#include <numeric>
#include <utility>

#include "base/env.h"
#include "base/log.h"
#include "base/mutex.h"
#include "collectives/batch.h"
#include "engine/membership.h"
#include "transport/mesh.h"
#include "transport/shm/segment.h"

namespace mycoll {
namespace {

enum Step : uint64_t { kOfferStep, kAnswerStep, kVerdictStep };

// Most of a job's data is reduced in its first group, so that one gets the best number of areas.
// There may be many other groups; they get fewer.
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

// The ranks that share an arena. members[0] offers it; shape: the one that this rank offers, or
// expects from a rank with its plans (membership: with its environment).
struct Sharing {
  Mailbox& mailbox;
  Membership* membership;  // null: the members are not all ranks of the group
  std::vector<int> members;
  ArenaShape shape;

  bool isFirst() const { return mailbox.rank() == members[0]; }
};

std::unique_ptr<Arena> makeArena(const Sharing& sharing, std::shared_ptr<Segment> segment,
                                 const ArenaShape& shape, DistanceChoice distance) {
  const Mailbox& mailbox = sharing.mailbox;
  if (sharing.membership) noteAreas(segment, shape.areas);
  std::vector<Bell> bells;
  int self = 0;
  for (const int rank : sharing.members) {
    if (rank == mailbox.rank()) self = static_cast<int>(bells.size());
    bells.push_back(mailbox.mesh().bellOf(mailbox.group().peers[rank]));
  }
  return std::make_unique<Arena>(std::move(segment), shape, self, std::move(bells), sharing.members,
                                 distance);
}

Task offerArena(Sharing sharing, std::unique_ptr<Arena>* arena) {
  Mailbox& mailbox = sharing.mailbox;
  const Signature signature;
  const std::vector<int> others(sharing.members.begin() + 1, sharing.members.end());
  ArenaShape shape = sharing.shape;
  std::shared_ptr<Segment> segment;
  const Status made = Segment::create(shape.totalBytes(), &segment);
  if (!made.ok()) {
    MYCOLL_LOG_WARN("%s", made.message().c_str());
    shape.ranks = 0;  // there is nothing to offer
  }
  Batch offers(mailbox, signature);
  for (const int rank : others) offers.send(rank, spanOf(shape), kOfferStep, segment);
  co_await offers;
  MYCOLL_CO_RETURN_IF_ERROR(offers.status());
  if (!made.ok()) co_return Status();

  std::vector<uint64_t> flags(others.size());
  Batch answers(mailbox, signature);
  for (size_t i = 0; i < others.size(); ++i) {
    answers.receive(others[i], spanOf(flags[i]), kAnswerStep);
  }
  co_await answers;
  MYCOLL_CO_RETURN_IF_ERROR(answers.status());
  segment->closeFd();
  uint64_t verdict = 1;
  for (const uint64_t flag : flags) verdict &= flag;
  // Attach the arena before the others receive the verdict: from then on all ranks look for a
  // failure there, so it must be written there.
  if (verdict) {
    *arena = makeArena(sharing, std::move(segment), shape, Env::process().distance);
    if (sharing.membership) sharing.membership->attach(arena->get());
  }
  Batch verdicts(mailbox, signature);
  for (const int rank : others) verdicts.send(rank, spanOf(verdict), kVerdictStep);
  co_await verdicts;
  // Until the verdicts are sent some rank may not have the arena yet, and detects a failure only by
  // a message.
  MYCOLL_CO_RETURN_IF_ERROR(verdicts.status());
  if (verdict && sharing.membership) sharing.membership->trustArena();
  co_return Status();
}

Status takeSegment(const Sharing& sharing, const ArenaShape& shape, Fd memory,
                   std::shared_ptr<Segment>* segment) {
  const ArenaShape& wanted = sharing.shape;
  const bool isAsWanted = shape == wanted || (sharing.membership && shape.ranks == wanted.ranks);
  if (!shape.isUsable() || !isAsWanted) {
    return Status(Code::kNetwork, sharing.mailbox.describeRank(sharing.members[0]) +
                                      " offers shared memory that cannot be used");
  }
  if (!memory.isOpen()) return Status(Code::kNetwork, "shared memory did not come");
  return Segment::adopt(std::move(memory), shape.totalBytes(), segment);
}

Task acceptArena(Sharing sharing, std::unique_ptr<Arena>* arena) {
  Mailbox& mailbox = sharing.mailbox;
  const int first = sharing.members[0];
  const Signature signature;
  ArenaShape shape;
  Batch offers(mailbox, signature);
  Transfer& offered = offers.receive(first, spanOf(shape), kOfferStep);
  co_await offers;
  MYCOLL_CO_RETURN_IF_ERROR(offers.status());
  if (shape.ranks == 0) co_return Status();

  std::shared_ptr<Segment> segment;
  const Status taken = takeSegment(sharing, shape, offered.takeDescriptor(), &segment);
  if (!taken.ok()) MYCOLL_LOG_WARN("%s", taken.message().c_str());
  uint64_t flag = taken.ok();
  Batch answer(mailbox, signature);
  answer.send(first, spanOf(flag), kAnswerStep);
  co_await answer;
  MYCOLL_CO_RETURN_IF_ERROR(answer.status());
  uint64_t verdict = 0;
  Batch verdicts(mailbox, signature);
  verdicts.receive(first, spanOf(verdict), kVerdictStep);
  co_await verdicts;
  MYCOLL_CO_RETURN_IF_ERROR(verdicts.status());
  if (!verdict) co_return Status();
  *arena = makeArena(sharing, std::move(segment), shape, DistanceChoice::kMeasured);
  if (!sharing.membership) co_return Status();
  sharing.membership->attach(arena->get());
  sharing.membership->trustArena();
  co_return Status();
}

Task share(Sharing sharing, std::unique_ptr<Arena>* arena) {
  const bool isFirst = sharing.isFirst();
  return isFirst ? offerArena(std::move(sharing), arena) : acceptArena(std::move(sharing), arena);
}

}  // namespace

Task shareArena(Mailbox& mailbox, Membership& membership, std::unique_ptr<Arena>* arena) {
  const Env& env = Env::process();
  std::vector<int> all(mailbox.ranks());
  std::iota(all.begin(), all.end(), 0);
  ArenaShape shape;
  shape.ranks = mailbox.ranks();
  shape.smallBytes = env.smallBytes;
  if (env.chunkBytes > 0) shape.chunkBytes = env.chunkBytes;
  shape.areas = chooseAreas();
  return share({mailbox, &membership, std::move(all), shape.enlarged()}, arena);
}

Task shareHostArena(Mailbox& mailbox, std::vector<int> members, ArenaShape shape,
                    std::unique_ptr<Arena>* arena) {
  shape.ranks = static_cast<int>(members.size());
  return share({mailbox, nullptr, std::move(members), shape.enlarged()}, arena);
}

}  // namespace mycoll
