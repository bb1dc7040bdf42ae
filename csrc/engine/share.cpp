#include "engine/share.h"

#include <algorithm>
#include <utility>

#include "base/env.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/os.h"
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

struct LargeArena {
  Mutex mutex;
  std::weak_ptr<Segment> segment GUARDED_BY(mutex);
};

uint64_t chooseAreas() {
  LargeArena& large = perProcess<LargeArena>();
  const MutexLock lock(large.mutex);
  return large.segment.expired() ? kManyAreas : kFewAreas;
}

void noteAreas(const std::shared_ptr<Segment>& segment, uint64_t areas) {
  LargeArena& large = perProcess<LargeArena>();
  const MutexLock lock(large.mutex);
  if (areas >= kManyAreas) large.segment = segment;
}

std::unique_ptr<Arena> makeArena(const Sharing& sharing, std::shared_ptr<Segment> segment,
                                 const ArenaShape& shape) {
  const Mailbox& mailbox = sharing.mailbox;
  if (sharing.membership) noteAreas(segment, shape.areas);
  std::vector<Bell> bells;
  int self = 0;
  for (const int rank : sharing.members) {
    if (rank == mailbox.rank()) self = static_cast<int>(bells.size());
    bells.push_back(mailbox.mesh().bellOf(mailbox.group().peers[rank]));
  }
  auto arena = std::make_unique<Arena>(std::move(segment), shape, self, std::move(bells),
                                       sharing.members, Env::process().distance);
  if (sharing.membership) sharing.membership->attach(arena.get());
  return arena;
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

// One flag between the first rank and each of the others.
void exchangeFlags(Batch& messages, bool isSending, const std::vector<int>& partners, Step step,
                   std::vector<uint64_t>* flags) {
  for (size_t i = 0; i < partners.size(); ++i) {
    if (isSending) {
      messages.send(partners[i], spanOf((*flags)[i]), step);
    } else {
      messages.receive(partners[i], spanOf((*flags)[i]), step);
    }
  }
}

}  // namespace

Task shareArena(Sharing sharing, std::unique_ptr<Arena>* arena) {
  Mailbox& mailbox = sharing.mailbox;
  sharing.shape.ranks = static_cast<int>(sharing.members.size());
  if (sharing.membership) {
    const Env& env = Env::process();
    sharing.shape.smallBytes = env.smallBytes;
    if (env.chunkBytes > 0) sharing.shape.chunkBytes = env.chunkBytes;
    sharing.shape.areas = chooseAreas();
  }
  sharing.shape = sharing.shape.enlarged();
  const bool isFirst = mailbox.rank() == sharing.members[0];
  std::vector<int> partners = {sharing.members[0]};
  if (isFirst) partners.assign(sharing.members.begin() + 1, sharing.members.end());
  const Signature signature;
  ArenaShape shape = sharing.shape;
  std::shared_ptr<Segment> segment;
  Status status;
  Batch offers(mailbox, signature);
  Transfer* offered = nullptr;
  if (isFirst) {
    status = Segment::create(shape.totalBytes(), &segment);
    if (!status.ok()) shape.ranks = 0;  // there is nothing to offer
    for (const int rank : partners) offers.send(rank, spanOf(shape), kOfferStep, segment);
  } else {
    offered = &offers.receive(partners[0], spanOf(shape), kOfferStep);
  }
  co_await offers;
  MYCOLL_CO_RETURN_IF_ERROR(offers.status());
  const bool isOffered = shape.ranks != 0;
  if (offered && isOffered) {
    status = takeSegment(sharing, shape, offered->takeDescriptor(), &segment);
  }
  if (!status.ok()) MYCOLL_LOG_WARN("%s", status.message().c_str());
  if (!isOffered) co_return Status();

  std::vector<uint64_t> flags(partners.size(), status.ok());
  Batch answers(mailbox, signature);
  exchangeFlags(answers, !isFirst, partners, kAnswerStep, &flags);
  co_await answers;
  MYCOLL_CO_RETURN_IF_ERROR(answers.status());
  if (isFirst) {
    segment->closeFd();
    const bool haveAll = std::count(flags.begin(), flags.end(), 0) == 0;
    flags.assign(partners.size(), haveAll);
    // Attach the arena before the others receive the verdict: from then on all ranks look for a
    // failure there, so it must be written there.
    if (haveAll) *arena = makeArena(sharing, segment, shape);
  }
  Batch verdicts(mailbox, signature);
  exchangeFlags(verdicts, isFirst, partners, kVerdictStep, &flags);
  co_await verdicts;
  // Until the verdicts are sent some rank may not have the arena yet, and detects a failure only by
  // a message.
  MYCOLL_CO_RETURN_IF_ERROR(verdicts.status());
  if (flags[0] == 0) co_return Status();
  if (!isFirst) *arena = makeArena(sharing, std::move(segment), shape);
  if (sharing.membership) sharing.membership->trustArena();
  co_return Status();
}

}  // namespace mycoll
