// What a rank still does while a failure ends its operations: memory, locks and the log.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/log.h"
#include "calls.h"
#include "collectives/run/run.h"
#include "test.h"
#include "transport/link.h"
#include "world.h"

using namespace mycoll;
using namespace test;
using namespace std::chrono_literals;

namespace {

// Holds back what a rank receives, then lets one thread read a large message, slowly.
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
  class Receiver final : public LinkReceiver {
   public:
    Receiver(SlowReader& tap, std::unique_ptr<LinkReceiver> link)
        : tap_(tap), link_(std::move(link)) {}
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
    void lookAgain() override { link_->lookAgain(); }
    void onEvent(bool isClosed) override { link_->onEvent(isClosed); }
    void setAsleep(bool asleep) override { link_->setAsleep(asleep); }
    int fd() const override { return link_->fd(); }

   private:
    SlowReader& tap_;
    std::unique_ptr<LinkReceiver> link_;
  };
};

}  // namespace

// A failure drops a collective whose messages are being received at that moment, by another thread.
// Nobody else may get the memory that they are received into.
TEST(Endings, scratchMemoryIsKeptUntilItsReceivesHaveEnded) {
  auto store = std::make_shared<MemoryStore>();
  auto tap = std::make_shared<SlowReader>();
  std::atomic<bool> isShared{false};
  tap->beforeRead = [&](const char* into, size_t bytes) {
    std::this_thread::sleep_for(500ms);  // the other thread drops the collective meanwhile
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
    // A failure of a later collective leaves this one a second to end well.
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
