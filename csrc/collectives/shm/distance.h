// Distance: whether the cores on which a group's ranks run are near each other, which decides how
// staging memory is best written (benchmarks/README.md has the figures):
//   near  a line that another core has written comes from a cache that both share, sooner than from
//         memory. Ordinary stores are best;
//   far   it comes from that other core, later than from memory. Stores past the caches are best,
//         by a factor of up to 6.
// Nothing that can be asked tells it: threads move from core to core, and virtual machines say one
// thing and are another, from one second to the next. So it is measured, in passing: with a
// collective that is worth it every other rank writes a few lines of its own, and rank 0 times how
// long those of two ranks take to read. At most 1 us in all.
//
// Thread contract: as Arena. One object on each rank; the marks lie in shared memory, each written
// by one rank.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "base/env.h"

namespace mycoll {

class Distance {
 public:
  // Zeroed when new. Apart, so that reading one fetches no other.
  static constexpr int kMarks = 4;
  struct Marks {
    struct alignas(512) {
      std::atomic<uint64_t> value;
    } marks[kMarks + 1];  // the last is never meant
  };

  Distance(int ranks, DistanceChoice choice)
      : choice_(choice), histories_(ranks, 0), areNear_(choice == DistanceChoice::kNear) {}

  // Other ranks, right before they arrive at the collective of that number.
  static void mark(Marks* mine, uint64_t number);
  // Rank 0, after that rank has arrived. Nothing happens if it has not marked this collective.
  void look(int rank, const Marks& theirs, uint64_t number);
  // Each rank was near in most of its last looks; or what was chosen.
  bool areNear() const { return areNear_; }

 private:
  const DistanceChoice choice_;
  // Bits, the last look in the lowest: 1 for near.
  std::vector<uint8_t> histories_;
  bool areNear_ = false;
};

}  // namespace mycoll
