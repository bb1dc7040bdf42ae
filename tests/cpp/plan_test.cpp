// The verifier proves plans of all operations for all kinds of worlds. Other tests count the bytes
// that plans send over the network.
#include "collectives/plan/plan.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "plan_counts.h"
#include "plan_verifier.h"
#include "test.h"

using namespace mycoll;
using test::numberFrom;
using test::verifier::verify;

namespace {

// Elements are large, so that few of them make a large tensor.
constexpr uint64_t kElement = 4096;

constexpr OpKind kKinds[] = {OpKind::kAllReduce,       OpKind::kReduce,    OpKind::kReduceScatter,
                             OpKind::kAllGather,       OpKind::kBroadcast, OpKind::kGather,
                             OpKind::kScatter,         OpKind::kAllToAll,  OpKind::kBarrier,
                             OpKind::kMonitoredBarrier};

// ./dev soak sets variables for more worlds than the suite has time for.
bool hasMuchTime() { return numberFrom("PLAN_WORLDS", 0) > 1000; }

// Reports the seed of a test that has failed.
struct ScopedSeed {
  ~ScopedSeed() {
    if (hasFailed()) test::fail(__FILE__, __LINE__, "seed " + std::to_string(seed));
  }
  bool hasFailed() const { return test::failureCount() > before; }
  const unsigned seed = std::random_device{}();
  const int before = test::failureCount();
};

std::vector<int> uniform(int hosts, int ranks) {
  std::vector<int> hostOf;
  for (int host = 0; host < hosts; ++host) hostOf.insert(hostOf.end(), ranks, host);
  return hostOf;
}

// Puts ranks on hosts at random.
std::vector<int> scattered(int ranks, int hosts, std::mt19937& random) {
  std::vector<int> hostOf(ranks);
  for (int& host : hostOf) host = static_cast<int>(random() % hosts);
  return hostOf;
}

std::vector<int> inARow(const std::vector<int>& sizes) {
  std::vector<int> hostOf;
  for (size_t host = 0; host < sizes.size(); ++host) {
    hostOf.insert(hostOf.end(), sizes[host], static_cast<int>(host));
  }
  return hostOf;
}

std::string describe(const std::vector<int>& hostOf) {
  std::string text;
  for (const int host : hostOf) text += std::to_string(host) + " ";
  return text;
}

std::vector<Job> jobsOf(OpKind kind, int ranks, int root, uint64_t bytes, bool isNarrow) {
  std::vector<Job> jobs;
  for (int rank = 0; rank < ranks; ++rank) {
    jobs.push_back(
        evenJob(kind, ranks, rank, root, bytes, kElement, isNarrow ? 2 * kElement : kElement));
  }
  return jobs;
}

// Cuts the job into chunks of few elements.
Chunking inChunks(const Job& job, uint64_t chunkBytes) {
  uint64_t block = 0;
  for (const uint64_t bytes : job.in) block = std::max(block, bytes);
  for (const uint64_t bytes : job.out) block = std::max(block, bytes);
  const bool isCut = job.kind == OpKind::kAllReduce || job.kind == OpKind::kReduce ||
                     job.kind == OpKind::kBroadcast || job.kind == OpKind::kReduceScatter ||
                     job.kind == OpKind::kAllGather;
  if (!isCut || block == 0) return {};
  return {(block + chunkBytes - 1) / chunkBytes, chunkBytes};
}

// One chunk or several, and memory shared on no host, on all, or on every other one.
constexpr int kVariants = 6;
constexpr uint64_t kChunkElements[] = {60, 7};  // in even and in odd variants

bool isRight(const std::vector<int>& hostOf, OpKind kind, int root, uint64_t elements,
             bool isNarrow, int variant, int mostInUnit = Shape::kMostInUnit,
             SumTree tree = SumTree()) {
  const int ranks = static_cast<int>(hostOf.size());
  const Shape shape(hostOf, tree, mostInUnit);
  const std::vector<Job> jobs = jobsOf(kind, ranks, root, elements * kElement, isNarrow);
  const Chunking chunking = inChunks(jobs[root], kChunkElements[variant % 2] * kElement);
  std::vector<bool> sharesMemory(shape.hosts(), variant / 2 == 1);
  for (size_t host = 0; host < sharesMemory.size() && variant / 2 == 2; host += 2) {
    sharesMemory[host] = true;
  }
  std::string wrong = verify(shape, jobs, chunking, sharesMemory, tree);
  if (wrong.empty() && (kind == OpKind::kBarrier || kind == OpKind::kMonitoredBarrier)) {
    wrong = verify(shape, jobs, chunking, sharesMemory, tree, root);
  }
  if (wrong.empty()) return true;
  test::fail(__FILE__, __LINE__,
             std::string(name(kind)) + " of " + std::to_string(elements) + " elements, root " +
                 std::to_string(root) + (isNarrow ? ", narrow" : "") + ", in " +
                 std::to_string(chunking.chunks) + " chunks, memory shared on " +
                 (variant / 2 == 0   ? "no host"
                  : variant / 2 == 1 ? "all"
                                     : "some") +
                 ", units of up to " + std::to_string(mostInUnit) + ", sums of blocks of " +
                 std::to_string(tree.block()) + ", hosts " + describe(hostOf) + ": " + wrong);
  return false;
}

void check(const std::vector<int>& hostOf, OpKind kind, int root, uint64_t elements, bool isNarrow,
           int mostInUnit = Shape::kMostInUnit, SumTree tree = SumTree()) {
  const Job job = evenJob(kind, static_cast<int>(hostOf.size()), root, root, elements * kElement,
                          kElement, kElement);
  // A job that is one chunk in all variants is not checked twice.
  const bool isCut = inChunks(job, kChunkElements[1] * kElement).chunks > 1;
  for (int variant = 0; variant < kVariants; variant += isCut ? 1 : 2) {
    if (!isRight(hostOf, kind, root, elements, isNarrow, variant, mostInUnit, tree)) return;
  }
}

// Verifies one operation in one variant.
bool isSomeRight(const std::vector<int>& hostOf, std::mt19937& random) {
  const int ranks = static_cast<int>(hostOf.size());
  const OpKind kind = kKinds[random() % std::size(kKinds)];
  const uint64_t blocks = kind == OpKind::kReduceScatter ? ranks : 1;
  const int root = static_cast<int>(random() % ranks);
  const uint64_t elements = blocks * (1 + random() % 20);
  const bool isNarrow = random() % 2;
  return isRight(hostOf, kind, root, elements, isNarrow, static_cast<int>(random() % kVariants));
}

void checkAll(const std::vector<int>& hostOf, std::mt19937& random,
              int mostInUnit = Shape::kMostInUnit) {
  const int ranks = static_cast<int>(hostOf.size());
  const SumTree tree(random() % 2 ? 1 : 2 + static_cast<int>(random() % 5));
  for (const OpKind kind : kKinds) {
    const int root = static_cast<int>(random() % ranks);
    const uint64_t few = kind == OpKind::kReduceScatter ? ranks : 1;
    check(hostOf, kind, root, few, random() % 2, mostInUnit, tree);
    if (kind == OpKind::kBarrier || kind == OpKind::kMonitoredBarrier) continue;
    check(hostOf, kind, root, few * (5 + random() % 40), random() % 2, mostInUnit, tree);
  }
}

// Calls visit(sizes) for all ways to put `ranks` ranks on up to `hosts` hosts in a row.
template <typename Visit>
void forPartitions(int ranks, int hosts, std::vector<int>& sizes, const Visit& visit) {
  if (ranks == 0) return visit(sizes);
  if (hosts == 0) return;
  for (int size = 1; size <= ranks; ++size) {
    if (hosts == 1 && size < ranks) continue;
    sizes.push_back(size);
    forPartitions(ranks - size, hosts - 1, sizes, visit);
    sizes.pop_back();
  }
}

PlanCounts countsOf(const std::vector<int>& hostOf, OpKind kind, uint64_t bytes,
                    uint64_t element = 4, SumTree tree = SumTree()) {
  return countsOf(Shape(hostOf, tree), kind, bytes, element, 4);
}

}  // namespace

