// Frames that are cancelled half way, that arrive before their group is made, and that are read
// when their sender is lost.
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "meshes.h"
#include "passing_link.h"
#include "resident.h"
#include "test.h"
#include "transport/frame.h"
#include "transport/link.h"
#include "transport/mailbox.h"
#include "transport/mesh.h"

using namespace mycoll;
using test::forBothLinks;
using test::kKeepsFreedMemory;
using test::Meshes;
using test::residentMiB;

namespace {

constexpr uint64_t kGroup = 42;
constexpr auto kMessages = MessageClass::kPointToPoint;

// Limits the bytes that are written to all links, and controls what is read from the first link.
class Gate final : public LinkTap {
 public:
  size_t budget = ~size_t{0};        // bytes that may still be written
  size_t atOnce = ~size_t{0};        // the most bytes of one write
  bool isShut = false;               // nothing is read from the first link before its end
  std::function<void()> beforeRead;  // called once, before the first link is read

  std::unique_ptr<LinkSender> tap(std::unique_ptr<LinkSender> link) override {
    return std::make_unique<Sender>(*this, std::move(link));
  }
  std::unique_ptr<LinkReceiver> tap(std::unique_ptr<LinkReceiver> link) override {
    if (std::exchange(hasFirst_, true)) return link;
    return std::make_unique<Receiver>(*this, std::move(link));
  }

 private:
  class Sender final : public test::PassingSender {
   public:
    Sender(Gate& gate, std::unique_ptr<LinkSender> link)
        : PassingSender(std::move(link)), gate_(gate) {}
    ssize_t write(const Span* parts, int) override {
      const size_t bytes = std::min({parts[0].bytes, gate_.budget, gate_.atOnce});
      if (bytes == 0) return 0;
      const Span part{parts[0].data, bytes};
      const ssize_t wrote = link_->write(&part, 1);
      if (wrote > 0) gate_.budget -= static_cast<size_t>(wrote);
      return wrote;
    }

   private:
    Gate& gate_;
  };

  class Receiver final : public test::PassingReceiver {
   public:
    Receiver(Gate& gate, std::unique_ptr<LinkReceiver> link)
        : PassingReceiver(std::move(link)), gate_(gate) {}
    ssize_t read(void* data, size_t bytes, bool streaming) override {
      if (gate_.beforeRead) std::exchange(gate_.beforeRead, nullptr)();
      return link_->read(data, bytes, streaming);
    }
    bool maybeReadable() const override { return !gate_.isShut && link_->maybeReadable(); }
    void onEvent(bool isClosed) override {
      gate_.isShut &= !isClosed;
      link_->onEvent(isClosed);
    }

   private:
    Gate& gate_;
  };

  bool hasFirst_ = false;
};

}  // namespace

// Half of the message's header was sent. The rest must follow, though there is no payload.
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

// A large message is cancelled before its receiver asks for it.
TEST(Frames, aCancelledMessageIsNotAskedFor) {
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

// The part of a put that arrives after its window was closed is read and dropped.
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

// A put is cancelled half way. The frame that was begun is completed, and no other follows.
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

// A message without bytes waits for its receiver, and its frame is then written in parts.
TEST(Frames, anEmptyPieceIsWrittenInParts) {
  forBothLinks([](TransportChoice transport) {
    const auto gate = std::make_shared<Gate>();
    Meshes world(2, transport, {{0, gate}});
    for (int rank : {0, 1}) world.join(rank, kGroup, {0, 1});
    // More than the receiver buffers, so that everything that follows waits.
    std::vector<char> filler(64 * 1024);
    std::vector<Transfer> unreceived(kMaxBufferedBytes / filler.size() + 8);
    for (Transfer& each : unreceived) {
      world.at(0, kGroup).mailbox->send(each, 1, kMessages, 1, Meshes::word(filler.size()),
                                        {filler.data(), filler.size()});
      world.turn(20);
    }
    world.turn();
    EXPECT(!unreceived.back().isDone());
    gate->atOnce = 10;
    Transfer sending, receiving;
    world.at(0, kGroup).mailbox->send(sending, 1, kMessages, 5, Meshes::word(0), {});
    world.at(1, kGroup).mailbox->receive(receiving, 0, kMessages, 5, Meshes::word(0), {});
    EXPECT(world.turnUntil([&] { return sending.isDone() && receiving.isDone(); }));
    EXPECT_OK(receiving.status());
    EXPECT_OK(world.at(1, kGroup).listener.failure());
  });
}

// The last frame of a rank that is lost makes the group fail. Rank 0 notifies rank 2, whose own
// connection is accepted at that moment.
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
    // Rank 2 has sent its hello, and rank 0 has answered it.
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

// Messages for a group that their receiver has not joined yet are kept up to a limit. Then their
// senders wait. No message is lost.
TEST(Frames, messagesBeforeTheirGroupAreBounded) {
  forBothLinks([](TransportChoice transport) {
    struct Kind {
      size_t messages, bytes;
      bool hasRoom = false;
    };
    for (const Kind kind : {Kind{100, 4, true}, Kind{100, 60'000, true}, Kind{200'000, 0},
                            Kind{2'000, 60'000}, Kind{40, 3'000'000}}) {
      if (kKeepsFreedMemory && kind.messages > 10'000) continue;  // takes long under a sanitizer
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
      EXPECT_EQ(sending.back().isDone(), kind.hasRoom);
      if (!kKeepsFreedMemory) EXPECT(residentMiB() <= before + 40);
      world.join(1, kGroup + 1, {0, 1});
      EXPECT_OK(world.at(1, kGroup + 1).listener.failure());
      std::vector<char> got(kind.bytes);
      size_t received = 0;
      for (; received < kind.messages; ++received) {
        Transfer receiving;
        world.at(1, kGroup + 1)
            .mailbox->receive(receiving, 0, kMessages, 5, Meshes::word(kind.bytes),
                              {got.data(), got.size()});
        if (!world.turnUntil([&] { return receiving.isDone(); }) || !receiving.status().ok()) break;
      }
      EXPECT_EQ(received, kind.messages);
      EXPECT(got == data);
    }
  });
}

// A frame that is larger than the limit drops no other frame.
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

// The receiver is in the group and sends nothing in it. Messages that wait at their sender are sent
// when it receives.
TEST(Frames, aReceiveReleasesAWaitingSender) {
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
  // In reverse order: the messages that have arrived are received last.
  std::vector<char> got(kBytes);
  for (size_t i = kCount; i-- > 0;) {
    Transfer receiving;
    world.at(1, kGroup).mailbox->receive(receiving, 0, kMessages, i, Meshes::word(kBytes),
                                         {got.data(), kBytes});
    ASSERT(world.turnUntil([&] { return receiving.isDone(); }));
    EXPECT_OK(receiving.status());
  }
}

// Ranks that wait for a rank that joins the group late notify it again and again.
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

// The sender of a message that arrives before its group is made is checked when the group is made.
TEST(Frames, anEarlyMessageInAnotherRanksNameIsRefused) {
  forBothLinks([](TransportChoice transport) {
    Meshes world(3, transport);
    for (int rank : {0, 1, 2}) world.join(rank, kGroup, {0, 1, 2});
    ASSERT(world.talk(2, 1, kGroup, 2, 1));
    world.join(2, kGroup + 1, {2, 1});  // the group's real ranks are 0 and 1
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
    EXPECT_CONTAINS(listener.failure(), "in the name of another rank");
    EXPECT(!receiving.isDone());
    EXPECT_EQ(got, 0);
  });
}
