// Groups that one side has left, or has not made yet, and what that does to the others.
#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "meshes.h"
#include "resident.h"
#include "test.h"
#include "transport/mailbox.h"
#include "transport/mesh.h"
#include "world.h"

using namespace mycoll;
using test::Meshes;

namespace {

constexpr auto kMessages = MessageClass::kPointToPoint;

void forBothLinks(const std::function<void(TransportChoice)>& body) {
  body(TransportChoice::kAuto);
  body(TransportChoice::kTcp);
}

// A message of 4 bytes under way.
struct Word {
  Word(Meshes& world, int from, uint64_t context, int rank) {
    world.at(from, context)
        .mailbox->send(transfer, rank, kMessages, 77, Meshes::word(4), {&value, 4});
  }
  int value = 7;
  Transfer transfer;
};

}  // namespace

// The first word between two processes is for a group that one of them makes much later.
TEST(Leaving, anOlderGroupVouchesForANewOne) {
  forBothLinks([](TransportChoice transport) {
    Meshes world(2, transport);
    for (int process : {0, 1}) world.join(process, 1, {0, 1});
    world.join(0, 2, {0, 1});
    Word word(world, 0, 2, 1);
    EXPECT(world.turnUntil([&] { return word.transfer.isDone(); }, 2000));
    world.join(1, 2, {0, 1});
    int got = 0;
    Transfer receiving;
    world.at(1, 2).mailbox->receive(receiving, 0, kMessages, 77, Meshes::word(4), {&got, 4});
    EXPECT(world.turnUntil([&] { return receiving.isDone(); }));
    EXPECT_EQ(got, word.value);
  });
}

// ... or that one of them has left, as no link told the other. It learns of it, and no more.
TEST(Leaving, aGroupThatWasLeftVouchesForNothing) {
  forBothLinks([](TransportChoice transport) {
    Meshes world(2, transport);
    for (uint64_t context : {1, 2}) {
      for (int process : {0, 1}) world.join(process, context, {0, 1});
    }
    world.leave(1, 1);
    EXPECT(world.talk(0, 1, 2, 0, 1));
    EXPECT_EQ(world.at(0, 1).listener.gone().size(), 1);
    EXPECT_OK(world.at(0, 1).listener.failure());
    EXPECT_OK(world.at(0, 2).listener.failure());
  });
}

// The group that hears of a departure sends, which lets the peer's own connection in: the attempt
// that had the news is over at that moment.
TEST(Leaving, aDepartureMayEndTheAttemptThatHeardOfIt) {
  Meshes(1, TransportChoice::kTcp).join(0, 1, {0});  // opens what the process keeps
  const int before = test::openDescriptors();
  {
    Meshes world(3, TransportChoice::kTcp);
    for (int process : {0, 1, 2}) world.join(process, 1, {0, 1, 2});
    for (int process : {0, 1}) world.join(process, 2, {0, 1});
    world.leave(1, 1);
    bool hasCrossed = false;
    test::Listener& listener = world.at(0, 1).listener;
    listener.beforeDeparture = [&]() NO_THREAD_SAFETY_ANALYSIS {
      if (std::exchange(hasCrossed, true)) return;
      world.all[1]->progress();
      world.at(0, 1).mailbox->sendControl(2, FrameKind::kProbe, "");
    };
    int values[2] = {7, 8}, got[2] = {};
    Transfer sending[2], receiving[2];
    for (int rank : {0, 1}) {
      Mailbox& mailbox = *world.at(rank, 2).mailbox;
      mailbox.receive(receiving[rank], 1 - rank, kMessages, 7, Meshes::word(4), {&got[rank], 4});
      mailbox.send(sending[rank], 1 - rank, kMessages, 7, Meshes::word(4), {&values[rank], 4});
      for (int i = 0; i < 20; ++i)
        world.all[1]->progress();  // answers the first, dials with its own
    }
    EXPECT(world.turnUntil([&] { return receiving[0].isDone() && receiving[1].isDone(); }));
    EXPECT(got[0] == 8 && got[1] == 7);
    EXPECT(hasCrossed);
  }
  EXPECT_EQ(test::openDescriptors(), before);  // no attempt goes on without its owner
}