TEST(Shape, takesHostsInTheOrderOfTheirLowestRanks) {
  const Shape shape({7, 7, 3, 7, 3});
  EXPECT_EQ(shape.hosts(), 2);
  EXPECT(shape.membersOf(0) == (std::vector<int>{0, 1, 3}));
  EXPECT(shape.membersOf(1) == (std::vector<int>{2, 4}));
  EXPECT_EQ(shape.hostOf(4), 1);
  EXPECT_EQ(shape.indexOf(3), 2);
  EXPECT_EQ(shape.lanes(), 3);
  EXPECT_EQ(shape.driver(1, 2), 2);
}

TEST(Shape, knowsTheNodesThatAHostHas) {
  using Nodes = std::vector<Node>;
  EXPECT(largestNodes({0, 1, 2, 3}, 8) == (Nodes{{0, 4}}));
  EXPECT(largestNodes({4, 5, 6}, 7) == (Nodes{{4, 7}}));
  EXPECT(largestNodes({3, 4, 5, 6, 7}, 8) == (Nodes{{3, 4}, {4, 8}}));
  EXPECT(largestNodes({1, 2}, 4) == (Nodes{{1, 2}, {2, 3}}));
  EXPECT(largestNodes({0, 2, 4}, 6) == (Nodes{{0, 1}, {2, 3}, {4, 5}}));
  EXPECT(largestNodes({0, 1, 2, 3, 4}, 5) == (Nodes{{0, 5}}));
  // Six ranks of a host in a row: two sums, or one of two blocks of three.
  EXPECT(largestNodes({6, 7, 8, 9, 10, 11}, 12) == (Nodes{{6, 8}, {8, 12}}));
  EXPECT(largestNodes({6, 7, 8, 9, 10, 11}, 12, SumTree(3)) == (Nodes{{6, 12}}));
  // All sets of ranks: the nodes of members only that are in no larger one.
  for (const int block : {1, 2, 3}) {
    const SumTree tree(block);
    for (int ranks = 1; ranks <= 10; ++ranks) {
      for (unsigned set = 0; set < 1U << ranks; ++set) {
        std::vector<int> members;
        for (int rank = 0; rank < ranks; ++rank) {
          if ((set >> rank & 1) != 0) members.push_back(rank);
        }
        Nodes expected;
        const auto isWithin = [&](int lo, int hi) {
          return static_cast<int>(std::count_if(members.begin(), members.end(), [&](int rank) {
                   return rank >= lo && rank < hi;
                 })) == hi - lo;
        };
        const auto visit = [&](const auto& self, int lo, int hi, bool isCovered) -> void {
          if (!isCovered && isWithin(lo, hi)) {
            expected.push_back({lo, hi});
            isCovered = true;
          }
          if (hi - lo < 2) return;
          self(self, lo, tree.middle(lo, hi), isCovered);
          self(self, tree.middle(lo, hi), hi, isCovered);
        };
        visit(visit, 0, ranks, false);
        EXPECT(largestNodes(members, ranks, tree) == expected);
      }
    }
  }
}

