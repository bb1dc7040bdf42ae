// Ranks that wait for each other, each in another call, report a deadlock; others do not.
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

// Several groups of the same ranks, on one engine for each rank. members[i]: of group i; empty:
// all.
void runGroups(int ranks, Links links, const std::vector<std::vector<int>>& members,
               const std::function<void(int rank, Groups& groups)>& body, int timeoutMs = 20'000,
               std::chrono::milliseconds warnAfter = 300ms) {
  std::vector<std::shared_ptr<test::MemoryStore>> stores(members.size());
  for (auto& store : stores) store = std::make_shared<test::MemoryStore>();
  test::Threads(ranks, [&](int rank) {
    MeshOptions mesh;
    mesh.transport = links == Links::kTcp ? TransportChoice::kTcp : TransportChoice::kAuto;
    mesh.storeHost = "127.0.0.1";
    std::shared_ptr<Engine> engine;
    ASSERT_OK(Engine::create(mesh, &engine));
    Groups groups(members.size());
    for (size_t i = 0; i < members.size(); ++i) {
      const auto at = std::find(members[i].begin(), members[i].end(), rank);
      if (!members[i].empty() && at == members[i].end()) continue;
      GroupOptions options;
      options.name = "group" + std::to_string(i);
      options.rank = members[i].empty() ? rank : static_cast<int>(at - members[i].begin());
      options.ranks = members[i].empty() ? ranks : static_cast<int>(members[i].size());
      options.timeout = std::chrono::milliseconds(timeoutMs);
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
  for (const char* word : words) {
    if (status.message().find(word) == std::string::npos) {
      EXPECT_EQ(status.message(), std::string("... ") + word);
    }
  }
}

// These tests consist of waiting: what can wait at the same time does.
void together(const std::vector<std::function<void()>>& bodies) {
  test::Threads(static_cast<int>(bodies.size()), [&](int i) { bodies[i](); });
}

void overShmAndTcp(const std::function<void(Links)>& body) {
  together({[&] { body(Links::kShm); }, [&] { body(Links::kTcp); }});
}

}  // namespace

TEST(Deadlock, twoGroupsInCrossedOrder) {
  // Named long before the groups' timeout, which would be another error.
  const auto play = [](Links links, bool areUsedBefore) {
    std::barrier everyone(2);
    runGroups(2, links, {{}, {}}, [&](int rank, Groups& groups) {
      if (areUsedBefore) {
        for (auto& group : groups) EXPECT_OK(barrier(*group));
      }
      expectDeadlock(barrier(*groups[rank]), {"'group0'", "'group1'", "rank 0", "rank 1"});
      everyone.arrive_and_wait();  // a rank that leaves first would be another error
    });
  };
  overShmAndTcp(
      [&](Links links) { together({[&] { play(links, true); }, [&] { play(links, false); }}); });
}

// Each waits for the next, in a group of the two; nobody is in all groups.
TEST(Deadlock, aCircleOfThree) {
  overShmAndTcp([](Links links) {
    std::barrier everyone(3);
    runGroups(3, links, {{0, 1}, {1, 2}, {2, 0}}, [&](int rank, Groups& groups) {
      // In an order that works.
      for (auto& group : groups) {
        if (group) EXPECT_OK(barrier(*group));
      }
      expectDeadlock(barrier(*groups[rank]), {"'group0'", "'group1'", "'group2'"});
      everyone.arrive_and_wait();
    });
  });
}

TEST(Deadlock, receivesFromEachOther) {
  overShmAndTcp([](Links links) {
    runGroups(2, links, {{}}, [&](int rank, Groups& groups) {
      EXPECT_OK(barrier(*groups[0]));
      int value = 0;
      OpPtr op = groups[0]->recv({{&value, 4}, 1 - rank, 3, DType::kInt32}, nullptr, true);
      expectDeadlock(groups[0]->wait(op, Deadline::never()),
                     {"recv from rank 0", "recv from rank 1"});
    });
  });
}

TEST(Deadlock, largeSendsToEachOther) {
  overShmAndTcp([](Links links) {
    runGroups(2, links, {{}}, [&](int rank, Groups& groups) {
      EXPECT_OK(barrier(*groups[0]));
      std::vector<char> data(1'000'000);
      OpPtr op =
          groups[0]->send({{data.data(), data.size()}, 1 - rank, 3, DType::kInt8}, nullptr, true);
      expectDeadlock(groups[0]->wait(op, Deadline::never()), {"send to rank 0", "send to rank 1"});
    });
  });
}

TEST(Deadlock, aReceiveAgainstABarrier) {
  runGroups(2, Links::kShm, {{}}, [&](int rank, Groups& groups) {
    EXPECT_OK(barrier(*groups[0]));
    int value = 0;
    OpPtr op = rank == 0 ? begin(*groups[0])
                         : groups[0]->recv({{&value, 4}, 0, 3, DType::kInt32}, nullptr, true);
    expectDeadlock(groups[0]->wait(op, Deadline::never()), {"barrier", "recv from rank 0"});
  });
}

// What looks like one from outside, but goes on.
TEST(Deadlock, noneBeforeTheFirstQuestion) {
  // Within their timeout these ranks ask each other only once, shortly before it.
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
  // A rank that is only slow, and operations in crossed order that nobody waits for yet.
  const auto slow = [](Links links) {
    runGroups(3, links, {{}, {}}, [&](int rank, Groups& groups) {
      for (auto& group : groups) EXPECT_OK(barrier(*group));
      if (rank == 2) std::this_thread::sleep_for(900ms);
      OpPtr first = begin(*groups[rank == 0 ? 1 : 0], false);
      EXPECT_OK(barrier(*groups[rank == 0 ? 0 : 1]));
      EXPECT_OK(groups[0]->wait(first, Deadline::never()));
    });
  };
  // Groups of threads of their own: the other thread comes, late.
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
  // Waits with a limit end by themselves.
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

// What the missing rank did last, in the others' timeout.
// Rank 1 waits for the root of a broadcast, which waits for rank 2 before it continues.
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
    // Rank 1's deadline comes first. Until then it asks rank 0, which may be busy with its memory.
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

TEST(Deadlock, timeoutsTellWhatTheMissingRankDid) {
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
          EXPECT(status.message().find("the last call that it finished is barrier (call #0") !=
                 std::string::npos);
          EXPECT(status.message().find("in no call of mycoll") != std::string::npos);
        },
        1800);
  });
}
