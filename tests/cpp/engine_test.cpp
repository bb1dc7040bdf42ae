// Compares all collectives and messages, over every kind of link, with plain arithmetic.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <iterator>
#include <latch>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "calls.h"
#include "passing_link.h"
#include "test.h"
#include "transport/frame.h"
#include "transport/link.h"
#include "world.h"

using namespace mycoll;
using namespace test;

namespace {

constexpr Links kAllLinks[] = {Links::kShm, Links::kTcp, Links::kMixed};
const size_t kCounts[] = {0, 1, 5, 1000, 9000, 70'001, 300'007};

void forAllWorlds(const std::function<void(Communicator&, size_t count, bool isAsync)>& body) {
  for (Links links : kAllLinks) {
    for (int ranks = 1; ranks <= 4; ++ranks) {
      runWorld(ranks, links, [&](Communicator& group) {
        for (size_t count : kCounts) {
          body(group, count, false);
          body(group, count, true);
        }
      });
    }
  }
}

}  // namespace

TEST(Engine, allReduce) {
  forAllWorlds([](Communicator& group, size_t count, bool isAsync) {
    std::vector<int32_t> in = input(group.rank(), count), out(count);
    Call c = call(OpKind::kAllReduce);
    c.in = {span(in)};
    c.out = {isAsync ? span(in) : span(out)};  // in place, too
    EXPECT(run(group, c, isAsync).ok());
    expectSums(isAsync ? in : out, group.ranks());
  });
}

TEST(Engine, reduceAndBroadcast) {
  forAllWorlds([](Communicator& group, size_t count, bool isAsync) {
    for (int root = 0; root < group.ranks(); ++root) {
      std::vector<int32_t> in = input(group.rank(), count), out(count);
      Call c = call(OpKind::kReduce);
      c.root = root;
      c.in = {span(in)};
      if (root == group.rank()) c.out = {span(out)};
      EXPECT(run(group, c, isAsync).ok());
      if (root == group.rank()) expectSums(out, group.ranks());
      expectInput(in, group.rank());

      Call b = call(OpKind::kBroadcast);
      b.root = root;
      b.out = {span(in)};
      EXPECT(run(group, b, isAsync).ok());
      expectInput(in, root);
    }
  });
}

// Sizes that differ by rank: rank r has count + r elements.
TEST(Engine, gathers) {
  forAllWorlds([](Communicator& group, size_t count, bool isAsync) {
    const int self = group.rank(), ranks = group.ranks();
    const int root = ranks - 1;
    std::vector<int32_t> in = input(self, count + self);
    std::vector<std::vector<int32_t>> out(ranks), gathered(ranks);
    Call c = call(OpKind::kAllGather), g = call(OpKind::kGather);
    g.root = root;
    c.in = g.in = {span(in)};
    for (int rank = 0; rank < ranks; ++rank) {
      out[rank].resize(count + rank);
      gathered[rank].resize(count + rank);
      c.out.push_back(span(out[rank]));
      if (self == root) g.out.push_back(span(gathered[rank]));
    }
    EXPECT(run(group, c, isAsync).ok());
    EXPECT(run(group, g, isAsync).ok());
    for (int rank = 0; rank < ranks; ++rank) {
      expectInput(out[rank], rank);
      if (self == root) expectInput(gathered[rank], rank);
    }
  });
}

TEST(Engine, scatterAndAllToAll) {
  forAllWorlds([](Communicator& group, size_t count, bool isAsync) {
    const int self = group.rank(), ranks = group.ranks();
    std::vector<std::vector<int32_t>> in(ranks), out(ranks);
    Call s = call(OpKind::kScatter), a = call(OpKind::kAllToAll);
    s.root = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      in[rank] = input(self, count + rank, 10 * rank);
      out[rank].resize(count + self);
      a.in.push_back(span(in[rank]));
      a.out.push_back(span(out[rank]));
      if (self == 0) s.in.push_back(span(in[rank]));
    }
    std::vector<int32_t> mine(count + self);
    s.out = {span(mine)};
    EXPECT(run(group, s, isAsync).ok());
    expectInput(mine, 0, 10 * self);
    EXPECT(run(group, a, isAsync).ok());
    for (int rank = 0; rank < ranks; ++rank) expectInput(out[rank], rank, 10 * self);
  });
}

