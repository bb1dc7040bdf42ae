// Groups of many ranks on pretended hosts: what each rank must know, and whom it talks to, does not
// grow with the number of ranks as fast as that does.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "calls.h"
#include "frame_counter.h"
#include "meshes.h"
#include "processes.h"
#include "test.h"
#include "world.h"

using namespace mycoll;
using namespace test;

namespace {

constexpr int kHosts = 12;
constexpr int kOnEach = 8;
constexpr int kRanks = kHosts * kOnEach;

std::vector<int> manyHosts() {
  std::vector<int> hostOf(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) hostOf[rank] = rank / kOnEach;
  return hostOf;
}

int peersOf(Communicator& group) {
  int peers = 0;
  for (int rank = 0; rank < group.ranks(); ++rank) {
    peers += rank != group.rank() && group.mailbox().isConnectedTo(rank);
  }
  return peers;
}

}  // namespace

// Everybody waits long for one rank, and says so: along a tree, and not to each other.
TEST(Many, waitingRanksConnectToFew) {
  std::atomic<int> connections{0}, most{0};
  runHosts(manyHosts(), [&](Communicator& group) {
    if (group.rank() == kRanks - 1) std::this_thread::sleep_for(std::chrono::milliseconds(900));
    EXPECT_OK(run(group, call(OpKind::kBarrier)));
    const int peers = peersOf(group);
    connections += peers;
    int known = most.load();
    while (known < peers && !most.compare_exchange_weak(known, peers)) {
    }
    EXPECT_OK(run(group, call(OpKind::kBarrier)));
  });
  // The first rank of the first host: the others of its host, those of the other hosts.
  EXPECT(most.load() <= kOnEach - 1 + kHosts - 1);
  // A host's ranks with its first one, both ends; the first ones with each other.
  EXPECT(connections.load() <= 2 * kHosts * (kOnEach - 1) + kHosts * (kHosts - 1));
}

// A root has one message from each other host, or for it. Rank r has r elements.
TEST(Many, aRootTalksToHosts) {
  constexpr int kRoot = 13;
  runHosts(manyHosts(), [](Communicator& group) {
    const int self = group.rank();
    const bool isRoot = self == kRoot;
    const std::vector<int32_t> mine = input(self, self);
    std::vector<int32_t> back(self);
    std::vector<std::vector<int32_t>> all(kRanks);
    Call gather = call(OpKind::kGather), scatter = call(OpKind::kScatter);
    gather.root = scatter.root = kRoot;
    std::vector<int32_t> given = mine;
    gather.in = {span(given)};
    scatter.out = {span(back)};
    for (int rank = 0; rank < kRanks && isRoot; ++rank) {
      all[rank].resize(rank);
      gather.out.push_back(span(all[rank]));
      scatter.in.push_back(span(all[rank]));
    }
    EXPECT_OK(run(group, gather));
    for (int rank = 0; rank < kRanks && isRoot; ++rank) expectInput(all[rank], rank);
    EXPECT_OK(run(group, scatter));
    EXPECT(back == mine);
    if (isRoot) EXPECT(peersOf(group) <= kOnEach - 1 + kHosts - 1);
  });
}

// A failure reaches everybody, also those that have no connection to where it happened.
TEST(Many, aFailureIsPassedOn) {
  std::atomic<int> connections{0}, heard{0};
  runHosts(manyHosts(), [&](Communicator& group) {
    // The first rank to come out of it may end it for the others.
    Status status = run(group, call(OpKind::kBarrier));
    if (group.rank() == kRanks - 2) group.abort("for a test");
    if (status.ok()) status = run(group, call(OpKind::kBarrier));
    EXPECT(status.code() == Code::kAborted);
    EXPECT(status.message().find("for a test") != std::string::npos);
    heard += status.code() == Code::kAborted;
    connections += peersOf(group);
  });
  EXPECT_EQ(heard.load(), kRanks);
  EXPECT(connections.load() <= 2 * kHosts * (kOnEach - 1) + kHosts * (kHosts - 1));
}

