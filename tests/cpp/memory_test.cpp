// Each allocation of a thread fails once: of an engine's thread, or of one that ends a group. The
// process continues, and every call ends, with success or an error.
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "allocation_hook.h"
#include "calls.h"
#include "meshes.h"
#include "test.h"
#include "world.h"

namespace {

// The number of the allocation that fails, 0: none. Counts allocations of at least `leastBytes`: of
// the engines' threads, or of the threads with lacksMemory if doesAnyLack.
std::atomic<int> failing{0};
std::atomic<size_t> leastBytes{0};
std::atomic<bool> doesAnyLack{false};
thread_local bool lacksMemory = false;

bool isEngineThread() {
  thread_local bool isKnown = false;
  char name[16] = "";
  if (!isKnown && pthread_getname_np(pthread_self(), name, sizeof(name)) == 0) {
    isKnown = std::strcmp(name, "mycoll") == 0;
  }
  return isKnown;
}

// All allocations of threads with lacksMemory fail.
std::atomic<bool> doAllFail{false};

}  // namespace

void test::beforeAllocation(std::size_t bytes) {
  if (doAllFail.load(std::memory_order_relaxed) && lacksMemory) throw std::bad_alloc();
  const bool isCounted = failing.load(std::memory_order_relaxed) > 0 &&
                         bytes >= leastBytes.load(std::memory_order_relaxed) &&
                         (doesAnyLack.load() ? lacksMemory : isEngineThread());
  if (isCounted && failing.fetch_sub(1, std::memory_order_relaxed) == 1) throw std::bad_alloc();
}

using namespace test;
using namespace std::chrono_literals;

namespace {

constexpr size_t kSmall = 25, kLarge = 100'000;
constexpr int kTimeoutMs = 5000;

// Waits without helping, so that only the engine's thread works on the operation.
Status waitFor(const OpPtr& op) {
  while (!op->done()) std::this_thread::sleep_for(50us);
  return op->status();
}

void expectNoTimeout(const Status& status, int number) {
  if (status.code() != Code::kTimeout) return;
  EXPECT_EQ("allocation " + std::to_string(number) + ": " + test::show(status), "");
}

// Calls sums and messages of both sizes. Returns true if all succeeded.
bool play(Communicator& group, int number) {
  bool isOk = true;
  for (const size_t count : {kSmall, kLarge}) {
    std::vector<int32_t> values = input(group.rank(), count);
    Call sum = call(OpKind::kAllReduce);
    sum.in = sum.out = {span(values)};
    const Status summed = waitFor(group.submit(std::move(sum), nullptr, false));
    expectNoTimeout(summed, number);
    if (summed.ok()) expectSums(values, 2);
    isOk &= summed.ok();

    const int other = 1 - group.rank();
    std::vector<int32_t> out = input(group.rank(), count), in(count);
    const OpPtr sending = group.send({span(out), other, 7}, nullptr, false);
    // The message usually arrives before its receive is posted, and is buffered.
    std::this_thread::sleep_for(200us);
    const Status received = waitFor(group.recv({span(in), other, 7}, nullptr, false));
    expectNoTimeout(received, number);
    if (received.ok()) expectInput(in, other);
    const Status sent = waitFor(sending);
    expectNoTimeout(sent, number);
    isOk &= received.ok() && sent.ok();
  }
  return isOk;
}

}  // namespace

// Calls body(number) for each number until fewer than that many allocations were made. Returns
// whether that happened, so that each allocation has failed once.
bool forEachAllocation(int most, const std::function<void(int number)>& body) {
  for (int number = 1; number <= most; ++number) {
    body(number);
    if (failing.exchange(0) <= 0) continue;
    std::printf("        %d allocations\n", number - 1);
    return true;
  }
  return false;
}

