// Groups of processes that know each other's handles: they grow, shrink and lose ranks, and their
// formation fails.
#include "engine/endpoint.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <latch>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "calls.h"
#include "processes.h"
#include "test.h"
#include "world.h"

using namespace mycoll;
using std::chrono::milliseconds;

namespace {

using test::Threads;

// A process, whose destructor ends it.
struct Process {
  explicit Process(const std::string& host = "") {
    MeshOptions mesh;
    mesh.host = host;
    GroupOptions options;
    options.name = "elastic";
    options.timeout = milliseconds(30'000);
    ASSERT_OK(Endpoint::make(options, test::makeEngine(mesh), &endpoint));
  }

  Status form(int64_t number, const std::vector<std::string>& handles, int timeoutMs = 20'000) {
    std::shared_ptr<Communicator> next;
    const Status status = endpoint->form(number, handles, milliseconds(timeoutMs), &next);
    if (status.ok()) group = std::move(next);
    return status;
  }

  std::unique_ptr<Endpoint> endpoint;
  std::shared_ptr<Communicator> group;  // the latest one
};
using Processes = std::vector<std::unique_ptr<Process>>;

Processes start(int count, bool isOnHosts = false) {
  Processes all;
  for (int i = 0; i < count; ++i) {
    all.push_back(std::make_unique<Process>(isOnHosts ? " host " + std::to_string(i / 2) : ""));
  }
  return all;
}

std::vector<std::string> handlesOf(const Processes& all, const std::vector<int>& members) {
  std::vector<std::string> handles;
  for (const int member : members) handles.push_back(all[member]->endpoint->handle());
  return handles;
}

// Forms a group. Returns the result of each member.
std::vector<Status> formAll(Processes& all, const std::vector<int>& members, int64_t number,
                            int without = -1, int timeoutMs = 20'000) {
  const std::vector<std::string> handles = handlesOf(all, members);
  std::vector<Status> found(members.size());
  Threads(static_cast<int>(members.size()), [&](int rank) {
    if (rank != without) found[rank] = all[members[rank]]->form(number, handles, timeoutMs);
  });
  return found;
}

void expectSum(Communicator& group, size_t count) {
  std::vector<int32_t> in = test::input(group.rank(), count), out(count);
  Call sum = test::call(OpKind::kAllReduce);
  sum.in = {test::span(in)};
  sum.out = {test::span(out)};
  EXPECT_OK(test::run(group, std::move(sum)));
  test::expectSums(out, group.ranks());
}

void expectSums(Processes& all, const std::vector<int>& members, size_t count = 1000) {
  Threads(static_cast<int>(members.size()), [&](int rank) {
    Communicator& group = *all[members[rank]]->group;
    EXPECT_EQ(group.rank(), rank);
    EXPECT_EQ(group.ranks(), static_cast<int>(members.size()));
    expectSum(group, count);
  });
}

}  // namespace

TEST(Endpoint, groupsShrinkAndGrow) {
  for (const bool isOnHosts : {false, true}) {
    Processes all = start(5, isOnHosts);
    const std::vector<std::vector<int>> generations = {{0, 1, 2}, {2, 0}, {1, 2, 0, 4},
                                                       {3},       {4, 3}, {0, 1, 2, 3, 4}};
    for (size_t i = 0; i < generations.size(); ++i) {
      for (const Status& status : formAll(all, generations[i], static_cast<int64_t>(i))) {
        EXPECT_OK(status);
      }
      expectSums(all, generations[i]);
      expectSums(all, generations[i], 300'000);
    }
  }
}

// In each step some processes end, others start, and some of the living ones make a group.
TEST(Endpoint, randomWalk) {
  const unsigned seeds = test::isShort() ? 2 : 6;
  for (unsigned seed = 1; seed <= seeds; ++seed) {
    std::mt19937 random(seed);
    const int before = test::failureCount();
    Processes all = start(4, seed % 2 == 0);
    for (int64_t step = 0; step < (test::isShort() ? 20 : 60); ++step) {
      if (random() % 3 == 0) all.erase(all.begin() + random() % all.size());
      while (all.size() < 2 || (all.size() < 7 && random() % 3 == 0)) {
        all.push_back(std::move(start(1).front()));
      }
      std::vector<int> members(all.size());
      std::iota(members.begin(), members.end(), 0);
      std::shuffle(members.begin(), members.end(), random);
      members.resize(1 + random() % members.size());
      for (const Status& status : formAll(all, members, step)) EXPECT_OK(status);
      expectSums(all, members, 1 + random() % 20'000);
      if (test::failureCount() > before) {
        test::fail(__FILE__, __LINE__,
                   "seed " + std::to_string(seed) + ", step " + std::to_string(step));
        return;
      }
    }
  }
}

TEST(Endpoint, aWrongCallIsRefused) {
  Processes all = start(2);
  Process& first = *all[0];
  const std::vector<std::string> handles = handlesOf(all, {0, 1});
  EXPECT_OK(first.form(7, {handles[0]}));
  EXPECT_CONTAINS(first.form(7, {handles[0]}), "7 was already used");
  EXPECT_CONTAINS(first.form(8, {handles[1]}), "own handle is not among");
  EXPECT_CONTAINS(first.form(8, {handles[0], handles[1], handles[1]}), "rank 1 (");
  EXPECT_CONTAINS(first.form(8, {handles[0], "gloo:0"}), "the handle of rank 1 is not");
  EXPECT_CONTAINS(first.form(8, {}), "own handle is not among");
  expectSum(*first.group, 10);
  for (const Status& status : formAll(all, {0, 1}, 8)) EXPECT_OK(status);
}

TEST(Endpoint, differentListsAreReported) {
  Processes all = start(3);
  const auto expectAll = [&](int64_t number, const std::vector<int>& first,
                             const std::vector<int>& second, const std::string& words) {
    Threads(2, [&](int rank) {
      const Status status = all[rank]->form(number, handlesOf(all, rank == 0 ? first : second));
      EXPECT_EQ(status.code(), Code::kInvalidArgument);
      EXPECT_CONTAINS(status, words);
    });
  };
  expectAll(1, {0, 1, 2}, {0, 1}, "different handles");
  expectAll(2, {0, 1}, {0, 1, 2}, "different handles");
  expectAll(3, {0, 1, 2}, {0, 2, 1}, "different handles");
  for (const Status& status : formAll(all, {0, 1, 2}, 4)) EXPECT_OK(status);
}

// If a rank is missing, the earlier group can still be used, and another one can be made.
TEST(Endpoint, aMissingRankIsNamed) {
  Processes all = start(4);
  for (const Status& status : formAll(all, {0, 1, 2}, 0)) EXPECT_OK(status);
  for (const int missing : {0, 3}) {
    const std::vector<Status> found = formAll(all, {0, 1, 2, 3}, 1 + missing, missing, 1000);
    for (int rank = 0; rank < 4; ++rank) {
      if (rank == missing) continue;
      EXPECT_EQ(found[rank].code(), Code::kTimeout);
      EXPECT_CONTAINS(found[rank], "missing: " + std::to_string(missing));
    }
    expectSums(all, {0, 1, 2});
  }
  for (const Status& status : formAll(all, {2, 1, 0, 3}, 9)) EXPECT_OK(status);
  expectSums(all, {2, 1, 0, 3});
}

// A process has ended, and the others have its handle. On separate hosts, rank 2 is between rank 0
// and rank 3 in the control tree, and rank 3 is notified of its death, too.
TEST(Endpoint, aDeadRankIsNamed) {
  for (unsigned i = 0; i < 16; ++i) {
    const int dead = static_cast<int>(i % 4);
    const bool isKnown = i & 4, isOnHosts = i & 8;
    Processes all;
    for (int rank = 0; rank < 4; ++rank) {
      all.push_back(std::make_unique<Process>(isOnHosts ? " host " + std::to_string(rank) : ""));
    }
    if (isKnown) {
      for (const Status& status : formAll(all, {0, 1, 2, 3}, 0)) EXPECT_OK(status);
    }
    const std::vector<std::string> handles = handlesOf(all, {0, 1, 2, 3});
    all[dead].reset();
    Threads(4, [&](int rank) {
      if (rank == dead) return;
      const Status status = all[rank]->form(1, handles);
      EXPECT_EQ(status.code(), Code::kPeerLost);
      EXPECT_CONTAINS(status, "rank " + std::to_string(dead) + " (");
    });
  }
}

// A rank ends while the others form the group. Their formation fails, or their first call does.
// Then they form a group without that rank.
TEST(Endpoint, aRankEndsDuringTheFormation) {
  std::mt19937 random(1);
  for (int64_t step = 0; step < (test::isShort() ? 4 : 16); ++step) {
    Processes all = start(4, step % 2 == 0);
    if (step % 4 < 2) {
      for (const Status& status : formAll(all, {0, 1, 2, 3}, 0)) EXPECT_OK(status);
    }
    const int victim = static_cast<int>(random() % 4);
    const bool callsFirst = random() % 2 == 0;
    const auto delay = std::chrono::microseconds(random() % 3000);
    const std::vector<std::string> handles = handlesOf(all, {0, 1, 2, 3});
    Threads(4, [&](int rank) {
      if (rank == victim) {
        std::this_thread::sleep_for(delay);
        if (callsFirst) (void)all[rank]->form(1, handles, 1);
        all[rank].reset();
        return;
      }
      const Status status = all[rank]->form(1, handles);
      if (status.ok()) {
        EXPECT(!test::barrier(*all[rank]->group).ok());
      } else {
        EXPECT(status.code() == Code::kPeerLost || status.code() == Code::kTimeout);
      }
    });
    std::vector<int> members;
    for (int rank = 0; rank < 4; ++rank) {
      if (rank != victim) members.push_back(rank);
    }
    for (const Status& status : formAll(all, members, 2)) EXPECT_OK(status);
    expectSums(all, members);
  }
}

namespace {

// Receives this many texts.
std::vector<std::string> receive(Process& process, size_t count) {
  std::vector<std::string> all;
  for (const Deadline end = Deadline::after(milliseconds(10'000));
       all.size() < count && !end.expired();) {
    for (std::string& text : process.endpoint->receive(milliseconds(50))) {
      all.push_back(std::move(text));
    }
  }
  return all;
}

// Waits until the process has detected that the owner of the handle is lost.
bool detectsLoss(Process& process, const std::string& handle) {
  return test::eventually([&] {
    (void)process.endpoint->receive(milliseconds(50));
    return !process.endpoint->lossOf(handle).empty();
  });
}

}  // namespace

TEST(Endpoint, textsArriveInOrder) {
  for (const bool isOnHosts : {false, true}) {
    constexpr int kSenders = 4, kTexts = 50;
    Processes all = start(kSenders + 1, isOnHosts);
    Process& receiver = *all[kSenders];
    Threads(kSenders + 1, [&](int sender) {
      if (sender == kSenders) {
        std::vector<int> next(kSenders);
        for (const std::string& text : receive(receiver, kSenders * kTexts)) {
          EXPECT_EQ(text.size(), static_cast<size_t>(1 + 1000 * next[text[0]]));
          ++next[text[0]];
        }
        EXPECT(next == std::vector<int>(kSenders, kTexts));
        return;
      }
      for (int i = 0; i < kTexts; ++i) {
        EXPECT_OK(all[sender]->endpoint->send(
            receiver.endpoint->handle(), std::string(1 + 1000 * i, static_cast<char>(sender))));
      }
    });
  }
}

// A process detects the end of one that was in a group with it, of one that it has only sent a
// text, and of one that it was not connected to.
TEST(Endpoint, lostProcessesAreDetected) {
  for (const bool isOnHosts : {false, true}) {
    Processes all = start(5, isOnHosts);
    for (const Status& status : formAll(all, {0, 1, 2}, 0)) EXPECT_OK(status);
    const std::vector<std::string> handles = handlesOf(all, {0, 1, 2, 3, 4});
    Endpoint& endpoint = *all[0]->endpoint;
    EXPECT_OK(endpoint.watch(handles));
    EXPECT_OK(endpoint.send(handles[3], "hello"));
    EXPECT(receive(*all[3], 1) == std::vector<std::string>{"hello"});
    for (const int victim : {1, 3}) {
      EXPECT_EQ(endpoint.lossOf(handles[victim]), "");
      all[victim].reset();
      EXPECT(detectsLoss(*all[0], handles[victim]));
    }
    EXPECT_EQ(endpoint.lossOf(handles[2]), "");
    EXPECT_EQ(endpoint.lossOf(handles[4]), "");
    // Its end is detected when a text is sent to it.
    all[4].reset();
    EXPECT_OK(endpoint.send(handles[4], "hello"));
    EXPECT(detectsLoss(*all[0], handles[4]));
    for (const Status& status : formAll(all, {0, 2}, 1)) EXPECT_OK(status);
    expectSums(all, {0, 2});
    // Texts still arrive.
    EXPECT_OK(endpoint.send(handles[2], "again"));
    EXPECT(receive(*all[2], 1) == std::vector<std::string>{"again"});
  }
}

namespace {

constexpr int kHosts = 8, kOnEach = 8, kAll = kHosts * kOnEach;

// Publishes its handle, waits for those of all ranks and forms the group of all.
struct RankOfMany : Process {
  RankOfMany(int rank, Store& store) : Process(" host " + std::to_string(rank / kOnEach)) {
    EXPECT_OK(store.set(std::to_string(rank), endpoint->handle()));
    for (int other = 0; other < kAll; ++other) {
      std::string handle;
      for (bool isThere = false; !isThere;) {
        EXPECT_OK(store.tryGet(std::to_string(other), &isThere, &handle));
        if (!isThere) usleep(1000);
      }
      handles.push_back(handle);
    }
    ASSERT_OK(form(1, handles));
    expectSum(*group, 1000);
  }
  std::vector<std::string> handles;
};

// Returns the milliseconds from the kill until all other ranks have the right sum in a new group.
double killHost(int host) {
  const test::ScopedFolder folder;
  test::FolderStore store(folder.path());
  const auto isOnHost = [&](int rank) { return rank / kOnEach == host; };
  const pid_t child = test::startProcess([&] {
    Threads(kAll, [&](int rank) {
      if (!isOnHost(rank)) return;
      RankOfMany self(rank, store);
      alarm(120);  // ends the process if the test does not
      pause();
    });
  });
  std::latch formed(kAll - kOnEach);
  std::atomic<int> over{0};
  std::chrono::steady_clock::time_point killed;
  double took = 0;
  Threads(kAll, [&](int rank) {
    if (isOnHost(rank)) return;
    RankOfMany self(rank, store);
    if (formed.count_down(); rank == (host == 0 ? kOnEach : 0)) {
      formed.wait();
      std::this_thread::sleep_for(milliseconds(100));
      killed = std::chrono::steady_clock::now();
      kill(child, SIGKILL);
    }
    const Status status = test::barrier(*self.group);
    EXPECT_EQ(status.code(), Code::kPeerLost);
    EXPECT(isOnHost(status.cause().rank));
    std::vector<std::string> others;
    for (int other = 0; other < kAll; ++other) {
      if (!isOnHost(other)) others.push_back(self.handles[other]);
    }
    ASSERT_OK(self.form(2, others));
    expectSum(*self.group, 1000);
    if (++over < kAll - kOnEach) return;
    const auto end = std::chrono::steady_clock::now();
    took = std::chrono::duration<double, std::milli>(end - killed).count();
  });
  waitpid(child, nullptr, 0);
  return took;
}

}  // namespace

// One of 8 hosts with 64 ranks is killed. HOSTS_KILLED: how often; benchmarks/elastic.py reads the
// times.
TEST(Endpoint, aHostIsLost) {
  const int events = test::numberFrom("HOSTS_KILLED", test::isShort() ? 1 : 2);
  for (int event = 0; event < events && test::failureCount() == 0; ++event) {
    const int host = event % kHosts;
    printf("    host %d killed: the others continue after %.1f ms\n", host, killHost(host));
    fflush(stdout);
  }
}
