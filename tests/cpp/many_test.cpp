// Groups of many ranks that pretend to be on several hosts. The number of connections and messages
// of a rank grows more slowly than the number of ranks.
#include <signal.h>
#include <sys/wait.h>
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

// All ranks wait long for one rank and notify others of that: along a tree, and not each other.
TEST(Many, waitingRanksConnectToFew) {
  std::atomic<int> connections{0}, most{0};
  runHosts(manyHosts(), [&](Communicator& group) {
    if (group.rank() == kRanks - 1) std::this_thread::sleep_for(std::chrono::milliseconds(900));
    EXPECT_OK(barrier(group));
    const int peers = peersOf(group);
    connections += peers;
    int known = most.load();
    while (known < peers && !most.compare_exchange_weak(known, peers)) {
    }
    EXPECT_OK(barrier(group));
  });
  // The first rank of the first host connects to the others of its host, and to the other hosts.
  EXPECT(most.load() <= kOnEach - 1 + kHosts - 1);
  // The ranks of a host connect to its first rank, and the first ranks to each other: both ends
  // count.
  EXPECT(connections.load() <= 2 * kHosts * (kOnEach - 1) + kHosts * (kHosts - 1));
}

// A root exchanges one message with each other host. Rank r has r elements.
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

// A failure is reported to all ranks, even those without a connection to the rank that failed.
TEST(Many, aFailureIsReportedToAll) {
  std::atomic<int> connections{0}, notified{0};
  runHosts(manyHosts(), [&](Communicator& group) {
    // The rank that aborts may do so while others are still in this barrier.
    Status status = barrier(group);
    if (group.rank() == kRanks - 2) group.abort("for a test");
    if (status.ok()) status = barrier(group);
    EXPECT(status.code() == Code::kAborted);
    EXPECT_CONTAINS(status, "for a test");
    notified += status.code() == Code::kAborted;
    connections += peersOf(group);
  });
  EXPECT_EQ(notified.load(), kRanks);
  EXPECT(connections.load() <= 2 * kHosts * (kOnEach - 1) + kHosts * (kHosts - 1));
}

// As above, when the first rank of a host, or of all hosts, has left.
TEST(Many, aFailureIsReportedPastRanksThatHaveLeft) {
  for (const int left : {kOnEach, 0}) {
    std::atomic<int> notified{0};
    runHosts(manyHosts(), [&](Communicator& group) {
      const Status first = barrier(group);
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
      EXPECT_CONTAINS(status, "for a test");
      notified += status.code() == Code::kAborted;
    });
    EXPECT_EQ(notified.load(), kRanks - 2);
  }
}

// As above, when the first rank of a host is stopped, and the failure is a timeout that names it.
TEST(Many, aTimeoutIsReportedPastTheRankThatItNames) {
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
  const auto isNotified = [&](int rank) {
    return rank == kStopped || !world.at(rank, 1).listener.failure().ok();
  };
  const Deadline deadline = Deadline::after(std::chrono::milliseconds(10'000));
  while (!std::all_of(processes.begin(), processes.end(), isNotified) && !deadline.expired()) {
    for (const int process : processes) {
      if (process != kStopped) world.all[process]->progress();
    }
  }
  EXPECT(std::all_of(processes.begin(), processes.end(), isNotified));
}

namespace {

// 256 ranks on 32 hosts are in a barrier, and the processes of some are killed.
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
        for (int i = 0; i < 2; ++i) EXPECT_OK(barrier(group));
        alarm(400);  // ends the process if the test does not
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
      for (int i = 0; i < 2; ++i) EXPECT_OK(barrier(group));
      std::this_thread::sleep_for(std::chrono::milliseconds(300));  // until both ends are counted
      if (++arrived == others) {
        before = counter->count();
        began = std::chrono::steady_clock::now();
        for (const pid_t child : children) kill(child, SIGKILL);
      }
      const Status status = barrier(group);
      EXPECT(status.code() == Code::kPeerLost);
      EXPECT(isKilled(status.cause().rank));
      if (++over == others) {
        const auto took = std::chrono::steady_clock::now() - began;
        after = counter->count();
        printf(
            "    %d killed: reported to all after %.0f ms, with %d frames between %d hosts and %d "
            "new "
            "connections\n",
            static_cast<int>(killed.size()),
            std::chrono::duration<double, std::milli>(took).count(), after.failures, kOf,
            after.connections - before.connections);
        isCounted = true;
      }
      while (!isCounted) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    });
  });
  for (const pid_t child : children) waitpid(child, nullptr, 0);
  EXPECT(after.failures <= 3 * kOf);
  // If the first rank of a host is dead, connections are made to the rank that takes its place.
  if (killed.size() > 1 || killed[0] % kEach != 0) EXPECT_EQ(after.connections, before.connections);
}

}  // namespace

// Reporting a death takes a few frames for each host, and no new connection.
TEST(Many, aDeathIsReportedInFewFrames) { killSome({131}); }

TEST(Many, deathsOfFirstRanksAreReported) {
  killSome({0});
  killSome({128});
  killSome({128, 129, 130, 131, 132, 133, 134, 135});
  killSome({0, 1, 2, 3, 4, 5, 6, 7});
  killSome({0, 1, 2, 3, 4, 5, 6, 7, 128, 129, 130, 131, 132, 133, 134, 135});
}

// Half of the ranks call with another root than the others. The two roots exchange no message.
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
    // A rank that only sends may be done before the calls are compared.
    EXPECT(status.ok() || status.code() == Code::kMismatch);
    EXPECT(barrier(group).code() == Code::kMismatch);
  });
  EXPECT(found.load() >= 2);
}