TEST(Leaving, aPeerWithoutACommonGroupIsNotLost) {
  forBothLinks([](TransportChoice transport) {
    Meshes world(2, transport);
    for (int process : {0, 1}) world.join(process, 1, {0, 1});
    world.leave(1, 1);
    Word word(world, 0, 1, 1);
    EXPECT(world.turnUntil([&] { return word.transfer.isDone(); }, 3000));
    EXPECT(word.transfer.status().message().find("has left the group") != std::string::npos);
    EXPECT(world.turnUntil([&] { return !world.all[0]->hasPending(); }, 3000));
    EXPECT_OK(world.at(0, 1).listener.failure());
    EXPECT(!world.all[0]->hasLost(world.addresses[1]));
  });
}

// Also what belongs to a collective ends with the name of who is gone.
TEST(Leaving, whatIsLeftToSendNamesWhoHasLeft) {
  forBothLinks([](TransportChoice transport) {
    for (const size_t bytes : {size_t{4}, size_t{1} << 20}) {  // sent at once, or asked for
      Meshes world(2, transport);
      for (int process : {0, 1}) world.join(process, 1, {0, 1});
      world.leave(1, 1);
      std::vector<char> data(bytes);
      Transfer sending;
      world.at(0, 1).mailbox->send(sending, 1, MessageClass::kCollective, 0, Meshes::word(bytes),
                                   {data.data(), bytes});
      EXPECT(world.turnUntil([&] { return sending.isDone(); }, 3000));
      EXPECT(sending.status().message().starts_with("mycoll group 'g1': "));
      EXPECT(sending.status().message().find("rank 1 (") != std::string::npos);
    }
  });
}

namespace {

// More than a link holds, and than is sent in one turn.
constexpr size_t kLarge = size_t{64} << 20;

// A message under way that needs its receiver.
struct Parcel {
  explicit Parcel(Meshes& world) : world(world) {
    for (int process : {0, 1}) world.join(process, 1, {0, 1});
  }
  void send() {
    world.at(0, 1).mailbox->send(sending, 1, kMessages, 77, Meshes::word(kLarge),
                                 {sent.data(), sent.size()});
  }
  void receive() {
    world.at(1, 1).mailbox->receive(receiving, 0, kMessages, 77, Meshes::word(kLarge),
                                    {got.data(), got.size()});
  }
  void expectLost() {
    EXPECT(sending.status().message() == "left");
    EXPECT(world.turnUntil([&] { return receiving.isDone(); }, 3000));
    EXPECT(receiving.status().code() == Code::kPeerLost);
    EXPECT(receiving.status().message().find("has left the group") != std::string::npos);
    EXPECT_OK(world.at(1, 1).listener.failure());
    EXPECT(!world.all[1]->hasPending());
  }
  Meshes& world;
  std::vector<char> sent = std::vector<char>(kLarge, 1), got = std::vector<char>(kLarge, 0);
  Transfer sending, receiving;
};

}  // namespace

// Its sender leaves, and does not wait for it: the receiver must not, either.
TEST(Leaving, aMessageThatNobodyReceivesYetLeavesWithItsSender) {
  forBothLinks([](TransportChoice transport) {
    Meshes world(2, transport);
    Parcel parcel(world);
    parcel.send();
    world.turn();
    world.leave(0, 1);
    world.turn();
    parcel.receive();
    parcel.expectLost();
  });
}

TEST(Leaving, aMessageUnderWayLeavesWithItsSender) {
  forBothLinks([](TransportChoice transport) {
    Meshes world(2, transport);
    Parcel parcel(world);
    parcel.receive();
    parcel.send();
    EXPECT(world.turnUntil([&] { return parcel.got[0] == 1; }));
    ASSERT(!parcel.sending.isDone());
    world.leave(0, 1);
    parcel.expectLost();
  });
}

