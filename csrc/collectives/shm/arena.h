// Arena: the shared memory in which the ranks of one host run a group's collectives, or their part
// of those that span hosts (collectives/run). Here, ranks are numbered within the host.
//
//   header          how many ranks sleep, how the group failed
//   rank 0          control lines | small[2] | bulk[areas]
//   rank 1          ...
//
// Each rank writes only its own part; the others read it. So every flag has a single writer.
//
// When a part may be reused. Every collective begins with an arrival, and no rank ends it before
// it has seen all arrivals. So a rank in collective n knows that all have finished n-2 (they
// arrived in n-1 after it), and a rank that has seen all arrivals of n knows that all have finished
// n-1. Hence:
//   small   two areas, by the parity of the collective's number: free when a collective begins;
//   bulk    free when all arrivals have been seen. The first one is often free earlier; it is then
//           filled before the arrival, so that ranks wait for each other once less:
//           isFirstAreaFree().
// Bulk areas are used round by round, in turn, also from one collective to the next; the counters
// never decrease. An area that was read long ago is faster to write through the caches.
//
// How a part is written depends on how near the ranks are (distance.h). Rank 0 publishes that, and
// each writer reads it before it writes: nothing else depends on it, so the ranks need not agree.
//
// Thread contract: one thread at a time (the one that runs the group's queue), except for the
// functions that are marked [any thread].
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/call.h"
#include "base/status.h"
#include "base/task.h"
#include "transport/bell.h"
#include "transport/shm/distance.h"
#include "transport/shm/segment.h"

namespace mycoll {

// Slices of bulk areas begin on cache lines, so that no element is split.
constexpr size_t kSliceUnit = 64;

// The same on all ranks of a group.
struct ArenaShape {
  int ranks = 1;
  size_t smallBytes = 32 * 1024;
  size_t chunkBytes = 256 * 1024;  // of a bulk area
  // Enough that a writer can be ahead of its readers, that the area which it fills has left their
  // caches, and that the one which they read has left its own.
  uint64_t areas = 8;

  // Whether it meets the needs of the algorithms: a bulk area has room for a slice of every rank,
  // and a small area for one size per rank.
  bool isUsable() const;
  // Returns the smallest usable shape that is no smaller in any field.
  ArenaShape enlarged() const;
  size_t totalBytes() const;
  bool operator==(const ArenaShape&) const = default;
};

// A rank publishes this when it arrives at a collective. Two cache lines: a few bytes of payload
// arrive with the flag, at no cost.
struct alignas(128) Arrival {
  std::atomic<uint64_t> number;  // of the collective, from 1; written last
  Signature signature;
  uint32_t rounds;     // for how many rounds this rank will fill its bulk areas
  uint32_t isOffer;    // the blob has the locations of its tensors: PeerMemory
  uint64_t blobBytes;  // published with the arrival: in `inlined`, or in the small area
  static constexpr size_t kInlineBytes = 80;
  char inlined[kInlineBytes];
};
static_assert(sizeof(Arrival) == 128);

// Rounds completed since the group was made.
enum class Counter { kFilled, kReduced, kDone };

class Arena {
 public:
  // bells, members: by rank. A new segment is zeroed. distance: rank 0's choice counts.
  Arena(std::shared_ptr<Segment> segment, const ArenaShape& shape, int rank,
        std::vector<Bell> bells, std::vector<int> members, DistanceChoice distance);

  int rank() const { return rank_; }
  int ranks() const { return shape_.ranks; }
  // The rank's number in the group.
  int memberOf(int rank) const { return members_[rank]; }
  const ArenaShape& shape() const { return shape_; }

  // ---- a collective
  // Begins the next collective: returns memory for up to smallBytes, which arrive() will publish.
  char* beginBlob(size_t bytes);
  void arrive(const Signature& signature, size_t blobBytes, uint64_t rounds, bool isOffer = false);
  // After all arrivals: what that rank published. Its blob is null if it claims an impossible size.
  uint64_t roundsOf(int rank) const { return arrival(rank).rounds; }
  bool isOffer(int rank) const { return arrival(rank).isOffer != 0; }
  size_t blobBytesOf(int rank) const { return arrival(rank).blobBytes; }
  const char* blobOf(int rank) const;

