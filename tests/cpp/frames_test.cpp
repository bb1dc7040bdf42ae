// Frames at their edges: cancelled half way, and read when their sender is lost.
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "meshes.h"
#include "resident.h"
#include "test.h"
#include "transport/frame.h"
#include "transport/link.h"
#include "transport/mailbox.h"
#include "transport/mesh.h"

using namespace mycoll;
using test::kKeepsFreedMemory;
using test::Meshes;
using test::residentMiB;

namespace {

constexpr uint64_t kGroup = 42;
constexpr auto kMessages = MessageClass::kPointToPoint;

// Lets so many bytes of all links out, so many at a time; and looks on before anything is read from
// the first link that came in.
class Gate final : public LinkTap {
 public:
  size_t budget = ~size_t{0};
  size_t atOnce = ~size_t{0};
  bool isShut = false;  // nothing comes in on the first link before it ends
  std::function<void()> beforeRead;

  std::unique_ptr<LinkSender> tap(std::unique_ptr<LinkSender> link) override {
    return std::make_unique<Sender>(*this, std::move(link));
  }
  std::unique_ptr<LinkReceiver> tap(std::unique_ptr<LinkReceiver> link) override {
    if (std::exchange(hasFirst_, true)) return link;
    return std::make_unique<Receiver>(*this, std::move(link));
  }

 private:
  class Sender final : public LinkSender {
   public:
    Sender(Gate& gate, std::unique_ptr<LinkSender> link) : gate_(gate), link_(std::move(link)) {}
    ssize_t write(const Span* parts, int) override {
      const size_t bytes = std::min({parts[0].bytes, gate_.budget, gate_.atOnce});
      if (bytes == 0) return 0;
      const Span part{parts[0].data, bytes};
      const ssize_t wrote = link_->write(&part, 1);
      if (wrote > 0) gate_.budget -= static_cast<size_t>(wrote);
      return wrote;
    }
    void setAsleep(bool asleep) override { link_->setAsleep(asleep); }
    int fd() const override { return link_->fd(); }
    bool hasArrived() const override { return link_->hasArrived(); }

   private:
    Gate& gate_;
    std::unique_ptr<LinkSender> link_;
  };

  class Receiver final : public LinkReceiver {
   public:
    Receiver(Gate& gate, std::unique_ptr<LinkReceiver> link)
        : gate_(gate), link_(std::move(link)) {}
    ssize_t read(void* data, size_t bytes, bool streaming) override {
      if (gate_.beforeRead) std::exchange(gate_.beforeRead, nullptr)();
      return link_->read(data, bytes, streaming);
    }
    bool maybeReadable() const override { return !gate_.isShut && link_->maybeReadable(); }
    void onEvent(bool isClosed) override {
      gate_.isShut &= !isClosed;
      link_->onEvent(isClosed);
    }
    void lookAgain() override { link_->lookAgain(); }
    void setAsleep(bool asleep) override { link_->setAsleep(asleep); }
    int fd() const override { return link_->fd(); }

   private:
    Gate& gate_;
    std::unique_ptr<LinkReceiver> link_;
  };

  bool hasFirst_ = false;
};

void forBothLinks(const std::function<void(TransportChoice)>& body) {
  body(TransportChoice::kAuto);
  body(TransportChoice::kTcp);
}

}  // namespace

// Half of its header has left: the rest has to follow, though there is no payload.
TEST(Frames, anEmptyMessageIsCancelledHalfWay) {
  forBothLinks([](TransportChoice transport) {
    const auto gate = std::make_shared<Gate>();
    Meshes world(2, transport, {{0, gate}});
    for (int rank : {0, 1}) world.join(rank, kGroup, {0, 1});
    ASSERT(world.talk(0, 1, kGroup, 0, 1));
    gate->budget = 40;
    {
      Transfer cancelled;
      world.at(0, kGroup).mailbox->send(cancelled, 1, kMessages, 5, Meshes::word(0), {});
      world.turn(100);
      EXPECT_EQ(gate->budget, 0);
      EXPECT(!cancelled.isDone());
    }
    gate->budget = ~size_t{0};
    EXPECT(world.talk(0, 1, kGroup, 0, 1));
    EXPECT_OK(world.at(1, kGroup).listener.failure());
  });
}

