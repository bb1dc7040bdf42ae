// A benchmark of the recorder: the three calls that the engine makes for an operation.
// MYCOLL_TRACE_ENTRIES=0 measures the cost of the clock alone.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include "observe/recorder.h"

int main() {
  using Clock = std::chrono::steady_clock;
  constexpr int kRounds = 21, kOperations = 200'000;
  mycoll::GroupRecord group({"bench", 1, 0, 2, {}});
  mycoll::Operation operation;
  operation.signature.kind = mycoll::OpKind::kAllReduce;
  operation.inBytes = operation.outBytes = 4;
  std::vector<double> recorded, clocks;
  for (int round = 0; round < kRounds; ++round) {
    auto begin = Clock::now();
    for (int i = 0; i < kOperations; ++i) {
      operation.sequence = static_cast<uint64_t>(i);
      // The engine has read the clock before this, for the deadline.
      const auto record = group.enqueue(operation, begin.time_since_epoch().count(), true);
      group.setSubmitted(operation.sequence + 1);
      record.finish(true, mycoll::steadyNanos());
    }
    recorded.push_back(std::chrono::duration<double, std::nano>(Clock::now() - begin).count() /
                       kOperations);
    begin = Clock::now();
    int64_t sum = 0;
    for (int i = 0; i < kOperations; ++i) sum += mycoll::steadyNanos();
    if (sum == 1) std::puts("");
    clocks.push_back(std::chrono::duration<double, std::nano>(Clock::now() - begin).count() /
                     kOperations);
  }
  std::sort(recorded.begin(), recorded.end());
  std::sort(clocks.begin(), clocks.end());
  std::printf("an operation's record: %.1f ns, of which reading the clock: %.1f ns\n",
              recorded[kRounds / 2], clocks[kRounds / 2]);
  return 0;
}