  // ---- its rounds, numbered from 0 in each collective
  char* bulk(int rank, uint64_t round) const;
  // The rounds that all ranks must have done before the area of this one may be filled.
  uint64_t roundsBefore(uint64_t round) const {
    return round < shape_.areas ? 0 : round + 1 - shape_.areas;
  }
  // After beginBlob, before arrive: whether no rank reads the area of round 0 any more.
  bool isFirstAreaFree() const;
  void publish(Counter counter, uint64_t roundsCompleted);
  bool has(int rank, Counter counter, uint64_t roundsCompleted) const;
  // All ranks call it with the same number, when they have finished their part.
  void endRounds(uint64_t rounds);

  // ---- filling, also blobs
  // Whether to write past the caches, or through them.
  bool isStreaming() const;
  void fill(char* to, const void* from, size_t bytes) const;

  // ---- [any thread]
  void setAsleep(bool asleep);
  // The first cause is kept, for all ranks of the host.
  void fail(const Status& cause);
  bool hasFailed() const;
  // A rank is writing the cause of a failure: the group has failed, but failure() is not known yet.
  bool isFailing() const;
  Status failure() const;
  // The others see it from then on. The reason may be empty; a long one is truncated.
  void leave(std::string_view reason);
  bool hasLeft(int rank) const;
  std::string reasonOf(int rank) const;
  void wakeAll() const;

 private:
  friend class AllArrived;
  friend struct ArenaShape;
  struct Header;
  struct Control;
  // Sizes in bytes, all of them whole pages: each rank's parts are placed near it.
  struct Layout {
    explicit Layout(const ArenaShape& shape);
    size_t header, control, small, chunk, rank;
  };

  Control& control(int rank) const;
  const Arrival& arrival(int rank) const;
  void wakeSleepers() const;
  bool looksAtDistance(const Arrival& theirs) const;
  // Called when all ranks have arrived at the current collective.
  void met();
  void publishDistance();

  std::shared_ptr<Segment> segment_;
  const ArenaShape shape_;
  const Layout layout_;
  const int rank_;
  std::vector<Bell> bells_;
  const std::vector<int> members_;
  uint64_t number_ = 0;  // of the current collective
  uint64_t base_ = 0;    // rounds before the current collective
  uint64_t began_ = 0;   // base_ when the current collective began
  uint64_t freed_ = 0;   // base_ when the previous one began: all ranks have finished these rounds
  Distance distance_;    // kept by rank 0
  int lastLook_ = 0;     // the rank that was last looked at
};

// Ready when all ranks have arrived at the current collective, and their calls agree with this
// rank's; or when a call differs.
class AllArrived final : public Condition {
 public:
  AllArrived(Arena& arena, const Signature& signature) : arena_(arena), signature_(signature) {}
  bool ready() override;
  // -1, or the first rank found whose call differs (its number in the group), and the signature of
  // that call.
  int differingRank() const { return differing_ < 0 ? -1 : arena_.memberOf(differing_); }
  Signature differingSignature() const { return arena_.arrival(differing_).signature; }
  std::vector<int> missing() const override;
  bool isExact() const override { return true; }

 private:
  Arena& arena_;
  const Signature& signature_;
  int next_ = 0;
  int differing_ = -1;
  bool hasMet_ = false;
};

// Ready at the second look. A rank that never has to wait, because it is the slowest, pauses
// between pieces of its work: its thread can look for signals, deadlines and the events of other
// groups.
class Pause : public Condition {
 public:
  bool ready() override { return std::exchange(isLookedAt_, true); }

 private:
  bool isLookedAt_ = false;
};

// Ready when one rank, or all of them, have completed this many rounds; a Pause in any case.
class RoundReached final : public Pause {
 public:
  RoundReached(const Arena& arena, int rank, Counter counter, uint64_t rounds)
      : arena_(arena), counter_(counter), rounds_(rounds), next_(rank), end_(rank + 1) {}
  RoundReached(const Arena& arena, Counter counter, uint64_t rounds)
      : arena_(arena), counter_(counter), rounds_(rounds), next_(0), end_(arena.ranks()) {}
  bool ready() override { return Pause::ready() && isReached(); }
  bool isReached() {
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
  bool isExact() const override { return true; }

 private:
  const Arena& arena_;
  const Counter counter_;
  const uint64_t rounds_;
  int next_;
  const int end_;
};

}  // namespace mycoll