// A large message waits for its receiver, who has not been asked yet.
TEST(Frames, aMessageThatIsTakenBackIsNotAskedFor) {
  Meshes world(2, TransportChoice::kTcp);
  for (int process : {0, 1}) world.join(process, 1, {0, 1});
  std::vector<char> large(1 << 20);
  {
    Transfer sending;
    world.at(0, 1).mailbox->send(sending, 1, MessageClass::kPointToPoint, 77,
                                 Meshes::word(large.size()), {large.data(), large.size()});
  }
  EXPECT(world.talk(0, 1, 1, 0, 1));
  EXPECT_OK(world.at(1, 1).listener.failure());
}

// What of a put has not come when its window closes goes nowhere; the frame ends all the same.
TEST(Frames, aWindowClosesInTheMiddleOfAPut) {
  forBothLinks([](TransportChoice transport) {
    const auto gate = std::make_shared<Gate>();
    Meshes world(2, transport, {{0, gate}});
    for (int rank : {0, 1}) world.join(rank, kGroup, {0, 1});
    ASSERT(world.talk(0, 1, kGroup, 0, 1));
    std::vector<char> data(1000, 'y');
    auto memory = std::make_unique<std::vector<char>>(1000, 'x');
    Mailbox& target = *world.at(1, kGroup).mailbox;
    target.windows().open(1, {memory->data(), 1000});
    gate->budget = sizeof(FrameHeader) + 400;
    Transfer putting;
    world.at(0, kGroup).mailbox->windows().put(putting, 1, 1, 0, Meshes::word(1000),
                                               {data.data(), 1000});
    EXPECT(world.turnUntil([&] { return gate->budget == 0 && (*memory)[399] == 'y'; }));
    EXPECT((*memory)[400] == 'x');
    target.windows().close(1, Status(Code::kAborted, "closed"));
    memory.reset();
    gate->budget = ~size_t{0};
    EXPECT(world.turnUntil([&] { return putting.isDone(); }));
    EXPECT_OK(putting.status());
    EXPECT(world.talk(0, 1, kGroup, 0, 1));
    EXPECT_OK(world.at(1, kGroup).listener.failure());
  });
}

// A put that is taken back half way: what has left ends as it was, and nothing follows.
TEST(Frames, aPutIsCancelledHalfWay) {
  forBothLinks([](TransportChoice transport) {
    const auto gate = std::make_shared<Gate>();
    Meshes world(2, transport, {{0, gate}});
    for (int rank : {0, 1}) world.join(rank, kGroup, {0, 1});
    ASSERT(world.talk(0, 1, kGroup, 0, 1));
    constexpr size_t kBytes = 3 * 1024 * 1024;
    std::vector<char> memory(kBytes, 'x');
    world.at(1, kGroup).mailbox->windows().open(1, {memory.data(), kBytes});
    gate->budget = sizeof(FrameHeader) + 400;
    {
      std::vector<char> data(kBytes, 'y');
      Transfer putting;
      world.at(0, kGroup).mailbox->windows().put(putting, 1, 1, 0, Meshes::word(kBytes),
                                                 {data.data(), kBytes});
      EXPECT(world.turnUntil([&] { return gate->budget == 0; }));
    }
    gate->budget = ~size_t{0};
    EXPECT(world.talk(0, 1, kGroup, 0, 1));
    EXPECT(memory[401] == 'y');
    EXPECT(memory[kBytes - 1] == 'x');
    EXPECT_OK(world.at(1, kGroup).listener.failure());
  });
}

// A message that had to wait for its receiver, has no bytes, and leaves in parts.
TEST(Frames, anEmptyPieceLeavesInParts) {
  forBothLinks([](TransportChoice transport) {
    const auto gate = std::make_shared<Gate>();
    Meshes world(2, transport, {{0, gate}});
    for (int rank : {0, 1}) world.join(rank, kGroup, {0, 1});
    // More than is kept, so that all that follows waits.
    std::vector<char> filler(64 * 1024);
    std::vector<Transfer> unheard(kMaxBufferedBytes / filler.size() + 8);
    for (Transfer& each : unheard) {
      world.at(0, kGroup).mailbox->send(each, 1, kMessages, 1, Meshes::word(filler.size()),
                                        {filler.data(), filler.size()});
      world.turn(20);
    }
    world.turn();
    EXPECT(!unheard.back().isDone());
    gate->atOnce = 10;
    Transfer sending, receiving;
    world.at(0, kGroup).mailbox->send(sending, 1, kMessages, 5, Meshes::word(0), {});
    world.at(1, kGroup).mailbox->receive(receiving, 0, kMessages, 5, Meshes::word(0), {});
    EXPECT(world.turnUntil([&] { return sending.isDone() && receiving.isDone(); }));
    EXPECT_OK(receiving.status());
    EXPECT_OK(world.at(1, kGroup).listener.failure());
  });
}