// What has been handed over comes, however late the receiver looks at its link, and though it has
// heard of the departure, and of the sender's end, before.
TEST(Leaving, aMessageThatWasSentOutlivesItsSender) {
  forBothLinks([](TransportChoice transport) {
    Meshes world(2, transport);
    for (int process : {0, 1}) world.join(process, 1, {0, 1});
    ASSERT(world.talk(0, 1, 1, 0, 1));
    Word word(world, 0, 1, 1);
    EXPECT(world.turnUntil([&] {
      world.all[0]->progress();
      return word.transfer.isDone();
    }));
    int got = 0;
    Transfer receiving;
    world.at(1, 1).mailbox->receive(receiving, 0, kMessages, 77, Meshes::word(4), {&got, 4});
    world.leave(0, 1);
    world.end(0);
    EXPECT(world.turnUntil([&] { return receiving.isDone(); }, 3000));
    EXPECT_OK(receiving.status());
    EXPECT_EQ(got, word.value);
  });
}

namespace {

// A network that is slower in one direction than in the other: what has been sent arrives later.
class Late final : public LinkTap {
 public:
  bool isHere = false;
  std::unique_ptr<LinkSender> tap(std::unique_ptr<LinkSender> link) override { return link; }
  std::unique_ptr<LinkReceiver> tap(std::unique_ptr<LinkReceiver> link) override {
    return std::make_unique<Receiver>(*this, std::move(link));
  }

 private:
  class Receiver final : public LinkReceiver {
   public:
    Receiver(Late& late, std::unique_ptr<LinkReceiver> link)
        : late_(late), link_(std::move(link)) {}
    ssize_t read(void* data, size_t bytes, bool streaming) override {
      return late_.isHere ? link_->read(data, bytes, streaming) : 0;
    }
    bool maybeReadable() const override { return late_.isHere && link_->maybeReadable(); }
    void onEvent(bool isClosed) override { link_->onEvent(isClosed); }
    void lookAgain() override { link_->lookAgain(); }
    void setAsleep(bool asleep) override { link_->setAsleep(asleep); }
    int fd() const override { return link_->fd(); }

   private:
    Late& late_;
    std::unique_ptr<LinkReceiver> link_;
  };
};

}  // namespace

// The news of the connection's end overtakes the last message and the goodbye.
TEST(Leaving, theLastBytesOverTcpAreWaitedFor) {
  const auto late = std::make_shared<Late>();
  late->isHere = true;
  Meshes world(2, TransportChoice::kTcp, {{1, late}});
  for (int process : {0, 1}) world.join(process, 1, {0, 1});
  ASSERT(world.talk(0, 1, 1, 0, 1));
  ASSERT(world.talk(1, 0, 1, 1, 0));
  late->isHere = false;
  Word word(world, 0, 1, 1);
  EXPECT(world.turnUntil([&] { return word.transfer.isDone(); }));
  int got = 0;
  Transfer receiving;
  world.at(1, 1).mailbox->receive(receiving, 0, kMessages, 77, Meshes::word(4), {&got, 4});
  world.leave(0, 1);
  world.end(0);
  EXPECT(!world.turnUntil([&] { return receiving.isDone(); }, 300));
  late->isHere = true;
  EXPECT(world.turnUntil([&] { return receiving.isDone(); }, 3000));
  EXPECT_OK(receiving.status());
  EXPECT_EQ(got, word.value);
  world.turn();
  EXPECT_OK(world.at(1, 1).listener.failure());
  EXPECT_EQ(world.at(1, 1).listener.gone().size(), 1);
}

// Longer than strangers are kept waiting: the connection is tried again, and is the same then.
TEST(Leaving, theOnlyGroupIsMadeLate) {
  Meshes world(2, TransportChoice::kAuto);
  world.join(0, 1, {0, 1});
  Word word(world, 0, 1, 1);
  EXPECT(!world.turnUntil([&] { return word.transfer.isDone(); }, 5500));
  world.join(1, 1, {0, 1});
  EXPECT(world.turnUntil([&] { return word.transfer.isDone(); }, 3000));
  EXPECT_OK(word.transfer.status());
  EXPECT(world.isShm(0, 1));  // not TCP instead
}