TEST(Shape, putsManyHostsIntoUnits) {
  const Shape few(uniform(16, 1));
  EXPECT_EQ(few.levels(), 1);
  const Shape many(uniform(125, 1));
  EXPECT_EQ(many.levels(), 2);
  EXPECT_EQ(many.unitSize(1), 8);
  EXPECT_EQ(many.unitOf(1, 124), 15);
  EXPECT_EQ(many.hostsIn(1, 15), 5);
  EXPECT_EQ(many.agent(1, 2, 27), 19);    // the fourth of its unit, too
  EXPECT_EQ(many.agent(1, 15, 23), 122);  // which has no eighth
  EXPECT(many.nodesOf(1, 15) == (std::vector<Node>{{120, 125}}));
  EXPECT_EQ(Shape(uniform(1250, 1)).levels(), 3);
}

TEST(Shape, knowsABetterBlock) {
  EXPECT_EQ(betterSumBlock(uniform(2, 8), SumTree()), 0);
  EXPECT_EQ(betterSumBlock(uniform(2, 12), SumTree()), 3);
  EXPECT_EQ(betterSumBlock(uniform(4, 20), SumTree()), 5);
  EXPECT_EQ(betterSumBlock(uniform(2, 12), SumTree(3)), 0);
  EXPECT_EQ(betterSumBlock(uniform(2, 8), SumTree(3)), 1);
}

