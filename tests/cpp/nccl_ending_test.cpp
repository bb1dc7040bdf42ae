// How communicators end, whatever NCCL and their peers do, and their children and memory.
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <csignal>
#include <cstdlib>

#include "nccl/comm.h"
#include "nccl_world.h"

extern char** environ;

namespace mycoll::nccl::world {
namespace {

using State = Comm::State;

// --- abort

TEST(NcclAbort, releasesAStreamThatWaits) {
  StandIn& standIn = StandIn::full();
  const auto script = standIn.scripted("connect=eagerly");
  World world(standIn, 2);
  Rank& rank = world[0];
  Buffer data(filled(1), rank.stream);
  ASSERT_OK(sum(rank, data));  // rank 1 never calls
  const Clock::time_point start = Clock::now();
  test::Threads(3, [&](int) {  // one thread aborts, and all wait until it has
    EXPECT_OK(rank.comm->abort(patient(), Status(Code::kAborted, "enough")));
  });
  EXPECT(mycoll_standin_stream_synchronize(rank.stream) == nullptr);
  EXPECT(secondsSince(start) < kSoon);
  EXPECT_EQ(rank.comm->state(), State::kAborted);
  EXPECT_EQ(sum(rank, data).message(), "enough");
}

TEST(NcclAbort, endsAnEnqueueThatHangs) {
  StandIn& standIn = StandIn::full();
  for (bool isBlocking : {true, false}) {
    const CommOptions options = blocking(isBlocking);
    World world(standIn, 1, options);
    Rank& rank = world[0];
    Buffer data(filled(1), rank.stream);
    const auto script = standIn.scripted(isBlocking ? "hang=enqueue" : "progress_ms=1000000");
    const int64_t before = standIn.count("ncclAllReduce");
    Status first, second;
    std::thread hanging([&] { first = sum(rank, data); });
    EXPECT(eventually([&] { return standIn.count("ncclAllReduce") > before; }));
    std::thread behind([&] { second = sum(rank, data); });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_OK(rank.comm->check());  // does not wait for the enqueue
    EXPECT_OK(rank.comm->abort(patient(), Status(Code::kTimeout, "rank 7 never called it")));
    hanging.join();
    behind.join();
    EXPECT_EQ(first.message(), "rank 7 never called it");
    EXPECT_EQ(second.message(), "rank 7 never called it");
  }
}

// If NCCL has ncclCommRevoke, a communicator is freed after the thread inside NCCL has returned.
TEST(NcclAbort, freesAfterAThreadHasReturned) {
  StandIn& standIn = StandIn::full();
  World world(standIn, 1);
  Rank& rank = world[0];
  Buffer data(filled(1), rank.stream);
  const auto script = standIn.scripted("hang=enqueue");
  const int64_t entered = standIn.count("ncclAllReduce"), revoked = standIn.count("ncclCommRevoke");
  std::atomic<bool> isBack{false};
  std::thread hanging([&] {
    (void)sum(rank, data);
    isBack = true;
  });
  EXPECT(eventually([&] { return standIn.count("ncclAllReduce") > entered; }));
  EXPECT_OK(rank.comm->abort(patient(), Status(Code::kAborted, "enough")));
  EXPECT_EQ(standIn.count("ncclCommRevoke"), revoked + 1);
  EXPECT(eventually([&] { return isBack.load(); }));
  hanging.join();
}

// Without ncclCommRevoke, the communicator remains until the thread returns by itself.
TEST(NcclAbort, waitsForAThreadThatCannotBeReleased) {
  StandIn& standIn = StandIn::required();
  const CommOptions options = blocking(true);
  const int64_t comms = standIn.count("comms");
  World world(standIn, 1, options);
  Rank& rank = world[0];
  Buffer data(filled(1), rank.stream);
  Status status;
  std::thread hanging;
  {
    const auto script = standIn.scripted("hang=enqueue");
    const int64_t entered = standIn.count("ncclAllReduce");
    hanging = std::thread([&] { status = sum(rank, data); });
    EXPECT(eventually([&] { return standIn.count("ncclAllReduce") > entered; }));
    EXPECT_EQ(rank.comm->abort(in(500), Status(Code::kAborted, "enough")).code(), Code::kTimeout);
    EXPECT_EQ(standIn.count("comms"), comms + 1);
  }
  hanging.join();
  EXPECT_OK(rank.comm->abort(patient(), Status(Code::kAborted, "again")));
  EXPECT_EQ(standIn.count("comms"), comms);
  EXPECT_EQ(rank.comm->cause().message(), "enough");
}

// As above, for a split on a thread of mycoll's, whose caller no longer waits.
TEST(NcclAbort, freesAfterASplitHasReturned) {
  StandIn& standIn = StandIn::full();
  const CommOptions options = blocking(true);
  World world(standIn, 2, options);
  const auto child = lone(standIn, 0, 2, options);
  const int64_t splits = standIn.count("ncclCommSplit");
  std::thread splitting([&] {
    EXPECT(
        !world[0].comm->split(0, 0, child.get(), patient(), nullptr).ok());  // rank 1 never calls
  });
  EXPECT(eventually([&] { return standIn.count("ncclCommSplit") > splits; }));
  EXPECT_OK(world[0].comm->abort(patient(), Status(Code::kAborted, "enough")));
  splitting.join();
}

TEST(NcclAbort, returnsByItsDeadlineWhenNcclDoesNot) {
  StandIn& standIn = StandIn::full();
  const int64_t comms = standIn.count("comms");
  World world(standIn, 2);
  {
    const auto script = standIn.scripted("hang=abort,rank=0");
    const Clock::time_point start = Clock::now();
    const Status status = world[0].comm->abort(in(300), Status(Code::kAborted, "enough"));
    EXPECT_EQ(status.code(), Code::kTimeout);
    EXPECT_CONTAINS(status, "ncclCommAbort timed out");
    EXPECT(secondsSince(start) < kSoon);
    EXPECT_EQ(world[0].comm->abort(in(10), Status(Code::kAborted, "again")).code(), Code::kTimeout);
    EXPECT_OK(world[1].comm->abort(patient(), Status(Code::kAborted, "enough")));
    World another(standIn, 2);  // the process can make other communicators
    another.run([](Rank& rank) {
      Buffer data(filled(2), rank.stream);
      ASSERT_OK(sum(rank, data));
      EXPECT(isSumOf(data, 4));
      // Its close() is under the same script, but does not abort.
    });
  }
  EXPECT(eventually([&] { return standIn.count("comms") == comms; }));
}

TEST(NcclAbort, anEnqueueEndsByItsTimeout) {
  StandIn& standIn = StandIn::full();
  CommOptions options;
  options.issueTimeout = [] { return std::chrono::milliseconds(100); };
  World world(standIn, 1, options);
  const auto script = standIn.scripted("progress_ms=1000000");
  Buffer data(filled(1), world[0].stream);
  const Status status = sum(world[0], data);
  EXPECT_EQ(status.code(), Code::kTimeout);
  EXPECT_CONTAINS(status, "ncclAllReduce timed out");
  EXPECT_EQ(world[0].comm->state(), State::kFailed);
}

// --- close

TEST(NcclClose, waitsForRunningOperations) {
  StandIn& standIn = StandIn::full();
  for (bool isBlocking : {true, false}) {
    const CommOptions options = blocking(isBlocking);
    World world(standIn, 2, options);
    world.run([](Rank& rank) {
      Buffer data(filled(1), rank.stream), first(filled(1), rank.stream);
      ASSERT_OK(sum(rank, first));  // connects, for which NCCL waits for the device
      void* const gate = mycoll_standin_gate_close(rank.stream);
      ASSERT_OK(sum(rank, data));
      std::thread opening([gate] {
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
        mycoll_standin_gate_open(gate);
      });
      EXPECT_OK(rank.comm->close(patient()));
      opening.join();
      EXPECT(isSumOf(data, 2));
      EXPECT_EQ(rank.comm->handle(), static_cast<RawComm*>(nullptr));
    });
  }
}

TEST(NcclClose, endsByItsDeadline) {
  StandIn& standIn = StandIn::full();
  for (const std::string what : {"finalize", "destroy", "pending", "pending without blocking"}) {
    const CommOptions options = blocking(what.find("without") == what.npos);
    const bool isPending = what.starts_with("pending");
    const int64_t comms = standIn.count("comms");
    {
      World world(standIn, 2, options);
      Buffer data(filled(1), world[0].stream), late(filled(1), world[1].stream);
      const auto script =
          standIn.scripted(isPending ? "connect=eagerly" : ("rank=0,hang=" + what).c_str());
      if (isPending) EXPECT_OK(sum(world[0], data));  // rank 1 calls too late
      const Clock::time_point start = Clock::now();
      const Status status = world[0].comm->close(in(200));
      EXPECT_EQ(status.code(), Code::kTimeout);
      EXPECT(secondsSince(start) < kSoon);
      EXPECT_EQ(world[0].comm->close(in(0)).message(), status.message());
      EXPECT_EQ(world[0].comm->abort(in(0), Status(Code::kAborted, "x")).code(), Code::kOk);
      // The thread that is inside NCCL keeps the handle.
      EXPECT_EQ(world[0].comm->handle(), static_cast<RawComm*>(nullptr));
      if (isPending) EXPECT_OK(sum(world[1], late));
    }
    EXPECT(eventually([&] { return standIn.count("comms") == comms; }));
  }
}

TEST(NcclClose, endsWhenItsCheckFails) {
  StandIn& standIn = StandIn::full();
  const int64_t comms = standIn.count("comms");
  {
    World world(standIn, 2);
    const auto script = standIn.scripted("rank=0,hang=finalize");
    int asked = 0;
    const Status status = world[0].comm->close(patient(), [&] {
      return ++asked < 5 ? Status() : Status(Code::kPeerLost, "rank 1 is dead");
    });
    EXPECT_EQ(status.message(), "rank 1 is dead");
    EXPECT_EQ(world[0].comm->state(), State::kAborted);
  }
  EXPECT(eventually([&] { return standIn.count("comms") == comms; }));
}

// Two ranks close two communicators in opposite orders. The first close of both times out, and NCCL
// may not end the second communicator at the same time.
TEST(NcclClose, endsACommunicatorBesideOneThatTimedOut) {
  StandIn& standIn = StandIn::full();
  const int64_t comms = standIn.count("comms");
  {
    World one(standIn, 2), other(standIn, 2);
    std::barrier bothAreLate(2);
    std::atomic<int> refused{0};
    test::Threads(2, [&](int rank) {
      World& first = rank == 0 ? one : other;
      World& second = rank == 0 ? other : one;
      EXPECT_EQ(first[rank].comm->close(in(300)).code(), Code::kTimeout);
      bothAreLate.arrive_and_wait();
      // The abort of the first rank releases the first close of the other one.
      const Status status = second[rank].comm->close(patient());
      if (status.ok()) return;
      ++refused;
      EXPECT_EQ(status.code(), Code::kAborted);
      EXPECT_CONTAINS(status, "all ranks of a host have to end their groups in one order");
    });
    EXPECT(refused >= 1);
  }
  EXPECT(eventually([&] { return standIn.count("comms") == comms; }));
}

// NCCL waits until a graph that contains its operations is destroyed.
TEST(NcclClose, endsByItsDeadlineWhileAGraphExists) {
  StandIn& standIn = StandIn::full();
  const int64_t comms = standIn.count("comms");
  for (bool isBlocking : {true, false}) {
    const CommOptions options = blocking(isBlocking);
    World world(standIn, 1, options);
    void* const stream = world[0].stream;
    Buffer data(filled(1), stream);
    void* graph = nullptr;
    ASSERT(mycoll_standin_capture_begin(stream, 2) == nullptr);
    EXPECT_OK(sum(world[0], data));
    ASSERT(mycoll_standin_capture_end(stream, &graph) == nullptr);
    EXPECT_EQ(world[0].comm->close(in(200)).code(), Code::kTimeout);
    mycoll_standin_graph_destroy(graph);
    EXPECT(eventually([&] { return standIn.count("comms") == comms; }));
  }
}

// --- children

TEST(NcclSplit, byColorAndKey) {
  StandIn& standIn = StandIn::full();
  for (bool isBlocking : {true, false}) {
    const CommOptions options = blocking(isBlocking);
    World world(standIn, 4, options);
    for (int round = 0; round < 3; ++round) {
      world.run([&](Rank& rank) {
        const int me = rank.comm->rank();
        // The child has ranks 3, 1 and 0 in this order; rank 2 is no member.
        const int place = me == 3 ? 0 : me == 1 ? 1 : 2;
        const bool isMember = me != 2;
        const auto child = std::make_shared<Comm>(standIn.library(), place, 3, "child", options);
        ASSERT_OK(rank.comm->split(isMember ? 5 : kSplitNoColor, place,
                                   isMember ? child.get() : nullptr, patient(), nullptr));
        if (!isMember) {
          EXPECT_OK(child->close(patient()));
          return;
        }
        Rank inChild{child, rank.stream};
        Buffer data(pattern(100, me), rank.stream);
        ASSERT_OK(enqueue(*child, callOf(OpKind::kBroadcast, DType::kOpaque, {}, {data.span()}, 0),
                          rank.stream));
        EXPECT(data.read() == pattern(100, 3));
        EXPECT_OK(child->close(patient()));
      });
    }
    world.run([](Rank& rank) {  // the parent can still be used
      Buffer data(filled(1), rank.stream);
      ASSERT_OK(sum(rank, data));
      EXPECT(isSumOf(data, 4));
    });
  }
}

TEST(NcclSplit, endsWhenOthersDoNotCall) {
  StandIn& standIn = StandIn::full();
  World world(standIn, 2);
  const auto child = lone(standIn, 0, 2);
  const Status status = world[0].comm->split(0, 0, child.get(), in(100), nullptr);
  EXPECT_EQ(status.code(), Code::kTimeout);
  EXPECT_EQ(child->state(), State::kAborted);
  EXPECT_EQ(world[0].comm->state(), State::kFailed);
  EXPECT_OK(world[0].comm->abort(patient(), status));
  const auto checked = lone(standIn, 0, 2);
  EXPECT_EQ(world[1]
                .comm
                ->split(0, 0, checked.get(), patient(),
                        [] { return Status(Code::kPeerLost, "rank 0 has left"); })
                .message(),
            "rank 0 has left");
}

// NCCL makes the child after the split has timed out.
TEST(NcclSplit, freesAChildThatIsMadeLate) {
  StandIn& standIn = StandIn::full();
  for (bool isBlocking : {true, false}) {
    const CommOptions options = blocking(isBlocking);
    const int64_t comms = standIn.count("comms");
    World world(standIn, 1, options);
    const auto child = lone(standIn, 0, 1, options);
    Status status;
    {
      const auto script = standIn.scripted("hang=init");
      status = world[0].comm->split(0, 0, child.get(), in(100), nullptr);
      EXPECT_EQ(status.code(), Code::kTimeout);
    }
    EXPECT(eventually([&] { return standIn.count("comms") == comms + 2; }));
    EXPECT_OK(world[0].comm->abort(patient(), status));
    EXPECT_EQ(standIn.count("comms"), comms);
  }
}

TEST(NcclLacks, errorsNameTheFunction) {
  StandIn& standIn = StandIn::required();
  World world(standIn, 1);
  Comm& comm = *world[0].comm;
  void* memory = nullptr;
  Comm::Registration made;
  for (const auto& [status, function] :
       {std::pair(comm.split(0, 0, nullptr, patient(), nullptr), "ncclCommSplit"),
        {comm.registerMemory(nullptr, 1, false, &made), "ncclCommRegister"},
        {comm.deregister({&memory, nullptr}), "ncclCommDeregister"},
        {comm.registerMemory(nullptr, 1, true, &made), "ncclCommWindowRegister"},
        {comm.deregister({nullptr, reinterpret_cast<Window*>(&memory)}),
         "ncclCommWindowDeregister"},
        {Comm::allocate(standIn.library(), 1, &memory), "ncclMemAlloc"},
        {Comm::free(standIn.library(), nullptr), "ncclMemFree"}}) {
    EXPECT_EQ(status.code(), Code::kUnsupported);
    EXPECT_CONTAINS(status, std::string("has no ") + function);
  }
  EXPECT_OK(comm.check());  // these errors do not fail the communicator
}

TEST(NcclMemory, isRegisteredAndDeregistered) {
  StandIn& standIn = StandIn::full();
  World world(standIn, 2);
  world.run([&](Rank& rank) {
    void* memory = nullptr;
    ASSERT_OK(Comm::allocate(standIn.library(), 10000, &memory));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % kWindowAlignment, 0);
    Comm::Registration buffer, window;
    ASSERT_OK(rank.comm->registerMemory(memory, 10000, /*isSymmetric=*/false, &buffer));
    ASSERT_OK(rank.comm->registerMemory(memory, 10000, /*isSymmetric=*/true, &window));
    EXPECT(buffer.buffer != nullptr && window.window != nullptr);
    EXPECT_OK(rank.comm->deregister(window));
    EXPECT_OK(rank.comm->deregister(buffer));
    EXPECT_CONTAINS(rank.comm->deregister(buffer), "ncclCommDeregister failed on rank");
    EXPECT_OK(rank.comm->deregister({}));
    EXPECT_OK(Comm::free(standIn.library(), memory));
    EXPECT_CONTAINS(Comm::free(standIn.library(), memory), "ncclMemFree failed");
    int onHost = 0;
    EXPECT(!rank.comm->registerMemory(&onHost, 4, /*isSymmetric=*/false, &buffer).ok());
    EXPECT_EQ(rank.comm->state(), State::kReady);
  });
}

// The thread of a registration that times out is still in NCCL, which no other thread may enter.
TEST(NcclMemory, aRegistrationThatTimesOutFailsTheCommunicator) {
  StandIn& standIn = StandIn::full();
  CommOptions options;
  options.issueTimeout = [] { return std::chrono::milliseconds(100); };
  World world(standIn, 1, options);
  Rank& rank = world[0];
  Buffer data(filled(1), rank.stream);
  void* const gate = mycoll_standin_gate_close(rank.stream);
  Comm::Registration made;
  const Status status = rank.comm->registerMemory(data.span().data, data.span().bytes,
                                                  /*isSymmetric=*/false, &made);
  EXPECT_EQ(status.code(), Code::kTimeout);
  EXPECT_CONTAINS(status, "ncclCommRegister timed out");
  EXPECT_EQ(rank.comm->state(), State::kFailed);
  EXPECT_EQ(sum(rank, data).message(), status.message());
  mycoll_standin_gate_open(gate);
}

// --- processes

std::string hex(const UniqueId& id) {
  std::string text;
  for (char byte : id.bytes) {
    char two[3];
    std::snprintf(two, sizeof(two), "%02x", static_cast<unsigned char>(byte));
    text += two;
  }
  return text;
}

// Rank 1 of the next test, which runs this in a process of its own. It sums until it is killed.
TEST(NcclProcess, peer) {
  const char* const text = std::getenv("NCCL_TEST_PEER_ID");
  if (text == nullptr) SKIP("is started by the next test");
  UniqueId id;
  for (size_t i = 0; i < sizeof(id.bytes); ++i) {
    id.bytes[i] = static_cast<char>(std::stoi(std::string(text + 2 * i, 2), nullptr, 16));
  }
  Rank rank{lone(StandIn::full(), 1, 2), World::streamOf(1)};
  ASSERT_OK(rank.comm->connect(id, patient(), nullptr));
  for (int round = 0;; ++round) {
    Buffer data(filled(2), rank.stream);
    ASSERT_OK(sum(rank, data));
    EXPECT(isSumOf(data, 3));
  }
}

TEST(NcclProcess, aKilledPeerIsReported) {
  StandIn& standIn = StandIn::full();
  const UniqueId id = newId(standIn);
  setenv("NCCL_TEST_PEER_ID", hex(id).c_str(), 1);
  std::string self = "/proc/self/exe", filter = "NcclProcess.peer";
  char* arguments[] = {self.data(), filter.data(), nullptr};
  pid_t peer = -1;
  ASSERT(posix_spawn(&peer, self.c_str(), nullptr, nullptr, arguments, environ) == 0);
  unsetenv("NCCL_TEST_PEER_ID");

  Rank rank{lone(standIn), World::streamOf(0)};
  EXPECT_OK(rank.comm->connect(id, patient(), nullptr));
  for (int round = 0; round < 10; ++round) {
    Buffer data(filled(1), rank.stream);
    EXPECT_OK(sum(rank, data));
    EXPECT(isSumOf(data, 3));
  }
  kill(peer, SIGKILL);
  waitpid(peer, nullptr, 0);
  Buffer data(filled(1), rank.stream);
  void* const gate = mycoll_standin_gate_close(rank.stream);
  // The peer may have sent its data for one more.
  for (int round = 0; round < 3; ++round) EXPECT_OK(sum(rank, data));
  mycoll_standin_gate_open(gate);
  EXPECT(eventually([&] { return !rank.comm->check().ok(); }));
  EXPECT_EQ(rank.comm->check().code(), Code::kPeerLost);
  EXPECT_CONTAINS(rank.comm->check(), "remote process exited");
  EXPECT_OK(rank.comm->abort(patient(), rank.comm->cause()));
}

}  // namespace
}  // namespace mycoll::nccl::world