// Rank 0 says goodbye to rank 1, and has no connection to rank 2. Rank 2 waits long for another
// rank, asks rank 0, and finds nobody. That is no failure, until it needs rank 0.
TEST(Leaving, aSilentPeerMayHaveLeft) {
  forBothLinks([](TransportChoice transport) {
    Meshes world(3, transport);
    for (int process : {0, 1, 2}) world.join(process, 1, {0, 1, 2});
    ASSERT(world.talk(0, 1, 1, 0, 1));
    world.leave(0, 1);
    world.turn();
    world.end(0);
    const test::Listener& listener = world.at(2, 1).listener;
    world.at(2, 1).listener.agreement().begin(0, Meshes::word(4));
    world.at(2, 1).listener.agreement().sendArrived({});
    EXPECT(world.turnUntil([&] { return !listener.gone().empty(); }, 3000));
    EXPECT_OK(listener.failure());
    EXPECT(world.talk(1, 2, 1, 1, 2));
    EXPECT_OK(world.at(1, 1).listener.failure());
    int got = 0;
    Transfer receiving;
    world.at(2, 1).mailbox->receive(receiving, 0, kMessages, 77, Meshes::word(4), {&got, 4});
    EXPECT(receiving.isDone());
    world.turn(1);
    EXPECT(listener.failure().code() == Code::kPeerLost);
    EXPECT(listener.failure().message().find("rank 0 (") != std::string::npos);
    EXPECT(world.turnUntil([&] { return !world.at(1, 1).listener.failure().ok(); }, 3000));
  });
}

// The same where rank 2 waits for it, or has something for it.
TEST(Leaving, aPeerThatIsNeededIsLostAtOnce) {
  forBothLinks([](TransportChoice transport) {
    for (const bool isSend : {true, false}) {
      Meshes world(3, transport);
      for (int process : {0, 1, 2}) world.join(process, 1, {0, 1, 2});
      const test::Listener& listener = world.at(2, 1).listener;
      world.end(0);
      int value = 0;
      Transfer transfer;
      if (isSend) {
        world.at(2, 1).mailbox->send(transfer, 0, kMessages, 7, Meshes::word(4), {&value, 4});
      } else {
        world.at(2, 1).mailbox->receive(transfer, 0, kMessages, 7, Meshes::word(4), {&value, 4});
        world.at(2, 1).listener.agreement().begin(0, Meshes::word(4));
        world.at(2, 1).listener.agreement().sendArrived({});
      }
      EXPECT(world.turnUntil([&] { return transfer.isDone(); }, 3000));
      EXPECT(listener.failure().code() == Code::kPeerLost);
      EXPECT(world.turnUntil([&] { return !world.at(1, 1).listener.failure().ok(); }, 3000));
    }
  });
}

// Also a group that is made afterwards, while another one still names the peer.
TEST(Leaving, aGroupThatIsMadeLaterHearsOfTheLoss) {
  forBothLinks([](TransportChoice transport) {
    Meshes world(3, transport);
    for (int process : {0, 1, 2}) world.join(process, 1, {0, 1, 2});
    ASSERT(world.talk(0, 1, 1, 0, 1));
    world.end(1);
    EXPECT(world.turnUntil([&] { return !world.at(0, 1).listener.failure().ok(); }, 3000));
    world.join(0, 2, {2, 0, 1});
    world.turn(1);
    EXPECT(world.at(0, 2).listener.failure().code() == Code::kPeerLost);
    EXPECT(world.at(0, 2).listener.failure().message().find("rank 2 (") != std::string::npos);
    world.join(0, 3, {2, 0});
    world.turn(1);
    EXPECT_OK(world.at(0, 3).listener.failure());
  });
}