TEST(Plan, isRightForAllSmallWorlds) {
  std::mt19937 random(1);
  for (int ranks = 1; ranks <= 12; ++ranks) {
    std::vector<int> sizes;
    forPartitions(ranks, 4, sizes,
                  [&](const std::vector<int>& hosts) { checkAll(inARow(hosts), random); });
  }
}

// Verifies a few of the ways to put more ranks on hosts, or all of them.
TEST(Plan, isRightForSomeOfAllWorldsOnFewHosts) {
  const ScopedSeed seed;
  std::mt19937 random(seed.seed);
  const unsigned stride = hasMuchTime() ? 1 : 2000;
  bool isRight = true;
  for (int ranks = 13; ranks <= 64; ++ranks) {
    std::vector<int> sizes;
    forPartitions(ranks, 4, sizes, [&](const std::vector<int>& hosts) {
      if (isRight && random() % stride == 0) isRight = isSomeRight(inARow(hosts), random);
    });
  }
}

// There are more chunks than areas.
TEST(Plan, isRightWhereMemoryIsUsedAgain) {
  constexpr uint64_t kChunks = 40;
  for (const auto& [hostOf, mostInUnit] :
       {std::pair(uniform(2, 2), 16), std::pair(inARow({3, 5}), 16), std::pair(uniform(6, 3), 2),
        std::pair(uniform(17, 2), 16)}) {
    const int ranks = static_cast<int>(hostOf.size()), root = ranks / 2;
    const Shape shape(hostOf, SumTree(), mostInUnit);
    EXPECT(kChunks > 2 * areaCount(shape));
    for (const OpKind kind : {OpKind::kAllReduce, OpKind::kReduce, OpKind::kReduceScatter,
                              OpKind::kAllGather, OpKind::kBroadcast}) {
      const uint64_t blocks = kind == OpKind::kReduceScatter ? ranks : 1;
      const std::vector<Job> jobs = jobsOf(kind, ranks, root, kChunks * blocks * kElement, true);
      const Chunking chunking = inChunks(jobs[root], kElement);
      EXPECT_EQ(chunking.chunks, kChunks);
      for (const bool areAll : {true, false}) {
        std::vector<bool> sharesMemory(shape.hosts(), areAll);
        sharesMemory[0] = true;
        const std::string wrong = verify(shape, jobs, chunking, sharesMemory);
        if (wrong.empty()) continue;
        test::fail(__FILE__, __LINE__,
                   std::string(name(kind)) + ", hosts " + describe(hostOf) + ": " + wrong);
      }
    }
  }
}

TEST(Plan, isRightForRandomWorlds) {
  const ScopedSeed seed;
  std::mt19937 random(seed.seed);
  for (int i = 0; i < numberFrom("PLAN_WORLDS", 40) && !seed.hasFailed(); ++i) {
    const int ranks = 2 + static_cast<int>(random() % 63);
    const int hosts = 1 + static_cast<int>(random() % std::min(ranks, 24));
    std::vector<int> hostOf = scattered(ranks, hosts, random);
    if (random() % 2) std::sort(hostOf.begin(), hostOf.end());
    // The small units make two to five levels.
    checkAll(hostOf, random, i % 2 ? Shape::kMostInUnit : 2 << random() % 3);
  }
}

// In a large world, the neighbours of a root send and receive for it.
TEST(Plan, isRightForRootsOfLargeWorlds) {
  const ScopedSeed seed;
  std::mt19937 random(seed.seed);
  for (int i = 0; i < numberFrom("PLAN_WORLDS", 40) / 5 && !seed.hasFailed(); ++i) {
    const int ranks = 65 + static_cast<int>(random() % 60);
    const int hosts = 2 + static_cast<int>(random() % 30);
    const std::vector<int> hostOf = scattered(ranks, hosts, random);
    const int root = static_cast<int>(random() % ranks);
    for (const OpKind kind : {OpKind::kBroadcast, OpKind::kReduce}) {
      check(hostOf, kind, root, 5 + random() % 100, random() % 2, 2 << random() % 4);
    }
  }
}

