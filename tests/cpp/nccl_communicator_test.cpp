// Communicators: connecting, enqueuing, and asynchronous errors.
#include "nccl/comm.h"
#include "nccl_world.h"

namespace mycoll::nccl::world {
namespace {

using State = Comm::State;

// --- connecting

TEST(NcclConnect, endsByItsDeadline) {
  StandIn& standIn = StandIn::full();
  for (bool isBlocking : {false, true}) {
    const CommOptions options = blocking(isBlocking);
    // On a device that no other test uses, as the thread of the blocking call stays in NCCL.
    const auto comm = lone(standIn, 3, 4, options);
    const Clock::time_point start = Clock::now();
    const Status status = comm->connect(newId(standIn), in(200), nullptr);
    EXPECT_EQ(status.code(), Code::kTimeout);
    EXPECT_CONTAINS(status, "ncclCommInitRankConfig timed out after");
    EXPECT_CONTAINS(status, "rank 3 of 4 in 'lone'; NCCL 2.28.9");
    EXPECT(secondsSince(start) < kSoon);
    EXPECT_EQ(comm->state(), State::kAborted);
    EXPECT_EQ(comm->cause().message(), status.message());
    EXPECT_EQ(comm->handle(), static_cast<RawComm*>(nullptr));
    // NCCL cannot end a blocking call, so its thread is left there.
    if (!isBlocking) EXPECT(eventually([&] { return standIn.count("comms") == 0; }));
  }
}

TEST(NcclConnect, endsWhenItsCheckFails) {
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

TEST(NcclConnect, abandonsACallThatHangs) {
  StandIn& standIn = StandIn::required();
  const auto comm = lone(standIn);
  {
    const auto script = standIn.scripted("hang=connect");
    EXPECT_EQ(comm->connect(newId(standIn), in(100), nullptr).code(), Code::kTimeout);
    EXPECT_EQ(standIn.count("comms"), 0);
  }
  // The call returns, and its communicator is freed.
  EXPECT(eventually([&] { return standIn.count("ncclCommAbort") > 0; }));
  EXPECT(eventually([&] { return standIn.count("comms") == 0; }));
  // NCCL connects one thread at a time, which the next test needs.
  EXPECT(eventually([&] { return standIn.count("connecting") == 0; }));
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

// An abort finds no handle to free, and NCCL's call returns one before the state is checked again.
TEST(NcclConnect, freesAHandleThatArrivesAfterAnAbort) {
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

TEST(NcclConnect, reportsErrorsOfNccl) {
  StandIn& standIn = StandIn::required();
  for (bool isBlocking : {true, false}) {
    const auto script = standIn.scripted("fail=init");
    const CommOptions options = blocking(isBlocking);
    const int64_t comms = standIn.count("comms");
    const Status status = lone(standIn, 0, 1, options)->connect(newId(standIn), patient(), nullptr);
    EXPECT(eventually([&] { return standIn.count("comms") == comms; }));  // no handle leaks
    EXPECT_EQ(status.code(), Code::kInternal);
    EXPECT_CONTAINS(status,
                    "ncclCommInitRankConfig failed on rank 0 of 1 in 'lone': internal error");
  }
  const auto script = standIn.scripted("duplicate_gpu=1");
  const UniqueId id = newId(standIn);
  test::Threads(2, [&](int rank) {
    const Status status = lone(standIn, rank)->connect(id, patient(), nullptr);
    EXPECT_CONTAINS(status, "invalid usage; last error: stand-in: Duplicate GPU detected");
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
  EXPECT_CONTAINS(lone(standIn, 0, 1, wrong)->connect(newId(standIn), patient(), nullptr),
                  "invalid argument");
}

// --- issuing

TEST(NcclIssue, waitsUntilACallIsEnqueued) {
  StandIn& standIn = StandIn::full();
  const auto script = standIn.scripted("progress_ms=20");
  World world(standIn, 2);
  world.run([](Rank& rank) {
    for (int round = 0; round < 3; ++round) {
      Buffer data(filled(rank.comm->rank() + 1), rank.stream);
      ASSERT_OK(sum(rank, data));
      // The call is enqueued, so later work on the stream runs after it.
      EXPECT(isSumOf(data, 3));
    }
  });
}

TEST(NcclIssue, refusesCommunicatorsThatAreNewOrClosed) {
  StandIn& standIn = StandIn::full();
  Rank rank{lone(standIn), World::streamOf(0)};
  Buffer data(filled(1), rank.stream);
  EXPECT_CONTAINS(sum(rank, data), "cannot be used: it is new");
  EXPECT_OK(rank.comm->check());
  EXPECT_OK(rank.comm->close(patient()));
  EXPECT_OK(rank.comm->close(patient()));
  EXPECT_EQ(rank.comm->state(), State::kClosed);
  EXPECT_OK(rank.comm->abort(patient(), Status(Code::kAborted, "late")));
  EXPECT_CONTAINS(sum(rank, data), "cannot be used: it is closed");
}

TEST(NcclIssue, aFailedCallFailsTheCommunicator) {
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
    EXPECT_CONTAINS(status, "ncclAllReduce failed on rank 0 of 1 in 'world': internal error");
    EXPECT_CONTAINS(status, "last error: stand-in: aborted, or told to fail");
    EXPECT_EQ(issue.end().message(), status.message());
  }
  EXPECT_EQ(rank.comm->state(), State::kFailed);
  EXPECT_EQ(sum(rank, data).message(), rank.comm->cause().message());
  // The thread is in no NCCL group.
  EXPECT(standIn.library().functions().groupEnd() == Result::kInvalidUsage);
  EXPECT(!rank.comm->close(patient()).ok());
  EXPECT_EQ(rank.comm->state(), State::kAborted);
}

// The stand-in behaves as NCCL with NCCL_CHECK_POINTERS. Without it, the behaviour is undefined.
TEST(NcclIssue, reportsMemoryOfAnotherDevice) {
  StandIn& standIn = StandIn::full();
  World world(standIn, 2);
  Buffer others(filled(1), world[1].stream);
  EXPECT_CONTAINS(sum(world[0], others),
                  "ncclAllReduce: a buffer is on device 1, the communicator on 0");
}

TEST(NcclIssue, takesTurnsBetweenThreads) {
  StandIn& standIn = StandIn::full();
  World world(standIn, 1);
  // Streams of the communicator's device. Each is a thread that never ends.
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

TEST(NcclErrors, areDetectedWhileOperationsRun) {
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
        EXPECT_CONTAINS(rank.comm->check(), "asynchronous error");
        EXPECT_EQ(rank.comm->state(), State::kFailed);
        EXPECT_EQ(sum(rank, data).code(), code);
      }
      EXPECT_OK(rank.comm->abort(patient(), Status(Code::kAborted, "rank 1 failed")));
      EXPECT(mycoll_standin_stream_synchronize(rank.stream) == nullptr);
      EXPECT_EQ(rank.comm->cause().code(), rank.comm->rank() == 1 ? code : Code::kAborted);
    });
  }
}

TEST(NcclErrors, differentCallsAreReported) {
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
    EXPECT_CONTAINS(rank.comm->check(), "invalid usage");
    EXPECT_OK(rank.comm->abort(patient(), rank.comm->cause()));
  });
  EXPECT(standIn.count("mismatches") > before);
}

}  // namespace
}  // namespace mycoll::nccl::world
