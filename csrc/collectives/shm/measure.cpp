// Which way the ranks take for calls of one kind and size: staging, or SingleCopy. They make the
// call that asks for it several times in both ways, alternately, on scratch memory:
//
//   each     arrive: which results it has already, whether it has scratch memory
//            the call by staging, the call by single copy, and again
//            arrive: the times
//   all      compare the slowest rank's times
#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <utility>

#include "base/log.h"
#include "collectives/shm/collectives.h"
#include "transport/mailbox.h"

namespace mycoll {
namespace {

using Choice = SingleCopy::Choice;

// A rank publishes this before the measurement.
struct Before {
  bool isAsking = false;  // the call is large enough on this rank
  Choice known = Choice::kUnknown;
  bool hasScratch = false;
};

constexpr int kRounds = SingleCopy::kRounds;

// ... and this after it: the microseconds of each round. They fit into its arrival.
struct Times {
  float staged[kRounds] = {}, direct[kRounds] = {};
};
static_assert(sizeof(Times) <= Arrival::kInlineBytes);

// Returns the same call on scratch memory, and with only the beginning of large tensors. The sizes
// depend only on those of the call: so the ranks still agree.
Call trialOf(const Call& call, int ranks, std::unique_ptr<char[]>* scratch) {
  Call trial = call;
  const bool isWhole = call.kind == OpKind::kAllReduce || call.kind == OpKind::kReduce ||
                       call.kind == OpKind::kBroadcast;
  size_t most = SingleCopy::kMostBytes / static_cast<size_t>(isWhole ? 1 : ranks);
  most -= most % call.elementBytes;
  for (Span& span : trial.in) span.bytes = std::min(span.bytes, most);
  for (Span& span : trial.out) span.bytes = std::min(span.bytes, most);
  scratch->reset(new (std::nothrow) char[totalBytes(trial.in) + totalBytes(trial.out)]);
  char* end = scratch->get();
  if (!end) return trial;
  for (Span& span : trial.in) span.data = std::exchange(end, end + span.bytes);
  for (Span& span : trial.out) {
    size_t same = 0;  // the input that this output is, if it is one
    while (same < call.in.size() && call.in[same].data != span.data) ++same;
    span.data = same < call.in.size() ? trial.in[same].data : std::exchange(end, end + span.bytes);
  }
  return trial;
}

// Writes the tensors that others will read, as a program does before most calls: they are then in
// this core's cache, and in no other.
void writeSources(const Call& trial) {
  for (const Span& span : trial.in.empty() ? trial.out : trial.in) {
    std::memset(span.data, 0, span.bytes);
  }
}

template <typename T>
Task exchange(ShmGroup group, const T& value) {
  std::memcpy(group.arena.beginBlob(sizeof(value)), &value, sizeof(value));
  Status status = co_await shmArrive(group, sizeof(value));
  co_return status;
}

template <typename T>
T valueOf(const Arena& arena, int rank) {
  T value;
  const char* const blob = arena.blobOf(rank);
  if (blob && arena.blobBytesOf(rank) == sizeof(value)) std::memcpy(&value, blob, sizeof(value));
  return value;
}

}  // namespace

Task shmMeasure(ShmGroup group, const Call& call) {
  Arena& arena = group.arena;
  PeerMemory& memory = group.memory;
  const std::optional<PeerMemory::Question> asked = memory.takeQuestion();
  Before before;
  before.isAsking = asked.has_value();
  if (asked && !asked->isAgain) before.known = SingleCopy::process().choice(asked->of);
  std::unique_ptr<char[]> scratch;
  const Call trial = trialOf(call, arena.ranks(), &scratch);
  before.hasScratch = scratch != nullptr;
  MYCOLL_CO_RETURN_IF_ERROR(co_await exchange(group, before));
  bool isKnown = true, haveScratch = true;
  Choice choice = Choice::kDirect;  // unless a rank has found the other
  for (int rank = 0; rank < arena.ranks(); ++rank) {
    const auto theirs = valueOf<Before>(arena, rank);
    haveScratch &= theirs.hasScratch;
    if (!theirs.isAsking) continue;
    isKnown &= theirs.known != Choice::kUnknown;
    if (theirs.known == Choice::kStaged) choice = Choice::kStaged;
  }
  if (isKnown || !haveScratch) {
    if (asked) memory.choose(asked->of, isKnown ? choice : Choice::kStaged);
    co_return Status();
  }

  Times mine;
  for (int round = -1; round < kRounds; ++round) {  // the first waits for pages, and fills caches
    for (const Choice way : {Choice::kStaged, Choice::kDirect}) {
      writeSources(trial);
      MYCOLL_CO_RETURN_IF_ERROR(co_await shmBarrier(group));
      const auto began = std::chrono::steady_clock::now();
      memory.force(way);
      MYCOLL_CO_RETURN_IF_ERROR(co_await shmCollective(group, trial));
      memory.force(Choice::kUnknown);
      const std::chrono::duration<float, std::micro> took =
          std::chrono::steady_clock::now() - began;
      if (round >= 0) (way == Choice::kStaged ? mine.staged : mine.direct)[round] = took.count();
    }
  }
  MYCOLL_CO_RETURN_IF_ERROR(co_await exchange(group, mine));
  Times slowest;
  for (int rank = 0; rank < arena.ranks(); ++rank) {
    const auto theirs = valueOf<Times>(arena, rank);
    for (int round = 0; round < kRounds; ++round) {
      slowest.staged[round] = std::max(slowest.staged[round], theirs.staged[round]);
      slowest.direct[round] = std::max(slowest.direct[round], theirs.direct[round]);
    }
  }
  const SingleCopy::Measured result = SingleCopy::judge(slowest.staged, slowest.direct);
  MYCOLL_LOG_DEBUG("%s: staged %.1f us, single copy %.1f us", group.signature.describe().c_str(),
                   result.stagedMicros, result.directMicros);
  if (asked) {
    memory.choose(asked->of, result.choice);
    SingleCopy::process().keep(asked->of, result);
  }
  co_return Status();
}

}  // namespace mycoll