TEST(Plan, isRightForLargeWorlds) {
  std::vector<int> worlds = {999, 1000, 1001, 1024};
  if (const int more = numberFrom("PLAN_RANKS", 0)) worlds.push_back(more);
  for (const int ranks : worlds) {
    std::vector<int> hostOf;
    for (int rank = 0; rank < ranks; ++rank) hostOf.push_back(rank / 8);
    for (const OpKind kind : {OpKind::kAllReduce, OpKind::kBroadcast, OpKind::kBarrier}) {
      check(hostOf, kind, 17, 3, false);
      if (ranks == 1000 && kind != OpKind::kBarrier) check(hostOf, kind, 17, 60, true);
    }
    const PlanCounts counts = countsOf(hostOf, OpKind::kAllReduce, 64 << 20);
    EXPECT(counts.scratch <= 48 << 20);
    // On a host with fewer ranks than lanes, a rank drives several lanes, and has as many peers as
    // all ranks of another host together.
    EXPECT(counts.peers <= (ranks % 8 == 0 ? 64 : 8 * 22));
  }
}

// With a block for each rank there is much to verify, so this uses one size and variant, or all.
TEST(Plan, isRightForAllOperationsOfLargeWorlds) {
  const ScopedSeed seed;
  std::mt19937 random(seed.seed);
  const std::vector<int> sizes = {999, 1000, 1001, 1024};
  for (const OpKind kind : kKinds) {
    if (kind == OpKind::kAllReduce || kind == OpKind::kBroadcast) continue;
    // It has as many messages as there are pairs.
    const bool isFew = kind == OpKind::kAllToAll && !hasMuchTime();
    const size_t chosen = random() % sizes.size();
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (!hasMuchTime() && i != chosen) continue;
      const int ranks = isFew ? sizes[i] / 4 : sizes[i];
      std::vector<int> hostOf;
      for (int rank = 0; rank < ranks; ++rank) hostOf.push_back(rank / 8);
      const int first = static_cast<int>(random() % kVariants);
      for (int variant = first; variant < (hasMuchTime() ? first + kVariants : first + 1);
           ++variant) {
        const uint64_t elements = kind == OpKind::kReduceScatter ? ranks : 1;
        isRight(hostOf, kind, static_cast<int>(random() % ranks), elements, random() % 2,
                variant % kVariants);
      }
    }
  }
}

