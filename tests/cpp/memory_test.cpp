// A thread that gets no memory, an engine's or one that drops a group: each of its allocations
// fails once. The process lives on, and every call ends, well or with an error.
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

#include "calls.h"
#include "meshes.h"
#include "test.h"
#include "world.h"

namespace {

// The so many-th allocation of at least so many bytes fails. 0: none. Of all engines' threads, but
// while some thread says that it is short of memory, of that one.
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

// Every allocation of a thread that says that it is short of memory fails.
std::atomic<bool> doAllFail{false};

void* allocate(std::size_t bytes) {
  if (doAllFail.load(std::memory_order_relaxed) && lacksMemory) throw std::bad_alloc();
  const bool isCounted = failing.load(std::memory_order_relaxed) > 0 &&
                         bytes >= leastBytes.load(std::memory_order_relaxed) &&
                         (doesAnyLack.load() ? lacksMemory : isEngineThread());
  if (isCounted && failing.fetch_sub(1, std::memory_order_relaxed) == 1) throw std::bad_alloc();
  if (void* const block = std::malloc(bytes)) return block;
  throw std::bad_alloc();
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes); }
void* operator new[](std::size_t bytes) { return allocate(bytes); }
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return std::malloc(bytes); }
void operator delete(void* block, const std::nothrow_t&) noexcept { std::free(block); }
void operator delete(void* block) noexcept { std::free(block); }
void operator delete[](void* block) noexcept { std::free(block); }
void operator delete(void* block, std::size_t) noexcept { std::free(block); }
void operator delete[](void* block, std::size_t) noexcept { std::free(block); }

using namespace test;
using namespace std::chrono_literals;

namespace {

constexpr size_t kSmall = 25, kLarge = 100'000;
constexpr int kTimeoutMs = 5000;

// The engine's thread alone works on it.
Status ended(const OpPtr& op) {
  while (!op->done()) std::this_thread::sleep_for(50us);
  return op->status();
}

void expectNoTimeout(const Status& status, int number) {
  if (status.code() != Code::kTimeout) return;
  EXPECT_EQ("allocation " + std::to_string(number) + ": " + test::show(status), "");
}

// Sums and messages of both sizes; true if all ended well.
bool play(Communicator& group, int number) {
  bool isWell = true;
  for (const size_t count : {kSmall, kLarge}) {
    std::vector<int32_t> values = input(group.rank(), count);
    Call sum = call(OpKind::kAllReduce);
    sum.in = sum.out = {span(values)};
    const Status summed = ended(group.submit(std::move(sum), nullptr, false));
    expectNoTimeout(summed, number);
    if (summed.ok()) expectSums(values, 2);
    isWell &= summed.ok();

    const int other = 1 - group.rank();
    std::vector<int32_t> sent = input(group.rank(), count), came(count);
    const OpPtr sending = group.send({span(sent), other, 7}, nullptr, false);
    // What comes before its receive is kept.
    std::this_thread::sleep_for(200us);
    const Status received = ended(group.recv({span(came), other, 7}, nullptr, false));
    expectNoTimeout(received, number);
    if (received.ok()) expectInput(came, other);
    const Status left = ended(sending);
    expectNoTimeout(left, number);
    isWell &= received.ok() && left.ok();
  }
  return isWell;
}

}  // namespace

TEST(Memory, everyAllocationOfTheEnginesThreadMayFail) {
  // Most are lists of this one group, of 16 bytes, which the thread makes whenever it looks round.
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
    int failed = 0, number = 0;
    bool isOver = false;
    leastBytes = bytes;
    while (!isOver && number < most) {
      ++number;
      std::atomic<bool> areWell{true};
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
            if (!play(group, number)) areWell = false;
          },
          kTimeoutMs);
      isOver = failing.exchange(0) > 0;
      failed += !areWell;
    }
    std::printf("        %d allocations, %d of them ended a call\n", number - 1, failed);
    if (bytes < kNoSuchList) continue;  // of those there is no end
    EXPECT(isOver);
    EXPECT(failed > 0);
  }
}

// Also those of which a part has been sent: the rest cannot be kept, and so not be sent.
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

// Whoever holds it last ends it, the engine's thread or another, and it may not have been left.
TEST(Memory, everyAllocationOfAGroupsEndMayFail) {
  leastBytes = 1;
  doesAnyLack = true;
  for (const Links links : {Links::kShm, Links::kTcp}) {
    for (const bool isLeft : {true, false}) {
      int number = 0;
      bool isOver = false;
      while (!isOver && number < 1000) {
        ++number;
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
        isOver = failing.exchange(0) > 0;
      }
      std::printf("        %d allocations%s\n", number - 1, isLeft ? "" : ", with leaving");
      EXPECT(isOver);
    }
  }
  doesAnyLack = false;
}

// One rank finds that the calls differ, with a thread that gets no memory. Its group fails anyway.
TEST(Memory, everyAllocationOfAFailureMayFail) {
  leastBytes = 1;
  doesAnyLack = true;
  for (const Links links : {Links::kShm, Links::kTcp}) {
    int number = 0;
    bool isOver = false;
    while (!isOver && number < 1000) {
      ++number;
      runWorld(
          2, links,
          [&](Communicator& group) {
            std::vector<int32_t> values = input(group.rank(), kSmall);
            Call differing = call(group.rank() == 0 ? OpKind::kAllReduce : OpKind::kBroadcast);
            differing.in = differing.out = {span(values)};
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
      isOver = failing.exchange(0) > 0;
    }
    std::printf("        %d allocations\n", number - 1);
    EXPECT(isOver);
  }
  doesAnyLack = false;
}
