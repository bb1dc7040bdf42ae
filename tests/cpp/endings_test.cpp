// The memory, the locks and the log of a rank while a failure ends its operations.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/env.h"
#include "base/log.h"
#include "calls.h"
#include "collectives/run/run.h"
#include "engine/membership.h"
#include "engine/queue.h"
#include "passing_link.h"
#include "test.h"
#include "transport/link.h"
#include "world.h"

using namespace mycoll;
using namespace test;
using namespace std::chrono_literals;

namespace {

// Holds back what a rank receives, and then lets one thread read a large message slowly.
class SlowReader final : public LinkTap {
 public:
  enum class Mode { kOpen, kHeldBack, kOneReader, kOver };
  std::atomic<Mode> mode{Mode::kOpen};
  std::thread::id reader;
  // Called under the I/O lock when that thread is about to read into this memory.
  std::function<void(const char* into, size_t bytes)> beforeRead;

  std::unique_ptr<LinkSender> tap(std::unique_ptr<LinkSender> link) override { return link; }
  std::unique_ptr<LinkReceiver> tap(std::unique_ptr<LinkReceiver> link) override {
    return std::make_unique<Receiver>(*this, std::move(link));
  }

 private:
  class Receiver final : public PassingReceiver {
   public:
    Receiver(SlowReader& tap, std::unique_ptr<LinkReceiver> link)
        : PassingReceiver(std::move(link)), tap_(tap) {}
    ssize_t read(void* data, size_t bytes, bool streaming) override {
      const Mode mode = tap_.mode;
      if (mode == Mode::kHeldBack) return 0;
      if (mode == Mode::kOneReader && std::this_thread::get_id() != tap_.reader) return 0;
      if (mode == Mode::kOneReader && bytes > 100'000) {
        tap_.beforeRead(static_cast<const char*>(data), bytes);
        tap_.mode = Mode::kOver;
      }
      return link_->read(data, bytes, streaming);
    }
    bool maybeReadable() const override { return true; }

   private:
    SlowReader& tap_;
  };
};

}  // namespace

