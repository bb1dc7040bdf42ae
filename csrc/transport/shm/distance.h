// Distance: whether the cores on which processes run are near each other, which decides how memory
// that one fills for another is best written (benchmarks/README.md has the figures):
//   near  a line that another core has written comes from a cache that both share, sooner than from
//         memory. Ordinary stores are best;
//   far   it comes from that other core, later than from memory. Stores past the caches are best,
//         by a factor of up to 6.
// Nothing that can be asked tells it: threads move from core to core, and virtual machines say one
// thing and are another, from one second to the next. So it is measured, in passing: beside what is
// worth it the others write a few lines of their own, and one process times how long those take to
// read, 0.5 us at most. In a group that is rank 0, with every collective that is large; in a link
// it is the receiver, whenever the ring begins anew.
//
// Thread contract: that of the arena or the link it belongs to. The marks lie in shared memory,
// each written by one process.
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

  // others: how many may be looked at, numbered from 0.
  Distance(int others, DistanceChoice choice)
      : choice_(choice), histories_(others, 0), areNear_(choice == DistanceChoice::kNear) {}

  // Others, right before what they publish under that number, which never repeats.
  static void mark(Marks* mine, uint64_t number);
  // After it was published. Nothing happens if they have not marked this number.
  void look(int other, const Marks& theirs, uint64_t number);
  // Each was near at the last look and in most of the last few; or what was chosen. To be wrong
  // with near costs more.
  bool areNear() const { return areNear_; }

 private:
  const DistanceChoice choice_;
  // Bits, the last look in the lowest: 1 for near.
  std::vector<uint8_t> histories_;
  bool areNear_ = false;
};

}  // namespace mycoll
