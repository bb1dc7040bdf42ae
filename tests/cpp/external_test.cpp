// Collectives that run elsewhere, as on a device: their order, their deadlines, and how different
// calls are detected, although the group transfers none of their data.
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

// Does what a watchdog does, until the operation is done.
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
      for (uint64_t i = 0; i < 600; ++i) {  // more signatures than are kept
        ops.push_back(group.submitExternal(allReduce(4 * i)));
        EXPECT_EQ(ops.back()->sequence(), i + 1);  // the group's first collective has number 0
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

// The device did not hang, so no rank waits for another, and the results are wrong.
TEST(External, differentCallsAreFoundAfterTheyEnded) {
  for (Links links : kAllLinks) {
    runExternalWorld(4, links, [](Communicator& group) {
      for (uint64_t i = 0; i < 20; ++i) {
        const bool differs = group.rank() == 2 && i == 7;
        group.submitExternal(allReduce(differs ? 8 : 4))->external->finish(Status());
        group.watchExternal();
      }
      EXPECT(test::eventually([&] { return group.watchExternal(), !group.error().ok(); }));
      EXPECT_EQ(group.error().code(), Code::kMismatch);
      EXPECT_CONTAINS(group.error(), "collective #8");
      EXPECT_CONTAINS(group.error(), "2 (");
      auto late = group.submitExternal(allReduce(4));
      EXPECT(late->done() && !late->status().ok());
    });
  }
}

TEST(External, differentCallsAreFoundWhileTheDeviceHangs) {
  runExternalWorld(3, Links::kTcp, [](Communicator& group) {
    const auto began = Clock::now();
    auto op = group.submitExternal(allReduce(group.rank() == 1 ? 400 : 4));
    EXPECT_EQ(watch(group, op).code(), Code::kMismatch);
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
          if (group.rank() == 2) {  // does not make the second call
            EXPECT(test::eventually([&] { return !group.error().ok(); }));
            return;
          }
          op = group.submitExternal(allReduce(4));
          const Status status = watch(group, op);
          EXPECT_EQ(status.code(), Code::kTimeout);
          // Both ranks report the text of the rank that detects the timeout first.
          const std::string& text = status.message();
          EXPECT_CONTAINS(text, "ms for rank 2 (");
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
      std::this_thread::sleep_for(300ms);  // until the others wait
      op->external->finish(Status(Code::kInternal, "the device fell off the bus"));
    }
    const Status status = watch(group, op);
    EXPECT_EQ(status.code(), Code::kInternal);
    EXPECT_CONTAINS(status, "fell off the bus");
  });
}

// All ranks have sent their goodbyes before they compare their calls.
TEST(External, differentCallsAreFoundAfterTheGoodbye) {
  for (Links links : kAllLinks) {
    std::latch haveMet(3);
    runExternalWorld(3, links, [&](Communicator& group) {
      haveMet.arrive_and_wait();
      group.submitExternal(allReduce(group.rank() == 2 ? 8 : 4))->external->finish(Status());
      EXPECT(group.leave(Deadline::after(10s)));
      EXPECT(!group.leave(Deadline::after(10s)));
      EXPECT(test::eventually([&] { return group.watchExternal(), !group.error().ok(); }));
      EXPECT_EQ(group.error().code(), Code::kMismatch);
      group.endLeaving();
    });
  }
}

// An operation that has ended on a rank that leaves may still run on the others.
TEST(External, aRankMayLeaveFirst) {
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