// A failure drops a collective while another thread receives its messages. The memory that they are
// received into may not be reused before that ends.
TEST(Endings, scratchMemoryIsKeptUntilItsReceivesHaveEnded) {
  auto store = std::make_shared<MemoryStore>();
  auto tap = std::make_shared<SlowReader>();
  std::atomic<bool> isShared{false};
  tap->beforeRead = [&](const char* into, size_t bytes) {
    std::this_thread::sleep_for(500ms);  // in which the other thread drops the collective
    std::vector<ScratchPool::Memory> taken;
    for (int i = 0; i < 4; ++i) {
      taken.push_back(ScratchPool::process().take(bytes));
      const char* memory = taken.back().data();
      if (into >= memory && into < memory + bytes) isShared = true;
    }
  };
  Threads(2, [&](int rank) {
    MeshOptions mesh;
    mesh.host = " host " + std::to_string(rank);
    if (rank == 0) mesh.tap = tap;
    std::shared_ptr<Engine> engine;
    auto group = makeRank(rank, 2, mesh, store, 20'000, &engine);
    std::vector<int32_t> data(128 * 1024, 1);
    Call c = call(OpKind::kAllReduce);
    c.in = c.out = {span(data)};
    ASSERT_OK(run(*group, c));
    if (rank == 1) {
      while (tap->mode == SlowReader::Mode::kOpen) std::this_thread::sleep_for(1ms);
      const OpPtr op = group->submit(c, nullptr, true);
      (void)group->wait(op, Deadline::after(3s));
      while (tap->mode != SlowReader::Mode::kOver) std::this_thread::sleep_for(1ms);
      return group->close(Deadline::after(500ms));
    }
    // If a later collective fails, this one has a second to complete.
    tap->mode = SlowReader::Mode::kHeldBack;
    group->membership().fail(Status(Code::kMismatch, "a later call differs"), false, 2);
    tap->reader = std::this_thread::get_id();
    const OpPtr op = group->submit(c, nullptr, true);
    std::atomic<bool> isOver{false};
    std::thread runner([&] {
      while (!isOver && !op->done()) group->advance();
    });
    std::this_thread::sleep_for(800ms);
    tap->mode = SlowReader::Mode::kOneReader;
    while (tap->mode == SlowReader::Mode::kOneReader) engine->mesh()->progress();
    (void)group->wait(op, Deadline::after(5s));
    isOver = true;
    runner.join();
    EXPECT(op->done() && !op->status().ok());
    group->close(Deadline::after(500ms));
  });
  EXPECT(!isShared);
}

namespace {

// For its lifetime, stderr is a full pipe that is not read.
class StuckStderr {
 public:
  StuckStderr() {
    ASSERT(pipe2(ends_, O_CLOEXEC) == 0);
    ASSERT(fcntl(ends_[1], F_SETFL, O_NONBLOCK) == 0);
    const char page[4096] = {};
    while (write(ends_[1], page, sizeof(page)) > 0) {
    }
    while (write(ends_[1], page, 1) > 0) {
    }
    ASSERT(fcntl(ends_[1], F_SETFL, 0) == 0);
    std::fflush(stderr);
    kept_ = dup(STDERR_FILENO);
    ASSERT(dup2(ends_[1], STDERR_FILENO) == STDERR_FILENO);
  }
  ~StuckStderr() {
    (void)dup2(kept_, STDERR_FILENO);
    for (const int fd : {kept_, ends_[0], ends_[1]}) close(fd);
  }
  // Returns what was written since the last call. The first call returns the bytes that filled the
  // pipe.
  std::string read() {
    ASSERT(fcntl(ends_[0], F_SETFL, O_NONBLOCK) == 0);
    std::string text;
    char page[4096];
    for (ssize_t got; (got = ::read(ends_[0], page, sizeof(page))) > 0;) {
      text.append(page, static_cast<size_t>(got));
    }
    return text;
  }

 private:
  int ends_[2];
  int kept_;
};

}  // namespace

// The log of a rank that fails is not read. Nevertheless the other ranks are notified of the
// failure and the rank continues. The line is in the log when it is read later.
TEST(Endings, aFullLogBlocksNoRank) {
  for (const Links links : {Links::kShm, Links::kTcp}) {
    setLogLevel(LogLevel::kError);  // logs failures after the process's first one, too
    StuckStderr stuck;
    runWorld(
        2, links,
        [&](Communicator& group) {
          ASSERT_OK(barrier(group));
          if (group.rank() == 0) {
            group.fail(Status(Code::kTimeout, "rank 0 has failed"));
            return;
          }
          const Status status = barrier(group);
          EXPECT_CONTAINS(status, "rank 0 has failed");
        },
        20'000);
    (void)stuck.read();
    flushLog();
    EXPECT_CONTAINS(stuck.read(), "rank 0 has failed");
    setLogLevel(Env::process().logLevel);
  }
}

// A call that differs ends all later ones on both ranks, even those of the same turn.
TEST(Endings, noCallSucceedsAfterOneThatDiffers) {
  for (int round = 0; round < 20; ++round) {
    runWorld(2, Links::kTcp, [&](Communicator& group) {
      ASSERT_OK(barrier(group));
      std::vector<float> in(2), out(1);
      Call scatter = call(OpKind::kScatter);
      scatter.root = group.rank();  // each rank sends, and waits for nothing
      scatter.in = {{&in[0], sizeof(float)}, {&in[1], sizeof(float)}};
      scatter.out = {{&out[0], sizeof(float)}};
      const Status first = run(group, scatter);
      const Status second = barrier(group);
      EXPECT_CONTAINS(second, "MISMATCH");
      if (!first.ok()) EXPECT_CONTAINS(first, "MISMATCH");
    });
  }
}

// Lines that do not fit into the log are kept up to a limit. The log reports how many were dropped.
TEST(Endings, droppedLinesAreCounted) {
  setLogLevel(LogLevel::kError);
  StuckStderr stuck;
  const std::string text(1000, 'x');
  for (int i = 0; i < 1000; ++i) MYCOLL_LOG_ERROR("%s", text.c_str());
  (void)stuck.read();
  std::string later;
  for (int i = 0; i < 100; ++i) {
    flushLog();
    later += stuck.read();
  }
  const size_t kept = later.size();
  EXPECT(kept > 100'000 && kept < 1'000'000);
  MYCOLL_LOG_ERROR("the end");
  EXPECT_CONTAINS(stuck.read(), "lines before this one were dropped");
  setLogLevel(Env::process().logLevel);
}

// A callback may use the group from any thread: no lock of the engine is held while it runs.
TEST(Endings, operationsEndWithoutTheRunLock) {
  std::promise<void> seen;
  runWorld(
      2, Links::kShm,
      [&seen](Communicator& group) {
        ASSERT_OK(barrier(group));
        std::vector<int32_t> data(1);
        if (group.rank() == 1) {
          std::this_thread::sleep_for(100ms);
          Call other = call(OpKind::kAllReduce);
          other.in = other.out = {span(data)};
          EXPECT(!run(group, other).ok());
          seen.get_future().wait();  // this rank's departure must not be noticed first
          return;
        }
        const OpPtr message = group.recv({span(data), 1, 3, DType::kInt32}, nullptr, false);
        const OpPtr first = group.submit(call(OpKind::kBarrier), nullptr, false);
        const OpPtr second = group.submit(call(OpKind::kBarrier), nullptr, false);
        message->onDone([&] {
          // It ends when a thread can run the queue.
          std::thread([&] {
            const Status status = group.wait(second, Deadline::after(5s));
            EXPECT_EQ(status.code(), Code::kMismatch);
            seen.set_value();
          }).join();
        });
        EXPECT(!group.wait(first, Deadline::never()).ok());
        (void)group.wait(message, Deadline::never());
      },
      20'000);
}

// A thread that is about to sleep checks the queue once more. If another thread inspects the queue
// at that moment, the sleeping thread is woken when the inspection ends.
TEST(Endings, theEndOfAnInspectionWakesAThreadThatCouldNotCheck) {
  std::atomic<int> round{0}, arrived{0};
  double least = 1e9;
  runWorld(2, Links::kShm, [&](Communicator& group) {
    constexpr int kRounds = 20;
    for (int i = 1; i <= kRounds; ++i) {
      ASSERT_OK(barrier(group));
      if (group.rank() == 1) {
        while (round < i) std::this_thread::sleep_for(100us);
        const OpPtr op = group.submit(call(OpKind::kBarrier), nullptr, true);
        arrived = i;
        ASSERT_OK(group.wait(op, Deadline::never()));
        continue;
      }
      const OpPtr op = group.submit(call(OpKind::kBarrier), nullptr, false);
      std::thread waiter;
      std::chrono::steady_clock::time_point ended;
      const bool isSeen = group.queue().inspectHead([&](CollectiveOp&, std::vector<int>) {
        round = i;
        waiter = std::thread([&] { EXPECT_OK(group.wait(op, Deadline::never())); });
        while (arrived < i) std::this_thread::sleep_for(100us);
        std::this_thread::sleep_for(15ms);  // the waiter falls asleep
        ended = std::chrono::steady_clock::now();
      });
      if (!isSeen) {
        round = i;
      } else {
        waiter.join();
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - ended;
        least = std::min(least, took.count());
      }
      ASSERT_OK(group.wait(op, Deadline::never()));
    }
  });
  EXPECT(least < 0.02);  // of 20 rounds; a sleep that is not ended takes 35 ms
}

namespace {

// Is ready whenever the queue looks at it after it has suspended a task.
class Always final : public Condition {
 public:
  bool ready() override { return std::exchange(isReady_, true); }

 private:
  bool isReady_ = false;
};

// Never has to wait.
Task workUntil(const std::atomic<bool>& isOver) {
  const Deadline latest = Deadline::after(10s);
  while (!isOver && !latest.expired()) {
    Always always;
    co_await always;
  }
  co_return Status();
}

}  // namespace

// An operation that never has to wait does not keep its thread from checking for signals and its
// deadline.
TEST(Endings, aWaitThatAlwaysAdvancesEnds) {
  std::atomic<bool> isSignalled{false}, isOver{false};
  std::shared_ptr<Engine> engine;
  ASSERT_OK(Engine::create(MeshOptions(), &engine));
  GroupOptions options;
  options.name = "test";
  options.interrupted = [&] { return isSignalled.load(); };
  std::shared_ptr<Communicator> group;
  ASSERT_OK(Communicator::create(options, std::make_shared<MemoryStore>(), engine, &group));
  std::this_thread::sleep_for(50ms);  // the engine's thread sleeps: this one runs the operation
  const OpPtr op = group->submitComposite(
      OpKind::kWindow, [&](CollectiveRunner&) { return workUntil(isOver); }, nullptr, true);
  EXPECT_EQ(group->wait(op, Deadline::after(100ms)).code(), Code::kTimeout);
  isSignalled = true;
  EXPECT_EQ(group->wait(op, Deadline::never()).code(), Code::kInterrupted);
  isSignalled = false;
  isOver = true;
  EXPECT_OK(group->wait(op, Deadline::never()));
}

// The engine's thread, which no group may keep busy, ends a collective of another group at its
// timeout.
TEST(Endings, aTimeoutEndsACallBesideOneThatAlwaysAdvances) {
  std::atomic<bool> isOver{false};
  runWorld(2, Links::kShm, [&](Communicator& group) {
    ASSERT_OK(run(group, call(OpKind::kBarrier)));
    if (group.rank() == 1) {
      while (!isOver) std::this_thread::sleep_for(1ms);
      return;
    }
    const auto other = Communicator::derive(group, " other", /*isExternal=*/false);
    const OpPtr late = group.submit(call(OpKind::kBarrier), nullptr, false, 300ms);
    const OpPtr busy = other->submitComposite(
        OpKind::kWindow, [&](CollectiveRunner&) { return workUntil(isOver); }, nullptr, false);
    while (!late->done() && !busy->done()) std::this_thread::sleep_for(1ms);
    EXPECT(!busy->done());
    isOver = true;
    EXPECT_EQ(group.wait(late, Deadline::never()).code(), Code::kTimeout);
    EXPECT_OK(other->wait(busy, Deadline::never()));
  });
}

// A child of fork() makes groups of its own, whatever lock another thread holds at that moment.
TEST(Endings, aChildTakesScratchMemory) {
  (void)ScratchPool::process().take(64);
  std::atomic<bool> isOver{false};
  std::thread user([&] {
    while (!isOver) (void)ScratchPool::process().take(64);
  });
  for (int i = 0; i < 100; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(5);
      (void)ScratchPool::process().take(64);
      _exit(0);
    }
    int status = -1;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    if (status != 0) break;
  }
  isOver = true;
  user.join();
}
