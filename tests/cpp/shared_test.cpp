// Shared tensors: the heap that contains them, and collectives that read them in place. Single
// copy: collectives and messages that read ordinary tensors of other processes.
#include <dlfcn.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/fd.h"
#include "base/os.h"
#include "calls.h"
#include "collectives/shm/collectives.h"
#include "processes.h"
#include "test.h"
#include "transport/shared_reads.h"
#include "transport/shm/peer_regions.h"
#include "transport/shm/shared_heap.h"
#include "world.h"

using namespace mycoll;
using namespace test;

namespace {

constexpr size_t kMiB = 1024 * 1024;

// Elements of a tensor, shared or not.
class Elements {
 public:
  Elements(bool isShared, size_t count) : count_(count) {
    if (isShared) {
      shared_ = static_cast<int32_t*>(SharedHeap::process().allocate(count * 4));
      ASSERT(shared_ != nullptr);
    } else {
      own_.resize(count);
    }
  }
  Elements(const Elements&) = delete;
  ~Elements() {
    if (shared_) EXPECT(SharedHeap::process().free(shared_));
  }

  int32_t* data() { return shared_ ? shared_ : own_.data(); }
  Span span(size_t from, size_t count) { return {data() + from, count * 4}; }
  Span span() { return span(0, count_); }
  void fill(int rank, size_t from) {
    for (size_t i = 0; i < count_; ++i) data()[i] = element(rank, from + i);
  }
  void expect(const std::function<int32_t(size_t)>& wanted, const std::string& where) {
    for (size_t i = 0; i < count_; ++i) {
      if (data()[i] == wanted(i)) continue;
      EXPECT_EQ(where + " at " + std::to_string(i) + ": " + std::to_string(data()[i]),
                std::to_string(wanted(i)));
      return;
    }
  }

 private:
  const size_t count_;
  int32_t* shared_ = nullptr;
  std::vector<int32_t> own_;
};

constexpr OpKind kKinds[] = {OpKind::kAllReduce, OpKind::kReduce,       OpKind::kBroadcast,
                             OpKind::kAllGather, OpKind::kGather,       OpKind::kScatter,
                             OpKind::kAllToAll,  OpKind::kReduceScatter};

// Whether the input or the output is a list with a part for each rank.
bool readsList(OpKind kind) {
  return kind == OpKind::kReduceScatter || kind == OpKind::kAllToAll || kind == OpKind::kScatter;
}
bool writesList(OpKind kind) {
  return kind == OpKind::kAllGather || kind == OpKind::kAllToAll || kind == OpKind::kGather;
}

// count: the number of elements of a part.
Call callOf(OpKind kind, Elements& in, Elements& out, size_t count, const Communicator& group,
            int root, bool isInPlace) {
  const bool isRoot = group.rank() == root;
  const bool isRooted = kind == OpKind::kReduce || kind == OpKind::kGather;
  auto parts = [&](Elements& all) {
    Spans list;
    for (int rank = 0; rank < group.ranks(); ++rank) {
      list.push_back(all.span(static_cast<size_t>(rank) * count, count));
    }
    return list;
  };
  Call c = call(kind);
  if (isRooted || kind == OpKind::kBroadcast || kind == OpKind::kScatter) c.root = root;
  if (kind == OpKind::kBroadcast) {
    c.out = {isRoot ? in.span() : out.span()};
    return c;
  }
  if (kind != OpKind::kScatter || isRoot) {
    c.in = readsList(kind) ? parts(in) : Spans{in.span()};
  }
  if (!isRooted || isRoot) c.out = writesList(kind) ? parts(out) : Spans{out.span()};
  if (kind == OpKind::kAllReduce && isInPlace) c.out = c.in;
  return c;
}

// Descriptors that arrive are dropped, as if the process had no number left for them.
std::atomic<bool> dropsDescriptors{false};

// The most bytes that one fallocate() may reserve.
std::atomic<off_t> mostReserved{INT64_MAX};

// For a scope, memory is reserved as on systems that do not overcommit it.
class Reserving {
 public:
  Reserving() { Segment::reserveForTest(true); }
  ~Reserving() {
    Segment::reserveForTest(false);
    mostReserved = INT64_MAX;
  }
  Reserving(const Reserving&) = delete;
  Reserving& operator=(const Reserving&) = delete;
};

// Marks all areas of this rank's staging memory.
void mark(const Arena& arena) {
  for (uint64_t area = 0; area < arena.shape().areas; ++area) {
    std::memset(arena.bulk(arena.rank(), area), 0x5a, arena.shape().chunkBytes);
  }
}
// Counts the bytes that have been written since.
size_t stagedBytes(const Arena& arena) {
  size_t bytes = 0;
  for (uint64_t area = 0; area < arena.shape().areas; ++area) {
    const char* begin = arena.bulk(arena.rank(), area);
    const char* end = begin + arena.shape().chunkBytes;
    bytes += static_cast<size_t>(end - begin - std::count(begin, end, 0x5a));
  }
  return bytes;
}

}  // namespace

extern "C" ssize_t recvmsg(int socket, msghdr* message, int flags) {
  static const auto next = reinterpret_cast<decltype(&recvmsg)>(dlsym(RTLD_NEXT, "recvmsg"));
  const ssize_t got = next(socket, message, flags);
  cmsghdr* const rights = got > 0 && dropsDescriptors ? CMSG_FIRSTHDR(message) : nullptr;
  if (rights != nullptr && rights->cmsg_type == SCM_RIGHTS) {
    int fd;
    std::memcpy(&fd, CMSG_DATA(rights), sizeof(fd));
    close(fd);
    message->msg_controllen = 0;
  }
  return got;
}

