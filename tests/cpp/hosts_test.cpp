// Collectives of groups that span hosts. The ranks are threads that pretend to be on several hosts.
// Every reduction has the bits of one reduce() over all inputs, wherever the ranks are.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <latch>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "base/env.h"
#include "calls.h"
#include "frame_counter.h"
#include "kernels/reduce.h"
#include "passing_link.h"
#include "plan_counts.h"
#include "test.h"
#include "transport/frame.h"
#include "transport/link.h"
#include "world.h"

using namespace mycoll;
using namespace test;

namespace {

// The same eight ranks, on one to eight hosts.
const std::vector<std::vector<int>> kPlacements = {
    {0, 0, 0, 0, 1, 1, 1, 1}, {0, 0, 1, 1, 2, 2, 3, 3}, {0, 1, 2, 3, 4, 5, 6, 7},
    {0, 0, 0, 1, 1, 1, 1, 1}, {0, 1, 1, 1, 1, 1, 1, 1}, {0, 1, 0, 1, 0, 1, 0, 1},
    {0, 0, 0, 1, 1, 2, 2, 2}, {0, 0, 0, 0, 0, 0, 0, 0},
};
constexpr int kRanks = 8;

// Random bits without infinities and NaNs. The bits of a sum of two NaNs depend on their order,
// which the tree does not fix.
std::vector<char> randomInput(DType dtype, int rank, size_t count) {
  std::mt19937 random(static_cast<unsigned>(rank + 1));
  const size_t bytes = elementSize(dtype);
  std::vector<char> values((count * bytes + 3) / 4 * 4);
  for (size_t at = 0; at < values.size(); at += 4) {
    const auto word = static_cast<uint32_t>(random());
    std::memcpy(values.data() + at, &word, sizeof(word));
  }
  values.resize(count * bytes);
  const bool isComplex = dtype == DType::kComplex64 || dtype == DType::kComplex128;
  const bool isFloating = isComplex || dtype <= DType::kFloat8E5M2;
  const size_t number = isComplex ? bytes / 2 : bytes;
  for (size_t at = number - 1; at < values.size() && isFloating; at += number) {
    values[at] = static_cast<char>(values[at] & ~0x40);  // the highest bit of the exponent
  }
  return values;
}

const std::vector<char>& expected(DType dtype, ReduceOp op, size_t count) {
  static std::mutex mutex;  // the ranks are threads, and all need the same result
  static std::map<std::tuple<DType, ReduceOp, size_t, int>, std::vector<char>> known;
  std::lock_guard<std::mutex> lock(mutex);
  std::vector<char>& result = known[{dtype, op, count, sumTree().block()}];
  if (!result.empty()) return result;
  std::vector<std::vector<char>> inputs;
  std::vector<const void*> pointers;
  for (int rank = 0; rank < kRanks; ++rank) inputs.push_back(randomInput(dtype, rank, count));
  for (const auto& input : inputs) pointers.push_back(input.data());
  result.resize(count * elementSize(dtype));
  reduce(dtype, op, result.data(), pointers.data(), kRanks, count, kRanks, false);
  return result;
}

Call reduction(OpKind kind, DType dtype, ReduceOp op) {
  Call c = call(kind);
  c.dtype = dtype;
  c.elementBytes = elementSize(dtype);
  c.reduceOp = op;
  return c;
}

bool areEqual(const char* left, const char* right, size_t bytes) {
  return bytes == 0 || std::memcmp(left, right, bytes) == 0;
}

void expectBits(Communicator& group, DType dtype, ReduceOp op, size_t count) {
  const int self = group.rank();
  const size_t bytes = count * elementSize(dtype);
  const std::vector<char>& wanted = expected(dtype, op, count);
  const std::string what = std::string(name(dtype)) + " " + name(op) + " " + std::to_string(count);
  auto isRight = [&](const char* got, const char* right, size_t length, const char* kind) {
    if (areEqual(got, right, length)) return;
    test::fail(__FILE__, __LINE__,
               std::string(kind) + " " + what + ", rank " + std::to_string(self));
  };

  std::vector<char> data = randomInput(dtype, self, count), out(bytes);
  Call all = reduction(OpKind::kAllReduce, dtype, op);
  all.in = {{data.data(), bytes}};
  all.out = {{out.data(), bytes}};
  EXPECT(run(group, all).ok());
  isRight(out.data(), wanted.data(), bytes, "all_reduce");

  Call one = reduction(OpKind::kReduce, dtype, op);
  one.root = static_cast<int>(count % kRanks);
  one.in = {{data.data(), bytes}};
  std::fill(out.begin(), out.end(), 0);
  if (self == one.root) one.out = {{out.data(), bytes}};
  EXPECT(run(group, one).ok());
  if (self == one.root) isRight(out.data(), wanted.data(), bytes, "reduce");

  // Uneven blocks: one element more for each rank but the last, which has the rest.
  Call scatter = reduction(OpKind::kReduceScatter, dtype, op);
  size_t begin = 0, mine = 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    const size_t share = std::min(count - begin, count / kRanks + static_cast<size_t>(rank));
    const size_t length = rank == kRanks - 1 ? count - begin : share;
    if (rank == self) mine = begin;
    scatter.in.push_back({data.data() + begin * elementSize(dtype), length * elementSize(dtype)});
    begin += length;
  }
  const size_t blockBytes = scatter.in[self].bytes;
  scatter.out = {{out.data(), blockBytes}};
  EXPECT(run(group, scatter).ok());
  isRight(out.data(), wanted.data() + mine * elementSize(dtype), blockBytes, "reduce_scatter");

