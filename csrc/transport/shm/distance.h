// Distance: whether the cores on which processes run are near each other, which decides how one
// process should write memory for another (benchmarks/README.md has the figures):
//   near  a line that another core has written comes from a cache that both share, sooner than from
//         memory. Ordinary stores are best;
//   far   it comes from that other core, later than from memory. Stores past the caches are best,
//         by a factor of up to 6.
// No system interface reports the distance: threads move from core to core, and the topology that a
// virtual machine reports may be wrong and may change from one second to the next. So it is
// measured in passing: beside data that is worth it, the other processes write a few lines of their
// own, and one process times how long it takes to read them, 0.5 us at most. In a group that is
// rank 0, with every large collective; in a link it is the receiver, whenever the ring begins
// again.
//
// Thread contract: that of the arena or the link it belongs to. The marks are in shared memory,
// each written by one process.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "base/env.h"

namespace mycoll {

class Distance {
 public:
  // Zero when new. Spaced apart, so that reading one mark does not fetch another.
  static constexpr int kMarks = 4;
  struct Marks {
    struct alignas(512) {
      std::atomic<uint64_t> value;
    } marks[kMarks + 1];  // the last is read only if a mark differs
  };

  // others: the number of processes to measure, numbered from 0.
  Distance(int others, DistanceChoice choice)
      : choice_(choice), histories_(others, 0), areNear_(choice == DistanceChoice::kNear) {}

  // Called by the others, right before they publish data under that number, which never repeats.
  static void mark(Marks* mine, uint64_t number);
  // Measures after the data was published. Does nothing if they have not marked this number.
  void look(int other, const Marks& theirs, uint64_t number);
  // Whether each was near in the latest measurement and in most of the last few, or what was
  // chosen. A wrong `near` costs more than a wrong `far`.
  bool areNear() const { return areNear_; }

 private:
  const DistanceChoice choice_;
  // One bit for each measurement, the latest in the lowest: 1 for near.
  std::vector<uint8_t> histories_;
  bool areNear_ = false;
};

}  // namespace mycoll
