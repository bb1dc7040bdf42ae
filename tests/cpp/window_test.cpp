// Windows: puts into the memory of other ranks, and the signals that follow them.
#include "engine/window.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "calls.h"
#include "processes.h"
#include "test.h"
#include "transport/mesh.h"
#include "transport/shm/shared_heap.h"
#include "world.h"

using namespace mycoll;
using namespace test;
using namespace std::chrono_literals;

namespace {

constexpr size_t kMiB = 1024 * 1024;

uint32_t valueOf(int from, int to, size_t index) {
  return static_cast<uint32_t>(from * 1'000'003 + to * 10'007 + static_cast<int>(index) * 7);
}

// Memory of a rank, shared or not, and zeroed.
class Memory {
 public:
  Memory(bool isShared, size_t count) : count_(count) {
    if (!isShared) {
      own_.resize(count);
      return;
    }
    shared_ = static_cast<uint32_t*>(SharedHeap::process().allocate(count * 4));
    ASSERT(shared_ != nullptr);
    std::memset(shared_, 0, count * 4);
  }
  ~Memory() {
    if (shared_) EXPECT(SharedHeap::process().free(shared_));
  }
  Memory(const Memory&) = delete;

  uint32_t* data() { return shared_ ? shared_ : own_.data(); }
  Span span() { return {data(), count_ * 4}; }

 private:
  const size_t count_;
  uint32_t* shared_ = nullptr;
  std::vector<uint32_t> own_;
};

Status complete(Communicator& group, const OpPtr& op) { return group.wait(op, Deadline::never()); }

Status run(Communicator& group, Composite composite) {
  return complete(group,
                  group.submitComposite(OpKind::kWindow, std::move(composite), nullptr, true));
}

Status open(Communicator& group, const std::shared_ptr<Window>& window, Span memory) {
  Composite opening;
  MYCOLL_RETURN_IF_ERROR(window->open(memory, {}, nullptr, &opening));
  return run(group, std::move(opening));
}

Status close(Communicator& group, const std::shared_ptr<Window>& window) {
  Composite closing;
  MYCOLL_RETURN_IF_ERROR(window->close(&closing));
  return run(group, std::move(closing));
}

Status put(Communicator& group, const std::shared_ptr<Window>& window, Span data, int rank,
           uint64_t offset) {
  OpPtr op;
  MYCOLL_RETURN_IF_ERROR(window->put(data, rank, offset, nullptr, true, kGroupTimeout, &op));
  return complete(group, op);
}

Status signal(Communicator& group, const std::shared_ptr<Window>& window, int rank) {
  OpPtr op;
  MYCOLL_RETURN_IF_ERROR(window->signal(rank, true, kGroupTimeout, &op));
  return complete(group, op);
}

Status waitSignal(Communicator& group, const std::shared_ptr<Window>& window, int rank,
                  std::chrono::milliseconds timeout = kGroupTimeout) {
  OpPtr op;
  MYCOLL_RETURN_IF_ERROR(window->waitSignal(rank, true, timeout, &op));
  return complete(group, op);
}

bool isMapped(const std::shared_ptr<Window>& window, int rank) {
  std::shared_ptr<Pages> pages;
  EXPECT_OK(window->map(rank, &pages));
  return pages != nullptr;
}

std::shared_ptr<Window> makeWindow(Communicator& group) {
  return std::make_shared<Window>(group.shared_from_this());
}

struct Place {
  Links links;
  bool isShared;
};
const Place kPlaces[] = {{Links::kShm, true},  {Links::kShm, false},  {Links::kTcp, true},
                         {Links::kTcp, false}, {Links::kMixed, true}, {Links::kMixed, false}};

void inAllPlaces(int ranks, const std::function<void(Communicator&, const Place&)>& body) {
  for (const Place& place : kPlaces) {
    runWorld(ranks, place.links, [&](Communicator& group) { body(group, place); });
  }
}

void putToEveryRank(Communicator& group, const Place& place) {
  // The largest is sent in pieces if it is sent by messages.
  const size_t sizes[] = {1, 1000, (isShort() ? 1 : 3) * kMiB / 4 + 17};
  for (const size_t count : sizes) {
    const int self = group.rank(), ranks = group.ranks();
    Memory memory(place.isShared, count * 3);
    const auto window = makeWindow(group);
    ASSERT_OK(open(group, window, memory.span()));
    for (int rank = 0; rank < ranks; ++rank) {
      std::vector<uint32_t> data(count);
      for (size_t i = 0; i < count; ++i) data[i] = valueOf(self, rank, i);
      EXPECT_OK(put(group, window, {data.data(), count * 4}, rank,
                    static_cast<uint64_t>(self) * count * 4));
      EXPECT_OK(signal(group, window, rank));
    }
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_OK(waitSignal(group, window, rank));
      const uint32_t* received = memory.data() + static_cast<size_t>(rank) * count;
      size_t wrong = 0;
      for (size_t i = 0; i < count; ++i) wrong += received[i] != valueOf(rank, self, i);
      EXPECT_EQ(wrong, 0u);
    }
    const bool isOnHost = place.links == Links::kShm;
    if (place.links != Links::kMixed) {
      EXPECT_EQ(isMapped(window, (self + 1) % ranks), isOnHost && place.isShared);
    }
    EXPECT_OK(close(group, window));
    EXPECT_EQ(put(group, window, {}, 0, 0).code(), Code::kInvalidArgument);
  }
}

}  // namespace