// Rank 0 ends because of a failure during the handshake with rank 2, and rank 1 tells why a moment
// later. That, and not that rank 0 does not answer, is what rank 2 reports.
TEST(Leaving, theFirstCauseIsWaitedForDuringTheHandshake) {
  forBothLinks([](TransportChoice transport) {
    for (const int turns : {0, 2000}) {  // before and after it has seen who is there
      Meshes world(3, transport);
      for (int process : {0, 1, 2}) world.join(process, 1, {0, 1, 2});
      int value = 0;
      Transfer transfer;
      world.at(2, 1).mailbox->send(transfer, 0, kMessages, 7, Meshes::word(4), {&value, 4});
      for (int turn = 0; turn < turns; ++turn) world.all[0]->progress();
      world.end(0);
      world.turn(100);
      world.at(1, 1).listener.membership().fail(Status(Code::kMismatch, "different calls"));
      EXPECT(world.turnUntil([&] { return transfer.isDone(); }, 3000));
      EXPECT_EQ(world.at(2, 1).listener.failure().message(), "mycoll group 'g1': different calls");
    }
  });
}

// Rank 1 has heard of a failure, and leaves without a connection to rank 0. When that makes one, it
// hears why before it hears that rank 1 has left.
TEST(Leaving, theFirstCauseComesBeforeTheGoodbye) {
  forBothLinks([](TransportChoice transport) {
    Meshes world(2, transport);
    for (int process : {0, 1}) world.join(process, 1, {0, 1});
    Membership& leaving = world.at(1, 1).listener.membership();
    leaving.fail(Status(Code::kMismatch, "different calls"), /*notifiesOthers=*/false);
    leaving.sendGoodbye(Status(Code::kAborted, "left"), "");
    Word word(world, 0, 1, 1);
    EXPECT(world.turnUntil([&] { return word.transfer.isDone(); }, 3000));
    EXPECT_EQ(world.at(0, 1).listener.failure().message(), "mycoll group 'g1': different calls");
  });
}

// There was no connection when the group was left; with the first one for another group the news
// comes, whoever makes it. Or that process's end would be a loss to the group.
TEST(Leaving, goodbyesAreKeptForTheFirstConnection) {
  forBothLinks([](TransportChoice transport) {
    for (const bool comes : {true, false}) {
      Meshes world(2, transport);
      for (uint64_t context : {1, 2}) {
        for (int process : {0, 1}) world.join(process, context, {0, 1});
      }
      world.leave(1, 2);
      EXPECT(comes ? world.talk(0, 1, 1, 0, 1) : world.talk(1, 0, 1, 1, 0));
      const test::Listener& listener = world.at(0, 2).listener;
      EXPECT(world.turnUntil([&] { return !listener.gone().empty(); }, 3000));
      world.leave(1, 1);
      world.turn();
      world.end(1);
      world.turn();
      EXPECT_OK(listener.failure());
      EXPECT_EQ(listener.gone().size(), 1);
    }
  });
}

// Of many groups that were left the goodbyes are not all kept. A rank that still waits in one of
// the older ones hears of it when it asks.
TEST(Leaving, aGoodbyeThatWasNotKeptIsSaidWhenItIsNeeded) {
  forBothLinks([](TransportChoice transport) {
    constexpr uint64_t kStays = 1, kFirst = 2, kLast = 102;
    Meshes world(2, transport);
    for (uint64_t context = kStays; context <= kLast; ++context) {
      for (int process : {0, 1}) world.join(process, context, {0, 1});
    }
    Membership& failed = world.at(1, kLast).listener.membership();
    failed.fail(Status(Code::kMismatch, "different calls"), /*notifiesOthers=*/false);
    for (uint64_t context = kFirst; context <= kLast; ++context) world.leave(1, context);
    EXPECT(world.talk(0, 1, kStays, 0, 1));
    world.turn();
    EXPECT_EQ(world.at(0, kLast).listener.failure().message(),
              "mycoll group 'g102': different calls");
    test::Listener& first = world.at(0, kFirst).listener;
    first.agreement().begin(0, Meshes::word(4));
    first.agreement().sendArrived({1});
    EXPECT(world.turnUntil([&] { return !first.gone().empty(); }, 3000));
    EXPECT_OK(first.failure());
    // A message that its receiver is to ask for: its sender waits for that.
    std::vector<char> large(4 * 1024 * 1024);
    Transfer sending;
    world.at(0, kFirst + 1)
        .mailbox->send(sending, 1, kMessages, 77, Meshes::word(large.size()),
                       {large.data(), large.size()});
    EXPECT(world.turnUntil([&] { return sending.isDone(); }, 3000));
    EXPECT(sending.status().message().find("has left the group") != std::string::npos);
  });
}

