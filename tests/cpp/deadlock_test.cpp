// Ranks that wait for each other in different calls report a deadlock. Other ranks do not.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <functional>
#include <latch>
#include <thread>
#include <vector>

#include "base/topology.h"
#include "processes.h"
#include "test.h"
#include "world.h"

using namespace mycoll;
using namespace std::chrono_literals;
using test::Links;

namespace {

using Groups = std::vector<std::shared_ptr<Communicator>>;

// Makes several groups of the same ranks, on one engine for each rank. members[i]: the ranks of
// group i; empty: all ranks.
void runGroups(int ranks, Links links, const std::vector<std::vector<int>>& members,
               const std::function<void(int rank, Groups& groups)>& body, int timeoutMs = 20'000,
               std::chrono::milliseconds warnAfter = 300ms) {
  std::vector<std::shared_ptr<test::MemoryStore>> stores(members.size());
  for (auto& store : stores) store = std::make_shared<test::MemoryStore>();
  test::Threads(ranks, [&](int rank) {
    const std::shared_ptr<Engine> engine = test::makeEngine(test::meshWith(links, rank));
    Groups groups(members.size());
    for (size_t i = 0; i < members.size(); ++i) {
      const auto at = std::find(members[i].begin(), members[i].end(), rank);
      const bool isOfAll = members[i].empty();
      if (!isOfAll && at == members[i].end()) continue;
      const GroupOptions options =
          test::groupOptions(isOfAll ? rank : static_cast<int>(at - members[i].begin()),
                             isOfAll ? ranks : static_cast<int>(members[i].size()), timeoutMs,
                             "group" + std::to_string(i));
      ASSERT_OK(Communicator::create(options, stores[i], engine, &groups[i]));
      groups[i]->setWarnAfter(warnAfter);
    }
    body(rank, groups);
    for (auto& group : groups) {
      if (group) group->close(Deadline::after(2000ms));
    }
  });
}

OpPtr begin(Communicator& group, bool willWait = true) {
  Call call;
  call.kind = OpKind::kBarrier;
  return group.submit(call, nullptr, willWait);
}
Status barrier(Communicator& group) { return group.wait(begin(group), Deadline::never()); }

void expectDeadlock(const Status& status, std::initializer_list<const char*> words) {
  EXPECT_EQ(status.code(), Code::kDeadlock);
  for (const char* word : words) EXPECT_CONTAINS(status, word);
}

// These tests mostly wait, so they run at the same time.
void together(const std::vector<std::function<void()>>& bodies) {
  test::Threads(static_cast<int>(bodies.size()), [&](int i) { bodies[i](); });
}

void overShmAndTcp(const std::function<void(Links)>& body) {
  together({[&] { body(Links::kShm); }, [&] { body(Links::kTcp); }});
}

}  // namespace

TEST(Deadlock, twoGroupsInCrossedOrder) {
  // The deadlock is reported long before the timeout of the groups.
  const auto play = [](Links links, bool areUsedBefore) {
    std::barrier everyone(2);
    runGroups(2, links, {{}, {}}, [&](int rank, Groups& groups) {
      if (areUsedBefore) {
        for (auto& group : groups) EXPECT_OK(barrier(*group));
      }
      expectDeadlock(barrier(*groups[rank]), {"'group0'", "'group1'", "rank 0", "rank 1"});
      everyone.arrive_and_wait();  // a rank that leaves first would cause another error
    });
  };
  overShmAndTcp(
      [&](Links links) { together({[&] { play(links, true); }, [&] { play(links, false); }}); });
}

// Each rank waits for the next in a group of the two. No rank is in all groups.
TEST(Deadlock, aCircleOfThree) {
  overShmAndTcp([](Links links) {
    std::barrier everyone(3);
    runGroups(3, links, {{0, 1}, {1, 2}, {2, 0}}, [&](int rank, Groups& groups) {
      // First in an order without a deadlock.
      for (auto& group : groups) {
        if (group) EXPECT_OK(barrier(*group));
      }
      expectDeadlock(barrier(*groups[rank]), {"'group0'", "'group1'", "'group2'"});
      everyone.arrive_and_wait();
    });
  });
}

namespace {

// Two ranks each call an operation and wait for it. A message has a megabyte.
void expectDeadlockOf(const std::function<OpPtr(Communicator& group, const Message& toOther)>& call,
                      std::initializer_list<const char*> words) {
  overShmAndTcp([&](Links links) {
    runGroups(2, links, {{}}, [&](int rank, Groups& groups) {
      EXPECT_OK(barrier(*groups[0]));
      std::vector<char> data(1'000'000);
      const Message message{{data.data(), data.size()}, 1 - rank, 3, DType::kInt8};
      const OpPtr op = call(*groups[0], message);
      expectDeadlock(groups[0]->wait(op, Deadline::never()), words);
    });
  });
}

}  // namespace

TEST(Deadlock, receivesFromEachOther) {
  expectDeadlockOf([](auto& group, auto& message) { return group.recv(message, nullptr, true); },
                   {"recv from rank 0", "recv from rank 1"});
}

TEST(Deadlock, largeSendsToEachOther) {
  expectDeadlockOf([](auto& group, auto& message) { return group.send(message, nullptr, true); },
                   {"send to rank 0", "send to rank 1"});
}