TEST(Engine, reduceScatter) {
  forAllWorlds([](Communicator& group, size_t count, bool isAsync) {
    const int self = group.rank(), ranks = group.ranks();
    size_t total = 0, before = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      if (rank < self) before += count + rank;
      total += count + rank;
    }
    std::vector<int32_t> in = input(self, total), out(count + self);
    Call c = call(OpKind::kReduceScatter);
    size_t from = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      c.in.push_back(span(in, from, count + rank));
      from += count + rank;
    }
    c.out = {span(out)};
    EXPECT(run(group, c, isAsync).ok());
    expectSums(out, ranks, before);
  });
}

TEST(Engine, barrier) {
  forAllWorlds([](Communicator& group, size_t, bool isAsync) {
    EXPECT_OK(run(group, call(OpKind::kBarrier), isAsync));
  });
}

TEST(Engine, pointToPoint) {
  forAllWorlds([](Communicator& group, size_t count, bool isAsync) {
    const int self = group.rank(), ranks = group.ranks();
    const int next = (self + 1) % ranks, previous = (self + ranks - 1) % ranks;
    std::vector<int32_t> out = input(self, count), other = input(self, count, 5);
    std::vector<int32_t> in(count), second(count);
    // Two tags, received in the other order. The only rank of a world is its own neighbour.
    OpPtr a = group.send({span(out), next, 1, DType::kInt32}, nullptr, false);
    OpPtr b = group.send({span(other), next, 2, DType::kInt32}, nullptr, false);
    OpPtr d = group.recv({span(second), previous, 2, DType::kInt32}, nullptr, !isAsync);
    EXPECT(group.wait(d, Deadline::never()).ok());
    OpPtr c = group.recv({span(in), kAnySource, 1, DType::kInt32}, nullptr, !isAsync);
    for (const OpPtr& op : {a, b, c}) EXPECT(group.wait(op, Deadline::never()).ok());
    EXPECT_EQ(c->sourceRank(), previous);
    expectInput(in, previous);
    expectInput(second, previous, 5);
  });
}