// Faults of process_vm_readv(), by the process that calls it:
// The kernel refuses reads of other processes, or reads of its own memory.
std::atomic<bool> refusesReads{false}, refusesOwn{false};
// The process ends when it begins to read another one.
std::atomic<bool> endsAtRead{false};
// The other process ends after the first of its data was read.
std::atomic<bool> endsOwner{false};
// The pid of the other process was reused by a stranger.
std::atomic<bool> readsStranger{false};
// Only the head of the other process can be read, not its data.
std::atomic<bool> losesData{false};
// Reads of others take a millisecond, and read nothing.
std::atomic<bool> readsSlowly{false};
// The process begins to read others when this one has ended.
const PeerAddress* readsAfterEndOf = nullptr;
std::atomic<int> readsOfOthers{0}, readsOfOwn{0};

extern "C" ssize_t process_vm_readv(pid_t pid, const iovec* local, unsigned long locals,
                                    const iovec* remote, unsigned long remotes,
                                    unsigned long flags) {
  static const auto next =
      reinterpret_cast<decltype(&process_vm_readv)>(dlsym(RTLD_NEXT, "process_vm_readv"));
  if (pid == getpid() ? refusesOwn : refusesReads) return errno = EPERM, -1;
  const auto read = [&] { return next(pid, local, locals, remote, remotes, flags); };
  if (pid == getpid()) return ++readsOfOwn, read();
  ++readsOfOthers;
  if (endsAtRead) _exit(0);
  if (readsSlowly) return usleep(1000), static_cast<ssize_t>(local->iov_len);
  const PeerAddress* const ends = readsAfterEndOf;
  const Deadline deadline = Deadline::after(std::chrono::seconds(20));
  while (ends && isLiving(lookAtProcess(ends->pid, ends->startTicks)) && !deadline.expired()) {
    usleep(1000);
  }
  const bool isHead = remote->iov_len == sizeof(ProcessHead);
  if (losesData && !isHead) return errno = EFAULT, -1;
  const ssize_t count = read();
  if (readsStranger && isHead) static_cast<char*>(local->iov_base)[0] ^= 1;
  if (endsOwner && !isHead && kill(pid, SIGUSR1) == 0) {
    while (read() > 0) sched_yield();
  }
  return count;
}

extern "C" int fallocate(int fd, int mode, off_t offset, off_t bytes) {
  static const auto next = reinterpret_cast<decltype(&fallocate)>(dlsym(RTLD_NEXT, "fallocate"));
  if (mode == 0 && bytes > mostReserved) return errno = ENOSPC, -1;
  return next(fd, mode, offset, bytes);
}

TEST(SharedHeap, blocksAreDisjointAndUsedAgain) {
  SharedHeap& heap = SharedHeap::process();
  std::mt19937 random(7);
  std::map<char*, std::pair<size_t, char>> blocks;
  for (int step = 0; step < 4000; ++step) {
    if (blocks.size() > 100 || (!blocks.empty() && random() % 3 == 0)) {
      auto at = std::next(blocks.begin(), static_cast<long>(random() % blocks.size()));
      const auto [begin, what] = *at;
      EXPECT(begin[0] == what.second && begin[what.first - 1] == what.second);
      EXPECT(heap.free(begin));
      blocks.erase(at);
      continue;
    }
    const size_t bytes = random() % (random() % 10 == 0 ? 3 * kMiB : 3000) + 1;
    auto* begin = static_cast<char*>(heap.allocate(bytes));
    ASSERT(begin != nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(begin) % pageBytes(), 0u);
    const char mark = static_cast<char>(random());
    begin[0] = begin[bytes - 1] = mark;
    const auto after = blocks.lower_bound(begin);
    EXPECT(after == blocks.end() || begin + bytes <= after->first);
    if (after != blocks.begin()) {
      const auto before = std::prev(after);
      EXPECT(before->first + before->second.first <= begin);
    }
    EXPECT(heap.find({begin, bytes}).region != 0);
    blocks[begin] = {bytes, mark};
  }
  for (const auto& [begin, what] : blocks) EXPECT(heap.free(begin));
  EXPECT_EQ(heap.usageForTest().blockBytes, 0u);
  EXPECT(heap.usageForTest().regionBytes <= SharedHeap::kKeptBytes);
  int other = 0;
  EXPECT(!heap.free(&other));
  EXPECT_EQ(heap.find({&other, sizeof(other)}).region, 0u);
}

TEST(SharedHeap, memoryIsReturned) {
  SharedHeap& heap = SharedHeap::process();
  const int descriptors = openDescriptors();
  std::vector<void*> blocks;
  for (int i = 0; i < 20; ++i) {
    blocks.push_back(heap.allocate(100 * kMiB));
    std::memset(blocks.back(), i, 4 * kMiB);
  }
  EXPECT(heap.usageForTest().regionBytes >= 2000 * kMiB);
  const SharedPlace place = heap.find({blocks[19], 100 * kMiB});
  const std::shared_ptr<Segment> peers = heap.segmentOf(place.region);
  for (void* block : blocks) EXPECT(heap.free(block));
  EXPECT(heap.usageForTest().regionBytes <= SharedHeap::kKeptBytes);
  EXPECT(openDescriptors() <= descriptors + 5);
  // The last region is still mapped here.
  EXPECT(heap.segmentOf(place.region) == nullptr);
  EXPECT(reinterpret_cast<const RegionHead*>(peers->data())->isDropped.load() != 0);
  EXPECT(peers->data()[place.offset] == 0);
}