TEST(Deadlock, aReceiveAgainstABarrier) {
  expectDeadlockOf(
      [](auto& group, auto& message) {
        return group.rank() == 0 ? begin(group) : group.recv(message, nullptr, true);
      },
      {"barrier", "recv from rank 0"});
}

// Ranks ask each other after `warnAfter`. If that is later than the timeout, they report a timeout.
TEST(Deadlock, noneBeforeTheFirstQuestion) {
  const auto crossed = [](std::chrono::milliseconds warnAfter, Code expected) {
    runGroups(
        2, Links::kShm, {{}, {}},
        [&](int rank, Groups& groups) {
          for (auto& group : groups) EXPECT_OK(barrier(*group));
          EXPECT_EQ(barrier(*groups[rank]).code(), expected);
        },
        1000, warnAfter);
  };
  crossed(std::chrono::hours(1), Code::kTimeout);
  crossed(std::chrono::milliseconds::max(), Code::kTimeout);
  crossed(100ms, Code::kDeadlock);
}

TEST(Deadlock, noFalseAlarm) {
  // A rank is slow, and operations are called in crossed order, but no rank waits for them yet.
  const auto slow = [](Links links) {
    runGroups(3, links, {{}, {}}, [&](int rank, Groups& groups) {
      for (auto& group : groups) EXPECT_OK(barrier(*group));
      if (rank == 2) std::this_thread::sleep_for(900ms);
      OpPtr first = begin(*groups[rank == 0 ? 1 : 0], false);
      EXPECT_OK(barrier(*groups[rank == 0 ? 0 : 1]));
      EXPECT_OK(groups[0]->wait(first, Deadline::never()));
    });
  };
  // Each group is used by its own thread, and the threads of the other rank call late.
  const auto threaded = [](Links links) {
    runGroups(2, links, {{}, {}}, [&](int rank, Groups& groups) {
      std::vector<std::thread> threads;
      for (int i = 0; i < 2; ++i) {
        threads.emplace_back([&, i] {
          EXPECT_OK(barrier(*groups[i]));
          if (rank == i) std::this_thread::sleep_for(900ms);
          EXPECT_OK(barrier(*groups[i]));
        });
      }
      for (auto& thread : threads) thread.join();
    });
  };
  // The waits of both ranks have a limit, and so end by themselves.
  const auto limited = [](Links links) {
    std::barrier bothHaveWaited(2);
    runGroups(2, links, {{}, {}}, [&](int rank, Groups& groups) {
      for (auto& group : groups) EXPECT_OK(barrier(*group));
      OpPtr op = begin(*groups[rank]);
      EXPECT_EQ(groups[rank]->wait(op, Deadline::after(800ms)).code(), Code::kTimeout);
      bothHaveWaited.arrive_and_wait();
      EXPECT_OK(barrier(*groups[1 - rank]));
      EXPECT_OK(groups[rank]->wait(op, Deadline::never()));
    });
  };
  overShmAndTcp([&](Links links) {
    together({[&] { slow(links); }, [&] { threaded(links); }, [&] { limited(links); }});
  });
}

// Rank 1 waits for the root of a broadcast, which waits for rank 2.
TEST(Deadlock, aTimeoutNamesTheRankThatAllWaitFor) {
  const test::ScopedEnv staged("MYCOLL_SINGLE_COPY", "off");
  test::runProcesses(3, [](Communicator& group) {
    constexpr int kStopped = 2;
    ASSERT_OK(barrier(group));
    std::vector<char> data(64 << 20);
    Call call;
    call.kind = OpKind::kBroadcast;
    call.root = 0;
    call.out = {{data.data(), data.size()}};
    const pid_t stopped = group.address().peers[kStopped].pid;
    if (group.rank() == kStopped) {
      const OpPtr op = group.submit(call, nullptr, /*willWait=*/true);
      group.advance();
      raise(SIGSTOP);
      EXPECT(!group.wait(op, Deadline::never()).ok());
      return;
    }
    while (lookAtProcess(stopped, group.address().peers[kStopped].startTicks) !=
           ProcessLife::kStopped) {
      usleep(1000);
    }
    // Rank 1's deadline is first. Until then it asks rank 0, which may be busy copying memory.
    group.setWarnAfter(300ms);
    group.setTimeout(group.rank() == 0 ? 4000ms : 2000ms);
    const Status status =
        group.wait(group.submit(call, nullptr, /*willWait=*/true), Deadline::never());
    EXPECT_EQ(status.code(), Code::kTimeout);
    EXPECT_EQ(status.cause().rank, kStopped);
    EXPECT(status.message().find("Arrived: 2") == std::string::npos);
    if (group.rank() == 0) kill(stopped, SIGCONT);
  });
}

// A timeout names the missing rank and its last call.
TEST(Deadlock, aTimeoutNamesTheLastCallOfTheMissingRank) {
  overShmAndTcp([](Links links) {
    std::latch areOver(2);
    runGroups(
        3, links, {{}, {}},
        [&](int rank, Groups& groups) {
          for (auto& group : groups) EXPECT_OK(barrier(*group));
          if (rank == 2) return areOver.wait();
          const Status status = barrier(*groups[0]);
          areOver.count_down();
          EXPECT_EQ(status.code(), Code::kTimeout);
          EXPECT_EQ(status.cause().rank, 2);
          EXPECT_CONTAINS(status, "the last call that it finished is barrier (call #0");
          EXPECT_CONTAINS(status, "in no call of mycoll");
        },
        1800);
  });
}
