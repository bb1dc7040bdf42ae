#include "collectives/run/run.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <optional>

#include "base/env.h"
#include "base/os.h"
#include "collectives/shm/arena.h"
#include "collectives/shm/collectives.h"
#include "kernels/copy.h"
#include "kernels/reduce.h"

namespace mycoll {
namespace {

constexpr uint64_t kRowsTag = tagOf(0, kTagsOfAChunk - 1);  // of no plan's phase
// Bytes of scratch memory that are kept. AddressSanitizer builds keep none, so that each use of
// memory that has been given back is detected.
#ifdef __SANITIZE_ADDRESS__
constexpr size_t kMostKept = 0;
#else
constexpr size_t kMostKept = 32 * 1024 * 1024;
#endif
constexpr size_t kMostBlocks = 256;
constexpr size_t kMostPlans = 16;

std::vector<uint64_t> sizesOf(const Spans& spans) {
  std::vector<uint64_t> sizes;
  sizes.reserve(spans.size());
  for (const Span& span : spans) sizes.push_back(span.bytes);
  return sizes;
}

Job jobOf(const Call& call) {
  Job job{call.kind,         call.root,        call.elementBytes,
          call.elementBytes, sizesOf(call.in), sizesOf(call.out)};
  if (call.dtype != DType::kOpaque && Env::process().partials == Partials::kWide) {
    job.wideBytes = elementSize(wideType(call.dtype));
  }
  return job;
}

void write(const Job::Row& row, char* to) {
  const size_t bytes = row.sends.size() * sizeof(uint64_t);
  std::memcpy(to, row.sends.data(), bytes);
  std::memcpy(to + bytes, row.receives.data(), bytes);
}

Job::Row readRow(const char* from, int ranks) {
  Job::Row row{std::vector<uint64_t>(ranks), std::vector<uint64_t>(ranks)};
  const size_t bytes = row.sends.size() * sizeof(uint64_t);
  std::memcpy(row.sends.data(), from, bytes);
  std::memcpy(row.receives.data(), from + bytes, bytes);
  return row;
}

// For ranks of a host that share no memory: each sends its row to the others.
Task exchangeRows(NetGroup group, const Job::Row& mine, std::vector<Job::Row>* rows) {
  const int rank = group.mailbox.rank();
  const std::vector<int>& members = group.shape.membersOf(group.shape.hostOf(rank));
  const size_t bytes = blobBytes(group.shape);
  std::vector<char> all(members.size() * bytes);
  auto rowOf = [&](int member) {
    return Span{all.data() + static_cast<size_t>(group.shape.indexOf(member)) * bytes, bytes};
  };
  write(mine, rowOf(rank).begin());
  Batch messages(group);
  for (const int member : members) {
    if (member != rank) messages.receive(member, rowOf(member), kRowsTag);
  }
  for (const int member : members) {
    if (member != rank) messages.send(member, rowOf(rank), kRowsTag);
  }
  co_await messages;
  MYCOLL_CO_RETURN_IF_ERROR(messages.status());
  for (const int member : members) {
    rows->push_back(readRow(rowOf(member).begin(), group.shape.ranks()));
  }
  co_return Status();
}

// Fails if ranks of this host disagree about what one sends to another.
Status checkRows(NetGroup group, const std::vector<Job::Row>& rows) {
  const int host = group.shape.hostOf(group.mailbox.rank());
  const std::vector<int>& members = group.shape.membersOf(host);
  for (size_t i = 0; i < rows.size(); ++i) {
    for (size_t k = 0; k < rows.size(); ++k) {
      const uint64_t sent = rows[i].sends[members[k]], expected = rows[k].receives[members[i]];
      if (sent == expected) continue;
      return sizeMismatch(group, members[i], sent, members[k], expected);
    }
  }
  return Status();
}

Counter counterOf(Mark mark) {
  switch (mark) {
    case Mark::kGiven: return Counter::kFilled;
    case Mark::kShared: return Counter::kReduced;
    default: return Counter::kDone;
  }
}

// A chunk in flight. It is a round of the arena, which is null if the plan uses none.
class Chunk {
 public:
  Chunk(NetGroup group, const Call& call, const Job& job, const Chunking& chunking, uint64_t number)
      : group_(group),
        call_(call),
        number_(number),
        begin_(chunking.begin(number)),
        isWide_(job.wideBytes > job.elementBytes),
        plan_(group.plans.planOf(group.shape, job, group.mailbox.rank(), chunking, number,
                                 group.arena != nullptr)),
        scratch_(ScratchPool::process().take(plan_->scratchBytes)) {}
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;

  uint64_t number() const { return number_; }
  // The messages of the phase that was begun; null: it has none.
  Batch* messages() { return batch_ ? &*batch_ : nullptr; }
  bool isOver() const { return phase_ > plan_->phases; }

