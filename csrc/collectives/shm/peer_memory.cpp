#include "collectives/shm/peer_memory.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/log.h"
#include "collectives/batch.h"
#include "collectives/shm/collectives.h"
#include "transport/mailbox.h"
#include "transport/shm/peer_regions.h"
#include "transport/shm/shared_heap.h"

namespace mycoll {
namespace {

// After so many introductions that failed, a region's tensors always go through the arena.
constexpr int kMostTries = 3;

// A region that is passed to the other ranks.
struct Passing {
  int owner = 0;
  uint64_t region = 0;
  uint64_t bytes = 0;
  Transfer* message = nullptr;  // from the owner
  std::shared_ptr<Segment> segment;
};

}  // namespace

bool PeerMemory::offer(const Span& mine, SharedSpan* offered) const {
  *offered = {0, 0, mine.bytes};
  if (mine.bytes == 0) return true;
  const SharedPlace place = SharedHeap::process().find(mine);
  if (place.region == 0) return false;
  const auto known = known_.find({self_, place.region});
  if (known != known_.end() && !known->second.isUsable &&
      (known->second.tries == kMostTries || !known->second.retry.expired())) {
    return false;
  }
  offered->region = place.region;
  offered->offset = place.offset;
  return true;
}

size_t PeerMemory::offersOf(const Arena& arena, int rank) {
  return arena.isOffer(rank) && arena.blobOf(rank) != nullptr
             ? arena.blobBytesOf(rank) / sizeof(SharedSpan)
             : 0;
}

SharedSpan PeerMemory::offerOf(const Arena& arena, int rank, size_t index) {
  SharedSpan span;
  if (index < offersOf(arena, rank)) {
    std::memcpy(&span, arena.blobOf(rank) + index * sizeof(span), sizeof(span));
  }
  return span;
}

bool PeerMemory::isAnyOffered(const Arena& arena) {
  for (int rank = 0; rank < arena.ranks(); ++rank) {
    if (arena.isOffer(rank)) return true;
  }
  return false;
}

bool PeerMemory::areAllOffered(const Arena& arena) {
  for (int rank = 0; rank < arena.ranks(); ++rank) {
    if (!arena.isOffer(rank)) return false;
  }
  return true;
}

bool PeerMemory::isAnyNew(const Arena& arena) const {
  return isAnyOffered(arena) && !newIn(arena).empty();
}

// Returns the new regions in an order that is the same on all ranks, and no more than one arrival
// can report.
std::vector<PeerMemory::Name> PeerMemory::newIn(const Arena& arena) const {
  std::vector<Name> names;
  for (int rank = 0; rank < arena.ranks(); ++rank) {
    const size_t offers = offersOf(arena, rank);
    for (size_t index = 0; index < offers; ++index) {
      const Name name(rank, offerOf(arena, rank, index).region);
      const auto known = known_.find(name);
      const bool isKnown =
          known != known_.end() && (known->second.isUsable || known->second.tries == kMostTries);
      if (name.second == 0 || isKnown) continue;
      if (std::find(names.begin(), names.end(), name) != names.end()) continue;
      if (names.size() == Arrival::kInlineBytes) return names;
      names.push_back(name);
    }
  }
  return names;
}

Task PeerMemory::introduce(ShmGroup group) {
  Arena& arena = group.arena;
  Mailbox& mailbox = group.mailbox;
  const int ranks = arena.ranks();
  std::vector<Passing> passings;
  for (const auto& [owner, region] : newIn(arena)) {
    Passing& passing = passings.emplace_back();
    passing.owner = owner;
    passing.region = region;
  }
  forgetDropped();

  Batch messages(group);
  for (size_t i = 0; i < passings.size(); ++i) {
    Passing& passing = passings[i];
    if (passing.owner != self_) {
      passing.message = &messages.receive(passing.owner, spanOf(passing.bytes), i);
      continue;
    }
    passing.segment = SharedHeap::process().segmentOf(passing.region);
    passing.bytes = passing.segment ? passing.segment->bytes() : 0;
    for (int rank = 0; rank < ranks; ++rank) {
      if (rank != self_) messages.send(rank, spanOf(passing.bytes), i, passing.segment);
    }
  }
  co_await messages;
  MYCOLL_CO_RETURN_IF_ERROR(messages.status());

  char* const mapped = arena.beginBlob(passings.size());
  for (size_t i = 0; i < passings.size(); ++i) {
    Passing& passing = passings[i];
    if (passing.message && passing.bytes > 0) {
      const Status status =
          PeerRegions::map(passing.message->takeDescriptor(), passing.bytes, &passing.segment);
      if (!status.ok()) {
        MYCOLL_LOG_WARN("the shared tensors of %s are copied: %s",
                        mailbox.describeRank(passing.owner).c_str(), status.message().c_str());
      }
    }
    mapped[i] = passing.segment != nullptr;
  }
  arena.arrive(group.signature, passings.size(), 0);
  AllArrived arrived(arena, group.signature);
  co_await arrived;
  if (arrived.differingRank() >= 0) co_return arrivalMismatch(group, arrived);
  for (size_t i = 0; i < passings.size(); ++i) {
    Passing& passing = passings[i];
    Known& known = known_[{passing.owner, passing.region}];
    known.isUsable = true;
    ++known.tries;
    for (int rank = 0; rank < ranks; ++rank) {
      const char* theirs = arena.blobOf(rank);
      const bool isMapped = theirs && i < arena.blobBytesOf(rank) && theirs[i] != 0;
      known.isUsable &= isMapped;
    }
    if (passing.owner == self_) {
      known.own = passing.segment;
      known.retry = Deadline::after(PeerRegions::kTryAgain);
    } else if (known.isUsable) {
      known.segment = std::move(passing.segment);
    }
  }
  co_return Status();
}

const char* PeerMemory::find(int rank, const SharedSpan& offered) const {
  const auto known = known_.find({rank, offered.region});
  if (known == known_.end() || !known->second.segment) return nullptr;
  return SharedHeap::memoryAt(*known->second.segment, offered.offset, offered.bytes);
}

const char* PeerMemory::find(const Arena& arena, int rank, size_t index, size_t bytes) const {
  const SharedSpan offered = offerOf(arena, rank, index);
  return offered.bytes == bytes ? find(rank, offered) : nullptr;
}

// Region numbers are never reused, so it does not matter when a rank forgets one.
void PeerMemory::forgetDropped() {
  std::erase_if(known_, [&](const auto& entry) {
    const auto& [name, known] = entry;
    if (!known.isUsable) return false;
    if (name.first == self_) return known.own.expired();
    return SharedHeap::isDropped(*known.segment);
  });
}

}  // namespace mycoll