  // In place.
  Call inPlace = reduction(OpKind::kAllReduce, dtype, op);
  inPlace.in = inPlace.out = {{data.data(), bytes}};
  EXPECT(run(group, inPlace).ok());
  isRight(data.data(), wanted.data(), bytes, "all_reduce in place");
}

void forAllPlacements(const RankBody& body) {
  for (const std::vector<int>& hostOf : kPlacements) runHosts(hostOf, body);
}

using Clock = std::chrono::steady_clock;

// A network with a long delay: bytes can be read only so long after they have arrived. No event
// reports that moment, so the test must wake threads that wait for them.
class SlowNetwork final : public LinkTap {
 public:
  explicit SlowNetwork(Clock::duration delay) : delay_(delay) {}
  std::unique_ptr<LinkSender> tap(std::unique_ptr<LinkSender> link) override { return link; }
  std::unique_ptr<LinkReceiver> tap(std::unique_ptr<LinkReceiver> link) override {
    return std::make_unique<Receiver>(delay_, std::move(link));
  }

 private:
  class Receiver final : public PassingReceiver {
   public:
    Receiver(Clock::duration delay, std::unique_ptr<LinkReceiver> link)
        : PassingReceiver(std::move(link)), delay_(delay) {}
    ssize_t read(void* data, size_t bytes, bool) override {
      receive();
      if (coming_.empty() || coming_.front().due > Clock::now()) {
        if (!coming_.empty() || end_ == 0) return 0;
        errno = error_;
        return -1;
      }
      Piece& piece = coming_.front();
      const size_t taken = std::min(bytes, piece.bytes.size() - piece.read);
      std::memcpy(data, piece.bytes.data() + piece.read, taken);
      piece.read += taken;
      if (piece.read == piece.bytes.size()) coming_.pop_front();
      return static_cast<ssize_t>(taken);
    }
    bool maybeReadable() const override { return true; }

   private:
    struct Piece {
      Clock::time_point due;
      std::string bytes;
      size_t read = 0;
    };

    void receive() {
      char buffer[64 * 1024];
      while (end_ == 0) {
        link_->lookAgain();
        const ssize_t got = link_->read(buffer, sizeof(buffer), false);
        if (got < 0) end_ = got, error_ = errno;
        if (got <= 0) return;
        coming_.push_back(
            {Clock::now() + delay_, std::string(buffer, static_cast<size_t>(got)), 0});
      }
    }

    const Clock::duration delay_;
    std::deque<Piece> coming_;
    ssize_t end_ = 0;
    int error_ = 0;
  };

  const Clock::duration delay_;
};