TEST(SharedHeap, smallBlocksKeepNoLargeRegion) {
  SharedHeap& heap = SharedHeap::process();
  void* const large = heap.allocate(300 * kMiB);
  void* const small = heap.allocate(1);
  const size_t with = heap.usageForTest().regionBytes;
  EXPECT(heap.free(large));
  EXPECT(heap.usageForTest().regionBytes <= with - 300 * kMiB);
  void* const next = heap.allocate(1);
  EXPECT(heap.find({next, 1}).region == heap.find({small, 1}).region);
  EXPECT(heap.free(small) && heap.free(next));
}

// Another process maps a region to read it, or a part of the region to write to it.
TEST(SharedHeap, otherProcessesMapIt) {
  SharedHeap& heap = SharedHeap::process();
  constexpr size_t kBytes = 10'000;
  auto* const block = static_cast<char*>(heap.allocate(kBytes + 100));
  std::memset(block, 1, kBytes + 100);
  const SharedPlace place = heap.find({block + 100, kBytes});
  const auto region = heap.segmentOf(place.region);
  endProcess(startProcess([&] {
    const auto descriptor = [&] { return Fd(dup(region->fd())); };
    std::shared_ptr<Segment> read;
    ASSERT_OK(
        Segment::adopt(descriptor(), region->bytes(), &read, Segment::Access::kReadOnly, true));
    EXPECT(read->data() != region->data());
    EXPECT(read->data()[place.offset] == 1 && !canWrite(read->data() + place.offset));

    std::shared_ptr<Pages> pages;
    ASSERT_OK(Pages::map(descriptor(), region->bytes(), place.offset, kBytes, &pages));
    EXPECT_EQ(pages->bytes(), kBytes);
    EXPECT(canWrite(pages->data()) && pages->data() != read->data() + place.offset);
    const size_t before = place.offset % pageBytes();
    EXPECT_EQ(mappingAt(pages->data()).access, "rw-s");
    EXPECT_EQ(mappingAt(pages->data()).bytes(), roundUp(before + kBytes, pageBytes()));
    EXPECT_EQ(mappingAt(pages->data()).begin, reinterpret_cast<uintptr_t>(pages->data()) - before);
    pages->data()[0] = 2;
    EXPECT(read->data()[place.offset] == 2);
    endProcess(
        startProcess([&] { pages->data()[kBytes - 1] = 3; }));  // a child inherits the mapping

    // Invalid descriptors, sizes and places are refused, and nothing is mapped.
    [[maybe_unused]] const size_t mapped = mappings().size();
    pages.reset();
    const auto expectRefused = [&](const std::function<Fd()>& given, size_t bytes, size_t offset,
                                   size_t size) {
      EXPECT(!Pages::map(given(), bytes, offset, size, &pages).ok() && pages == nullptr);
      if (offset > 0) return;
      std::shared_ptr<Segment> segment;
      EXPECT(!Segment::adopt(given(), bytes, &segment).ok() && segment == nullptr);
    };
    const size_t whole = region->bytes();
    expectRefused(descriptor, whole + 4096, 0, kBytes);
    expectRefused(descriptor, whole - 4096, 0, kBytes);
    expectRefused(descriptor, 0, 0, 0);
    expectRefused(descriptor, whole, whole + 1, 0);
    expectRefused(descriptor, whole, whole - kBytes + 1, kBytes);
    expectRefused(descriptor, whole, place.offset, ~size_t{0});
    expectRefused(descriptor, whole, ~size_t{0}, 2);
    expectRefused([] { return Fd(); }, whole, 0, kBytes);
    for (const int seals : {0, F_SEAL_GROW, F_SEAL_SHRINK, F_SEAL_GROW | F_SEAL_SEAL}) {
      const auto unsealed = [&] {
        Fd made(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
        EXPECT(ftruncate(made.get(), 8192) == 0 && fcntl(made.get(), F_ADD_SEALS, seals) == 0);
        return made;
      };
      expectRefused(unsealed, 8192, 0, 4096);
    }
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)  // they map memory, too
    EXPECT(mappings().size() < mapped);
#endif
  }));
  EXPECT(block[99] == 1 && block[100] == 2 && block[99 + kBytes] == 3);
  EXPECT(heap.free(block));
}

// On systems that do not overcommit memory, the first access to a page could fail. So memory is
// reserved there.
TEST(SharedHeap, memoryIsReservedIfNecessary) {
  const auto heldBytes = [](const Segment& segment) {
    struct stat info{};
    ASSERT(fstat(segment.fd(), &info) == 0);
    return static_cast<size_t>(info.st_blocks) * 512;
  };
  std::shared_ptr<Segment> lazy, reserved;
  ASSERT_OK(Segment::create(9 * kMiB + 4096, &lazy));
  EXPECT_EQ(heldBytes(*lazy), 0u);
  const Reserving reserving;
  for (const bool useHugePages : {false, true}) {
    reserved.reset();
    ASSERT_OK(Segment::create(9 * kMiB + 4096, &reserved, useHugePages));
    EXPECT(heldBytes(*reserved) >= 9 * kMiB + 4096);
    reserved->discard(0, kMiB);  // keeps the reservation, as others may still write there
    EXPECT(heldBytes(*reserved) >= 9 * kMiB + 4096);
  }
  lazy->data()[0] = 1;
  lazy->discard(0, kMiB);
  EXPECT_EQ(heldBytes(*lazy), 0u);
}

