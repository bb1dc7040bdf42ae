// The shared memory of a group: areas are reused when they are free, and there is room for all
// ranks.
#include "collectives/shm/arena.h"

#include <chrono>
#include <iterator>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "calls.h"
#include "test.h"
#include "world.h"

using namespace mycoll;
using namespace test;

// Collectives of no, one and several rounds follow each other, and ranks call late. No rank fills
// an area that another one still reads.
TEST(Arena, areasAreFilledWhenTheyAreFree) {
  test::ScopedEnv chunk("MYCOLL_CHUNK_BYTES", "4096");
  test::ScopedEnv small("MYCOLL_SMALL_BYTES", "1024");
  const unsigned seed = std::random_device()();
  const std::string where = "seed " + std::to_string(seed);
  constexpr OpKind kKinds[] = {OpKind::kAllReduce, OpKind::kBroadcast, OpKind::kAllGather,
                               OpKind::kAllToAll, OpKind::kReduce};
  for (int ranks = 2; ranks <= 4; ++ranks) {
    runWorld(ranks, Links::kShm, [&](Communicator& group) {
      std::mt19937 random(seed), own(seed + group.rank());
      for (int index = 0; index < 600; ++index) {
        const size_t count = random() % (random() % 4 == 0 ? 12'000 : 3'000) + 1;
        const int root = static_cast<int>(random() % ranks);
        Call c = call(kKinds[random() % std::size(kKinds)]);
        std::vector<int32_t> in = input(group.rank(), count, index);
        std::vector<std::vector<int32_t>> out(ranks, std::vector<int32_t>(count));
        const bool isRooted = c.kind == OpKind::kBroadcast || c.kind == OpKind::kReduce;
        const bool isMany = c.kind == OpKind::kAllToAll || c.kind == OpKind::kAllGather;
        if (isRooted) c.root = root;
        if (c.kind == OpKind::kBroadcast) {
          if (group.rank() == root) out[0] = in;
        } else {
          c.in = spans(c.kind == OpKind::kAllToAll ? ranks : 1, span(in));
        }
        for (int rank = 0; rank < (isMany ? ranks : 1); ++rank) c.out.push_back(span(out[rank]));
        if (c.kind == OpKind::kReduce && group.rank() != root) c.out = {};
        if (own() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 200));
        const Status status = run(group, c);
        if (!status.ok()) EXPECT_EQ(where + ": " + status.message(), "");
        if (isMany) {
          for (int rank = 0; rank < ranks; ++rank) expectInput(out[rank], rank, index);
        } else if (c.kind == OpKind::kBroadcast) {
          expectInput(out[0], root, index);
        } else if (!c.out.empty()) {
          expectSums(out[0], ranks, index);
        }
      }
    });
  }
}

// However little memory the user chooses, an area has a slice for each rank, and room for the sizes
// of what it sends to each rank.
TEST(Arena, manyRanksFindRoom) {
  test::ScopedEnv chunk("MYCOLL_CHUNK_BYTES", "4096");
  test::ScopedEnv small("MYCOLL_SMALL_BYTES", "0");
  for (const int ranks : {12, 66}) {
    runWorld(ranks, Links::kShm, [&](Communicator& group) {
      const auto count = static_cast<size_t>(ranks);
      const size_t kLarge = 5000;
      auto in = input(group.rank(), kLarge);
      std::vector<int32_t> out(kLarge);
      Call c = call(OpKind::kAllReduce);
      c.in = {span(in)};
      c.out = {span(out)};
      ASSERT_OK(run(group, c));
      EXPECT_EQ(group.transport(), "shm");
      expectSums(out, ranks);
      for (const size_t part : {size_t{1}, size_t{100}}) {
        in = input(group.rank(), count * part);
        c = call(OpKind::kReduceScatter);
        for (size_t i = 0; i < count; ++i) c.in.push_back(span(in, i * part, part));
        out.resize(part);
        c.out = {span(out)};
        ASSERT_OK(run(group, c));
        expectSums(out, ranks, static_cast<size_t>(group.rank()) * part);
        c = call(OpKind::kAllToAll);
        out.resize(count * part);
        for (size_t i = 0; i < count; ++i) {
          c.in.push_back(span(in, i * part, part));
          c.out.push_back(span(out, i * part, part));
        }
        ASSERT_OK(run(group, c));
        for (size_t i = 0; i < count * part; ++i) {
          const int from = static_cast<int>(i / part);
          const size_t index = static_cast<size_t>(group.rank()) * part + i % part;
          if (out[i] != element(from, index)) EXPECT_EQ(out[i], element(from, index));
        }
      }
    });
  }
}

// A rank that never has to wait returns to its thread between rounds.
TEST(Arena, roundsPause) {
  runWorld(2, Links::kShm, [](Communicator& group) {
    ASSERT_OK(run(group, call(OpKind::kBarrier)));
    Task rounds = [](const Arena& arena) -> Task {
      for (uint64_t round = 0; round < 3; ++round) {
        RoundReached isReached(arena, arena.rank(), Counter::kDone, round);
        co_await isReached;
      }
      co_return Status();
    }(*group.arena());
    rounds.resume();
    for (int round = 0; round < 3; ++round) {
      EXPECT(!rounds.finished());
      EXPECT(rounds.waitingFor()->ready());
      rounds.resume();
    }
    EXPECT(rounds.finished());
  });
}

// The shape that another rank sends is checked.
TEST(Arena, shapesAreChecked) {
  ArenaShape shape;
  shape.ranks = 66;
  EXPECT(shape.isUsable());
  for (const uint64_t areas : {uint64_t{0}, uint64_t{1} << 40}) {
    ArenaShape wrong = shape;
    wrong.areas = areas;
    EXPECT(!wrong.isUsable());
  }
  for (const size_t bytes : {size_t{0}, size_t{4096}, (size_t{1} << 20) + 4, ~size_t{63}}) {
    ArenaShape wrong = shape;
    wrong.chunkBytes = bytes;
    EXPECT(!wrong.isUsable());
  }
  for (const size_t bytes : {size_t{0}, size_t{520}, ~size_t{0}}) {
    ArenaShape wrong = shape;
    wrong.smallBytes = bytes;
    EXPECT(!wrong.isUsable());
  }
  ArenaShape nothing;
  nothing.ranks = 66;
  nothing.smallBytes = nothing.chunkBytes = nothing.areas = 0;
  EXPECT(nothing.enlarged().isUsable());
}
