// CopyTrials: chooses the way of large messages that this process receives from others of its host:
// staging, or SingleCopy. The messages themselves are timed. Those that are received at the same
// time take the same way; they form a round, from the first data to the end of the last message.
// Rounds of the two ways alternate. So a round includes what both processes do for a message, each
// on its core. It includes neither the wait of a message for its receive, nor the wait of a receive
// for the sender's core: where ranks outnumber cores, another rank computes meanwhile.
//
// The receiver alone chooses: the sender offers each large message both ways.
//
// Thread contract: the mesh's I/O lock. SingleCopy keeps the results for the process.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "transport/io_lock.h"
#include "transport/shm/single_copy.h"

namespace mycoll {

class CopyTrials {
 public:
  // The way of a message that is now received. *isTimed: end() must be called for it.
  SingleCopy::Choice begin(size_t bytes, bool* isTimed) REQUIRES(ioRole);
  // The data of a message that is timed begins to arrive.
  void onData() REQUIRES(ioRole) {
    if (round_.began == Clock::time_point()) round_.began = Clock::now();
  }
  // It has been received this way. Or isOk is false, and its round does not count.
  void end(SingleCopy::Choice way, bool isOk) REQUIRES(ioRole);

 private:
  using Clock = std::chrono::steady_clock;
  // Later messages join no round that has so many: where one follows another without a pause, a
  // round must end, too.
  static constexpr int kMostMessages = 32;
  // If single copy was chosen, it is measured again after so many messages: while other programs
  // occupy a core, staging takes long, as it needs both ranks.
  static constexpr uint64_t kAgain = 256;
  struct Round {
    SingleCopy::Case of{};
    SingleCopy::Choice way{};
    Clock::time_point began{};
    int messages = 0, unfinished = 0;
    size_t bytes = 0;
    bool isSpoiled = false;
  };
  // The messages of one size: the times of rounds, in microseconds for 2^logBytes bytes. The first
  // round of each way waits for pages and fills caches.
  struct Trial {
    SingleCopy::Chosen chosen;
    std::vector<float> staged, direct;
  };

  Round round_ GUARDED_BY(ioRole);
  std::map<SingleCopy::Case, Trial> trials_ GUARDED_BY(ioRole);
};

}  // namespace mycoll