// If memory cannot be reserved, the heap reports that, and groups and messages work without shared
// memory.
TEST(SharedHeap, groupsWorkWithoutReservedMemory) {
  const Reserving reserving;
  for (const bool isAll : {true, false}) {
    // All reservations fail, or those of arenas do and those of rings do not.
    mostReserved = isAll ? 0 : static_cast<off_t>(ringSegmentBytes());
    runWorld(2, Links::kShm, [&](Communicator& group) {
      Elements mine(false, 100'000);
      mine.fill(group.rank(), 0);
      Call sum = call(OpKind::kAllReduce);
      sum.in = sum.out = {mine.span()};
      EXPECT_OK(run(group, sum));
      mine.expect([](size_t i) { return element(0, i) + element(1, i); }, "sum");
      Mailbox& mailbox = group.mailbox();
      {
        const IoLock lock(mailbox.ioMutex());
        const PeerAddress& peer = mailbox.group().peers[1 - group.rank()];
        EXPECT_EQ(mailbox.mesh().linkTo(peer).isShm(), !isAll);
      }
      EXPECT_OK(barrier(group));  // until both ranks have checked the link
      EXPECT(group.arena() == nullptr);
    });
    EXPECT(SharedHeap::process().allocate(2 * SharedHeap::kRegionBytes) == nullptr);
  }
}

TEST(SharedHeap, childrenWriteToCopies) {
  SharedHeap& heap = SharedHeap::process();
  auto* block = static_cast<char*>(heap.allocate(1000));
  std::memset(block, 1, 1000);
  endProcess(startProcess([&] {
    EXPECT(block[999] == 1);
    block[0] = 2;
    auto* own = static_cast<char*>(heap.allocate(1000));
    EXPECT(own != nullptr && heap.find({block, 1}).region == 0);
    EXPECT(heap.find({own, 1}).region != 0 && heap.free(block));
    std::memset(own, 3, 1000);
  }));
  for (int i = 0; i < 1000; ++i) EXPECT(block[i] == 1);
  EXPECT(heap.free(block));
}

namespace {

// Random collectives. Some tensors of some ranks are shared, and regions are made and dropped.
void runMixture(Communicator& group, unsigned seed, int calls) {
  std::mt19937 random(seed), own(seed + group.rank());
  const int self = group.rank(), ranks = group.ranks();
  for (int index = 0; index < calls; ++index) {
    const OpKind kind = kKinds[random() % std::size(kKinds)];
    const std::string where = "seed " + std::to_string(seed) + ", " + name(kind) + " #" +
                              std::to_string(index) + " of " + std::to_string(ranks);
    const size_t count = (random() % 2 ? 40'000 : 400'000) + random() % 5000;
    const auto n = static_cast<size_t>(ranks);
    const int root = static_cast<int>(random() % ranks);
    const bool isInPlace = random() % 2;
    const int mixture = random() % 4;  // in half of the calls, all tensors are shared
    const bool isShared = mixture > 1 || own() % 2;
    const bool isRoot = self == root;
    Elements in(isShared, readsList(kind) ? n * count : count);
    in.fill(self, index);
    Elements out(mixture > 1 || own() % 2, writesList(kind) ? n * count : count);
    const Call c = callOf(kind, in, out, count, group, root, isInPlace);
    const Status status = run(group, c);
    if (!status.ok()) EXPECT_EQ(where + ": " + status.message(), "");
    Elements& result = kind == OpKind::kAllReduce && isInPlace ? in : out;
    const auto at = static_cast<size_t>(self) * count;
    switch (kind) {
      case OpKind::kAllReduce:
        result.expect([&](size_t i) { return summed(ranks, index + i); }, where);
        break;
      case OpKind::kReduce:
        if (!isRoot) break;
        result.expect([&](size_t i) { return summed(ranks, index + i); }, where);
        break;
      case OpKind::kReduceScatter:
        result.expect([&](size_t i) { return summed(ranks, index + at + i); }, where);
        break;
      case OpKind::kBroadcast:
        if (!isRoot) result.expect([&](size_t i) { return element(root, index + i); }, where);
        break;
      case OpKind::kScatter:
        result.expect([&](size_t i) { return element(root, index + at + i); }, where);
        break;
      case OpKind::kAllToAll:
        result.expect(
            [&](size_t i) { return element(static_cast<int>(i / count), index + at + i % count); },
            where);
        break;
      default:
        if (kind == OpKind::kGather && !isRoot) break;
        result.expect(
            [&](size_t i) { return element(static_cast<int>(i / count), index + i % count); },
            where);
    }
  }
}

}  // namespace

TEST(SharedTensors, collectivesOfAnyMixture) {
  const unsigned seed = std::random_device()();
  for (const char* use : {"off", "on", "auto"}) {
    const ScopedEnv singleCopy("MYCOLL_SINGLE_COPY", use);
    for (int ranks = 2; ranks <= 4; ++ranks) {
      runWorld(ranks, Links::kShm,
               [&](Communicator& group) { runMixture(group, seed, isShort() ? 40 : 80); });
    }
  }
}

// A process can read the regions of others, and write only to its own.
TEST(SharedTensors, processesReadEachOther) {
  const unsigned seed = std::random_device()();
  constexpr size_t kCount = PeerMemory::kLeastShared / 4;
  runProcesses(3, [&](Communicator& group) {
    const auto ranks = static_cast<size_t>(group.ranks());
    Elements in(true, kCount), out(true, ranks * kCount);
    in.fill(group.rank(), 0);
    ASSERT_OK(run(group, callOf(OpKind::kAllGather, in, out, kCount, group, 0, false)));
    const auto wanted = [&](size_t i) { return element(static_cast<int>(i / kCount), i % kCount); };
    out.expect(wanted, "all_gather of processes");
    size_t theirs = 0;
    for (const Mapping& mapping : mappings()) {
      // A private mapping is a copy of a region of the parent.
      const bool isRegion = mapping.name.starts_with("/memfd:") && mapping.access.ends_with("s") &&
                            mapping.bytes() >= SharedHeap::kRegionBytes;
      if (!isRegion) continue;
      char* const place = reinterpret_cast<char*>(mapping.begin) + SharedHeap::headBytes();
      const bool isOwn = SharedHeap::process().find({place, 1}).region != 0;
      EXPECT_EQ(mapping.access, isOwn ? "rw-s" : "r--s");
      EXPECT_EQ(canWrite(place), isOwn);
      theirs += !isOwn;
    }
    EXPECT_EQ(theirs, ranks - 1);
    runMixture(group, seed, isShort() ? 10 : 40);
  });
}

// From the first call, shared tensors are read in place, and with single copy any tensors are. The
// staging memory remains unchanged, and arrivals contain only the locations of the tensors. A
// reduce is always staged.
TEST(SharedTensors, nothingIsStaged) {
  constexpr size_t kCount = PeerMemory::kLeastSharedReduce / 4;
  const auto check = [](int ranks, bool isShared, bool isSingleCopy) {
    const ScopedEnv singleCopy("MYCOLL_SINGLE_COPY", isSingleCopy ? "on" : "off");
    std::map<OpKind, std::atomic<size_t>> staged;
    for (const OpKind kind : kKinds) staged[kind] = 0;
    runWorld(ranks, Links::kShm, [&](Communicator& group) {
      const int self = group.rank(), root = ranks - 1;
      ASSERT_OK(barrier(group));
      const Arena& arena = *group.arena();
      for (const OpKind kind : kKinds) {
        for (const bool isInPlace : {true, false}) {
          const auto n = static_cast<size_t>(ranks);
          Elements in(isShared, readsList(kind) ? n * kCount : kCount);
          Elements out(isShared, writesList(kind) ? n * kCount : kCount);
          in.fill(self, 0);
          mark(arena);
          EXPECT_OK(run(group, callOf(kind, in, out, kCount, group, root, isInPlace)));
          staged.at(kind) += stagedBytes(arena);
          if ((!isShared && !isSingleCopy) || kind == OpKind::kReduce) continue;
          EXPECT(arena.blobBytesOf(self) <= (n + 1) * sizeof(SharedSpan));
        }
      }
    });
    for (const OpKind kind : kKinds) {
      const std::string where = std::string(name(kind)) + " of " + std::to_string(ranks) + ": ";
      const bool isAny = staged.at(kind) > 0;
      const bool isRead = (isShared || isSingleCopy) && kind != OpKind::kReduce;
      EXPECT_EQ(where + (isAny ? "staged" : "read"), where + (isRead ? "read" : "staged"));
    }
  };
  for (int ranks = 2; ranks <= 4; ++ranks) {
    check(ranks, true, false);
    check(ranks, false, false);
    check(ranks, false, true);
  }
}

// A rank has no descriptor left when it first receives a region, and has some later.
TEST(SharedTensors, aRegionThatCouldNotBeMappedIsIntroducedAgain) {
  const ScopedEnv singleCopy("MYCOLL_SINGLE_COPY", "off");
  constexpr size_t kCount = PeerMemory::kLeastSharedReduce / 4;
  runWorld(2, Links::kShm, [&](Communicator& group) {
    const int self = group.rank();
    Elements mine(true, kCount);
    const auto staged = [&] {
      mine.fill(self, 0);
      mark(*group.arena());
      Call sum = call(OpKind::kAllReduce);
      sum.in = sum.out = {mine.span()};
      EXPECT_OK(run(group, sum));
      mine.expect([](size_t i) { return element(0, i) + element(1, i); }, "sum");
      return stagedBytes(*group.arena());
    };
    EXPECT_OK(barrier(group));
    dropsDescriptors = true;
    EXPECT(staged() > 0);
    EXPECT_OK(barrier(group));
    dropsDescriptors = false;
    std::this_thread::sleep_for(PeerRegions::kTryAgain);
    EXPECT_OK(barrier(group));
    EXPECT_EQ(staged(), 0u);
  });
}

namespace {

// Rank 0 leaves a group with an unfinished broadcast of a shared tensor, as `leave` does, and then
// changes the tensor. Returns the result of rank 1, which calls the broadcast afterwards and must
// not read the tensor.
Status broadcastOfALeaver(const std::function<void(Communicator&, const Call&)>& leave) {
  std::atomic<bool> hasLeft{false};
  Status result;
  runWorld(2, Links::kShm, [&](Communicator& group) {
    Elements data(true, PeerMemory::kLeastShared);
    data.fill(group.rank(), 0);
    Call broadcast = call(OpKind::kBroadcast);
    broadcast.root = 0;
    broadcast.out = {data.span()};
    EXPECT_OK(run(group, broadcast));
    if (group.rank() == 0) {
      leave(group, broadcast);
      data.fill(2, 0);
      hasLeft = true;
      return;
    }
    while (!hasLeft) std::this_thread::yield();
    result = run(group, broadcast);
  });
  return result;
}

}  // namespace

TEST(SharedTensors, aRankThatLeavesTooEarlyFailsItsCollective) {
  const Status status = broadcastOfALeaver([](Communicator& group, const Call& broadcast) {
    const OpPtr op = group.submit(broadcast, nullptr, /*willWait=*/false);
    group.close(Deadline::after(std::chrono::milliseconds(100)), "");
    EXPECT(!group.wait(op, Deadline::never()).ok());  // another thread may be ending it
  });
  EXPECT_EQ(status.code(), Code::kPeerLost);
  EXPECT_CONTAINS(status, "has left the group with operations");
}

// Another thread calls the collective after its rank has sent its goodbye.
TEST(SharedTensors, aCallDuringADepartureFailsTheCollective) {
  const Status status = broadcastOfALeaver([](Communicator& group, const Call& broadcast) {
    EXPECT(group.leave(Deadline::after(std::chrono::seconds(20))));
    const OpPtr op = group.submit(broadcast, nullptr, /*willWait=*/false);
    group.endLeaving();
    EXPECT_EQ(group.wait(op, Deadline::never()).code(), Code::kAborted);
    EXPECT_EQ(run(group, broadcast).code(), Code::kAborted);
  });
  EXPECT_EQ(status.code(), Code::kPeerLost);
}

// The group fails while the rank leaves it, because its operation times out.
TEST(SharedTensors, aTimeoutDuringADepartureFailsTheCollective) {
  const Status status = broadcastOfALeaver([](Communicator& group, const Call& broadcast) {
    const OpPtr op =
        group.submit(broadcast, nullptr, /*willWait=*/false, std::chrono::milliseconds(100));
    group.close(Deadline::after(std::chrono::seconds(20)), "");
    EXPECT(!group.wait(op, Deadline::never()).ok());
  });
  EXPECT_EQ(status.code(), Code::kTimeout);
  EXPECT_EQ(status.cause().rank, 1);
}

// The locations that a peer sends are checked before they are used.
TEST(SharedTensors, offersAreChecked) {
  ArenaShape shape;
  shape.ranks = 2;
  std::shared_ptr<Segment> segment;
  ASSERT_OK(Segment::create(shape.totalBytes(), &segment));
  Arena arenas[2] = {{segment, shape, 0, std::vector<Bell>(2), {0, 1}, DistanceChoice::kMeasured},
                     {segment, shape, 1, std::vector<Bell>(2), {0, 1}, DistanceChoice::kMeasured}};
  PeerMemory memory(0, SingleCopyUse::kOff);
  std::vector<char> own(PeerMemory::kLeastShared);
  const Call gather = call(OpKind::kAllGather);
  EXPECT(memory.offer(arenas[0], gather, {{own.data(), own.size()}}, own.size()).empty());
  const SharedSpan offers[] = {{1, SharedHeap::headBytes(), 64},
                               {SharedSpan::kProcess, reinterpret_cast<uint64_t>(own.data()), 64}};
  for (const SharedSpan& offer : offers) {
    for (Arena& arena : arenas) {
      std::memcpy(arena.beginBlob(sizeof(offer)), &offer, sizeof(offer));
      arena.arrive(gather.signature(), sizeof(offer), 0, /*isOffer=*/true);
    }
    EXPECT_EQ(PeerMemory::offersOf(arenas[0], 1), 1u);
    EXPECT(memory.view(arenas[0], 1, 0, 0, 64) == nullptr);
    EXPECT(!memory.read(arenas[0], 1, 0, 0, {own.data(), 64}, false));
  }
}

// ---- single copy

namespace {

using Choice = SingleCopy::Choice;

std::string describe(const SingleCopy::Case& which) {
  return std::string(name(which.kind)) + " of " + std::to_string(which.ranks) + ", 2^" +
         std::to_string(which.logBytes);
}

}  // namespace

// The first group of some number of ranks measures each kind and size once.
TEST(SingleCopy, isMeasuredOnce) {
  const ScopedEnv singleCopy("MYCOLL_SINGLE_COPY", "auto");
  runProcesses(2, [](Communicator& group) {
    for (const size_t count : {20'000, 40'000, 5'000'000}) {
      for (const OpKind kind : kKinds) {
        const auto make = [&] {
          Elements in(false, readsList(kind) ? 2 * count : count);
          Elements out(false, writesList(kind) ? 2 * count : count);
          in.fill(group.rank(), 0);
          ASSERT_OK(run(group, callOf(kind, in, out, count, group, 0, false)));
          if (kind != OpKind::kAllReduce) return;
          out.expect([](size_t i) { return element(0, i) + element(1, i); }, "sum");
        };
        make();
        const auto first = SingleCopy::process().measured();
        make();
        const auto second = SingleCopy::process().measured();
        EXPECT_EQ(first.size(), second.size());
        for (const auto& [which, result] : second) {
          EXPECT(first.contains(which));
          EXPECT(result.choice != Choice::kUnknown);
          EXPECT(result.stagedMicros > 0 && result.directMicros > 0);
        }
      }
    }
    size_t found = 0;
    for (const auto& [which, result] : SingleCopy::process().measured()) {
      EXPECT_EQ(which.ranks, 2);
      if (which.kind == OpKind::kReduce) EXPECT_EQ(describe(which), "");
      ++found;
    }
    // A broadcast, a gather and a scatter are measured on one rank only.
    EXPECT(found >= 3 * 4);
  });
}

// Single copy is chosen only if it is clearly faster in all rounds but one.
TEST(SingleCopy, theChoiceToleratesNoise) {
  const float staged[] = {10, 10, 10, 30};
  const float faster[] = {7, 80, 6, 8}, sometimes[] = {7, 9.5, 10, 8},
              similar[] = {9.5, 9.5, 9.5, 9};
  EXPECT(SingleCopy::judge(staged, faster, 4).choice == Choice::kDirect);
  EXPECT(SingleCopy::judge(staged, sometimes, 4).choice == Choice::kStaged);
  EXPECT(SingleCopy::judge(staged, similar, 4).choice == Choice::kStaged);
  EXPECT_EQ(SingleCopy::judge(staged, faster, 4).stagedMicros, 10.0);
}

// A rank tries to read another process. If the kernel refuses that, the data is staged.
TEST(SingleCopy, dataOfAProcessThatCannotBeReadIsStaged) {
  const ScopedEnv singleCopy("MYCOLL_SINGLE_COPY", "on");
  runProcesses(3, [](Communicator& group) {
    ASSERT_OK(barrier(group));
    if (group.rank() == 1) refusesReads = true;
    constexpr size_t kCount = 100'000;
    Elements in(false, kCount), out(false, 3 * kCount);
    in.fill(group.rank(), 0);
    mark(*group.arena());
    ASSERT_OK(run(group, callOf(OpKind::kAllGather, in, out, kCount, group, 0, false)));
    out.expect([](size_t i) { return element(static_cast<int>(i / kCount), i % kCount); },
               "all_gather");
    EXPECT(stagedBytes(*group.arena()) > 0);
  });
}

// A rank stages memory that other processes cannot read, such as that of some devices.
TEST(SingleCopy, memoryThatCannotBeReadIsStaged) {
  const ScopedEnv singleCopy("MYCOLL_SINGLE_COPY", "on");
  runProcesses(2, [](Communicator& group) {
    constexpr size_t kCount = 100'000;
    Elements in(false, kCount), out(false, 2 * kCount);
    in.fill(group.rank(), 0);
    const Call gather = callOf(OpKind::kAllGather, in, out, kCount, group, 0, false);
    ASSERT_OK(run(group, gather));
    refusesOwn = group.rank() == 1;
    mark(*group.arena());
    ASSERT_OK(run(group, gather));
    EXPECT_EQ(stagedBytes(*group.arena()) > 0, group.rank() == 1);
    out.expect([](size_t i) { return element(static_cast<int>(i / kCount), i % kCount); },
               "all_gather");
  });
}

// A rank that never has to wait still looks for signals and deadlines, however much it reads.
TEST(SingleCopy, aDeadlineEndsTheWaitBetweenPieces) {
  const ScopedEnv singleCopy("MYCOLL_SINGLE_COPY", "on");
  runProcesses(2, [](Communicator& group) {
    constexpr size_t kBytes = size_t{1} << 30;
    const std::unique_ptr<char[]> untouched(new char[kBytes]);
    Call broadcast = call(OpKind::kBroadcast);
    broadcast.root = 0;
    broadcast.out = {{untouched.get(), SingleCopy::kLeastBytes}};
    ASSERT_OK(run(group, broadcast));
    broadcast.out = {{untouched.get(), kBytes}};
    readsSlowly = group.rank() == 1;
    const OpPtr op = group.submit(std::move(broadcast), nullptr, /*willWait=*/true);
    if (readsSlowly) {
      EXPECT_EQ(group.wait(op, Deadline::after(std::chrono::milliseconds(1))).code(),
                Code::kTimeout);
      EXPECT(!op->done());
      group.abort("it has seen enough");
    }
    EXPECT_EQ(group.wait(op, Deadline::never()).code(), Code::kAborted);
    EXPECT(group.rank() == 0 || readsOfOthers < 600);
  });
}

// A rank that has read everything may leave and end while a slower one still reads.
TEST(SingleCopy, aReaderThatEndsDoesNotAffectAnother) {
  const ScopedEnv singleCopy("MYCOLL_SINGLE_COPY", "on");
  runProcesses(3, [](Communicator& group) {
    constexpr size_t kCount = 100'000;
    Elements data(false, kCount);
    Call broadcast = call(OpKind::kBroadcast);
    broadcast.root = 0;
    broadcast.out = {data.span()};
    data.fill(group.rank(), 0);
    ASSERT_OK(run(group, broadcast));
    data.fill(group.rank() + 3, 0);
    group.setTimeout(std::chrono::seconds(30));
    if (group.rank() == 1) readsAfterEndOf = &group.address().peers[2];
    EXPECT_OK(run(group, broadcast));
    data.expect([](size_t i) { return element(3, i); }, "broadcast");
  });
}

// The end of a rank that others read is reported as any death, and its data is not used.
TEST(SingleCopy, aDeathWhileReadingIsReported) {
  const ScopedEnv singleCopy("MYCOLL_SINGLE_COPY", "on");
  runProcesses(3, [](Communicator& group) {
    constexpr size_t kCount = 100'000;
    Elements in(false, kCount), out(false, 3 * kCount);
    in.fill(group.rank(), 0);
    const Call gather = callOf(OpKind::kAllGather, in, out, kCount, group, 0, false);
    ASSERT_OK(run(group, gather));
    endsAtRead = group.rank() == 1;
    const Status status = run(group, gather);
    EXPECT_EQ(status.code(), Code::kPeerLost);
    EXPECT_CONTAINS(status, "rank 1 (");
    EXPECT(status.message().find("cannot be read") == std::string::npos);
  });
}

// ---- messages by single copy

namespace {

// Rank 0 sends a message to rank 1. Its elements depend on `number`.
Status passOn(Communicator& group, size_t count, uint64_t number = 0) {
  Elements data(false, count);
  const bool isSender = group.rank() == 0;
  if (isSender) data.fill(static_cast<int>(number), 0);
  const Message message{data.span(), 1 - group.rank(), number, DType::kInt32};
  const OpPtr op =
      isSender ? group.send(message, nullptr, true) : group.recv(message, nullptr, true);
  Status status = group.wait(op, Deadline::never());
  if (status.ok())
    data.expect([&](size_t i) { return element(static_cast<int>(number), i); }, "message");
  return status;
}

// Runs the body on two processes that are connected: before that, no message is offered for
// reading.
void runPair(SingleCopyUse use, const RankBody& body) {
  MeshOptions mesh;
  mesh.singleCopy = use;
  const auto connected = [&](Communicator& group) {
    ASSERT_OK(passOn(group, 100));
    body(group);
  };
  runProcesses(2, connected, mesh);
}

constexpr size_t kLarge[] = {30'000, 1'000'000};  // elements of one piece, and of several

}  // namespace

TEST(SingleCopy, messagesAreReadFromTheSender) {
  for (const auto use : {SingleCopyUse::kOff, SingleCopyUse::kOn}) {
    runPair(use, [&](Communicator& group) {
      uint64_t number = 1;
      for (const size_t count : {100, 16'385, 30'000, 1'000'000, 3'000'000}) {
        readsOfOthers = 0;
        ASSERT_OK(passOn(group, count, number++));
        const bool isRead = use == SingleCopyUse::kOn && count > 100 && group.rank() == 1;
        EXPECT_EQ(readsOfOthers > 0, isRead);
      }
    });
  }
}

// A process measures each size once, with real messages.
TEST(SingleCopy, messagesAreMeasured) {
  runPair(SingleCopyUse::kMeasured, [](Communicator& group) {
    for (const size_t count : kLarge) {
      const auto size = SingleCopy::caseOf(OpKind::kSend, 2, count * 4);
      const auto measured = [&] { return SingleCopy::process().measured(); };
      uint64_t number = 0;
      for (int round = 0; round <= SingleCopy::kRounds; ++round) {
        for (const bool isDirect : {false, true}) {
          EXPECT(!measured().contains(size));
          readsOfOthers = 0;
          ASSERT_OK(passOn(group, count, ++number));
          EXPECT_EQ(readsOfOthers > 0, isDirect && group.rank() == 1);
        }
      }
      EXPECT_EQ(measured().contains(size), group.rank() == 1);
      const SingleCopy::Measured result = measured()[size];
      EXPECT_EQ(result.stagedMicros > 0 && result.directMicros > 0, group.rank() == 1);
      for (int i = 0; i < 10; ++i) {
        readsOfOthers = 0;
        ASSERT_OK(passOn(group, count, ++number));
        EXPECT_EQ(readsOfOthers > 0, result.choice == Choice::kDirect);
      }
    }
  });
}

// A sender offers messages only now and then if its receiver has measured that staging is faster.
TEST(SingleCopy, messagesThatAreStagedAreNotOffered) {
  runPair(SingleCopyUse::kMeasured, [](Communicator& group) {
    constexpr size_t kCount = 30'000;
    SingleCopy::process().keep(SingleCopy::caseOf(OpKind::kSend, 2, kCount * 4),
                               {1, 1, Choice::kStaged});
    readsOfOwn = 0;
    for (uint64_t number = 1; number <= 20; ++number) {
      ASSERT_OK(passOn(group, kCount, number));
    }
    EXPECT_EQ(readsOfOwn > 0, group.rank() == 0);
    EXPECT(readsOfOwn < 20);
    EXPECT_EQ(readsOfOthers.load(), 0);
  });
}

// A receiver that cannot read the sender, or finds another process in its place, asks for the data.
// The sender then offers it no messages for a while.
TEST(SingleCopy, messagesOfAProcessThatCannotBeReadAreStaged) {
  for (const auto use : {SingleCopyUse::kOn, SingleCopyUse::kMeasured}) {
    for (std::atomic<bool>* obstacle : {&refusesReads, &readsStranger, &losesData}) {
      runPair(use, [&](Communicator& group) {
        *obstacle = true;
        for (uint64_t number = 1; number < 40; ++number) {
          ASSERT_OK(passOn(group, kLarge[number % 2], number));
        }
        if (obstacle != &refusesReads) EXPECT_EQ(readsOfOthers > 0, group.rank() == 1);
        EXPECT(SingleCopy::process().measured().empty());
      });
    }
  }
}

// The kernel cannot read the memory of a device, so its owner does not offer it.
TEST(SingleCopy, messagesInMemoryThatCannotBeReadAreStaged) {
  runPair(SingleCopyUse::kOn, [](Communicator& group) {
    refusesOwn = group.rank() == 0;
    ASSERT_OK(passOn(group, kLarge[1], 1));
    EXPECT_EQ(readsOfOthers.load(), 0);
    refusesOwn = false;
    ASSERT_OK(passOn(group, kLarge[1], 2));
    EXPECT_EQ(readsOfOthers > 0, group.rank() == 1);
  });
}

// If one of the two ranks ends meanwhile, the other one reports that and uses no data.
TEST(SingleCopy, aDeathWhileAMessageIsReadIsReported) {
  for (const size_t count : kLarge) {
    for (const int victim : {0, 1}) {
      runPair(SingleCopyUse::kOn, [&](Communicator& group) {
        if (victim == 0 && group.rank() == 0) signal(SIGUSR1, [](int) { _exit(0); });
        ASSERT_OK(passOn(group, count, 1));
        if (group.rank() == 1) (victim == 0 ? endsOwner : endsAtRead) = true;
        const Status status = passOn(group, count, 2);
        EXPECT_EQ(status.code(), Code::kPeerLost);
        EXPECT_CONTAINS(status, "rank " + std::to_string(victim) + " (");
      });
    }
  }
}