// The last words of a rank that is lost make its group fail here, which is told to a rank whose own
// connection comes in at that very moment.
TEST(Frames, linksAreAddedWhileALostOneIsRead) {
  forBothLinks([](TransportChoice transport) {
    const auto gate = std::make_shared<Gate>();
    Meshes world(4, transport, {{0, gate}});
    for (int rank : {0, 1, 2, 3}) world.join(rank, kGroup, {0, 1, 2, 3});
    ASSERT(world.talk(1, 0, kGroup, 1, 0));
    ASSERT(world.talk(3, 0, kGroup, 3, 0));
    ASSERT(world.talk(0, 1, kGroup, 0, 1));
    gate->isShut = true;
    char data[8] = {};
    Transfer expected, differs, coming;
    world.at(0, kGroup).mailbox->receive(expected, 1, kMessages, 5, Meshes::word(8), {data, 8});
    world.at(1, kGroup).mailbox->send(differs, 0, kMessages, 5, Meshes::word(4), {data, 4});
    world.turn(20);
    // Rank 2 has said hello, and has been answered.
    world.at(2, kGroup).mailbox->send(coming, 0, kMessages, 6, Meshes::word(4), {data, 4});
    for (int i = 0; i < 3000; ++i) world.all[0]->progress();
    gate->beforeRead = [&] {
      for (int i = 0; i < 100; ++i) world.all[2]->progress();
    };
    world.end(1);
    EXPECT(world.turnUntil([&] { return expected.isDone(); }));
    EXPECT(world.at(0, kGroup).listener.failure().code() == Code::kMismatch);
    EXPECT(world.turnUntil([&] { return !world.at(2, kGroup).listener.failure().ok(); }));
    EXPECT(world.at(2, kGroup).listener.failure().code() == Code::kMismatch);
  });
}