// A rank that computes receives in the background, however much arrives, so its sender does not
// wait for its next call.
TEST(Engine, aComputingRankStillReceives) {
  for (Links links : kAllLinks) {
    std::atomic<bool> isSent = false;
    runWorld(2, links, [&](Communicator& group) {
      constexpr size_t kMessages = 64, kCount = 16 * 1024;  // the largest that are sent unasked
      ASSERT_OK(barrier(group));
      std::vector<int32_t> values = input(0, kCount);
      // Rank 1 computes until rank 0 has sent everything.
      const Deadline deadline = Deadline::after(std::chrono::seconds(20));
      while (group.rank() == 1 && !isSent && !deadline.expired()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      EXPECT(!deadline.expired());
      for (size_t i = 0; i < kMessages; ++i) {
        if (group.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(i ? 0 : 200));
        OpPtr op = group.rank() == 0
                       ? group.send({span(values), 1, 0, DType::kInt32}, nullptr, true)
                       : group.recv({span(values), 0, 0, DType::kInt32}, nullptr, true);
        ASSERT_OK(group.wait(op, Deadline::never()));
      }
      if (group.rank() == 0) isSent = true;
      expectInput(values, 0);
    });
  }
}

TEST(Engine, mismatchIsSeenByAll) {
  for (Links links : kAllLinks) {
    for (int kind = 0; kind < 5; ++kind) {
      runWorld(3, links, [&](Communicator& group) {
        const Status met = barrier(group);
        const bool isOdd = group.rank() == 1;
        std::vector<int32_t> in(1000), out(1000);
        Call c = call(OpKind::kAllReduce);
        if (isOdd && kind == 0) in.resize(500), out.resize(500);
        c.in = {span(in)};
        c.out = {span(out)};
        if (isOdd && kind == 1) c.dtype = DType::kUInt32;
        if (isOdd && kind == 2) c.reduceOp = ReduceOp::kMax;
        if (kind == 3) {
          c = call(OpKind::kGather);
          c.root = isOdd ? 1 : 0;
          c.in = {span(in, 0, 10)};
          for (int i = 0; i < 3 && group.rank() == c.root; ++i) c.out.push_back(span(out, 0, 10));
        }
        if (isOdd && kind == 4) c = call(OpKind::kBarrier);
        EXPECT_OK(met);  // though the next call fails
        Status status = run(group, c);
        // A rank whose part ended before the others called gets the error in its next call.
        if (status.ok()) status = barrier(group);
        EXPECT_EQ(status.code(), Code::kMismatch);
        EXPECT_CONTAINS(status, "rank 1");
      });
    }
  }
}

namespace {

// Limits the bytes that are written.
class Gate final : public LinkTap {
 public:
  std::unique_ptr<LinkSender> tap(std::unique_ptr<LinkSender> link) override {
    return std::make_unique<Sender>(std::move(link), budget);
  }
  std::unique_ptr<LinkReceiver> tap(std::unique_ptr<LinkReceiver> link) override { return link; }

  std::atomic<size_t> budget{~size_t{0}};

 private:
  class Sender final : public PassingSender {
   public:
    Sender(std::unique_ptr<LinkSender> link, std::atomic<size_t>& budget)
        : PassingSender(std::move(link)), budget_(budget) {}
    ssize_t write(const Span* parts, int) override {
      const Span part{parts[0].data, std::min(parts[0].bytes, budget_.load())};
      const ssize_t wrote = part.bytes > 0 ? link_->write(&part, 1) : 0;
      if (wrote > 0) budget_ -= static_cast<size_t>(wrote);
      return wrote;
    }

   private:
    std::atomic<size_t>& budget_;
  };
};

}  // namespace

// The goodbye of a rank is lost with its connection, perhaps together with half of its last
// message. The shared memory records the departure, so no receive waits for that rank.
TEST(Engine, receivesEndWhenAGoodbyeIsLost) {
  constexpr size_t kBytes = 1000;
  for (const auto& [bytes, isLate] :
       std::initializer_list<std::pair<size_t, bool>>{{0, false},
                                                      {sizeof(FrameHeader) / 2, false},
                                                      {sizeof(FrameHeader) + 100, false},
                                                      {sizeof(FrameHeader) + 100, true}}) {
    const auto gate = std::make_shared<Gate>();
    const auto meshOf = [&](int rank) {
      MeshOptions mesh;
      if (rank == 1) mesh.tap = gate;
      return mesh;
    };
    const auto body = [&](Communicator& group) {
      std::vector<char> data(kBytes);
      Message message{{data.data(), kBytes}, 1 - group.rank(), 7};
      if (group.rank() == 1) {
        EXPECT_OK(group.wait(group.send(message, nullptr, true), Deadline::never()));
        ASSERT_OK(barrier(group));
        gate->budget = bytes;
        const OpPtr last = bytes > 0 ? group.send(message, nullptr, false) : nullptr;
        while (gate->budget > 0) std::this_thread::yield();
        return group.close(Deadline::after(std::chrono::milliseconds(50)));
      }
      EXPECT_OK(group.wait(group.recv(message, nullptr, true), Deadline::never()));
      ASSERT_OK(barrier(group));
      // Half of a message arrives before its receive is posted, or after.
      for (const uint64_t tag : {isLate ? uint64_t{8} : 7, uint64_t{7}}) {
        message.tag = tag;
        const Status status = group.wait(group.recv(message, nullptr, true), Deadline::never());
        EXPECT_EQ(status.code(), Code::kPeerLost);
        EXPECT_CONTAINS(status, "rank 1");
        EXPECT_CONTAINS(status, "has left the group");
      }
    };
    runMeshes(2, meshOf, body, 5000);
  }
}

// A collective in shared memory fails immediately if a rank has left, without the time that is
// granted for messages that are still under way. The machine may be busy: the fastest round counts.
TEST(Engine, aDepartureFailsCollectivesImmediately) {
  constexpr int kRounds = 5;
  std::atomic<int64_t> fastest{1'000'000};
  for (int round = 0; round < kRounds; ++round) {
    runWorld(3, Links::kShm, [&](Communicator& group) {
      ASSERT_OK(barrier(group));
      if (group.rank() == 1) return;
      const auto began = std::chrono::steady_clock::now();
      const Status status = barrier(group);
      const auto took = std::chrono::steady_clock::now() - began;
      EXPECT_EQ(status.code(), Code::kPeerLost);
      EXPECT_EQ(status.cause().rank, 1);
      EXPECT_CONTAINS(status, "has left the group");
      const int64_t milliseconds =
          std::chrono::duration_cast<std::chrono::milliseconds>(took).count();
      int64_t known = fastest.load();
      while (milliseconds < known && !fastest.compare_exchange_weak(known, milliseconds)) {
      }
    });
  }
  EXPECT(fastest.load() < 400);
}

TEST(Engine, aReceiveFromAnyRankEndsWhenAllOthersHaveLeft) {
  for (Links links : kAllLinks) {
    std::latch posted(3);
    runWorld(3, links, [&](Communicator& group) {
      ASSERT_OK(barrier(group));
      int32_t value = 0;
      const Message fromAny{{&value, 4}, kAnySource, 5, DType::kInt32};
      OpPtr receiving;
      if (group.rank() == 0) receiving = group.recv(fromAny, nullptr, true);
      posted.arrive_and_wait();
      if (group.rank() == 1) {
        int32_t word = 7;
        const Message toZero{{&word, 4}, 0, 6, DType::kInt32};
        EXPECT_OK(group.wait(group.send(toZero, nullptr, true), Deadline::never()));
      }
      if (group.rank() != 0) return;
      const Status status = group.wait(receiving, Deadline::after(std::chrono::seconds(60)));
      EXPECT_EQ(status.code(), Code::kPeerLost);
      EXPECT_CONTAINS(status, "has left the group");
      // A message that has arrived is received, and a receive without one ends with an error.
      for (const auto& [tag, code] : {std::pair{6, Code::kOk}, std::pair{6, Code::kPeerLost}}) {
        Message late = fromAny;
        late.tag = tag;
        const OpPtr op = group.recv(late, nullptr, true);
        EXPECT_EQ(group.wait(op, Deadline::after(std::chrono::seconds(60))).code(), code);
      }
      EXPECT_EQ(value, 7);
    });
  }
}

TEST(Engine, abortEndsReceives) {
  for (Links links : kAllLinks) {
    for (bool leavesAtOnce : {true, false}) {
      std::latch met(3);
      runWorld(3, links, [&](Communicator& group) {
        EXPECT_OK(barrier(group));
        met.arrive_and_wait();
        if (group.rank() == 2) {
          std::this_thread::sleep_for(std::chrono::milliseconds(50));
          group.abort("enough");
          if (!leavesAtOnce) std::this_thread::sleep_for(std::chrono::milliseconds(500));
          return;
        }
        int32_t value = 0;
        const int from = leavesAtOnce ? 2 : 1 - group.rank();
        OpPtr op = group.recv({{&value, 4}, from, 0, DType::kInt32}, nullptr, true);
        const Status status = group.wait(op, Deadline::after(std::chrono::milliseconds(5000)));
        EXPECT_EQ(status.code(), Code::kAborted);
        EXPECT_CONTAINS(status, "enough");
      });
    }
  }
}

// Random calls, synchronous or not, of which many are pending at a time. A failure names the seed.
TEST(Engine, randomWalk) {
  const unsigned seed = std::random_device()();
  for (Links links : kAllLinks) {
    for (int ranks = 2; ranks <= 4; ++ranks) {
      runWorld(ranks, links, [&](Communicator& group) {
        struct Step {
          OpPtr op;
          std::vector<int32_t> data;
          int root;  // -1: all_reduce
          int index;
        };
        std::mt19937 random(seed);
        std::deque<Step> open;
        auto settle = [&](Step& step) {
          Status status = group.wait(step.op, Deadline::never());
          if (!status.ok()) {
            EXPECT_EQ("seed " + std::to_string(seed) + ": " + status.message(), "");
          } else if (step.root >= 0) {
            expectInput(step.data, step.root, step.index);
          } else {
            expectSums(step.data, ranks, step.index);
          }
        };
        for (int index = 0; index < (isShort() ? 100 : 300); ++index) {
          const size_t count = random() % 3 == 0 ? random() % 200'000 : random() % 64;
          const bool isAsync = random() % 2;
          const int root = random() % 2 ? static_cast<int>(random() % ranks) : -1;
          Step& step =
              open.emplace_back(Step{nullptr, input(group.rank(), count, index), root, index});
          Call c = call(root >= 0 ? OpKind::kBroadcast : OpKind::kAllReduce);
          c.root = root;
          if (root < 0) c.in = {span(step.data)};
          c.out = {span(step.data)};
          step.op = group.submit(c, nullptr, !isAsync);
          if (!isAsync) {
            settle(step);
            open.pop_back();
          }
          if (random() % 64 > 0) continue;
          // Waits for all in the order of their calls, or in the reverse order.
          const bool isReverse = random() % 2;
          for (size_t i = 0; i < open.size(); ++i) {
            settle(open[isReverse ? open.size() - 1 - i : i]);
          }
          open.clear();
        }
        for (Step& step : open) settle(step);
      });
    }
  }
}

// Calls without data are compared, too.
TEST(Engine, emptyCallsAreCompared) {
  for (Links links : kAllLinks) {
    for (OpKind kind : {OpKind::kReduceScatter, OpKind::kAllReduce, OpKind::kAllGather,
                        OpKind::kAllToAll, OpKind::kBroadcast, OpKind::kReduce}) {
      runWorld(3, links, [&](Communicator& group) {
        ASSERT_OK(barrier(group));
        Call c = call(kind);
        const bool isMany = kind == OpKind::kReduceScatter || kind == OpKind::kAllToAll;
        const bool isRooted = kind == OpKind::kBroadcast || kind == OpKind::kReduce;
        if (isRooted) c.root = 0;
        if (kind != OpKind::kBroadcast) c.in = spans(isMany ? 3 : 1, {});
        const bool isOther = kind == OpKind::kReduce && group.rank() != c.root;
        const bool isList = kind == OpKind::kAllGather || kind == OpKind::kAllToAll;
        c.out = spans(isList ? 3 : isOther ? 0 : 1, {});
        if (group.rank() == 1) c.dtype = DType::kFloat32;
        Status status = run(group, c);
        if (status.ok()) status = barrier(group);
        EXPECT_EQ(status.code(), Code::kMismatch);
      });
    }
  }
}

namespace {

// A program of one thread on its own group: collectives and messages of any size, waited for or
// polled. The ranks make the same calls; how they wait is their own choice.
void driveGroup(Communicator& group, unsigned seed, int steps) {
  std::mt19937 random(seed), own(seed * 77 + static_cast<unsigned>(group.rank()));
  const int ranks = group.ranks(), rank = group.rank();
  const auto await = [&](const OpPtr& op, bool isPolled) {
    while (isPolled && !op->done()) {
      std::this_thread::sleep_for(std::chrono::microseconds(own() % 300));
    }
    const Status status = group.wait(op, Deadline::never());
    if (!status.ok()) EXPECT_EQ("seed " + std::to_string(seed) + ": " + status.message(), "");
  };
  for (int step = 0; step < steps; ++step) {
    const size_t count = random() % 4 == 0 ? random() % 200'000 : random() % 300;
    const bool willWait = own() % 3 == 0, isPolled = !willWait && own() % 2 == 0;
    std::vector<int32_t> in = input(rank, count), out(count);
    if (random() % 3 == 0) {
      const int next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
      const auto tag = static_cast<uint64_t>(step);
      const OpPtr sent = group.send({span(in), next, tag, DType::kInt32}, nullptr, false);
      await(group.recv({span(out), previous, tag, DType::kInt32}, nullptr, willWait), isPolled);
      await(sent, isPolled);
      expectInput(out, previous);
    } else {
      Call c = call(OpKind::kAllReduce);
      c.in = {span(in)};
      c.out = {span(out)};
      await(group.submit(c, nullptr, willWait), isPolled);
      expectSums(out, ranks);
    }
  }
}

}  // namespace

// Each thread of a rank has a group of its own, and all of them share one mesh and one sleeper.
TEST(Engine, threadsWithGroupsOfTheirOwn) {
  const unsigned seed = std::random_device()();
  for (Links links : kAllLinks) {
    runWorld(3, links, [&](Communicator& parent) {
      constexpr int kGroups = 3;
      std::vector<std::shared_ptr<Communicator>> groups;
      for (int i = 0; i < kGroups; ++i) {
        groups.push_back(Communicator::derive(parent, " " + std::to_string(i), false));
      }
      Threads(kGroups,
              [&](int i) { driveGroup(*groups[i], seed + static_cast<unsigned>(i), 100); });
      ASSERT_OK(run(parent, call(OpKind::kBarrier)));
      for (const auto& group : groups) group->close(Deadline::after(std::chrono::seconds(2)));
    });
  }
}