TEST(Memory, everyAllocationOfTheEnginesThreadMayFail) {
  // The thread allocates a list of 16 bytes, for this one group, in each of its rounds.
  constexpr size_t kNoSuchList = 17;
  struct Round {
    Links links;
    size_t leastBytes;
    int most;
    SingleCopyUse singleCopy = SingleCopyUse::kOff;
  };
  for (const auto& [links, bytes, most, singleCopy] :
       std::initializer_list<Round>{{Links::kTcp, 1, 25},
                                    {Links::kShm, kNoSuchList, 1000},
                                    {Links::kShm, kNoSuchList, 1000, SingleCopyUse::kOn},
                                    {Links::kShm, kNoSuchList, 1000, SingleCopyUse::kMeasured},
                                    {Links::kTcp, kNoSuchList, 1000}}) {
    int failed = 0;
    leastBytes = bytes;
    const bool isOver = forEachAllocation(most, [&](int number) {
      std::atomic<bool> areOk{true};
      std::atomic<int> ready{0};
      runMeshes(
          2,
          [&](int rank) {
            MeshOptions mesh = meshWith(links, rank);
            mesh.singleCopy = singleCopy;
            return mesh;
          },
          [&](Communicator& group) {
            ready.fetch_add(1);
            while (ready.load() < 2) std::this_thread::yield();
            if (group.rank() == 0) failing = number;
            if (!play(group, number)) areOk = false;
          },
          kTimeoutMs);
      failed += !areOk;
    });
    if (bytes < kNoSuchList) continue;  // the number of those has no limit
    EXPECT(isOver);
    EXPECT(failed > 0);
  }
}

// Messages are cancelled without memory. A part of one has been sent, and the rest cannot be kept,
// so the group fails on both ranks.
TEST(Memory, messagesAreCancelledWithoutAny) {
  constexpr uint64_t kGroup = 42;
  for (const TransportChoice transport : {TransportChoice::kAuto, TransportChoice::kTcp}) {
    Meshes world(2, transport);
    for (int rank : {0, 1}) world.join(rank, kGroup, {0, 1});
    ASSERT(world.talk(0, 1, kGroup, 0, 1));
    ASSERT(world.talk(1, 0, kGroup, 1, 0));
    {
      std::vector<char> data(60'000);
      std::vector<Transfer> sending(1000);
      for (Transfer& each : sending) {
        world.at(0, kGroup).mailbox->send(each, 1, MessageClass::kPointToPoint, 5,
                                          Meshes::word(data.size()), {data.data(), data.size()});
        if (!each.isDone()) break;
      }
      EXPECT(!sending.back().isDone());
      lacksMemory = true;
      doAllFail = true;
    }
    doAllFail = false;
    lacksMemory = false;
    EXPECT(world.turnUntil([&] { return !world.at(0, kGroup).listener.failure().ok(); }));
    EXPECT(world.turnUntil([&] { return !world.at(1, kGroup).listener.failure().ok(); }));
  }
}

// The thread that releases a group last ends it, whether the rank has left it or not.
TEST(Memory, everyAllocationOfAGroupsEndMayFail) {
  leastBytes = 1;
  doesAnyLack = true;
  for (const Links links : {Links::kShm, Links::kTcp}) {
    for (const bool isLeft : {true, false}) {
      EXPECT(forEachAllocation(1000, [&](int number) {
        const auto store = std::make_shared<MemoryStore>();
        Threads(2, [&](int rank) {
          std::shared_ptr<Engine> engine;
          auto group = makeRank(rank, 2, meshWith(links, rank), store, kTimeoutMs, &engine);
          EXPECT(play(*group, number));
          if (isLeft || rank == 1) group->close(Deadline::after(2s));
          lacksMemory = rank == 0;
          if (lacksMemory) failing = number;
          group.reset();
          engine.reset();
          lacksMemory = false;
        });
      }));
    }
  }
  doesAnyLack = false;
}

// A thread without memory detects that calls differ. Its group fails nevertheless.
TEST(Memory, everyAllocationOfAFailureMayFail) {
  leastBytes = 1;
  doesAnyLack = true;
  for (const Links links : {Links::kShm, Links::kTcp}) {
    EXPECT(forEachAllocation(1000, [&](int number) {
      runWorld(
          2, links,
          [&](Communicator& group) {
            std::vector<int32_t> values = input(group.rank(), kSmall);
            Call differing = call(group.rank() == 0 ? OpKind::kAllReduce : OpKind::kBroadcast);
            differing.out = {span(values)};
            if (differing.kind == OpKind::kAllReduce) differing.in = differing.out;
            if (differing.kind == OpKind::kBroadcast) differing.root = 0;
            OpPtr op = group.submit(std::move(differing), nullptr, false);
            lacksMemory = group.rank() == 0;
            if (lacksMemory) failing = number;
            Status status;
            for (bool isKnown = false; !isKnown;) {
              try {
                status = group.wait(op, Deadline::never());
                isKnown = true;
              } catch (const std::bad_alloc&) {
              }
            }
            lacksMemory = false;
            EXPECT(!status.ok());
            expectNoTimeout(status, number);
            EXPECT(group.hasFailed());
          },
          kTimeoutMs);
    }));
  }
  doesAnyLack = false;
}
