// Collectives of groups that span hosts: ranks are threads that pretend to be on several hosts. The
// bits of every reduction are those of one reduce() over all inputs, wherever the ranks are.
#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "calls.h"
#include "kernels/reduce.h"
#include "test.h"
#include "world.h"

using namespace mycoll;
using namespace test;

namespace {

// The same eight ranks, on one to eight hosts.
const std::vector<std::vector<int>> kPlacements = {
    {0, 0, 0, 0, 1, 1, 1, 1}, {0, 0, 1, 1, 2, 2, 3, 3}, {0, 1, 2, 3, 4, 5, 6, 7},
    {0, 0, 0, 1, 1, 1, 1, 1}, {0, 1, 1, 1, 1, 1, 1, 1}, {0, 1, 0, 1, 0, 1, 0, 1},
    {0, 0, 0, 1, 1, 2, 2, 2},
};
constexpr int kRanks = 8;

// Any bits, but no infinities and NaNs: two of these may meet in an order that the tree leaves
// open.
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

std::vector<char> expected(DType dtype, ReduceOp op, size_t count) {
  static std::mutex mutex;  // the ranks are threads, and all want the same
  static std::map<std::tuple<DType, ReduceOp, size_t>, std::vector<char>> known;
  std::lock_guard<std::mutex> lock(mutex);
  std::vector<char>& result = known[{dtype, op, count}];
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
  const std::vector<char> wanted = expected(dtype, op, count);
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

}  // namespace

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

TEST(Hosts, dataThatIsMoved) {
  forAllPlacements([](Communicator& group) {
    const int self = group.rank();
    for (const size_t count : {0, 1, 1000, 70'001, 900'001}) {
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
      std::vector<int32_t> from(kRanks * count);
      for (int rank = 0; rank < kRanks; ++rank) {
        const std::vector<int32_t> block = input(self, count, rank * count);
        std::copy(block.begin(), block.end(), from.begin() + rank * count);
      }
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
      EXPECT(run(group, call(OpKind::kBarrier)).ok());
    }
  });
}

// Different calls are found out, also between ranks that have no message for each other.
TEST(Hosts, differentCallsAreMismatches) {
  runHosts({0, 0, 1, 1}, [](Communicator& group) {
    std::vector<int32_t> data(group.rank() == 3 ? 40'000 : 50'000);
    Call c = call(OpKind::kAllReduce);
    c.in = c.out = {span(data)};
    EXPECT_EQ(static_cast<int>(run(group, c).code()), static_cast<int>(Code::kMismatch));
  });
}