// What comes for a group that is not made yet is kept, but only so much of it: then its senders
// wait. Nothing is lost.
TEST(Frames, whatComesBeforeItsGroupIsBounded) {
  if (kKeepsFreedMemory) SKIP("memory cannot be measured under this sanitizer");
  forBothLinks([](TransportChoice transport) {
    struct Kind {
      size_t messages, bytes;
    };
    for (const Kind kind : {Kind{200'000, 0}, Kind{2'000, 60'000}, Kind{40, 3'000'000}}) {
      Meshes world(2, transport);
      for (int rank : {0, 1}) world.join(rank, kGroup, {0, 1});
      ASSERT(world.talk(0, 1, kGroup, 0, 1));
      world.join(0, kGroup + 1, {0, 1});
      std::vector<char> data(kind.bytes, 'd');
      std::vector<Transfer> sending(kind.messages);
      const size_t before = residentMiB();
      for (Transfer& each : sending) {
        world.at(0, kGroup + 1)
            .mailbox->send(each, 1, kMessages, 5, Meshes::word(kind.bytes),
                           {data.data(), data.size()});
        world.turn(kind.messages > 10'000 ? 0 : 1);
      }
      world.turn(1000);
      EXPECT(!sending.back().isDone());
      EXPECT(residentMiB() <= before + 40);
      world.join(1, kGroup + 1, {0, 1});
      EXPECT_OK(world.at(1, kGroup + 1).listener.failure());
      std::vector<char> got(kind.bytes);
      size_t came = 0;
      for (; came < kind.messages; ++came) {
        Transfer receiving;
        world.at(1, kGroup + 1)
            .mailbox->receive(receiving, 0, kMessages, 5, Meshes::word(kind.bytes),
                              {got.data(), got.size()});
        if (!world.turnUntil([&] { return receiving.isDone(); }) || !receiving.status().ok()) break;
      }
      EXPECT_EQ(came, kind.messages);
      EXPECT(got == data);
    }
  });
}

// There is nothing to drop in its favour.
TEST(Frames, aFrameThatIsTooLargeIsNotKept) {
  IoMutex mutex;
  const IoLock lock(mutex);
  GroupTable table;
  EXPECT(table.makeRoom(kGroup + 1, 0, 10));
  EXPECT(!table.makeRoom(kGroup, 0, kMaxInvitationBytes));
  bool isComplete = true;
  (void)table.takeEarly(kGroup, 0, &isComplete);
  EXPECT(!isComplete);
}

// A receiver that has made the group, and has nothing to send in it.
TEST(Frames, aSenderGoesOnWhenItsReceiverIsThere) {
  Meshes world(2, TransportChoice::kAuto);
  for (int rank : {0, 1}) world.join(rank, kGroup, {0, 1});
  constexpr size_t kBytes = 60'000, kCount = 1'000;
  std::vector<char> data(kBytes, 'd');
  std::vector<Transfer> sending(kCount);
  for (size_t i = 0; i < kCount; ++i) {
    world.at(0, kGroup).mailbox->send(sending[i], 1, kMessages, i, Meshes::word(kBytes),
                                      {data.data(), kBytes});
    world.turn(1);
  }
  // In reverse: the first ones, which have come, are asked for last.
  std::vector<char> got(kBytes);
  for (size_t i = kCount; i-- > 0;) {
    Transfer receiving;
    world.at(1, kGroup).mailbox->receive(receiving, 0, kMessages, i, Meshes::word(kBytes),
                                         {got.data(), kBytes});
    ASSERT(world.turnUntil([&] { return receiving.isDone(); }));
    EXPECT_OK(receiving.status());
  }
}

// Ranks that wait for one that is late with the group repeat that they do.
TEST(Frames, repeatedNotificationsReplaceEachOther) {
  Meshes world(2, TransportChoice::kAuto);
  for (int rank : {0, 1}) world.join(rank, kGroup, {0, 1});
  ASSERT(world.talk(0, 1, kGroup, 0, 1));
  Mailbox& mailbox = *world.join(0, kGroup + 1, {0, 1}).mailbox;
  std::vector<char> once(100);
  Transfer message;
  mailbox.send(message, 1, kMessages, 5, Meshes::word(100), {once.data(), 100});
  for (int i = 0; i < 100'000; ++i) {
    mailbox.notify(1, i % 2 ? FrameKind::kArrived : FrameKind::kQuestion, std::string(1000, 'a'),
                   static_cast<uint64_t>(i % 3));
    world.turn(1);
  }
  world.join(1, kGroup + 1, {0, 1});
  EXPECT_OK(world.at(1, kGroup + 1).listener.failure());
  std::vector<char> got(100);
  Transfer receiving;
  world.at(1, kGroup + 1)
      .mailbox->receive(receiving, 0, kMessages, 5, Meshes::word(100), {got.data(), 100});
  EXPECT(world.turnUntil([&] { return receiving.isDone(); }));
}

// What comes before its group is made is held to the same as what comes later.
TEST(Frames, anEarlyMessageCarriesItsSendersOwnName) {
  forBothLinks([](TransportChoice transport) {
    Meshes world(3, transport);
    for (int rank : {0, 1, 2}) world.join(rank, kGroup, {0, 1, 2});
    ASSERT(world.talk(2, 1, kGroup, 2, 1));
    world.join(2, kGroup + 1, {2, 1});  // in truth 0 and 1
    int value = 7, got = 0;
    Transfer sending, receiving;
    world.at(2, kGroup + 1).mailbox->send(sending, 1, kMessages, 5, Meshes::word(4), {&value, 4});
    ASSERT(world.turnUntil([&] { return sending.isDone(); }));
    world.turn();
    world.join(1, kGroup + 1, {0, 1});
    world.at(1, kGroup + 1)
        .mailbox->receive(receiving, 0, kMessages, 5, Meshes::word(4), {&got, 4});
    const test::Listener& listener = world.at(1, kGroup).listener;
    EXPECT(world.turnUntil([&] { return !listener.failure().ok(); }, 3000));
    EXPECT(listener.failure().message().find("in the name of another rank") != std::string::npos);
    EXPECT(!receiving.isDone());
    EXPECT_EQ(got, 0);
  });
}