// Also past a rank that stands for its host, or for all, and has left.
TEST(Many, aFailureIsPassedOnPastRanksThatHaveLeft) {
  for (const int left : {kOnEach, 0}) {
    std::atomic<int> heard{0};
    runHosts(manyHosts(), [&](Communicator& group) {
      const Status first = run(group, call(OpKind::kBarrier));
      if (!first.ok() || group.rank() == left) return;
      if (group.rank() == kRanks - 2) {
        std::this_thread::sleep_for(std::chrono::milliseconds(800));
        group.abort("for a test");
        return;
      }
      std::vector<int32_t> data(1);
      const int source = group.rank() == kRanks - 1 ? 1 : kRanks - 1;
      const OpPtr op = group.recv({span(data), source, 0, DType::kInt32}, nullptr, true);
      const Status status = group.wait(op, Deadline::after(std::chrono::milliseconds(5000)));
      EXPECT(status.message().find("for a test") != std::string::npos);
      heard += status.code() == Code::kAborted;
    });
    EXPECT_EQ(heard.load(), kRanks - 2);
  }
}

// ... and past one that is stopped, which a timeout names.
TEST(Many, aTimeoutIsPassedOnPastTheRankThatItNames) {
  constexpr int kAll = 72, kEach = 24, kStopped = kEach;
  int made = 0;
  Meshes world(kAll, TransportChoice::kAuto, {}, [&](MeshOptions& options) {
    options.host = " host " + std::to_string(made++ / kEach);
  });
  std::vector<int> processes(kAll);
  std::iota(processes.begin(), processes.end(), 0);
  for (const int process : processes) world.join(process, 1, processes);
  Cause cause;
  cause.rank = kStopped;
  world.at(kAll - 1, 1).listener.membership().fail(Status(Code::kTimeout, "too late", cause));
  const auto hasHeard = [&](int rank) {
    return rank == kStopped || !world.at(rank, 1).listener.failure().ok();
  };
  const Deadline deadline = Deadline::after(std::chrono::milliseconds(10'000));
  while (!std::all_of(processes.begin(), processes.end(), hasHeard) && !deadline.expired()) {
    for (const int process : processes) {
      if (process != kStopped) world.all[process]->progress();
    }
  }
  EXPECT(std::all_of(processes.begin(), processes.end(), hasHeard));
}

namespace {

// 256 ranks on 32 hosts, in a barrier. The processes of some are killed.
void killSome(const std::vector<int>& killed) {
  constexpr int kEach = 8, kOf = 32, kAll = kEach * kOf;
  std::vector<int> hostOf(kAll);
  for (int rank = 0; rank < kAll; ++rank) hostOf[rank] = rank / kEach;
  auto isKilled = [&](int rank) {
    return std::find(killed.begin(), killed.end(), rank) != killed.end();
  };
  const ScopedFolder folder;
  const auto store = std::make_shared<FolderStore>(folder.path());
  const auto counter = std::make_shared<FrameCounter>(hostOf);
  auto meshOf = [&](int rank) {
    MeshOptions mesh;
    mesh.host = " host " + std::to_string(hostOf[rank]);
    if (!isKilled(rank)) mesh.tap = counter;
    return mesh;
  };
  std::vector<pid_t> children;
  for (const int rank : killed) {
    children.push_back(startProcess([&] {
      runRank(rank, kAll, meshOf(rank), store, [](Communicator& group) {
        for (int i = 0; i < 2; ++i) EXPECT_OK(run(group, call(OpKind::kBarrier)));
        alarm(400);  // should nobody kill it
        pause();
      });
    }));
  }
  const int others = kAll - static_cast<int>(killed.size());
  std::atomic<int> arrived{0}, over{0};
  std::atomic<bool> isCounted{false};
  std::chrono::steady_clock::time_point began;
  FrameCounter::Count before, after;
  Threads(kAll, [&](int rank) {
    if (isKilled(rank)) return;
    runRank(rank, kAll, meshOf(rank), store, [&](Communicator& group) {
      for (int i = 0; i < 2; ++i) EXPECT_OK(run(group, call(OpKind::kBarrier)));
      std::this_thread::sleep_for(std::chrono::milliseconds(300));  // both ends are counted
      if (++arrived == others) {
        before = counter->count();
        began = std::chrono::steady_clock::now();
        for (const pid_t child : children) kill(child, SIGKILL);
      }
      const Status status = run(group, call(OpKind::kBarrier));
      EXPECT(status.code() == Code::kPeerLost);
      EXPECT(isKilled(status.cause().rank));
      if (++over == others) {
        const auto took = std::chrono::steady_clock::now() - began;
        after = counter->count();
        printf(
            "    %d killed: all know after %.0f ms; %d frames of it between %d hosts, %d new "
            "connections\n",
            static_cast<int>(killed.size()),
            std::chrono::duration<double, std::milli>(took).count(), after.news, kOf,
            after.connections - before.connections);
        isCounted = true;
      }
      while (!isCounted) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    });
  });
  for (const pid_t child : children) waitpid(child, nullptr, 0);
  EXPECT(after.news <= 3 * kOf);
  // A rank that stands for its host has others in its place, to which connections are made.
  if (killed.size() > 1 || killed[0] % kEach != 0) EXPECT_EQ(after.connections, before.connections);
}

}  // namespace

// The news of a death takes a few frames for each host, and the connections that there are.
TEST(Many, aDeathIsToldInFewFrames) { killSome({131}); }

TEST(Many, aDeathIsToldPastTheDead) {
  killSome({0});
  killSome({128});
  killSome({128, 129, 130, 131, 132, 133, 134, 135});
  killSome({0, 1, 2, 3, 4, 5, 6, 7});
  killSome({0, 1, 2, 3, 4, 5, 6, 7, 128, 129, 130, 131, 132, 133, 134, 135});
}

// Two ranks that exchange no message call with another root than the rest, and than each other.
TEST(Many, differentCallsAreFound) {
  std::atomic<int> found{0};
  runHosts(manyHosts(), [&](Communicator& group) {
    std::vector<int32_t> mine = input(group.rank(), 1), all(kRanks);
    Call gather = call(OpKind::kGather);
    gather.root = group.rank() < kRanks / 2 ? 0 : kRanks - 1;
    gather.in = {span(mine)};
    for (int rank = 0; rank < kRanks && group.rank() == gather.root; ++rank) {
      gather.out.push_back(span(all, rank, 1));
    }
    const Status status = run(group, std::move(gather));
    found += status.code() == Code::kMismatch;
    // A rank that only sends may be done before anybody compares.
    EXPECT(status.ok() || status.code() == Code::kMismatch);
    EXPECT(run(group, call(OpKind::kBarrier)).code() == Code::kMismatch);
  });
  EXPECT(found.load() >= 2);
}

// Rank 0 says who is missing, and all hear the same words.
TEST(Many, oneRankKnowsTheMissing) {
  auto store = std::make_shared<MemoryStore>();
  std::atomic<int> heard{0};
  Threads(kRanks, [&](int rank) {
    if (rank == kRanks - 1) return;
    MeshOptions mesh;
    mesh.storeHost = "127.0.0.1";
    std::shared_ptr<Engine> engine;
    ASSERT_OK(Engine::create(mesh, &engine));
    GroupOptions options;
    options.name = "late";
    options.rank = rank;
    options.ranks = kRanks;
    options.timeout = std::chrono::milliseconds(4000);
    std::shared_ptr<Communicator> group;
    const Status status = Communicator::create(options, store, engine, &group);
    EXPECT(status.code() == Code::kTimeout);
    heard += status.message().find("missing: " + std::to_string(kRanks - 1)) != std::string::npos;
  });
  EXPECT_EQ(heard.load(), kRanks - 1);
}
