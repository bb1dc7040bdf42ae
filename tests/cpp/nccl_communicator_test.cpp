// Communicators: connecting, enqueuing, and errors that come later.
#include "nccl/comm.h"
#include "nccl_world.h"

namespace mycoll::nccl::world {
namespace {

using State = Comm::State;

// --- connecting

TEST(NcclConnect, endsByItsDeadline) {
  StandIn& standIn = StandIn::full();
  for (bool isBlocking : {false, true}) {
    CommOptions options;
    options.nccl.isBlocking = isBlocking;
    // On a device that no other test uses: the thread of the blocking call stays in NCCL.
    const auto comm = lone(standIn, 3, 4, options);
    const Clock::time_point start = Clock::now();
    const Status status = comm->connect(newId(standIn), in(200), nullptr);
    EXPECT_EQ(status.code(), Code::kTimeout);
    EXPECT(contains(status, "ncclCommInitRankConfig timed out after"));
    EXPECT(contains(status, "rank 3 of 4 in 'lone'; NCCL 2.28.9"));
    EXPECT(secondsSince(start) < kSoon);
    EXPECT_EQ(comm->state(), State::kAborted);
    EXPECT_EQ(comm->cause().message(), status.message());
    EXPECT_EQ(comm->handle(), static_cast<RawComm*>(nullptr));
    // A blocking call is left alone in NCCL, which has no way to end it.
    if (!isBlocking) EXPECT(eventually([&] { return standIn.count("comms") == 0; }));
  }
}

TEST(NcclConnect, endsWhenTheCheckSaysSo) {
  StandIn& standIn = StandIn::required();
  const auto comm = lone(standIn);
  int asked = 0;
  const Status status = comm->connect(newId(standIn), patient(), [&] {
    return ++asked < 5 ? Status() : Status(Code::kPeerLost, "rank 1 is dead");
  });
  EXPECT_EQ(status.message(), "rank 1 is dead");
  EXPECT_EQ(comm->state(), State::kAborted);
  EXPECT(eventually([&] { return standIn.count("comms") == 0; }));
}

TEST(NcclConnect, leavesACallThatHangs) {
  StandIn& standIn = StandIn::required();
  const auto comm = lone(standIn);
  {
    const auto script = standIn.scripted("hang=connect");
    EXPECT_EQ(comm->connect(newId(standIn), in(100), nullptr).code(), Code::kTimeout);
    EXPECT_EQ(standIn.count("comms"), 0);
  }
  // It comes back, and what it made is freed.
  EXPECT(eventually([&] { return standIn.count("ncclCommAbort") > 0; }));
  EXPECT(eventually([&] { return standIn.count("comms") == 0; }));
  EXPECT(eventually([&] { return standIn.count("connecting") == 0; }));  // NCCL takes one thread
}

TEST(NcclConnect, endsWhenAborted) {
  StandIn& standIn = StandIn::required();
  const auto comm = lone(standIn);
  Status status;
  std::thread connecting([&] { status = comm->connect(newId(standIn), patient(), nullptr); });
  EXPECT(eventually([&] { return comm->handle() != nullptr; }));
  EXPECT_OK(comm->abort(patient(), Status(Code::kAborted, "on request")));
  connecting.join();
  EXPECT_EQ(status.message(), "on request");
  EXPECT_OK(comm->abort(patient(), Status(Code::kAborted, "again")));
  EXPECT_EQ(comm->cause().message(), "on request");
}

// The abort finds no handle to free, and NCCL's call comes back before anybody looks again.
TEST(NcclConnect, freesWhatComesAfterAnAbort) {
  StandIn& standIn = StandIn::required();
  const auto comm = lone(standIn, 0, 1);
  auto hanging = std::make_unique<StandIn::Scripted>(standIn, "hang=connect");
  const Status status = comm->connect(newId(standIn), patient(), [&] {
    comm->beginAbort(Status(Code::kAborted, "on request"));
    hanging.reset();
    EXPECT(eventually([&] { return standIn.count("comms") == 1; }));
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    return Status();
  });
  EXPECT_EQ(status.message(), "on request");
  EXPECT_EQ(comm->handle(), static_cast<RawComm*>(nullptr));
  EXPECT(eventually([&] { return standIn.count("comms") == 0; }));
  EXPECT(eventually([&] { return standIn.count("connecting") == 0; }));
}

TEST(NcclConnect, reportsWhatNcclSays) {
  StandIn& standIn = StandIn::required();
  for (bool isBlocking : {true, false}) {
    const auto script = standIn.scripted("fail=init");
    CommOptions options;
    options.nccl.isBlocking = isBlocking;
    const int64_t comms = standIn.count("comms");
    const Status status = lone(standIn, 0, 1, options)->connect(newId(standIn), patient(), nullptr);
    EXPECT(eventually([&] { return standIn.count("comms") == comms; }));  // no handle is left
    EXPECT_EQ(status.code(), Code::kInternal);
    EXPECT(
        contains(status, "ncclCommInitRankConfig failed on rank 0 of 1 in 'lone': internal error"));
  }
  const auto script = standIn.scripted("duplicate_gpu=1");
  const UniqueId id = newId(standIn);
  test::Threads(2, [&](int rank) {
    const Status status = lone(standIn, rank)->connect(id, patient(), nullptr);
    EXPECT(contains(status, "invalid usage; last error: stand-in: Duplicate GPU detected"));
  });
}

TEST(NcclConnect, passesOptionsOn) {
  StandIn& standIn = StandIn::full();
  CommOptions options;
  options.nccl.minCtas = 3;
  options.nccl.maxCtas = 9;
  options.nccl.cgaClusterSize = 2;
  options.nccl.trafficClass = 7;
  options.nccl.nvlsCtas = 4;
  options.nccl.ctaPolicy = 1;
  options.nccl.isBlocking = true;
  options.nccl.netName = "Socket";
  World world(standIn, 1, options);
  Config config;
  reinterpret_cast<void (*)(void*, uint64_t)>(standIn.symbol("mycoll_standin_nccl_last_config"))(
      &config, sizeof(config));
  EXPECT_EQ(config.minCtas, 3);
  EXPECT_EQ(config.maxCtas, 9);
  EXPECT_EQ(config.cgaClusterSize, 2);
  EXPECT_EQ(config.trafficClass, 7);
  EXPECT_EQ(config.splitShare, 0);
  EXPECT_EQ(config.nvlsCtas, 4);
  EXPECT_EQ(config.ctaPolicy, 1);
  EXPECT_EQ(config.blocking, 1);
  EXPECT_EQ(config.shrinkShare, kUndefined);

  CommOptions wrong;
  wrong.nccl.minCtas = 9;
  wrong.nccl.maxCtas = 2;
  EXPECT(contains(lone(standIn, 0, 1, wrong)->connect(newId(standIn), patient(), nullptr),
                  "invalid argument"));
}

// --- issuing

TEST(NcclIssue, waitsForWhatIsInProgress) {
  StandIn& standIn = StandIn::full();
  const auto script = standIn.scripted("progress_ms=20");
  World world(standIn, 2);
  world.run([](Rank& rank) {
    for (int round = 0; round < 3; ++round) {
      Buffer data(filled(rank.comm->rank() + 1), rank.stream);
      ASSERT_OK(sum(rank, data));
      // Enqueued by now: what follows on the stream comes after it.
      EXPECT(isSumOf(data, 3));
    }
  });
}

TEST(NcclIssue, refusesBeforeAndAfter) {
  StandIn& standIn = StandIn::full();
  Rank rank{lone(standIn), World::streamOf(0)};
  Buffer data(filled(1), rank.stream);
  EXPECT(contains(sum(rank, data), "cannot be used: it is new"));
  EXPECT_OK(rank.comm->check());
  EXPECT_OK(rank.comm->close(patient()));
  EXPECT_OK(rank.comm->close(patient()));
  EXPECT_EQ(rank.comm->state(), State::kClosed);
  EXPECT_OK(rank.comm->abort(patient(), Status(Code::kAborted, "late")));
  EXPECT(contains(sum(rank, data), "cannot be used: it is closed"));
}

TEST(NcclIssue, failsForGoodWhenACallFails) {
  StandIn& standIn = StandIn::full();
  World world(standIn, 1);
  Rank& rank = world[0];
  Buffer data(filled(1), rank.stream);
  {
    const auto script = standIn.scripted("fail=enqueue");
    Issue issue(*rank.comm);
    ASSERT_OK(issue.group());
    const Status status =
        enqueue(issue, callOf(OpKind::kAllReduce, DType::kInt32, {data.span()}, {data.span()}),
                rank.stream);
    EXPECT(contains(status, "ncclAllReduce failed on rank 0 of 1 in 'world': internal error"));
    EXPECT(contains(status, "last error: stand-in: aborted, or told to fail"));
    EXPECT_EQ(issue.end().message(), status.message());
  }
  EXPECT_EQ(rank.comm->state(), State::kFailed);
  EXPECT_EQ(sum(rank, data).message(), rank.comm->cause().message());
  // The thread's group depth is back at none.
  EXPECT(standIn.library().functions().groupEnd() == Result::kInvalidUsage);
  EXPECT(!rank.comm->close(patient()).ok());
  EXPECT_EQ(rank.comm->state(), State::kAborted);
}

// As NCCL does with NCCL_CHECK_POINTERS; without it, what follows is NCCL's luck.
TEST(NcclIssue, isRefusedMemoryOfAnotherDevice) {
  StandIn& standIn = StandIn::full();
  World world(standIn, 2);
  Buffer others(filled(1), world[1].stream);
  EXPECT(contains(sum(world[0], others),
                  "ncclAllReduce: a buffer is on device 1, the communicator on 0"));
}

TEST(NcclIssue, takesTurnsBetweenThreads) {
  StandIn& standIn = StandIn::full();
  World world(standIn, 1);
  // Of the communicator's device; each is a thread for good.
  static void* const kStreams[] = {World::streamOf(0), World::streamOf(4),
                                   mycoll_standin_stream_create(0, 0),
                                   mycoll_standin_stream_create(0, 0)};
  test::Threads(4, [&](int thread) {
    Rank rank{world[0].comm, kStreams[thread]};
    for (int round = 0; round < 50; ++round) {
      Buffer data(filled(thread + 1, 10), rank.stream);
      ASSERT_OK(sum(rank, data));
      EXPECT(isSumOf(data, thread + 1));
    }
  });
}

// --- errors

TEST(NcclErrors, areNoticedWhileOperationsRun) {
  for (const auto& [result, code] :
       {std::pair("1", Code::kInternal), {"6", Code::kPeerLost}, {"2", Code::kNetwork}}) {
    StandIn& standIn = StandIn::full();
    const auto script =
        standIn.scripted((std::string("rank=1,error_after=1,error=") + result).c_str());
    World world(standIn, 2);
    world.run([code = code](Rank& rank) {
      Buffer data(filled(1), rank.stream);
      ASSERT_OK(sum(rank, data));
      EXPECT(isSumOf(data, 2));
      EXPECT_OK(rank.comm->check());
      void* const gate = mycoll_standin_gate_close(rank.stream);
      ASSERT_OK(sum(rank, data));  // never ends on rank 1
      mycoll_standin_gate_open(gate);
      if (rank.comm->rank() == 1) {
        EXPECT(eventually([&] { return !rank.comm->check().ok(); }));
        EXPECT_EQ(rank.comm->check().code(), code);
        EXPECT(contains(rank.comm->check(), "asynchronous error"));
        EXPECT_EQ(rank.comm->state(), State::kFailed);
        EXPECT_EQ(sum(rank, data).code(), code);
      }
      EXPECT_OK(rank.comm->abort(patient(), Status(Code::kAborted, "rank 1 failed")));
      EXPECT(mycoll_standin_stream_synchronize(rank.stream) == nullptr);
      EXPECT_EQ(rank.comm->cause().code(), rank.comm->rank() == 1 ? code : Code::kAborted);
    });
  }
}

TEST(NcclErrors, ranksThatDiffer) {
  StandIn& standIn = StandIn::full();
  const auto script = standIn.scripted("mismatch=error");
  const int64_t before = standIn.count("mismatches");
  World world(standIn, 2);
  world.run([](Rank& rank) {
    Buffer data(filled(1, rank.comm->rank() == 0 ? 10 : 11), rank.stream);
    Buffer first(filled(1), rank.stream);
    ASSERT_OK(sum(rank, first));  // connects, for which NCCL waits for the device
    void* const gate = mycoll_standin_gate_close(rank.stream);
    ASSERT_OK(sum(rank, data));
    mycoll_standin_gate_open(gate);
    EXPECT(eventually([&] { return !rank.comm->check().ok(); }));
    EXPECT(contains(rank.comm->check(), "invalid usage"));
    EXPECT_OK(rank.comm->abort(patient(), rank.comm->cause()));
  });
  EXPECT(standIn.count("mismatches") > before);
}

}  // namespace
}  // namespace mycoll::nccl::world