TEST(Window, everyRankPutsToEveryRank) { inAllPlaces(3, putToEveryRank); }

TEST(Window, everyProcessPutsToEveryProcess) {
  for (const bool isShared : {true, false}) {
    runProcesses(3, [&](Communicator& group) { putToEveryRank(group, {Links::kShm, isShared}); });
  }
}

// A process maps the pages of another process's window, and nothing else of its memory. The mapping
// is that memory and no copy.
TEST(Window, aProcessMapsTheWindowAlone) {
  constexpr size_t kCount = 3000;
  runProcesses(2, [](Communicator& group) {
    Memory before(true, 50'000), memory(true, kCount), after(true, 50'000);
    const auto window = makeWindow(group);
    ASSERT_OK(open(group, window, memory.span()));
    std::shared_ptr<Pages> pages;
    ASSERT_OK(window->map(1 - group.rank(), &pages));
    ASSERT(pages != nullptr);
    const Mapping mapping = mappingAt(pages->data());
    EXPECT_EQ(mapping.access, "rw-s");
    EXPECT(mapping.bytes() >= kCount * 4 && mapping.bytes() < kCount * 4 + 2 * 4096);
    EXPECT_EQ(pages->bytes(), kCount * 4);
    pages->data()[0] = 5;
    EXPECT_OK(barrier(group));
    EXPECT(*memory.span().begin() == 5);
    const auto* word = before.data();
    EXPECT(std::count(word, word + 50'000, 0u) == 50'000);
    word = after.data();
    EXPECT(std::count(word, word + 50'000, 0u) == 50'000);
    pages.reset();
    EXPECT_OK(close(group, window));
    EXPECT_EQ(mappingAt(reinterpret_cast<char*>(mapping.begin)).bytes(), 0u);
  });
}

// A rank puts more bytes than any socket or ring holds while the target is in no call.
TEST(Window, aPutNeedsNoCallOfItsTarget) {
  const size_t count = (isShort() ? 12 : 48) * kMiB / 4;
  for (const Place& place : kPlaces) {
    std::latch isPut(2);
    runWorld(2, place.links, [&](Communicator& group) {
      Memory memory(place.isShared, count);
      const auto window = makeWindow(group);
      ASSERT_OK(open(group, window, memory.span()));
      if (group.rank() == 0) {
        std::vector<uint32_t> data(count, 7);
        EXPECT_OK(put(group, window, {data.data(), count * 4}, 1, 0));
        EXPECT_OK(signal(group, window, 1));
        isPut.arrive_and_wait();
      } else {
        isPut.arrive_and_wait();
        EXPECT_OK(waitSignal(group, window, 0));
        EXPECT(memory.data()[0] == 7 && memory.data()[count - 1] == 7);
      }
      EXPECT_OK(close(group, window));
    });
  }
}

// Signals do not overtake the pieces of a put, whatever else is sent over the connection.
TEST(Window, signalsArriveAfterTheirPuts) {
  const size_t count = (isShort() ? 4 : 8) * kMiB / 4;
  for (const Place& place : kPlaces) {
    runWorld(2, place.links, [&](Communicator& group) {
      Memory memory(place.isShared, count), other(place.isShared, 1);
      std::vector<uint32_t> message(count), data(count);
      const auto window = makeWindow(group), second = makeWindow(group);
      ASSERT_OK(open(group, window, memory.span()));
      ASSERT_OK(open(group, second, other.span()));
      for (uint32_t round = 1; round <= 5; ++round) {
        const Span span{message.data(), count * 4};
        std::vector<OpPtr> ops;
        if (group.rank() == 0) {
          data.assign(count, round);
          ops.push_back(group.send({span, 1, 3, DType::kUInt32}, nullptr, false));
          OpPtr op;
          EXPECT_OK(
              window->put({data.data(), count * 4}, 1, 0, nullptr, false, kGroupTimeout, &op));
          ops.push_back(op);
          // The other window's signal follows no put, so it may arrive first.
          EXPECT_OK(second->signal(1, false, kGroupTimeout, &op));
          ops.push_back(op);
          EXPECT_OK(window->signal(1, false, kGroupTimeout, &op));
          ops.push_back(op);
          EXPECT_OK(waitSignal(group, second, 1));  // rank 1 has checked the data
        } else {
          ops.push_back(group.recv({span, 0, 3, DType::kUInt32}, nullptr, false));
          EXPECT_OK(waitSignal(group, second, 0));
          EXPECT_OK(waitSignal(group, window, 0));
          size_t wrong = 0;
          for (size_t i = 0; i < count; ++i) wrong += memory.data()[i] != round;
          EXPECT_EQ(wrong, 0u);
          EXPECT_OK(signal(group, second, 0));
        }
        for (const OpPtr& op : ops) EXPECT_OK(complete(group, op));
      }
      EXPECT_OK(close(group, second));
      EXPECT_OK(close(group, window));
    });
  }
}

TEST(Window, signalsAreCounted) {
  inAllPlaces(2, [](Communicator& group, const Place& place) {
    constexpr int kSignals = 500;
    Memory memory(place.isShared, 1);
    const auto window = makeWindow(group);
    ASSERT_OK(open(group, window, memory.span()));
    const int other = 1 - group.rank();
    OpPtr early;
    ASSERT_OK(window->waitSignal(other, false, kGroupTimeout, &early));
    for (int i = 0; i < kSignals; ++i) EXPECT_OK(signal(group, window, other));
    EXPECT_OK(complete(group, early));
    for (int i = 1; i < kSignals; ++i) EXPECT_OK(waitSignal(group, window, other));
    OpPtr last;
    ASSERT_OK(window->waitSignal(other, false, kGroupTimeout, &last));
    EXPECT_OK(barrier(group));
    EXPECT(!last->done());  // no signal is left
    EXPECT_OK(barrier(group));
    EXPECT_OK(signal(group, window, other));
    EXPECT_OK(complete(group, last));
    EXPECT_OK(close(group, window));
  });
}

TEST(Window, boundsAreCheckedBeforeAnythingIsSent) {
  inAllPlaces(2, [](Communicator& group, const Place& place) {
    // Each rank has another size.
    const size_t count = 100 + 50 * static_cast<size_t>(group.rank());
    Memory memory(place.isShared, count);
    std::vector<uint32_t> data(200, 9);
    const auto window = makeWindow(group);
    EXPECT_EQ(put(group, window, {data.data(), 4}, 0, 0).code(), Code::kInvalidArgument);
    ASSERT_OK(open(group, window, memory.span()));
    const int other = 1 - group.rank();
    const uint64_t theirs = (100 + 50 * static_cast<uint64_t>(other)) * 4;
    const uint64_t wrong[][2] = {
        {theirs + 4, 0}, {4, theirs}, {0, theirs + 1}, {8, theirs - 4}, {4, ~uint64_t{0} - 3}};
    for (const auto& [bytes, offset] : wrong) {
      const Status status = put(group, window, {data.data(), bytes}, other, offset);
      EXPECT_EQ(status.code(), Code::kInvalidArgument);
      EXPECT_CONTAINS(status, "rank " + std::to_string(other));
    }
    for (const int rank : {-1, 2}) {
      EXPECT_EQ(put(group, window, {data.data(), 4}, rank, 0).code(), Code::kInvalidArgument);
      EXPECT_EQ(signal(group, window, rank).code(), Code::kInvalidArgument);
      EXPECT_EQ(waitSignal(group, window, rank).code(), Code::kInvalidArgument);
    }
    EXPECT_OK(put(group, window, {data.data(), theirs}, other, 0));
    EXPECT_OK(put(group, window, {data.data(), 4}, other, theirs - 4));
    EXPECT_OK(put(group, window, {}, other, theirs));
    EXPECT_OK(signal(group, window, other));
    EXPECT_OK(waitSignal(group, window, other));
    EXPECT(memory.data()[0] == 9 && memory.data()[count - 1] == 9);
    EXPECT_OK(close(group, window));
  });
}

// The receiver checks bounds, too: a frame that would write beyond the window fails the group and
// writes nothing.
TEST(Window, aFrameBeyondTheWindowIsRefused) {
  const uint64_t wrong[][3] = {// window, offset, bytes
                               {1, 64, 1},
                               {1, 0, 65},
                               {1, ~uint64_t{0}, 2},
                               {2, 0, 1},
                               {99, 0, 1}};
  for (const auto& [number, offset, bytes] : wrong) {
    for (const Links links : {Links::kShm, Links::kTcp}) {
      std::latch isOpen(2);  // otherwise the frame could fail the group before rank 1 has opened
      runWorld(2, links, [&](Communicator& group) {
        std::vector<char> memory(192, 'x'), data(256, 'y');
        const auto window = makeWindow(group);
        ASSERT_OK(open(group, window, {memory.data() + 64, 64}));
        isOpen.arrive_and_wait();
        if (group.rank() == 0) {
          Message message;
          message.data = {data.data(), bytes};
          message.rank = 1;
          message.tag = number;
          message.offset = offset;
          (void)complete(group, group.post(OpKind::kPut, message, nullptr, true));
        }
        const Status status = waitSignal(group, window, 1 - group.rank());
        EXPECT_EQ(status.code(), Code::kInternal);
        EXPECT_CONTAINS(status, "rank 0");
        EXPECT_CONTAINS(status, "no window");
        EXPECT_EQ(std::string(memory.begin(), memory.end()), std::string(192, 'x'));
      });
    }
  }
}

// A put to a window that its target has dropped writes nothing and is no failure.
TEST(Window, putsToADroppedWindowAreIgnored) {
  for (const Place& place : kPlaces) {
    std::latch isDropped(2);
    runWorld(2, place.links, [&](Communicator& group) {
      auto window = makeWindow(group), next = makeWindow(group);
      Memory kept(place.isShared, 4 * kMiB / 4);
      {
        Memory memory(place.isShared, 4 * kMiB / 4);
        ASSERT_OK(open(group, window, memory.span()));
        ASSERT_OK(open(group, next, kept.span()));
        if (group.rank() == 1) window.reset();
        isDropped.arrive_and_wait();
        if (group.rank() == 0) {
          std::vector<uint32_t> data(kMiB, 5);
          EXPECT_OK(put(group, window, {data.data(), 4 * kMiB}, 1, 0));
          EXPECT_OK(signal(group, window, 1));
          EXPECT_OK(put(group, next, {data.data(), 4 * kMiB}, 1, 0));
          EXPECT_OK(signal(group, next, 1));
          window.reset();
        }
      }
      // Rank 1 has freed its memory. New memory in its place is not overwritten.
      Memory after(place.isShared, 4 * kMiB / 4);
      if (group.rank() == 1) {
        EXPECT_OK(waitSignal(group, next, 0));
        EXPECT(kept.data()[0] == 5 && kept.data()[kMiB - 1] == 5);
        size_t wrong = 0;
        for (size_t i = 0; i < kMiB; ++i) wrong += after.data()[i] != 0;
        EXPECT_EQ(wrong, 0u);
      }
      EXPECT_OK(close(group, next));
    });
  }
}

// Memory whose window was only dropped is not reused, because others may still write to it.
TEST(Window, exposedMemoryIsNotUsedAgain) {
  SharedHeap& heap = SharedHeap::process();
  const size_t before = heap.usageForTest().regionBytes;
  void* const neighbour = heap.allocate(100);
  for (const size_t bytes : {size_t{1000}, 3 * kMiB, 100 * kMiB}) {
    void* const block = heap.allocate(bytes);
    const Span half{static_cast<char*>(block) + bytes / 2, bytes / 4};
    EXPECT(heap.expose(half));
    EXPECT(heap.expose(half));
    heap.conceal(half);
    std::memset(block, 1, bytes);
    const auto segment = heap.segmentOf(heap.find(half).region);
    const uint64_t offset = heap.find(half).offset;
    EXPECT(heap.free(block));
    void* const next = heap.allocate(bytes);
    EXPECT(next != block);
    if (bytes >= kMiB) EXPECT(segment->data()[offset] == 0);  // its pages have been returned
    EXPECT(heap.free(next));
  }
  // Memory that is no longer exposed is reused.
  void* const block = heap.allocate(1000);
  EXPECT(heap.expose({block, 1000}));
  heap.conceal({block, 1000});
  EXPECT(heap.free(block));
  EXPECT(heap.allocate(1000) == block);
  EXPECT(heap.free(block));
  EXPECT(heap.free(neighbour));
  EXPECT(heap.usageForTest().regionBytes <= std::max(before, SharedHeap::kKeptBytes));
  int other = 0;
  EXPECT(!heap.expose({&other, sizeof(other)}));
  EXPECT(!heap.expose({neighbour, 0}));
}

TEST(Window, memoryOfAWindowThatAllHaveClosedIsUsedAgain) {
  std::latch areMapped(2);
  runWorld(2, Links::kShm, [&](Communicator& group) {
    SharedHeap& heap = SharedHeap::process();
    const bool isFirst = group.rank() == 0;
    for (const bool staysMapped : {false, true}) {
      void* const block = heap.allocate(40 * kMiB);
      const auto window = makeWindow(group);
      ASSERT_OK(open(group, window, {block, 40 * kMiB}));
      std::shared_ptr<Pages> pages;
      if (staysMapped && isFirst) EXPECT_OK(window->map(1, &pages));
      EXPECT_OK(close(group, window));
      const uint64_t region = heap.find({block, 1}).region;
      EXPECT(heap.free(block));
      // The block has a region of its own, which is kept for the next block unless it is mapped.
      EXPECT_EQ(heap.segmentOf(region) == nullptr, staysMapped);
      if (pages) pages->data()[0] = 1;  // the mapping remains valid
    }
  });
}

// Windows are destroyed in any order, with pending waits, before the group or after it.
TEST(Window, endsInAnyOrder) {
  inAllPlaces(2, [](Communicator& group, const Place& place) {
    Memory memory(place.isShared, 1000);
    auto first = makeWindow(group), second = makeWindow(group);
    ASSERT_OK(open(group, first, memory.span()));
    ASSERT_OK(open(group, second, memory.span()));
    OpPtr waiting;
    ASSERT_OK(first->waitSignal(1 - group.rank(), false, kGroupTimeout, &waiting));
    first.reset();
    const Status ended = complete(group, waiting);
    EXPECT_EQ(ended.code(), Code::kAborted);
    EXPECT_CONTAINS(ended, "window #1");
    EXPECT_OK(signal(group, second, 1 - group.rank()));
    EXPECT_OK(waitSignal(group, second, 1 - group.rank()));
    group.close(Deadline::after(2000ms));
    EXPECT_EQ(put(group, second, memory.span(), 1 - group.rank(), 0).code(), Code::kAborted);
    EXPECT_EQ(waitSignal(group, second, 0).code(), Code::kAborted);
    EXPECT(!open(group, makeWindow(group), memory.span()).ok());
    second.reset();
  });
}

TEST(Window, aTimeoutNamesTheMissingRank) {
  for (const Place& place : kPlaces) {
    std::latch isOver(1);
    runWorld(2, place.links, [&](Communicator& group) {
      Memory memory(place.isShared, 10);
      const auto window = makeWindow(group);
      ASSERT_OK(open(group, window, memory.span()));
      if (group.rank() == 1) return isOver.wait();
      const Status status = waitSignal(group, window, 1, 300ms);
      isOver.count_down();
      EXPECT_EQ(status.code(), Code::kTimeout);
      EXPECT_CONTAINS(status, "wait_signal from rank 1");
      EXPECT_CONTAINS(status, "window #1");
    });
  }
}

TEST(Window, aRankThatHasLeftIsNamed) {
  for (const Place& place : kPlaces) {
    std::latch hasLeft(2);
    runWorld(2, place.links, [&](Communicator& group) {
      Memory memory(place.isShared, 10);
      const auto window = makeWindow(group);
      ASSERT_OK(open(group, window, memory.span()));
      if (group.rank() == 1) {
        group.close(Deadline::after(2000ms));
        hasLeft.arrive_and_wait();
        return;
      }
      hasLeft.arrive_and_wait();
      const Status waited = waitSignal(group, window, 1);
      EXPECT_EQ(waited.code(), Code::kPeerLost);
      const Status status = put(group, window, memory.span(), 1, 0);
      EXPECT_EQ(status.code(), Code::kPeerLost);
      EXPECT_CONTAINS(status, "rank 1");
    });
  }
}

// A group that fails releases its windows' mappings.
TEST(Window, aFailedGroupReleasesMappings) {
  runWorld(2, Links::kShm, [](Communicator& group) {
    Memory memory(true, 1000);
    const auto window = makeWindow(group);
    ASSERT_OK(open(group, window, memory.span()));
    std::shared_ptr<Pages> pages;
    ASSERT_OK(window->map(1 - group.rank(), &pages));
    ASSERT(pages != nullptr);
    EXPECT_EQ(pages.use_count(), 2);
    ASSERT_OK(barrier(group));
    if (group.rank() == 0) group.abort("enough");
    EXPECT(eventually([&] { return pages.use_count() == 1; }));
    pages->data()[0] = 1;  // a mapping remains valid while it is referenced
    EXPECT_EQ(put(group, window, memory.span(), 1 - group.rank(), 0).code(), Code::kAborted);
  });
}

// Windows of ranks on the same host are mapped, and those of the other host are not.
TEST(Window, spansHosts) {
  runHosts({0, 0, 1, 1}, [](Communicator& group) {
    const int self = group.rank();
    Memory memory(true, 4000);
    const auto window = makeWindow(group);
    ASSERT_OK(open(group, window, memory.span()));
    for (int rank = 0; rank < 4; ++rank) {
      if (rank != self) EXPECT_EQ(isMapped(window, rank), rank / 2 == self / 2);
      std::vector<uint32_t> data(1000, static_cast<uint32_t>(self + 1));
      EXPECT_OK(put(group, window, {data.data(), 4000}, rank, static_cast<uint64_t>(self) * 4000));
      EXPECT_OK(signal(group, window, rank));
    }
    for (int rank = 0; rank < 4; ++rank) {
      EXPECT_OK(waitSignal(group, window, rank));
      EXPECT_EQ(memory.data()[rank * 1000 + 999], static_cast<uint32_t>(rank + 1));
    }
    EXPECT_OK(close(group, window));
  });
}

// Opening a window does not match another collective.
TEST(Window, otherCollectivesDoNotMatch) {
  runWorld(2, Links::kShm, [](Communicator& group) {
    Memory memory(true, 10);
    const auto window = makeWindow(group);
    Status status;
    if (group.rank() == 0) {
      status = open(group, window, memory.span());
    } else {
      status = barrier(group);
    }
    EXPECT_EQ(status.code(), Code::kMismatch);
  });
}
