// Arena: the shared memory in which the ranks of one host run a group's collectives, or their part
// of those that span hosts (collectives/run). Ranks are counted among those of the host here.
//
//   header          who sleeps, how the group failed
//   rank 0          control lines | small[2] | bulk[areas]
//   rank 1          ...
//
// Each rank writes only its own part; the others read it. That makes every flag single-writer.
//
// How a part may be reused without asking. Every collective begins with an arrival, and ends on no
// rank before that rank has seen all arrivals. So whoever is in collective n knows that all have
// finished n-2 (they arrived in n-1 after it), and whoever has seen all arrivals of n knows that
// all have finished n-1. Hence:
//   small   two areas, by the parity of the collective's number: free when a collective begins;
//   bulk    free when all arrivals were seen. The first one is often free before, and is then
//           filled with the arrival, so that ranks wait for each other once less:
//           isFirstAreaFree().
// Bulk areas are used round by round, with counters that never go back, in turn also from one
// collective to the next: an area that was read long ago is quicker to write through the caches.
//
// How a part is written depends on how near the ranks are (distance.h). Rank 0 knows, and each
// writer asks before it writes: nothing else depends on it, so they need not agree.
//
// Thread contract: one thread at a time (the one that runs the group's queue), but for setAsleep,
// failure and fail [any thread].
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/call.h"
#include "base/status.h"
#include "base/task.h"
#include "transport/bell.h"
#include "transport/shm/distance.h"
#include "transport/shm/segment.h"

namespace mycoll {

// Slices of bulk areas begin on lines of cache, which also keeps every element whole.
constexpr size_t kSliceUnit = 64;

// The same on all ranks of a group.
struct ArenaShape {
  int ranks = 1;
  size_t smallBytes = 32 * 1024;
  size_t chunkBytes = 256 * 1024;  // a bulk area
  // So many that a writer can be ahead of its readers, and that what it fills has left their
  // caches, and what they read has left its own.
  uint64_t areas = 8;

  // What the algorithms need: a bulk area has room for a slice of every rank, and a small area for
  // a size to each.
  bool isUsable() const;
  // The least such shape that is no smaller in anything.
  ArenaShape enlarged() const;
  size_t rankBytes() const;
  size_t totalBytes() const;
  bool operator==(const ArenaShape&) const = default;
};

// What a rank says when it comes to a collective. Two lines of cache: a few bytes of payload come
// with the flag, for free.
struct alignas(128) Arrival {
  std::atomic<uint64_t> number;  // of the collective, from 1; written last
  Signature signature;
  uint32_t rounds;     // for how many rounds this rank will fill its bulk areas
  uint32_t isOffer;    // the blob says where its tensors lie: PeerMemory
  uint64_t blobBytes;  // published with the arrival: in `inlined`, or in the small area
  static constexpr size_t kInlineBytes = 80;
  char inlined[kInlineBytes];
};
static_assert(sizeof(Arrival) == 128);

// Rounds completed since the group was made.
enum class Counter { kFilled, kReduced, kDone };

class Arena {
 public:
  // bells, members: by rank. The segment is zeroed when new. distance: what rank 0 says counts.
  Arena(std::shared_ptr<Segment> segment, const ArenaShape& shape, int rank,
        std::vector<Bell> bells, std::vector<int> members, DistanceChoice distance);

  int rank() const { return rank_; }
  int ranks() const { return shape_.ranks; }
  // Which rank of the group that is.
  int memberOf(int rank) const { return members_[rank]; }
  const ArenaShape& shape() const { return shape_; }

  // ---- a collective
  // Begins the next one: returns where to put up to smallBytes that arrive() will publish.
  char* beginBlob(size_t bytes);
  void arrive(const Signature& signature, size_t blobBytes, uint64_t rounds, bool isOffer = false);
  // After all arrivals: what that rank said. Its blob is null when it claims an impossible size.
  uint64_t roundsOf(int rank) const { return arrival(rank).rounds; }
  bool isOffer(int rank) const { return arrival(rank).isOffer != 0; }
  size_t blobBytesOf(int rank) const { return arrival(rank).blobBytes; }
  const char* blobOf(int rank) const;