TEST(Plan, isRightForTenThousandRanks) {
  std::vector<int> unequal(104, 96);
  unequal.push_back(16);
  for (const std::vector<int>& hostOf : {uniform(1250, 8), inARow(unequal), uniform(10'000, 1)}) {
    const Shape shape(hostOf);
    for (const OpKind kind : {OpKind::kAllReduce, OpKind::kBroadcast, OpKind::kBarrier}) {
      if (shape.hosts() == shape.ranks() && !hasMuchTime()) continue;
      isRight(hostOf, kind, 17, hasMuchTime() ? 30 : 3, false, 4);
    }
    // Large plans take long to make, so this makes those of some ranks, or of all.
    for (const OpKind kind :
         {OpKind::kAllReduce, OpKind::kBroadcast, OpKind::kAllGather, OpKind::kReduce}) {
      for (int rank = 0; rank < shape.ranks(); rank += hasMuchTime() ? 1 : 1111) {
        const uint64_t bytes = kind == OpKind::kAllGather ? 4 : 64 << 20;
        const Job job = evenJob(kind, shape.ranks(), rank, 17, bytes, 4, 4);
        std::set<int> peers;
        for (const Step& step : planOf(shape, job, rank, chunkingOf(shape, job), 0, true).steps) {
          if (step.act < Step::Act::kSend || hostOf[step.peer] == hostOf[rank]) continue;
          peers.insert(step.peer);
        }
        // A small host that is alone in its unit acts for all others in it.
        const bool isAlone = shape.hosts() == 105 && hostOf[rank] == 104;
        EXPECT(peers.size() <= (isAlone ? 640 : 96));
      }
    }
  }
}

namespace {

// A gather, scatter or all_to_all with blocks of all sizes. Many are empty, and some are large.
std::vector<Job> unevenJobs(OpKind kind, int ranks, int root, std::mt19937& random) {
  const uint64_t most = random() % 3 == 0 ? 30 : 3;
  std::vector<std::vector<uint64_t>> bytes(ranks, std::vector<uint64_t>(ranks));
  for (auto& from : bytes) {
    for (uint64_t& block : from) block = random() % 2 * (random() % most) * kElement;
  }
  std::vector<Job> jobs = jobsOf(kind, ranks, root, 0, false);
  for (int rank = 0; rank < ranks; ++rank) {
    Job& job = jobs[rank];
    if (kind == OpKind::kGather) {
      job.in[0] = bytes[rank][root];
      jobs[root].out[rank] = bytes[rank][root];
    } else if (kind == OpKind::kScatter) {
      job.out[0] = bytes[root][rank];
      jobs[root].in[rank] = bytes[root][rank];
    } else {
      job.in = bytes[rank];
      for (int from = 0; from < ranks; ++from) job.out[from] = bytes[from][rank];
    }
  }
  return jobs;
}

}  // namespace

TEST(Plan, exchangesBlocksOfAllSizes) {
  const ScopedSeed seed;
  std::mt19937 random(seed.seed);
  for (int i = 0; i < numberFrom("PLAN_WORLDS", 100); ++i) {
    for (const OpKind kind : {OpKind::kGather, OpKind::kScatter, OpKind::kAllToAll}) {
      // Blocks are sent together in large worlds only.
      const int least = i % 2 == 0 ? 2 : kind == OpKind::kAllToAll ? 8 : 65;
      const int ranks = least + static_cast<int>(random() % 20);
      const int hosts = 1 + static_cast<int>(random() % std::min(ranks, 8));
      const std::vector<int> hostOf = scattered(ranks, hosts, random);
      const Shape shape(hostOf);
      const int root = static_cast<int>(random() % ranks);
      std::vector<bool> sharesMemory(shape.hosts());
      for (size_t host = 0; host < sharesMemory.size(); ++host) sharesMemory[host] = random() % 2;
      std::vector<Job> jobs = unevenJobs(kind, ranks, root, random);
      const std::string where = std::string(name(kind)) + ", root " + std::to_string(root) +
                                ", hosts " + describe(hostOf);
      std::string wrong = verify(shape, jobs, {}, sharesMemory);
      if (!wrong.empty()) return test::fail(__FILE__, __LINE__, where + ": " + wrong);
      // One host expects more than another one sends. No rank waits for the difference.
      const int to = kind == OpKind::kGather ? root : static_cast<int>(random() % ranks);
      const int from = kind == OpKind::kScatter ? root : static_cast<int>(random() % ranks);
      if (shape.hostOf(from) == shape.hostOf(to)) continue;
      jobs[to].out[kind == OpKind::kScatter ? 0 : from] += (1 + random() % 40) * kElement;
      wrong = verify(shape, jobs, {}, sharesMemory);
      if (wrong == "a message is not as long as expected") continue;
      return test::fail(__FILE__, __LINE__, where + ", and sizes that differ: " + wrong);
    }
  }
}

// Compares the bytes that plans send with the least that a host must send. Between more than 16
// hosts, some pieces are sent on by other hosts, so a plan may send a factor `ofMany` more.
TEST(Plan, sendsNoByteTwiceToAHost) {
  constexpr uint64_t kBytes = 16 << 20;
  for (const auto& [hosts, ranks] :
       {std::pair(2, 2), std::pair(2, 4), std::pair(4, 2), std::pair(4, 4), std::pair(17, 8),
        std::pair(32, 2), std::pair(125, 8)}) {
    const std::vector<int> hostOf = uniform(hosts, ranks);
    const double share = kBytes * (hosts - 1.0) / hosts;
    const struct {
      OpKind kind;
      double bound;
      double ofMany;
    } bounds[] = {{OpKind::kAllReduce, 2 * share, 1.10},
                  {OpKind::kReduceScatter, share, 1},
                  {OpKind::kReduce, 1.0 * kBytes, 1.22},
                  {OpKind::kAllGather, 1.0 * kBytes * ranks * (hosts - 1), 1.19},
                  {OpKind::kBroadcast, 1.0 * kBytes, 1.85}};
    for (const auto& [kind, bound, ofMany] : bounds) {
      const PlanCounts counts = countsOf(hostOf, kind, kBytes);
      EXPECT(counts.sent <= 1.01 * bound * (hosts > 16 ? ofMany : 1));
    }
  }
  // With unequal hosts, collectives that only move data send no more. Reductions send more, as the
  // tree has more nodes.
  const std::vector<int> unequal = inARow({3, 5});
  EXPECT(countsOf(unequal, OpKind::kAllGather, kBytes).sent <= 5 * kBytes * 1.01);
  EXPECT(countsOf(unequal, OpKind::kBroadcast, kBytes).sent <= kBytes * 1.01);
  for (const OpKind kind : {OpKind::kAllReduce, OpKind::kReduce, OpKind::kReduceScatter}) {
    EXPECT(countsOf(unequal, kind, kBytes).sent <= kBytes * 1.6);
  }
  // Hosts of three times a power of two ranks send two sums, or one sum with blocks of three.
  const std::vector<int> twelve = uniform(4, 12);
  EXPECT(countsOf(twelve, OpKind::kReduceScatter, kBytes).sent >= 1.9 * kBytes * 3 / 4);
  EXPECT(countsOf(twelve, OpKind::kReduceScatter, kBytes, 4, SumTree(3)).sent <=
         1.01 * kBytes * 3 / 4);
  // Sums of narrow floats are sent as wide floats.
  EXPECT(countsOf(uniform(2, 4), OpKind::kAllReduce, kBytes, 2).sent <= kBytes * 1.51);
}

TEST(Plan, needsLittleMemoryAndFewMessages) {
  for (const int hosts : {2, 4, 32}) {
    for (const OpKind kind : {OpKind::kAllReduce, OpKind::kReduce, OpKind::kReduceScatter}) {
      EXPECT(countsOf(uniform(hosts, 8), kind, 64 << 20).scratch <= 32 << 20);
    }
  }
  // Small tensors take one message from each host to each other one.
  EXPECT_EQ(countsOf(uniform(4, 2), OpKind::kAllReduce, 4).messages, 4u * 3);
  EXPECT_EQ(countsOf(uniform(4, 2), OpKind::kBarrier, 0).messages, 4u * 2);
  EXPECT_EQ(countsOf(uniform(4, 2), OpKind::kBroadcast, 4).messages, 3u);
  EXPECT_EQ(countsOf(uniform(4, 2), OpKind::kAllToAll, 4).messages, 4u * 3);
  // In a large world a rank has few peers.
  EXPECT(countsOf(uniform(125, 8), OpKind::kAllReduce, 1 << 20).peers <= 34);
  EXPECT(countsOf(uniform(125, 8), OpKind::kAllReduce, 4).messages <= 125 * 24);
  EXPECT_EQ(countsOf(uniform(125, 8), OpKind::kAllToAll, 8).messages, 125u * 124);
  EXPECT(countsOf(uniform(125, 8), OpKind::kAllToAll, 8).peers <= 16);
  for (const OpKind kind : {OpKind::kBroadcast, OpKind::kReduce}) {
    EXPECT(countsOf(uniform(125, 8), kind, 1 << 20).peers <= 34);
  }
  for (const OpKind kind : {OpKind::kGather, OpKind::kScatter}) {
    EXPECT(countsOf(uniform(125, 8), kind, 8).peers <= 16);
  }
  EXPECT_EQ(countsOf(uniform(125, 8), OpKind::kGather, 8).messages, 124u);
  EXPECT_EQ(countsOf(uniform(125, 8), OpKind::kScatter, 8).messages, 124u);
}

// The verifier detects plans that do not match.
TEST(Verifier, findsAJobThatDiffers) {
  const Shape shape(uniform(2, 2));
  std::vector<Job> jobs = jobsOf(OpKind::kAllReduce, 4, 0, 64 * kElement, false);
  const std::vector<bool> alone(2, false);
  EXPECT_EQ(verify(shape, jobs, {}, alone), "");
  jobs[3].in[0] = jobs[3].out[0] = 63 * kElement;
  EXPECT(verify(shape, jobs, {}, alone) != "");
  jobs = jobsOf(OpKind::kBroadcast, 4, 0, 64 * kElement, false);
  jobs[2].root = 1;
  EXPECT(verify(shape, jobs, {}, alone) != "");
}
