// How near the ranks of a host are to each other: it is measured, all ranks agree on it, and
// results do not depend on it.
#include "transport/shm/distance.h"

#include <memory>
#include <numeric>
#include <vector>

#include "collectives/shm/arena.h"
#include "test.h"
#include "world.h"

using namespace mycoll;
using test::Links;
using test::runWorld;

namespace {

// A thread is near itself, but another program may interrupt some measurements.
constexpr int kPatience = 1000;

// The arenas of all ranks, used by one thread.
struct Ranks {
  Ranks(int ranks, DistanceChoice choice) {
    ArenaShape shape;
    shape.ranks = ranks;
    std::shared_ptr<Segment> segment;
    ASSERT(Segment::create(shape.totalBytes(), &segment).ok());
    std::vector<int> members(ranks);
    std::iota(members.begin(), members.end(), 0);
    for (int rank = 0; rank < ranks; ++rank) {
      arenas.push_back(
          std::make_unique<Arena>(segment, shape, rank, std::vector<Bell>(ranks), members, choice));
    }
  }

  // Runs a collective in which rank 0 fills a round, and the others, too, unless they only take it.
  // Returns whether the ranks then bypass their caches.
  bool isStreaming(bool onlyTake = false) {
    Signature signature;
    if (onlyTake) signature.bytes = 1 << 20;
    for (auto& arena : arenas) {
      arena->beginBlob(0);
      arena->arrive(signature, 0, onlyTake && arena->rank() > 0 ? 0 : 1);
    }
    for (auto& arena : arenas) {
      AllArrived arrived(*arena, signature);
      ASSERT(arrived.ready());
      arena->endRounds(1);
    }
    size_t streaming = 0;
    for (auto& arena : arenas) streaming += arena->isStreaming();
    ASSERT(streaming == 0 || streaming == arenas.size());
    return streaming > 0;
  }

  std::vector<std::unique_ptr<Arena>> arenas;
};

}  // namespace

TEST(Distance, isKnownAfterSeveralMeasurements) {
  Distance distance(1, DistanceChoice::kMeasured);
  const auto marks = std::make_unique<Distance::Marks>();
  EXPECT(!distance.areNear());
  uint64_t number = 1;
  Distance::mark(marks.get(), number);
  distance.look(0, *marks, number);
  EXPECT(!distance.areNear());
  while (!distance.areNear() && number < kPatience) {
    Distance::mark(marks.get(), ++number);
    distance.look(0, *marks, number);
  }
  EXPECT(distance.areNear());
}

TEST(Distance, needsEveryRankAndItsMarks) {
  Distance distance(2, DistanceChoice::kMeasured);
  const auto marks = std::make_unique<Distance::Marks>();
  for (uint64_t number = 1; number < kPatience; ++number) {
    Distance::mark(marks.get(), number);
    distance.look(0, *marks, number);
    distance.look(1, *marks, number + 1);  // a mark that has not been set
  }
  EXPECT(!distance.areNear());
}

TEST(Distance, mayBeSetByTheUser) {
  const auto marks = std::make_unique<Distance::Marks>();
  Distance near(1, DistanceChoice::kNear), far(1, DistanceChoice::kFar);
  EXPECT(near.areNear());
  for (uint64_t number = 1; number < kPatience; ++number) {
    Distance::mark(marks.get(), number);
    far.look(0, *marks, number);
  }
  EXPECT(!far.areNear());
}

TEST(Distance, allRanksFollowRankZero) {
#if defined(__SANITIZE_THREAD__)
  SKIP("measurements take too long under TSan to distinguish near from far");
#endif
  for (const bool onlyTake : {false, true}) {
    for (int ranks : {2, 3, 6}) {
      Ranks measured(ranks, DistanceChoice::kMeasured);
      EXPECT(measured.isStreaming(onlyTake));
      // So few collectives that all of them are measured.
      for (int i = 0; i < 50 && measured.isStreaming(onlyTake); ++i) continue;
      EXPECT(!measured.isStreaming(onlyTake));
    }
  }
  Ranks near(2, DistanceChoice::kNear), far(2, DistanceChoice::kFar);
  for (int i = 0; i < 100; ++i) {
    EXPECT(!near.isStreaming());
    EXPECT(far.isStreaming());
  }
}

// Odd sizes around the borders of chunks, with collectives of several rounds: a sum in place, a sum
// elsewhere, and an average.
TEST(Distance, resultsDoNotDependOnIt) {
  for (const char* choice : {"near", "far", "measured"}) {
    test::ScopedEnv distance("MYCOLL_DISTANCE", choice);
    for (int ranks = 2; ranks <= 4; ++ranks) {
      runWorld(ranks, Links::kShm, [&](Communicator& group) {
        for (size_t count : {300, 8'191, 70'001, 262'144, 262'147, 600'011}) {
          if (test::isShort() && count > 100'000 && count != 262'147) continue;
          for (int repeat = 0; repeat < 3; ++repeat) {
            std::vector<int64_t> data(count), gathered(count * static_cast<size_t>(ranks));
            std::vector<int64_t> elsewhere(count);
            std::vector<int64_t>& result = repeat == 1 ? elsewhere : data;
            for (size_t i = 0; i < count; ++i) {
              data[i] = static_cast<int64_t>(i * 31) + group.rank() * 1'000'003 + repeat;
            }
            auto span = [](std::vector<int64_t>& of, size_t from, size_t length) {
              return Span{of.data() + from, length * 8};
            };
            Call gather;
            gather.kind = OpKind::kAllGather;
            gather.dtype = DType::kInt64;
            gather.elementBytes = 8;
            gather.in = {span(data, 0, count)};
            Call reduce = gather;
            reduce.kind = OpKind::kAllReduce;
            reduce.reduceOp = repeat == 2 ? ReduceOp::kAvg : ReduceOp::kSum;
            reduce.out = {span(result, 0, count)};
            for (int rank = 0; rank < ranks; ++rank) {
              gather.out.push_back(span(gathered, static_cast<size_t>(rank) * count, count));
            }
            ASSERT(group.wait(group.submit(gather, nullptr, true), Deadline::never()).ok());
            ASSERT(group.wait(group.submit(reduce, nullptr, true), Deadline::never()).ok());
            size_t wrong = 0;
            for (size_t i = 0; i < count; ++i) {
              int64_t sum = 0;
              for (int rank = 0; rank < ranks; ++rank) {
                const int64_t value = static_cast<int64_t>(i * 31) + rank * 1'000'003 + repeat;
                wrong += gathered[static_cast<size_t>(rank) * count + i] != value;
                sum += value;
              }
              wrong += result[i] != (repeat == 2 ? sum / ranks : sum);
            }
            EXPECT_EQ(wrong, size_t{0});
          }
        }
      });
    }
  }
}
