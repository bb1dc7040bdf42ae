#include "collectives/shm/peer_memory.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "base/log.h"
#include "collectives/batch.h"
#include "collectives/shm/collectives.h"
#include "kernels/copy.h"
#include "transport/mailbox.h"
#include "transport/mesh.h"
#include "transport/shm/peer_regions.h"
#include "transport/shm/shared_heap.h"

namespace mycoll {
namespace {

// After so many introductions that failed, a region's tensors always go through the arena.
constexpr int kMostTries = 3;
// A few of these fit in the cache of a core.
constexpr size_t kViewBytes = 128 * 1024;

// A region that is passed to the other ranks.
struct Passing {
  int owner = 0;
  uint64_t region = 0;
  uint64_t bytes = 0;
  Transfer* message = nullptr;  // from the owner
  std::shared_ptr<Segment> segment;
};

// Ready when the group has failed: that will be because this rank's process has ended.
class GroupFailed final : public Condition {
 public:
  GroupFailed(const Arena& arena, int rank) : arena_(arena), rank_(rank) {}
  bool ready() override { return arena_.hasFailed() && !arena_.isFailing(); }
  std::vector<int> missing() const override { return {arena_.memberOf(rank_)}; }

 private:
  const Arena& arena_;
  const int rank_;
};

// In these calls a rank has a piece for each rank.
bool isForItself(OpKind kind, size_t piece, int self) {
  return (kind == OpKind::kAllToAll || kind == OpKind::kScatter) &&
         piece == static_cast<size_t>(self);
}

// Whether the process with this pid has the peer's uid, as only the peer has, at this address.
bool hasUid(const PeerAddress& peer, uint64_t address) {
  std::string uid(PeerAddress::kUidLength, '\0');
  return readProcess(peer.pid, uid.data(), address, uid.size()) == 0 && uid == peer.uid;
}

bool contains(const SharedSpan& offered, size_t offset, size_t bytes) {
  return offset <= offered.bytes && bytes <= offered.bytes - offset;
}

}  // namespace

std::vector<SharedSpan> PeerMemory::offer(const Arena& arena, const Call& call, const Spans& pieces,
                                          size_t bytes) {
  const bool isReduction = call.kind == OpKind::kAllReduce || call.kind == OpKind::kReduceScatter;
  question_.reset();
  if (bytes < SingleCopy::kLeastBytes) return {};
  if (pieces.size() * sizeof(SharedSpan) > arena.shape().smallBytes) return {};
  std::vector<SharedSpan> offered(pieces.size());
  const bool mayBeShared = bytes >= (isReduction ? kLeastSharedReduce : kLeastShared) &&
                           forced_ == SingleCopy::Choice::kUnknown;
  if (mayBeShared && offerShared(call.kind, pieces, &offered)) return offered;
  if (offerProcess(arena, call.kind, pieces, bytes, &offered)) return offered;
  return {};
}

// Memory of 0 bytes can always be offered, and also the piece that a rank has for itself.
bool PeerMemory::offerShared(OpKind kind, const Spans& pieces,
                             std::vector<SharedSpan>* offered) const {
  for (size_t i = 0; i < pieces.size(); ++i) {
    SharedSpan& span = (*offered)[i];
    span = {0, 0, pieces[i].bytes};
    if (pieces[i].bytes == 0 || isForItself(kind, i, self_)) continue;
    const SharedPlace place = SharedHeap::process().find(pieces[i]);
    if (place.region == 0) return false;
    const auto known = known_.find({self_, place.region});
    if (known != known_.end() && !known->second.isUsable &&
        (known->second.tries == kMostTries || !known->second.retry.expired())) {
      return false;
    }
    span.region = place.region;
    span.offset = place.offset;
  }
  return true;
}

bool PeerMemory::offerProcess(const Arena& arena, OpKind kind, const Spans& pieces, size_t bytes,
                              std::vector<SharedSpan>* offered) {
  using Choice = SingleCopy::Choice;
  if (use_ == SingleCopyUse::kOff || access_ == Access::kRefused) return false;
  Choice choice = forced_;
  if (choice == Choice::kUnknown && use_ == SingleCopyUse::kOn) choice = Choice::kDirect;
  const SingleCopy::Case which = SingleCopy::caseOf(kind, arena.ranks(), bytes);
  bool isAgain = false;
  if (choice == Choice::kUnknown) {
    const auto chosen = chosen_.find(which);
    if (chosen != chosen_.end()) {
      choice = chosen->second.way;
      isAgain = chosen->second.isDueAgain();
    }
  }
  if (choice == Choice::kStaged) return false;
  const bool isKnown = choice == Choice::kDirect && !isAgain;
  const uint64_t region = isKnown ? SharedSpan::kProcess : SharedSpan::kProcessUnmeasured;
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (!isForItself(kind, i, self_) && !isReadableByOthers(pieces[i])) return false;
    (*offered)[i] = {region, reinterpret_cast<uint64_t>(pieces[i].data), pieces[i].bytes};
  }
  if (!isKnown) question_ = Question{which, isAgain};
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

PeerMemory::News PeerMemory::newsIn(const Arena& arena) const {
  News news;
  if (!isAnyOffered(arena)) return news;
  news.isRegion = !newIn(arena).empty();
  for (int rank = 0; rank < arena.ranks(); ++rank) {
    const SharedSpan first = offerOf(arena, rank, 0);
    news.isProcess |= first.isOfProcess() && access_ == Access::kUnknown;
    news.isUnmeasured |= first.region == SharedSpan::kProcessUnmeasured;
  }
  return news;
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
      if (name.second == 0 || name.second >= SharedSpan::kProcessUnmeasured || isKnown) continue;
      if (std::find(names.begin(), names.end(), name) != names.end()) continue;
      if (names.size() == Arrival::kInlineBytes) return names;
      names.push_back(name);
    }
  }
  return names;
}

