#include "collectives/shm/arena.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <utility>

#include "base/os.h"
#include "base/text.h"
#include "kernels/copy.h"

namespace mycoll {
namespace {

constexpr size_t kLine = 128;
// The bulk areas of many ranks grow by this.
constexpr size_t kChunkUnit = 4096;

// Larger than any size that a leader would choose; too small to overflow.
constexpr size_t kMaxAreaBytes = size_t{1} << 32;
constexpr uint64_t kMaxAreas = 1024;

// If a rank's arrival shows no use of rounds, it is looked at in every kLookEvery-th collective.
constexpr uint64_t kLookEvery = 64;
// Ranks that are looked at in one collective, in turn.
constexpr int kLooksAtOnce = 2;

}  // namespace

struct Arena::Header {
  alignas(kLine) std::atomic<uint32_t> sleepers;
  enum : uint32_t { kAlive, kFailing, kFailed };
  alignas(kLine) std::atomic<uint32_t> state;
  uint32_t code;
  uint32_t textBytes;
  Cause cause;
  char text[3072];
  alignas(kLine) std::atomic<uint32_t> areNear;  // written by rank 0
};

struct Arena::Control {
  Arrival arrivals[2];  // by the parity of the collective's number
  struct alignas(kLine) Line {
    std::atomic<uint64_t> value;
  } counters[3];
  alignas(kLine) std::atomic<uint32_t> asleep;
  std::atomic<uint32_t> left;
  char reason[256];  // for leaving; ends with a zero
  Distance::Marks marks;
};

ArenaShape ArenaShape::enlarged() const {
  ArenaShape result = *this;
  result.smallBytes = std::max(smallBytes, static_cast<size_t>(ranks) * sizeof(uint64_t));
  result.chunkBytes =
      std::max(chunkBytes, roundUp(static_cast<size_t>(ranks) * kSliceUnit, kChunkUnit));
  result.areas = std::max<uint64_t>(areas, 1);
  return result;
}

bool ArenaShape::isUsable() const {
  const ArenaShape least = enlarged();
  return ranks > 0 && smallBytes >= least.smallBytes && chunkBytes >= least.chunkBytes &&
         areas >= least.areas && smallBytes <= kMaxAreaBytes && chunkBytes <= kMaxAreaBytes &&
         areas <= kMaxAreas && chunkBytes % kSliceUnit == 0;
}

Arena::Layout::Layout(const ArenaShape& shape) {
  const size_t page = pageBytes();
  header = roundUp(sizeof(Header), page);
  control = roundUp(sizeof(Control), page);
  small = roundUp(shape.smallBytes, page);
  chunk = roundUp(shape.chunkBytes, page);
  rank = control + 2 * small + shape.areas * chunk;
}

size_t ArenaShape::totalBytes() const {
  const Arena::Layout layout(*this);
  return layout.header + static_cast<size_t>(ranks) * layout.rank;
}

Arena::Arena(std::shared_ptr<Segment> segment, const ArenaShape& shape, int rank,
             std::vector<Bell> bells, std::vector<int> members, DistanceChoice distance)
    : segment_(std::move(segment)),
      shape_(shape),
      layout_(shape),
      rank_(rank),
      bells_(std::move(bells)),
      members_(std::move(members)),
      distance_(shape.ranks - 1, distance) {
  if (rank_ == 0) publishDistance();
}

Arena::Control& Arena::control(int rank) const {
  return *reinterpret_cast<Control*>(segment_->data() + layout_.header +
                                     static_cast<size_t>(rank) * layout_.rank);
}

const Arrival& Arena::arrival(int rank) const { return control(rank).arrivals[number_ & 1]; }

char* Arena::beginBlob(size_t bytes) {
  assert(bytes <= shape_.smallBytes || bytes <= Arrival::kInlineBytes);
  ++number_;
  freed_ = std::exchange(began_, base_);
  if (bytes <= Arrival::kInlineBytes) return control(rank_).arrivals[number_ & 1].inlined;
  return reinterpret_cast<char*>(&control(rank_)) + layout_.control + (number_ & 1) * layout_.small;
}

void Arena::arrive(const Signature& signature, size_t blobBytes, uint64_t rounds, bool isOffer) {
  Arrival& mine = control(rank_).arrivals[number_ & 1];
  assert(mine.number.load(std::memory_order_relaxed) < number_);  // once in each collective
  mine.signature = signature;
  mine.rounds = static_cast<uint32_t>(rounds);
  mine.isOffer = isOffer;
  mine.blobBytes = blobBytes;
  if (rank_ != 0 && looksAtDistance(mine)) Distance::mark(&control(rank_).marks, number_);
  // Releases the arrival and the blob; sequentially consistent because of the look at the sleepers
  // (setAsleep).
  mine.number.store(number_, std::memory_order_seq_cst);
  wakeSleepers();
}

bool Arena::looksAtDistance(const Arrival& theirs) const {
  return theirs.rounds > 0 || theirs.signature.bytes > shape_.smallBytes ||
         number_ % kLookEvery == 1;
}

void Arena::met() {
  if (rank_ != 0) return;
  for (int looks = std::min(kLooksAtOnce, shape_.ranks - 1); looks > 0; --looks) {
    const int rank = lastLook_ % (shape_.ranks - 1) + 1;
    if (!looksAtDistance(arrival(rank))) return;
    distance_.look(rank - 1, control(rank).marks, number_);
    lastLook_ = rank;
  }
  publishDistance();
}

// A hint: nothing is ordered by it.
void Arena::publishDistance() {
  auto& areNear = reinterpret_cast<Header*>(segment_->data())->areNear;
  const uint32_t are = distance_.areNear();
  if (areNear.load(std::memory_order_relaxed) != are) {
    areNear.store(are, std::memory_order_relaxed);
  }
}

bool Arena::isStreaming() const {
  const auto& areNear = reinterpret_cast<const Header*>(segment_->data())->areNear;
  return areNear.load(std::memory_order_relaxed) == 0;
}

void Arena::fill(char* to, const void* from, size_t bytes) const {
  copy(to, from, bytes, isStreaming());
}

const char* Arena::blobOf(int rank) const {
  const Arrival& theirs = arrival(rank);
  if (theirs.blobBytes <= Arrival::kInlineBytes) return theirs.inlined;
  if (theirs.blobBytes > shape_.smallBytes) return nullptr;
  return reinterpret_cast<const char*>(&control(rank)) + layout_.control +
         (number_ & 1) * layout_.small;
}

char* Arena::bulk(int rank, uint64_t round) const {
  assert(rank >= 0 && rank < shape_.ranks);
  return reinterpret_cast<char*>(&control(rank)) + layout_.control + 2 * layout_.small +
         ((base_ + round) % shape_.areas) * layout_.chunk;
}

bool Arena::isFirstAreaFree() const {
  const uint64_t rounds = roundsBefore(base_);
  if (rounds <= freed_) return true;
  for (int rank = 0; rank < shape_.ranks; ++rank) {
    const auto& done = control(rank).counters[static_cast<int>(Counter::kDone)].value;
    if (rank != rank_ && done.load(std::memory_order_acquire) < rounds) return false;
  }
  return true;
}

// Releases what this rank has written, and its reads: others may write there again. Sequentially
// consistent because of the look at the sleepers (setAsleep).
void Arena::publish(Counter counter, uint64_t roundsCompleted) {
  assert(!has(rank_, counter, roundsCompleted + 1));  // a collective may begin again
  control(rank_).counters[static_cast<int>(counter)].value.store(base_ + roundsCompleted,
                                                                 std::memory_order_seq_cst);
  wakeSleepers();
}

bool Arena::has(int rank, Counter counter, uint64_t roundsCompleted) const {
  return control(rank).counters[static_cast<int>(counter)].value.load(std::memory_order_acquire) >=
         base_ + roundsCompleted;
}

void Arena::endRounds(uint64_t rounds) {
  // No rank waits for more than was published: the next collective starts from here. Releases the
  // reads of this rank, as publish() does.
  for (auto& counter : control(rank_).counters) {
    counter.value.store(base_ + rounds, std::memory_order_release);
  }
  base_ += rounds;
}

void Arena::setAsleep(bool asleep) {
  Header& header = *reinterpret_cast<Header*>(segment_->data());
  if (asleep) {
    control(rank_).asleep.fetch_add(1, std::memory_order_seq_cst);
    header.sleepers.fetch_add(1, std::memory_order_seq_cst);
    // A rank that publishes either sees this one asleep, or this one sees what was published in its
    // last check, whose loads are only acquire.
    std::atomic_thread_fence(std::memory_order_seq_cst);
  } else {
    header.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    control(rank_).asleep.fetch_sub(1, std::memory_order_seq_cst);
  }
}

void Arena::wakeSleepers() const {
  const Header& header = *reinterpret_cast<const Header*>(segment_->data());
  if (header.sleepers.load(std::memory_order_seq_cst) == 0) return;
  for (int rank = 0; rank < shape_.ranks; ++rank) {
    if (rank != rank_ && control(rank).asleep.load(std::memory_order_seq_cst)) bells_[rank].ring();
  }
}

void Arena::wakeAll() const {
  for (int rank = 0; rank < shape_.ranks; ++rank) {
    if (rank != rank_) bells_[rank].ring();
  }
}

void Arena::fail(const Status& cause) {
  assert(!cause.ok());
  Header& header = *reinterpret_cast<Header*>(segment_->data());
  uint32_t alive = Header::kAlive;
  if (header.state.compare_exchange_strong(alive, Header::kFailing, std::memory_order_acq_rel)) {
    header.code = static_cast<uint32_t>(cause.code());
    header.cause = cause.cause();
    header.textBytes = static_cast<uint32_t>(std::min(cause.message().size(), sizeof(header.text)));
    std::memcpy(header.text, cause.message().data(), header.textBytes);
    header.state.store(Header::kFailed, std::memory_order_seq_cst);
  }
  // The program may write to its tensors after this, and a store does not wait for an earlier store
  // to become visible. Pairs with ReadInTime.
  std::atomic_thread_fence(std::memory_order_release);
  wakeAll();
}

bool Arena::hasFailed() const {
  const Header& header = *reinterpret_cast<const Header*>(segment_->data());
  return header.state.load(std::memory_order_relaxed) == Header::kFailed;  // failure() acquires
}

bool Arena::isFailing() const {
  const Header& header = *reinterpret_cast<const Header*>(segment_->data());
  return header.state.load(std::memory_order_acquire) == Header::kFailing;
}

Status Arena::failure() const {
  const Header& header = *reinterpret_cast<const Header*>(segment_->data());
  if (header.state.load(std::memory_order_acquire) != Header::kFailed) return Status();
  return statusFromPeer(
      static_cast<int>(header.code),
      std::string(header.text, std::min<size_t>(header.textBytes, sizeof(header.text))),
      header.cause);
}

void Arena::leave(std::string_view reason) {
  Control& own = control(rank_);
  reason = beginning(reason, sizeof(own.reason) - 1);
  std::memcpy(own.reason, reason.data(), reason.size());
  own.left.store(1, std::memory_order_seq_cst);
}

bool Arena::hasLeft(int rank) const {
  return control(rank).left.load(std::memory_order_seq_cst) != 0;
}

std::string Arena::reasonOf(int rank) const {
  if (!hasLeft(rank)) return {};
  const char* reason = control(rank).reason;
  return sanitized({reason, strnlen(reason, sizeof(Control::reason))});
}

bool AllArrived::ready() {
  for (; next_ < arena_.ranks(); ++next_) {
    if (next_ == arena_.rank()) continue;
    const Arrival& theirs = arena_.arrival(next_);
    if (theirs.number.load(std::memory_order_acquire) != arena_.number_) return false;
    if (!(theirs.signature == signature_)) {
      differing_ = next_;
      return true;
    }
  }
  if (!std::exchange(hasMet_, true)) arena_.met();
  return true;
}

std::vector<int> AllArrived::missing() const {
  std::vector<int> result;
  for (int rank = 0; rank < arena_.ranks(); ++rank) {
    if (rank != arena_.rank() &&
        arena_.arrival(rank).number.load(std::memory_order_acquire) != arena_.number_) {
      result.push_back(arena_.memberOf(rank));
    }
  }
  return result;
}

}  // namespace mycoll