  // Begins the next phase; the one before must be over. After the last one, it begins nothing. If
  // it returns a condition, wait for that and call it again; null: the phase has begun. haveMet:
  // other ranks of the host are known to be in the same call, so that what they have given may be
  // used.
  Condition* beginPhase(bool haveMet = true) {
    if (!ranksOfHost_) batch_.reset();
    ranksOfHost_.reset();
    while (next_ < plan_->steps.size() && plan_->steps[next_].phase == phase_) {
      const Step& step = plan_->steps[next_++];
      switch (step.act) {
        case Step::Act::kCopy: copyFor(step); break;
        case Step::Act::kFold: foldFor(step); break;
        case Step::Act::kMark: group_.arena->publish(counterOf(step.mark), number_ + 1); break;
        case Step::Act::kWait: {
          const bool isForArea = step.mark == Mark::kDone;
          const uint64_t rounds = isForArea ? group_.arena->roundsBefore(number_) : number_ + 1;
          if (rounds == 0) break;  // earlier collectives have left it free
          ranksOfHost_.emplace(*group_.arena, counterOf(step.mark), rounds);
          if (!ranksOfHost_->isReached() || (!isForArea && !haveMet)) return &*ranksOfHost_;
          ranksOfHost_.reset();
          break;
        }
        case Step::Act::kSend: messagesToBegin().send(step.peer, at(step.place), tag()); break;
        case Step::Act::kReceive:
          messagesToBegin().receive(step.peer, at(step.place), tag());
          break;
      }
    }
    ++phase_;
    return nullptr;
  }

 private:
  uint64_t tag() const { return tagOf(number_, phase_); }

  Batch& messagesToBegin() {
    if (!batch_) batch_.emplace(group_);
    return *batch_;
  }

  Span at(const Place& place) const {
    if (place.bytes == 0) return {};
    char* base = nullptr;
    switch (place.space) {
      case Space::kInput: base = call_.in[place.block].begin() + begin_; break;
      case Space::kOutput: base = outputOf(place.block).begin() + begin_; break;
      case Space::kScratch: base = scratch_.data(); break;
      case Space::kShared: base = group_.arena->bulk(place.block, number_); break;
    }
    return {base + place.begin, place.bytes};
  }

  // The root of a broadcast may have its data in the inputs.
  const Span& outputOf(int block) const {
    const bool isSource = call_.kind == OpKind::kBroadcast && call_.root == group_.mailbox.rank();
    return isSource && !call_.in.empty() ? call_.in[0] : call_.out[block];
  }

  void copyFor(const Step& step) const {
    const Span to = at(step.place), from = at(plan_->inputs[step.first].place);
    if (step.place.space == Space::kShared)
      return group_.arena->fill(to.begin(), from.data, to.bytes);
    if (to.data != from.data) copy(to.data, from.data, to.bytes);
  }

  void foldFor(const Step& step) const {
    std::vector<Partial> partials;
    partials.reserve(step.inputs);
    for (uint32_t i = 0; i < step.inputs; ++i) {
      const FoldInput& input = plan_->inputs[step.first + i];
      partials.push_back({input.node.lo, input.node.hi, at(input.place).data, input.isWide});
    }
    // If partial sums are not wide, they are rounded like results, but not divided.
    const bool isRounded = step.isResult || !isWide_;
    const bool isDivided = step.isResult || call_.reduceOp != ReduceOp::kAvg;
    foldTree(call_.dtype, isDivided ? call_.reduceOp : ReduceOp::kSum, at(step.place).data,
             isRounded, partials.data(), static_cast<int>(partials.size()), step.count,
             group_.mailbox.ranks());
  }