// The ranks of a host share an arena, and most of them no connection.
TEST(Leaving, groupsThatWereLeftTakeNoMemory) {
  const int groups = test::isShort() ? 400 : 10'000;
  const auto store = std::make_shared<test::MemoryStore>();
  size_t before = 0, after = 0;
  test::Threads(8, [&](int rank) {
    const auto stays = test::makeRank(rank, 8, {}, store);
    auto meet = [&] {
      Call barrier;
      barrier.kind = OpKind::kBarrier;
      ASSERT_OK(stays->wait(stays->submit(barrier, nullptr, true), Deadline::never()));
    };
    auto measure = [&](size_t* resident) {
      meet();
      if (rank == 0) *resident = test::residentMiB();
      meet();
    };
    for (int i = 0; i < groups; ++i) {
      if (i % 100 == 0) meet();  // goodbyes are not far ahead of the groups that they are for
      if (i == groups / 2) measure(&before);
      const auto group = Communicator::derive(*stays, " " + std::to_string(i), false);
      group->close(Deadline::after(std::chrono::seconds(2)));
    }
    measure(&after);
    stays->close(Deadline::after(std::chrono::seconds(2)));
  });
  if (!test::kKeepsFreedMemory) EXPECT(after <= before + 3);
}

// Rank 0 leaves its last group at any moment of the handshake with rank 2, which only asks how it
// is, and ends soon after. That it has left comes with the connection, or it is found not to listen
// any more.
TEST(Leaving, aRankMayLeaveDuringTheHandshake) {
  auto ask = [](Meshes& world) {
    for (int process : {0, 1, 2}) world.join(process, 1, {0, 1, 2});
    world.at(2, 1).listener.agreement().begin(0, Meshes::word(4));
    world.at(2, 1).listener.agreement().sendArrived({});
  };
  forBothLinks([&](TransportChoice transport) {
    int last = 0;  // when it has been asked, and answers
    {
      Meshes world(3, transport);
      ask(world);
      auto answers = [&] {
        std::lock_guard<std::mutex> lock(world.all[0]->ioMutex());
        return world.all[0]->hasLinkTo(world.addresses[2]);
      };
      ASSERT(world.turnUntil([&] { return ++last, answers(); }));
    }
    for (int moment = std::max(0, 3 * (last - 10)); moment < 3 * (last + 5); ++moment) {
      Meshes world(3, transport);
      ask(world);
      world.turn(moment / 3);
      world.at(0, 1).listener.membership().sendGoodbye(Status(Code::kAborted, "left"), "");
      EXPECT(world.turnUntil([&] { return world.at(0, 1).mailbox->isFlushed(); }));
      world.members.erase({0, 1});
      world.turn(moment % 3);
      world.end(0);
      const test::Listener& listener = world.at(2, 1).listener;
      EXPECT(world.turnUntil([&] { return !listener.gone().empty(); }, 8000));
      EXPECT_OK(listener.failure());
    }
  });
}

// A peer that ends after the last group with it was left leaves nothing behind, as one that ends
// before.
TEST(Leaving, aPeerThatEndsAfterTheLastGroupIsForgotten) {
  forBothLinks([](TransportChoice transport) {
    for (const bool endsFirst : {true, false}) {
      Meshes world(2, transport);
      for (int process : {0, 1}) world.join(process, 1, {0, 1});
      ASSERT(world.talk(0, 1, 1, 0, 1));
      if (!endsFirst) world.leave(0, 1);
      world.end(1);
      world.turn();
      if (endsFirst) {
        EXPECT(world.turnUntil([&] { return world.all[0]->hasLost(world.addresses[1]); }));
        world.leave(0, 1);
      }
      std::lock_guard<std::mutex> lock(world.all[0]->ioMutex());
      EXPECT(!world.all[0]->hasLinkTo(world.addresses[1]));
    }
  });
}