// Returns how many delays an all_reduce of two hosts takes after both have called it. Measures five
// rounds, and on a busy machine up to forty until one is within `most`, and returns the least.
double delaysOfAllReduce(size_t bytes, int flows, double most) {
  constexpr auto kDelay = std::chrono::milliseconds(60);
  constexpr int kRounds = 5, kMostRounds = 40;
  const auto network = std::make_shared<SlowNetwork>(kDelay);
  std::barrier together(2);
  double delays[2];              // of this round
  double least[2] = {1e9, 1e9};  // computed by each rank
  auto store = std::make_shared<MemoryStore>();
  std::shared_ptr<Engine> engines[2];
  for (int rank = 0; rank < 2; ++rank) {
    MeshOptions mesh;
    mesh.host = " host " + std::to_string(rank);
    mesh.tap = network;
    mesh.flows = flows;
    engines[rank] = makeEngine(mesh);
  }
  std::atomic<bool> isOver{false};
  std::thread clock([&] {
    while (!isOver.load()) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      for (auto& engine : engines) engine->mesh()->sleeper().wakeAll();
    }
  });
  Threads(2, [&](int rank) {
    std::shared_ptr<Communicator> group;
    ASSERT_OK(Communicator::create(groupOptions(rank, 2), store, engines[rank], &group));
    std::vector<int32_t> data(bytes / 4);
    Call c = call(OpKind::kAllReduce);
    c.in = c.out = {span(data)};
    EXPECT_OK(run(*group, c));  // connects the ranks
    for (int round = 0; round < kRounds || (round < kMostRounds && least[rank] > most); ++round) {
      together.arrive_and_wait();
      const auto before = Clock::now();
      EXPECT(run(*group, c).ok());
      delays[rank] = std::chrono::duration<double>(Clock::now() - before) / kDelay;
      together.arrive_and_wait();
      least[rank] = std::min(least[rank], std::max(delays[0], delays[1]));
    }
    group->close(Deadline::after(std::chrono::milliseconds(2000)));
  });
  isOver.store(true);
  clock.join();
  return least[0];
}

}  // namespace