  const NetGroup group_;
  const Call& call_;
  const uint64_t number_;
  const uint64_t begin_;  // in each block
  const bool isWide_;     // partial sums are
  const std::shared_ptr<const Plan> plan_;
  ScratchPool::Memory scratch_;
  std::optional<Batch> batch_;
  std::optional<RoundReached> ranksOfHost_;  // waited for
  size_t next_ = 0;                          // step
  int phase_ = 0;
};

}  // namespace

ScratchPool::ScratchPool() { free_.reserve(kMostBlocks); }

ScratchPool& ScratchPool::process() { return perProcess<ScratchPool>(); }

ScratchPool::Memory ScratchPool::take(size_t bytes) {
  if (bytes == 0) return {};
  {
    const MutexLock lock(mutex_);
    for (size_t i = free_.size(); i-- > 0;) {
      Block& block = free_[i];
      if (block.bytes < bytes) continue;
      std::swap(block, free_.back());
      Block taken = std::move(free_.back());
      free_.pop_back();
      freeBytes_ -= taken.bytes;
      return {std::move(taken.data), taken.bytes};
    }
  }
  return {std::unique_ptr<char[]>(new char[bytes]), bytes};
}

void ScratchPool::giveBack(std::unique_ptr<char[]> data, size_t bytes) {
  const MutexLock lock(mutex_);
  if (freeBytes_ + bytes > kMostKept || free_.size() == kMostBlocks) return;
  freeBytes_ += bytes;
  free_.push_back({std::move(data), bytes});
}

std::shared_ptr<const Plan> PlanCache::planOf(const Shape& shape, const Job& job, int rank,
                                              const Chunking& chunking, uint64_t chunk,
                                              bool sharesMemory) {
  // Comparing rows takes as long as planning.
  if (!job.rows.empty()) {
    return std::make_shared<const Plan>(
        mycoll::planOf(shape, job, rank, chunking, chunk, sharesMemory));
  }
  const auto found = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) {
    return entry.sharesMemory == sharesMemory && entry.job == job &&
           areAlike(job, chunking, entry.chunk, chunk);
  });
  if (found != entries_.end()) {
    std::rotate(found, found + 1, entries_.end());
    return entries_.back().plan;
  }
  if (entries_.size() == kMostPlans) entries_.erase(entries_.begin());
  auto plan =
      std::make_shared<const Plan>(mycoll::planOf(shape, job, rank, chunking, chunk, sharesMemory));
  entries_.push_back({job, sharesMemory, chunk, plan});
  return plan;
}

size_t blobBytes(const Shape& shape) {
  return 2 * static_cast<size_t>(shape.ranks()) * sizeof(uint64_t);  // a row
}

Task netCollective(NetGroup group, const Call& call) {
  Job job = jobOf(call);
  const Chunking chunking = chunkingOf(group.shape, job);
  if (!isShared(group.shape, job, chunking)) group.arena = nullptr;
  const bool needsRows = goesByHost(group.shape, call.kind);
  Job::Row row;
  if (needsRows) row = rowOf(job, group.shape.ranks(), group.mailbox.rank());
  std::deque<Chunk> underWay;
  if (group.arena) {
    const size_t bytes = needsRows ? blobBytes(group.shape) : 0;
    char* blob = group.arena->beginBlob(bytes);
    if (needsRows) write(row, blob);
    // The ranks of a host meet once less if a rank, when it arrives, has already given what the
    // others need. If they need nothing from each other, messages are in flight before they meet.
    Condition* first = nullptr;
    const bool mayBegin = needsRows ? goesByItself(group.shape, job, group.mailbox.rank())
                                    : chunking.chunks == 1 && group.arena->isFirstAreaFree();
    if (mayBegin) {
      Chunk& chunk = underWay.emplace_back(group, call, job, chunking, 0);
      while (!first && !chunk.messages() && !chunk.isOver()) {
        first = chunk.beginPhase(/*haveMet=*/false);
      }
    }
    group.arena->arrive(group.signature, bytes, chunking.chunks);
    AllArrived arrived(*group.arena, group.signature);
    co_await arrived;
    if (arrived.differingRank() >= 0) {
      co_return arrivalMismatch(group, arrived);
    }
    if (first) co_await *first;
    for (int rank = 0; needsRows && rank < group.arena->ranks(); ++rank) {
      const char* theirs = group.arena->blobOf(rank);
      if (!theirs || group.arena->blobBytesOf(rank) != bytes) {
        co_return Status(Code::kInternal, group.mailbox.describeRank(group.arena->memberOf(rank)) +
                                              " published no sizes");
      }
      job.rows.push_back(readRow(theirs, group.shape.ranks()));
    }
  } else if (needsRows) {
    MYCOLL_CO_RETURN_IF_ERROR(co_await exchangeRows(group, row, &job.rows));
  }
  if (needsRows) MYCOLL_CO_RETURN_IF_ERROR(checkRows(group, job.rows));
  uint64_t begun = underWay.size();
  const uint64_t steps = stepsOfAPhase(group.shape);
  for (uint64_t step = 0; step < chunking.chunks || !underWay.empty(); ++step) {
    for (Chunk& chunk : underWay) {
      if ((step - chunk.number()) % steps != 0) continue;
      if (Batch* messages = chunk.messages()) {
        co_await *messages;
        MYCOLL_CO_RETURN_IF_ERROR(messages->status());
      }
      while (Condition* first = chunk.beginPhase()) co_await *first;
    }
    // The oldest is the first to end.
    while (!underWay.empty() && underWay.front().isOver()) underWay.pop_front();
    if (step == begun && begun < chunking.chunks) {
      Chunk& chunk = underWay.emplace_back(group, call, job, chunking, begun++);
      while (Condition* first = chunk.beginPhase()) co_await *first;
    }
  }
  if (group.arena) group.arena->endRounds(chunking.chunks);
  co_return Status();
}

}  // namespace mycoll