Task PeerMemory::introduceRegions(ShmGroup group) {
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
  MYCOLL_CO_RETURN_IF_ERROR(co_await shmArrive(group, passings.size()));
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

// ---- processes

Task PeerMemory::introduceProcesses(ShmGroup group) {
  Arena& arena = group.arena;
  const int ranks = arena.ranks();
  const PeerList& peers = group.mailbox.group().peers;
  if (use_ != SingleCopyUse::kOff) permitReading();
  const std::string& uid = peers[self_].uid;
  const auto address = reinterpret_cast<uint64_t>(uid.data());
  std::memcpy(arena.beginBlob(sizeof(address)), &address, sizeof(address));
  MYCOLL_CO_RETURN_IF_ERROR(co_await shmArrive(group, sizeof(address)));
  processes_.clear();
  processes_.resize(static_cast<size_t>(ranks));
  lives_.assign(static_cast<size_t>(ranks), {-1, POLLIN, 0});
  bool canReadAll = use_ != SingleCopyUse::kOff;
  for (int rank = 0; rank < ranks && canReadAll; ++rank) {
    if (rank == self_) continue;
    uint64_t theirs = 0;
    const char* const blob = arena.blobOf(rank);
    if (blob && arena.blobBytesOf(rank) == sizeof(theirs)) {
      std::memcpy(&theirs, blob, sizeof(theirs));
    }
    Process& process = processes_[rank];
    process = {peers[rank].pid, group.mailbox.mesh().descriptorOf(peers[rank])};
    canReadAll = process.fd && hasUid(peers[rank], theirs);
    if (canReadAll) lives_[rank].fd = process.fd->get();
  }
  // If all live, what this rank has read was those processes' memory.
  canReadAll = canReadAll && areAlive([](int) { return true; });
  *arena.beginBlob(1) = static_cast<char>(canReadAll);
  MYCOLL_CO_RETURN_IF_ERROR(co_await shmArrive(group, 1));
  access_ = Access::kGranted;
  for (int rank = 0; rank < ranks; ++rank) {
    const char* const blob = arena.blobOf(rank);
    if (!blob || arena.blobBytesOf(rank) != 1 || *blob == 0) access_ = Access::kRefused;
  }
  MYCOLL_LOG_DEBUG("group '%s': ranks %s read each other's memory",
                   group.mailbox.group().name.c_str(), hasAccess() ? "can" : "cannot");
  if (!hasAccess()) {
    lives_.clear();
    processes_.clear();
  }
  co_return Status();
}

template <typename Counts>
bool PeerMemory::areAlive(Counts counts) const {
  if (lives_.empty() || ::poll(lives_.data(), lives_.size(), 0) <= 0) return true;
  for (size_t rank = 0; rank < lives_.size(); ++rank) {
    if (lives_[rank].revents != 0 && counts(static_cast<int>(rank))) return false;
  }
  return true;
}

bool PeerMemory::areOwnersAlive(const Arena& arena) const {
  return areAlive([&arena](int rank) { return arena.isOffer(rank); });
}

// ---- reading

bool PeerMemory::readProcessOf(int rank, const SharedSpan& offered, size_t offset, const Span& to) {
  if (!hasAccess() || !contains(offered, offset, to.bytes)) return false;
  error_ = readProcess(processes_[rank].pid, to.data, offered.offset + offset, to.bytes);
  return error_ == 0;
}

const char* PeerMemory::view(const Arena& arena, int rank, size_t index, size_t offset,
                             size_t bytes) {
  error_ = 0;
  const SharedSpan offered = offerOf(arena, rank, index);  // it may change at any time
  if (!offered.isOfProcess()) return find(rank, offered, offset, bytes);
  if (bytes > kViewBytes) return nullptr;
  buffers_.resize(static_cast<size_t>(arena.ranks()));
  std::unique_ptr<char[]>& buffer = buffers_[rank];
  if (!buffer) buffer = std::make_unique_for_overwrite<char[]>(kViewBytes);
  return readProcessOf(rank, offered, offset, {buffer.get(), bytes}) ? buffer.get() : nullptr;
}

bool PeerMemory::read(const Arena& arena, int rank, size_t index, size_t offset, const Span& to,
                      bool isStreaming) {
  error_ = 0;
  const SharedSpan offered = offerOf(arena, rank, index);  // it may change at any time
  if (offered.isOfProcess()) return readProcessOf(rank, offered, offset, to);
  const char* const place = find(rank, offered, offset, to.bytes);
  if (place) copy(to.data, place, to.bytes, isStreaming);
  return place != nullptr;
}

size_t PeerMemory::viewBytes(const Arena& arena) {
  for (int rank = 0; rank < arena.ranks(); ++rank) {
    if (offerOf(arena, rank, 0).isOfProcess()) return kViewBytes;
  }
  return SIZE_MAX;
}

Task PeerMemory::unreadable(ShmGroup group, int rank) const {
  const std::string call =
      ", in collective #" + std::to_string(group.sequence) + ", " + group.signature.describe();
  const std::string who = group.mailbox.describeRank(rank);
  if (error_ == 0) {
    co_return Status(Code::kInternal, who + " offers memory that it has not shared" + call);
  }
  if (error_ == ESRCH || !areOwnersAlive(group.arena) || group.arena.isFailing() ||
      group.arena.hasFailed()) {
    GroupFailed failed(group.arena, rank);
    co_await failed;
    co_return group.arena.failure();
  }
  co_return Status(Code::kInternal, "the memory of " + who + " cannot be read (" +
                                        strerror(error_) + ")" + call +
                                        ". Set MYCOLL_SINGLE_COPY=off on all ranks");
}

const char* PeerMemory::find(int rank, const SharedSpan& offered, size_t offset,
                             size_t bytes) const {
  const auto known = known_.find({rank, offered.region});
  const bool isKnown = known != known_.end() && known->second.segment;
  if (!isKnown || !contains(offered, offset, bytes)) return nullptr;
  const char* const begin =
      SharedHeap::memoryAt(*known->second.segment, offered.offset, offered.bytes);
  return begin ? begin + offset : nullptr;
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