// The ranks of a host exchange data through memory. Messages to other hosts are sent without asking
// first.
TEST(Hosts, sendOnlyBetweenHosts) {
  const std::vector<int> hostOf = {0, 0, 0, 1, 1};
  constexpr size_t kCount = 1'000'003;
  const auto counter = std::make_shared<FrameCounter>(hostOf);
  runHosts(
      hostOf,
      [&](Communicator& group) {
        const int self = group.rank(), ranks = group.ranks();
        for (const size_t count : {size_t{1}, kCount}) {
          std::vector<int32_t> data(count), all(count * static_cast<size_t>(ranks));
          for (const OpKind kind : {OpKind::kAllReduce, OpKind::kReduce, OpKind::kBroadcast,
                                    OpKind::kAllGather, OpKind::kReduceScatter, OpKind::kBarrier}) {
            Call c = call(kind);
            c.root = kind == OpKind::kReduce || kind == OpKind::kBroadcast ? 1 : -1;
            const bool isReceiver = kind != OpKind::kReduce || self == c.root;
            Spans each;
            for (int rank = 0; rank < ranks; ++rank) each.push_back(span(all, rank * count, count));
            if (kind == OpKind::kReduceScatter) c.in = each;
            if (kind == OpKind::kAllGather) c.out = each;
            if (kind != OpKind::kReduceScatter && kind != OpKind::kBroadcast &&
                kind != OpKind::kBarrier)
              c.in = {span(data)};
            if (kind != OpKind::kAllGather && kind != OpKind::kBarrier && isReceiver)
              c.out = {span(data)};
            EXPECT_OK(run(group, c));
          }
        }
      },
      60'000, counter);
  const FrameCounter::Count count = counter->count();
  EXPECT_EQ(count.requests, 0);
  EXPECT_EQ(count.insideHosts, 0);
  EXPECT(count.betweenHosts > 4 * kCount * sizeof(int32_t));
}

TEST(Hosts, sendAsManyMessagesAsPlanned) {
  for (const std::vector<int>& hostOf :
       {std::vector<int>{0, 0, 1, 1}, {0, 0, 1, 1, 2, 2, 3, 3}, {0, 0, 0, 1, 1, 1, 1, 1}}) {
    const Shape shape(hostOf);
    for (const OpKind kind :
         {OpKind::kAllReduce, OpKind::kAllGather, OpKind::kBroadcast, OpKind::kBarrier}) {
      for (const size_t count : {size_t{1}, size_t{50'000}}) {
        auto messagesOf = [&](int calls) {
          const auto counter = std::make_shared<FrameCounter>(hostOf);
          runHosts(
              hostOf,
              [&](Communicator& group) {
                const auto ranks = static_cast<size_t>(group.ranks());
                std::vector<int32_t> data(count), all(count * ranks);
                Call c = call(kind);
                if (kind == OpKind::kBroadcast) c.root = 0;
                if (kind == OpKind::kAllReduce || kind == OpKind::kAllGather) c.in = {span(data)};
                if (kind == OpKind::kAllReduce || kind == OpKind::kBroadcast) c.out = {span(data)};
                for (size_t rank = 0; kind == OpKind::kAllGather && rank < ranks; ++rank) {
                  c.out.push_back(span(all, rank * count, count));
                }
                for (int i = 0; i < calls; ++i) EXPECT_OK(run(group, c));
              },
              60'000, counter);
          return counter->count().messages;
        };
        const size_t bytes = kind == OpKind::kBarrier ? 0 : count * sizeof(int32_t);
        const PlanCounts counts = countsOf(shape, kind, bytes, sizeof(int32_t), sizeof(int32_t));
        EXPECT(counts.messages > 0);
        EXPECT_EQ(messagesOf(5) - messagesOf(2), 3 * counts.messages);
      }
    }
  }
}

TEST(Hosts, bitsAreThoseOfOneHost) {
  forAllPlacements([](Communicator& group) {
    for (int dtype = 0; dtype < static_cast<int>(DType::kCount); ++dtype) {
      for (int op = 0; op < static_cast<int>(ReduceOp::kCount); ++op) {
        const auto type = static_cast<DType>(dtype);
        const auto reduceOp = static_cast<ReduceOp>(op);
        if (!isSupported(type, reduceOp)) continue;
        for (const size_t count : {1, 13, 5003}) expectBits(group, type, reduceOp, count);
      }
    }
  });
}

TEST(Hosts, bitsOfAFewChunks) {
  forAllPlacements(
      [](Communicator& group) { expectBits(group, DType::kFloat32, ReduceOp::kSum, 400'007); });
}

TEST(Hosts, bitsOfLargeTensors) {
  forAllPlacements([](Communicator& group) {
    expectBits(group, DType::kFloat32, ReduceOp::kSum, 1'500'007);
    expectBits(group, DType::kBFloat16, ReduceOp::kAvg, 1'500'007);
    expectBits(group, DType::kInt64, ReduceOp::kAvg, 300'001);
  });
}

TEST(Hosts, bitsOfSumsInBlocks) {
  const ScopedEnv blocks("MYCOLL_SUM_BLOCK", "3");
  forAllPlacements([](Communicator& group) {
    for (const size_t count : {1, 5003, 400'007}) {
      expectBits(group, DType::kFloat32, ReduceOp::kSum, count);
      expectBits(group, DType::kBFloat16, ReduceOp::kAvg, count);
    }
  });
}

// In a group without an arena the ranks of a host exchange messages. A rank that has only TCP
// counts as a host of its own.
TEST(Hosts, bitsWhereRanksShareNoArena) {
  for (const std::vector<int>& hostOf : {kPlacements[0], kPlacements[3], kPlacements[7]}) {
    auto meshOf = [&](int rank) {
      MeshOptions mesh;
      mesh.host = " host " + std::to_string(hostOf[rank]);
      if (rank == 2) mesh.transport = TransportChoice::kTcp;
      return mesh;
    };
    runMeshes(kRanks, meshOf, [](Communicator& group) {
      const std::shared_ptr<Communicator> external =
          Communicator::derive(group, " elsewhere", /*isExternal=*/true);
      ASSERT_OK(external->meetNeighbours());
      for (Communicator* each : {&group, external.get()}) {
        for (const size_t count : {1, 5003, 400'007}) {
          expectBits(*each, DType::kFloat32, ReduceOp::kSum, count);
          expectBits(*each, DType::kBFloat16, ReduceOp::kAvg, count);
        }
      }
      external->close(Deadline::after(std::chrono::milliseconds(2000)));
    });
  }
}

// If partial sums of 16-bit floats may be rounded, they take half of the bytes.
TEST(Hosts, roundedPartialsAreShorter) {
  constexpr size_t kCount = 300'000;
  const std::vector<int> hostOf = {0, 0, 1, 1};
  uint64_t bytes[2];
  for (const bool isRounded : {false, true}) {
    const ScopedEnv choice("MYCOLL_PARTIALS", isRounded ? "rounded" : "wide");
    Env::readAgainForTest();
    const auto counter = std::make_shared<FrameCounter>(hostOf);
    runHosts(
        hostOf,
        [&](Communicator& group) {
          // bfloat16 represents their sums exactly.
          std::vector<uint16_t> data(kCount);
          for (size_t i = 0; i < kCount; ++i)
            data[i] = static_cast<uint16_t>(0x3f80 + 0x80 * (i % 2));
          Call c = reduction(OpKind::kAllReduce, DType::kBFloat16, ReduceOp::kAvg);
          c.in = c.out = {{data.data(), kCount * 2}};
          EXPECT(run(group, c).ok());
          for (size_t i = 0; i < kCount; ++i) {
            if (data[i] == static_cast<uint16_t>(0x3f80 + 0x80 * (i % 2))) continue;
            EXPECT_EQ(data[i], 0x3f80 + 0x80 * (i % 2));
            break;
          }
        },
        60'000, counter);
    bytes[isRounded] = counter->count().betweenHosts;
  }
  Env::readAgainForTest();
  // With two bytes for each element, each host sends its partial sums of half of the elements and
  // the result of the other half.
  EXPECT(bytes[0] >= 2 * 3 * kCount);
  EXPECT(bytes[1] <= 2 * 2 * kCount + 10'000);
}

TEST(Hosts, dataThatIsMoved) {
  forAllPlacements([](Communicator& group) {
    const int self = group.rank();
    for (const size_t count : {0, 1, 1000, 70'001, 900'001}) {
      if (isShort() && count > 100'000) continue;
      std::vector<int32_t> in = input(self, count), out(count * kRanks);
      Call gather = call(OpKind::kAllGather);
      gather.in = {span(in)};
      for (int rank = 0; rank < kRanks; ++rank)
        gather.out.push_back(span(out, rank * count, count));
      EXPECT(run(group, gather).ok());
      for (int rank = 0; rank < kRanks; ++rank) {
        expectInput({out.begin() + rank * count, out.begin() + (rank + 1) * count}, rank);
      }
      for (const int root : {0, 5}) {
        std::vector<int32_t> data(count);
        if (self == root) data = input(root, count);
        Call broadcast = call(OpKind::kBroadcast);
        broadcast.root = root;
        broadcast.out = {span(data)};
        EXPECT(run(group, broadcast).ok());
        expectInput(data, root);
      }
      std::vector<int32_t> from = input(self, kRanks * count);
      Call exchange = call(OpKind::kAllToAll);
      for (int rank = 0; rank < kRanks; ++rank) {
        exchange.in.push_back(span(from, rank * count, count));
        exchange.out.push_back(span(out, rank * count, count));
      }
      EXPECT(run(group, exchange).ok());
      for (int rank = 0; rank < kRanks; ++rank) {
        expectInput({out.begin() + rank * count, out.begin() + (rank + 1) * count}, rank,
                    self * count);
      }
      EXPECT(barrier(group).ok());
    }
  });
}

namespace {

// The number of elements for each pair of ranks. Many are zero, and some blocks are so large that
// they are sent alone.
std::vector<std::vector<size_t>> randomBlocks(std::mt19937& random) {
  const size_t most = random() % 2 ? 40 : 9'000;
  std::vector<std::vector<size_t>> counts(kRanks, std::vector<size_t>(kRanks));
  for (auto& from : counts) {
    for (size_t& count : from) count = random() % 3 ? random() % most : 0;
  }
  return counts;
}

// Element i of the block that one rank sends to another.
int32_t element(int from, int to, size_t i) {
  return from * 1'000'000 + to * 100'000 + static_cast<int32_t>(i % 99'991);
}

std::vector<int32_t> block(int from, int to, size_t count) {
  std::vector<int32_t> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = element(from, to, i);
  return values;
}

void exchange(Communicator& group, OpKind kind, int root,
              const std::vector<std::vector<size_t>>& counts) {
  const int self = group.rank();
  auto isMeant = [&](int from, int to) {
    return kind == OpKind::kAllToAll || (kind == OpKind::kGather ? to : from) == root;
  };
  std::vector<std::vector<int32_t>> in(kRanks), out(kRanks);
  Call c = call(kind);
  if (kind != OpKind::kAllToAll) c.root = root;
  for (int other = 0; other < kRanks; ++other) {
    if (isMeant(self, other)) {
      in[other] = block(self, other, counts[self][other]);
      c.in.push_back(span(in[other]));
    }
    if (isMeant(other, self)) {
      out[other].resize(counts[other][self]);
      c.out.push_back(span(out[other]));
    }
  }
  EXPECT_OK(run(group, c));
  for (int from = 0; from < kRanks; ++from) {
    if (isMeant(from, self)) EXPECT(out[from] == block(from, self, counts[from][self]));
  }
}

}  // namespace

// In some placements, all hosts share memory, in some every other one, and in some none.
TEST(Hosts, blocksOfAllSizesAreExchanged) {
  const unsigned seed = std::random_device{}();
  const int before = failureCount();
  for (size_t placement = 0; placement < kPlacements.size(); ++placement) {
    auto meshOf = [&](int rank) {
      const int host = kPlacements[placement][rank];
      MeshOptions mesh;
      mesh.host = " host " + std::to_string(host);
      const bool shares = placement % 3 == 0 || (placement % 3 == 1 && host % 2 == 0);
      mesh.transport = shares ? TransportChoice::kAuto : TransportChoice::kTcp;
      return mesh;
    };
    runMeshes(
        kRanks, meshOf,
        [&](Communicator& group) {
          std::mt19937 random(seed);
          for (int round = 0; round < (isShort() ? 3 : 10); ++round) {
            const int root = static_cast<int>(random() % kRanks);
            for (const OpKind kind : {OpKind::kGather, OpKind::kScatter, OpKind::kAllToAll}) {
              exchange(group, kind, root, randomBlocks(random));
            }
          }
        },
        60'000);
  }
  if (failureCount() > before) fail(__FILE__, __LINE__, "seed " + std::to_string(seed));
}

// If a rank receives another size than it expects, all ranks of its host report that in the same
// call. If the sender is on that host, the error names both ranks.
TEST(Hosts, sizesThatDifferAreMismatches) {
  for (const auto& [from, to, less] :
       {std::tuple(4, 1, 1), std::tuple(4, 1, 80'000), std::tuple(2, 1, 1)}) {
    runHosts(kPlacements[0], [&](Communicator& group) {
      constexpr size_t kCount = 80'001;
      std::vector<int32_t> data(kRanks * kCount), out(kRanks * kCount);
      Call c = call(OpKind::kAllToAll);
      for (int rank = 0; rank < kRanks; ++rank) {
        const size_t sent = less == 1 ? 7 : rank == to && group.rank() == from ? kCount : 1;
        const bool isWrong = rank == from && group.rank() == to;
        const size_t expected = less == 1 ? 7 - isWrong : 1;
        c.in.push_back(span(data, rank * kCount, sent));
        c.out.push_back(span(out, rank * kCount, expected));
      }
      const Status status = run(group, c);
      if (group.rank() >= 4) return;
      EXPECT_EQ(status.code(), Code::kMismatch);
      EXPECT_CONTAINS(status, "MISMATCH of sizes");
      if (from == 2 && group.rank() == 0) EXPECT_CONTAINS(status, "sends 28 bytes to rank 1");
    });
  }
}

// Messages are sent without asking first. A small all_reduce takes one trip and a large one two at
// most, with one socket and with several.
TEST(Hosts, anAllReduceTakesOneTripOrTwo) {
  for (const int flows : {1, 4}) {
    const double small = delaysOfAllReduce(4, flows, 1.2);
    EXPECT(small >= 1);
    EXPECT(small <= 1.2);
    const double large = delaysOfAllReduce(1024 * 1024, flows, 2.3);
    EXPECT(large >= 1);
    EXPECT(large <= 2.3);
  }
}

// The ranks that wait in shared memory and those that wait for messages name the missing rank and
// no other. In the first call, the ranks of a host first wait for each other to share memory.
TEST(Hosts, aMissingRankIsNamed) {
  const std::vector<int> hostOf = {0, 0, 0, 1, 1, 1};
  constexpr int kMissing = 4;
  for (const bool isFirstCall : {false, true}) {
    std::latch areOver(static_cast<int>(hostOf.size()) - 1);
    runHosts(hostOf, [&](Communicator& group) {
      std::vector<int32_t> data(100'000);
      Call c = call(OpKind::kAllReduce);
      c.in = c.out = {span(data)};
      if (!isFirstCall) EXPECT_OK(run(group, c));
      if (group.rank() == kMissing) return areOver.wait();
      group.setTimeout(std::chrono::milliseconds(1000));
      const Status status = run(group, c);
      areOver.count_down();
      EXPECT_EQ(status.code(), Code::kTimeout);
      EXPECT_EQ(status.cause().rank, kMissing);
      if (isFirstCall) return;
      EXPECT_CONTAINS(status, "for rank " + std::to_string(kMissing) + " (");
      const std::string& text = status.message();
      const std::string arrived = text.substr(text.find("Arrived: "));
      EXPECT(arrived.find(std::to_string(kMissing)) > arrived.find('.'));
    });
  }
}

// A rank that leaves before it has completed a collective ends it on all others, although they also
// wait for a third rank. Collectives that it has completed succeed.
TEST(Hosts, aRankThatLeavesInACallIsReported) {
  constexpr int kLate = 1, kLeaver = 2;
  for (const size_t elements : {size_t{10}, size_t{1'000'000}}) {
    std::latch areOver(2);
    runHosts({0, 0, 1, 1}, [&](Communicator& group) {
      std::vector<int32_t> data(elements);
      Call c = call(OpKind::kAllReduce);
      c.in = c.out = {span(data)};
      ASSERT_OK(run(group, c));
      if (group.rank() == kLate) return areOver.wait();
      if (group.rank() == kLeaver) {
        const OpPtr unfinished = group.submit(c, nullptr, false);
        return group.close(Deadline::after(std::chrono::milliseconds(300)), "its program ended");
      }
      group.setTimeout(std::chrono::milliseconds(20'000));
      const Status status = run(group, c);
      areOver.count_down();
      EXPECT_EQ(status.code(), Code::kPeerLost);
      EXPECT_CONTAINS(status, "rank 2 (");
      EXPECT_CONTAINS(status, "with operations that were not done");
    });
  }
}

// The data of a call that differs from those of the other ranks of its host is not used, even if it
// is there first. No rank of another host may get a result.
TEST(Hosts, aCallThatDiffersInsideAHostIsNotUsedOnOthers) {
  runHosts({0, 1, 1}, [](Communicator& group) {
    for (const bool isLast : {false, true}) {
      const bool isOdd = isLast && group.rank() == 2;
      if (isLast && !isOdd) std::this_thread::sleep_for(std::chrono::milliseconds(100));
      std::vector<int32_t> data(isOdd ? 50 : 43);
      Call c = call(OpKind::kAllReduce);
      c.in = c.out = {span(data)};
      const Code code = run(group, c).code();
      EXPECT_EQ(static_cast<int>(code), static_cast<int>(isLast ? Code::kMismatch : Code::kOk));
    }
  });
}

// Different calls are reported by ranks that exchange no message, too.
TEST(Hosts, differentCallsAreMismatches) {
  runHosts({0, 0, 1, 1}, [](Communicator& group) {
    std::vector<int32_t> data(group.rank() == 3 ? 40'000 : 50'000);
    Call c = call(OpKind::kAllReduce);
    c.in = c.out = {span(data)};
    EXPECT_EQ(run(group, c).code(), Code::kMismatch);
  });
}
