// Collectives that run elsewhere: their order, their deadlines, and how ranks that were called
// differently are found, although nothing of theirs travels over the group.
#include <atomic>
#include <chrono>
#include <latch>
#include <thread>

#include "world.h"

namespace {

using namespace mycoll;
using namespace std::chrono_literals;
using test::Links;
using Clock = std::chrono::steady_clock;

constexpr Links kAllLinks[] = {Links::kShm, Links::kTcp};

Signature allReduce(uint64_t bytes) {
  Signature signature;
  signature.kind = OpKind::kAllReduce;
  signature.dtype = DType::kFloat32;
  signature.reduceOp = ReduceOp::kSum;
  signature.bytes = bytes;
  return signature;
}

// What a watchdog does, until the op is done.
Status watch(Communicator& group, const OpPtr& op) {
  while (!op->done()) {
    group.watchExternal();
    std::this_thread::sleep_for(5ms);
  }
  return op->status();
}

void runExternalWorld(int ranks, Links links, const test::RankBody& body, int timeoutMs = 60'000) {
  test::runWorld(ranks, links, body, timeoutMs, /*isExternal=*/true);
}

TEST(External, endsInOrder) {
  for (Links links : kAllLinks) {
    runExternalWorld(3, links, [](Communicator& group) {
      std::vector<std::shared_ptr<CollectiveOp>> ops;
      for (uint64_t i = 0; i < 600; ++i) {  // more than are remembered
        ops.push_back(group.submitExternal(allReduce(4 * i)));
        EXPECT_EQ(ops.back()->sequence(), i + 1);  // after the meeting
      }
      ops[1]->external->finish(Status());
      group.watchExternal();
      EXPECT(!ops[0]->done() && !ops[1]->done());
      ops[0]->external->finish(Status());
      group.watchExternal();
      EXPECT(ops[0]->done() && ops[1]->done() && !ops[2]->done());
      for (size_t i = 2; i < ops.size(); ++i) {
        ops[i]->external->finish(Status());
        if (i % 50 == 0) group.watchExternal();
      }
      EXPECT_EQ(watch(group, ops.back()).message(), "");
    });
  }
}

// A device that did not hang: the ranks' numbers are wrong, and nobody waits for anybody.
TEST(External, differentCallsAreFoundAfterTheFact) {
  for (Links links : kAllLinks) {
    runExternalWorld(4, links, [](Communicator& group) {
      for (uint64_t i = 0; i < 20; ++i) {
        const bool differs = group.rank() == 2 && i == 7;
        group.submitExternal(allReduce(differs ? 8 : 4))->external->finish(Status());
        group.watchExternal();
      }
      const auto until = Clock::now() + 10s;
      while (group.error().ok() && Clock::now() < until) {
        group.watchExternal();
        std::this_thread::sleep_for(5ms);
      }
      EXPECT_EQ(static_cast<int>(group.error().code()), static_cast<int>(Code::kMismatch));
      EXPECT(group.error().message().find("collective #8") != std::string::npos);
      EXPECT(group.error().message().find("2 (") != std::string::npos);
      auto late = group.submitExternal(allReduce(4));
      EXPECT(late->done() && !late->status().ok());
    });
  }
}

TEST(External, differentCallsAreFoundWhileTheDeviceHangs) {
  runExternalWorld(3, Links::kTcp, [](Communicator& group) {
    const auto began = Clock::now();
    auto op = group.submitExternal(allReduce(group.rank() == 1 ? 400 : 4));
    EXPECT_EQ(static_cast<int>(watch(group, op).code()), static_cast<int>(Code::kMismatch));
    EXPECT(Clock::now() - began < 5s);
  });
}

TEST(External, timeoutNamesTheRankThatIsBehind) {
  for (Links links : kAllLinks) {
    runExternalWorld(
        3, links,
        [](Communicator& group) {
          auto op = group.submitExternal(allReduce(4));
          op->external->finish(Status());
          EXPECT(watch(group, op).ok());
          if (group.rank() == 2) {  // never comes to the second
            const auto until = Clock::now() + 10s;
            while (group.error().ok() && Clock::now() < until) {
              std::this_thread::sleep_for(20ms);
            }
            return;
          }
          op = group.submitExternal(allReduce(4));
          const Status status = watch(group, op);
          EXPECT_EQ(static_cast<int>(status.code()), static_cast<int>(Code::kTimeout));
          // Whoever was first to see it tells the story for both.
          const std::string& text = status.message();
          EXPECT(text.find("ms for rank 2 (") != std::string::npos);
          EXPECT(text.find("Arrived: 0.") != std::string::npos ||
                 text.find("Arrived: 1.") != std::string::npos);
        },
        1500);
  }
}

TEST(External, theFirstCauseEndsAll) {
  std::latch haveCalled(3);
  runExternalWorld(3, Links::kShm, [&](Communicator& group) {
    const auto op = group.submitExternal(allReduce(4));
    haveCalled.arrive_and_wait();
    if (group.rank() == 1) {
      std::this_thread::sleep_for(300ms);  // all others have met
      op->external->finish(Status(Code::kInternal, "the device fell off the bus"));
    }
    const Status status = watch(group, op);
    EXPECT_EQ(static_cast<int>(status.code()), static_cast<int>(Code::kInternal));
    EXPECT(status.message().find("fell off the bus") != std::string::npos);
  });
}

// All of them have left before they hear of each other.
TEST(External, differentCallsAreFoundAfterTheGoodbye) {
  for (Links links : kAllLinks) {
    std::latch haveMet(3);
    runExternalWorld(3, links, [&](Communicator& group) {
      haveMet.arrive_and_wait();
      group.submitExternal(allReduce(group.rank() == 2 ? 8 : 4))->external->finish(Status());
      EXPECT(group.leave(Deadline::after(10s)));
      EXPECT(!group.leave(Deadline::after(10s)));
      const auto until = Clock::now() + 10s;
      while (group.error().ok() && Clock::now() < until) {
        group.watchExternal();
        std::this_thread::sleep_for(5ms);
      }
      EXPECT_EQ(static_cast<int>(group.error().code()), static_cast<int>(Code::kMismatch));
      group.endLeaving();
    });
  }
}

// What has ended on a rank that leaves may still be under way on the others.
TEST(External, aRankThatLeavesFirstIsNotMissed) {
  for (Links links : kAllLinks) {
    runExternalWorld(3, links, [](Communicator& group) {
      const auto op = group.submitExternal(allReduce(4));
      const auto until = Clock::now() + (group.rank() == 1 ? 0ms : 900ms);
      while (Clock::now() < until) {
        group.watchExternal();
        std::this_thread::sleep_for(5ms);
      }
      op->external->finish(Status());
      EXPECT_EQ(watch(group, op).message(), "");
      group.close(Deadline::after(10s));
    });
  }
}

// The last owner of a group drops it while an operation waits for the other ranks, and is due to
// ask them why.
TEST(External, aGroupMayBeDroppedWhileItWaits) {
  std::latch haveDropped(2);
  runExternalWorld(2, Links::kTcp, [&](Communicator& group) {
    auto part = Communicator::derive(group, " part", /*isExternal=*/true);
    part->setWarnAfter(0ms);
    if (group.rank() == 0) part->submitExternal(allReduce(4));
    std::this_thread::sleep_for(10ms);
    part.reset();
    haveDropped.arrive_and_wait();
  });
}

}  // namespace
