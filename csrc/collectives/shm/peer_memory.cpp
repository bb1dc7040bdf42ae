#include "collectives/shm/peer_memory.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/log.h"
#include "base/sha256.h"
#include "collectives/batch.h"
#include "collectives/shm/collectives.h"
#include "transport/shm/link.h"
#include "transport/shm/shared_heap.h"

namespace mycoll {
namespace {

// What the owner of a region tells a rank of it.
struct Word {
  uint64_t bytes = 0;
  char cookie[kCookieBytes] = {};

  std::string cookieText() const { return std::string(cookie, sizeof(cookie)); }
};

// A descriptor on its way between two ranks.
struct Passing {
  int owner = 0;
  uint64_t region = 0;
  std::vector<Word> words;        // by rank; others than the owner use their own only
  std::vector<uint64_t> areSent;  // the same
  std::shared_ptr<Segment> segment;
};

template <typename T>
Span spanOf(T& value) {
  return {&value, sizeof(value)};
}

Status describe(const Mailbox& mailbox, Passing& passing) {
  passing.segment = SharedHeap::process().segmentOf(passing.region);
  for (Word& word : passing.words) {
    word.bytes = passing.segment ? passing.segment->bytes() : 0;
    MYCOLL_RETURN_IF_ERROR(randomBytes(word.cookie, sizeof(word.cookie)));
    const std::string prefix = mailbox.fdPrefix();
    std::memcpy(word.cookie, prefix.data(), prefix.size());
  }
  return Status();
}

// What another rank has sent of it. Nothing where that cannot be mapped, which is no failure.
void adopt(Mailbox& mailbox, Passing& passing) {
  const Word& word = passing.words[mailbox.rank()];
  if (!passing.areSent[mailbox.rank()]) return;
  Fd fd = mailbox.takeFd(passing.owner, word.cookieText());
  Status status(Code::kNetwork, "shared tensors: the descriptor did not come");
  if (fd.isOpen() && word.bytes >= SharedHeap::kHeadBytes) {
    status = Segment::adopt(std::move(fd), word.bytes, &passing.segment, Segment::Access::kReadOnly,
                            /*useHugePages=*/true);
  }
  if (!status.ok()) {
    MYCOLL_LOG_WARN("tensors of %s are copied: %s", mailbox.describeRank(passing.owner).c_str(),
                    status.message().c_str());
  }
}

}  // namespace

bool PeerMemory::offer(const Span& mine, SharedSpan* offered) const {
  *offered = {0, 0, mine.bytes};
  if (mine.bytes == 0) return true;
  const SharedPlace place = SharedHeap::process().find(mine);
  if (place.region == 0) return false;
  const auto known = known_.find({self_, place.region});
  if (known != known_.end() && !known->second.isUsable) return false;
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

// In an order that is the same on all ranks, and no more than one arrival can tell about.
std::vector<PeerMemory::Name> PeerMemory::newIn(const Arena& arena) const {
  std::vector<Name> names;
  for (int rank = 0; rank < arena.ranks(); ++rank) {
    const size_t offers = offersOf(arena, rank);
    for (size_t index = 0; index < offers; ++index) {
      const Name name(rank, offerOf(arena, rank, index).region);
      if (name.second == 0 || known_.contains(name)) continue;
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
    passings.push_back({owner, region, std::vector<Word>(ranks), std::vector<uint64_t>(ranks), {}});
    if (owner == self_) MYCOLL_CO_RETURN_IF_ERROR(describe(mailbox, passings.back()));
  }
  forgetDropped();

  Batch words(mailbox, group.sequence, group.signature);
  for (size_t i = 0; i < passings.size(); ++i) {
    Passing& passing = passings[i];
    if (passing.owner != self_) {
      words.receive(passing.owner, spanOf(passing.words[self_]), 2 * i);
      continue;
    }
    for (int rank = 0; rank < ranks; ++rank) {
      if (rank != self_) words.send(rank, spanOf(passing.words[rank]), 2 * i);
    }
  }
  co_await words;
  MYCOLL_CO_RETURN_IF_ERROR(words.status());

  // The words have left, so there is a connection to each.
  Batch sent(mailbox, group.sequence, group.signature);
  for (size_t i = 0; i < passings.size(); ++i) {
    Passing& passing = passings[i];
    if (passing.owner != self_) {
      sent.receive(passing.owner, spanOf(passing.areSent[self_]), 2 * i + 1);
      continue;
    }
    for (int rank = 0; rank < ranks; ++rank) {
      if (rank == self_) continue;
      passing.areSent[rank] = passing.segment && mailbox.sendFd(rank, passing.segment->fd(),
                                                                passing.words[rank].cookieText());
      sent.send(rank, spanOf(passing.areSent[rank]), 2 * i + 1);
    }
  }
  co_await sent;
  MYCOLL_CO_RETURN_IF_ERROR(sent.status());

  char* const mapped = arena.beginBlob(passings.size());
  for (size_t i = 0; i < passings.size(); ++i) {
    if (passings[i].owner != self_) adopt(mailbox, passings[i]);
    mapped[i] = passings[i].segment != nullptr;
  }
  arena.arrive(group.signature, passings.size(), 0);
  AllArrived arrived(arena, group.signature);
  co_await arrived;
  if (arrived.differingRank() >= 0) co_return shmMismatch(group, arrived);
  for (size_t i = 0; i < passings.size(); ++i) {
    Passing& passing = passings[i];
    Known& known = known_[{passing.owner, passing.region}];
    known.isUsable = true;
    for (int rank = 0; rank < ranks; ++rank) {
      const char* theirs = arena.blobOf(rank);
      known.isUsable &= theirs && i < arena.blobBytesOf(rank) && theirs[i] != 0;
    }
    if (passing.owner == self_) {
      known.own = passing.segment;
    } else if (known.isUsable) {
      known.segment = std::move(passing.segment);
    }
  }
  co_return Status();
}

const char* PeerMemory::find(int rank, const SharedSpan& offered) const {
  const auto known = known_.find({rank, offered.region});
  if (known == known_.end() || !known->second.segment) return nullptr;
  const Segment& segment = *known->second.segment;
  if (offered.offset < SharedHeap::kHeadBytes || offered.offset > segment.bytes() ||
      offered.bytes > segment.bytes() - offered.offset) {
    return nullptr;
  }
  return segment.data() + offered.offset;
}

// The numbers of regions are never used again, so it does not matter which rank forgets one when.
void PeerMemory::forgetDropped() {
  std::erase_if(known_, [&](const auto& entry) {
    const auto& [name, known] = entry;
    if (!known.isUsable) return false;
    if (name.first == self_) return known.own.expired();
    const auto* head = reinterpret_cast<const RegionHead*>(known.segment->data());
    return head->isDropped.load(std::memory_order_acquire) != 0;
  });
}

}  // namespace mycoll