  // ---- its rounds, numbered from 0 in each collective
  char* bulk(int rank, uint64_t round) const;
  // How many rounds all must have done before the area of this one may be filled.
  uint64_t roundsBefore(uint64_t round) const {
    return round < shape_.areas ? 0 : round + 1 - shape_.areas;
  }
  // After beginBlob, before arrive: nobody reads the area of round 0 any more.
  bool isFirstAreaFree() const;
  void publish(Counter counter, uint64_t roundsCompleted);
  bool has(int rank, Counter counter, uint64_t roundsCompleted) const;
  // All ranks call it with the same number, when they have finished their part.
  void endRounds(uint64_t rounds);

  // ---- filling, also blobs
  // Past the caches, or through them.
  bool isStreaming() const;
  void fill(char* to, const void* from, size_t bytes) const;

  // ---- [any thread]
  void setAsleep(bool asleep);
  // First cause wins, on all ranks of the host.
  void fail(const Status& cause);
  bool hasFailed() const;
  Status failure() const;
  // The others see it from then on. The reason may be empty; of a long one, the beginning.
  void leave(std::string_view reason);
  bool hasLeft(int rank) const;
  std::string reasonOf(int rank) const;
  void wakeAll() const;

 private:
  friend class AllArrived;
  friend struct ArenaShape;
  struct Header;
  struct Control;

  Control& control(int rank) const;
  const Arrival& arrival(int rank) const;
  void wakeSleepers() const;
  bool looksAtDistance(const Arrival& theirs) const;
  // All have come to the current collective.
  void met();
  void tellDistance();

  std::shared_ptr<Segment> segment_;
  const ArenaShape shape_;
  const int rank_;
  const size_t rankBytes_;
  std::vector<Bell> bells_;
  const std::vector<int> members_;
  uint64_t number_ = 0;  // of the current collective
  uint64_t base_ = 0;    // rounds before the current collective
  uint64_t began_ = 0;   // base_ when the current collective began
  uint64_t freed_ = 0;   // when the last one began: so many rounds all ranks have finished
  Distance distance_;    // kept by rank 0
  int lastLook_ = 0;     // at which rank
};

// All ranks have come to the current collective, and their calls agree with mine.
class AllArrived final : public Condition {
 public:
  AllArrived(Arena& arena, const Signature& signature) : arena_(arena), signature_(signature) {}
  bool ready() override;
  // -1, or the first rank found to have been called differently (which one of the group), and what
  // it was called for.
  int differingRank() const { return differing_ < 0 ? -1 : arena_.memberOf(differing_); }
  Signature differingSignature() const { return arena_.arrival(differing_).signature; }
  std::vector<int> missing() const override;

 private:
  Arena& arena_;
  const Signature& signature_;
  int next_ = 0;
  int differing_ = -1;
  bool hasMet_ = false;
};

// Some rank, or all of them, have completed so many rounds.
class RoundReached final : public Condition {
 public:
  RoundReached(const Arena& arena, int rank, Counter counter, uint64_t rounds)
      : arena_(arena), counter_(counter), rounds_(rounds), next_(rank), end_(rank + 1) {}
  RoundReached(const Arena& arena, Counter counter, uint64_t rounds)
      : arena_(arena), counter_(counter), rounds_(rounds), next_(0), end_(arena.ranks()) {}
  bool ready() override {
    while (next_ < end_ && (next_ == arena_.rank() || arena_.has(next_, counter_, rounds_))) {
      ++next_;
    }
    return next_ == end_;
  }
  std::vector<int> missing() const override {
    std::vector<int> result;
    for (int rank = next_; rank < end_; ++rank) {
      if (rank == arena_.rank() || arena_.has(rank, counter_, rounds_)) continue;
      result.push_back(arena_.memberOf(rank));
    }
    return result;
  }

 private:
  const Arena& arena_;
  const Counter counter_;
  const uint64_t rounds_;
  int next_;
  const int end_;
};

}  // namespace mycoll
