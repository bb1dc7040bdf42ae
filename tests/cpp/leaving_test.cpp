// Groups that a rank has left or has not joined yet, seen by the other ranks.
#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "meshes.h"
#include "passing_link.h"
#include "resident.h"
#include "test.h"
#include "transport/mailbox.h"
#include "transport/mesh.h"
#include "world.h"

using namespace mycoll;
using test::forBothLinks;
using test::Meshes;

namespace {

constexpr auto kMessages = MessageClass::kPointToPoint;

// A message of 4 bytes that is being sent.
struct Word {
  Word(Meshes& world, int from, uint64_t context, int rank) {
    world.at(from, context)
        .mailbox->send(transfer, rank, kMessages, 77, Meshes::word(4), {&value, 4});
  }
  int value = 7;
  Transfer transfer;
};

}  // namespace

// Two processes share a group. The first message between them is for another group, which its
// receiver joins later.
TEST(Leaving, membersOfAGroupConnectForANewGroup) {
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

// Two processes share two groups, and one of them has left the first. The other one is notified
// when they connect for the second.
TEST(Leaving, aDepartureIsReportedByTheFirstConnection) {
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

// A handshake reports a departure. The group then sends a message, for which the mesh accepts the
// peer's own connection; that ends the attempt whose handshake this is.
TEST(Leaving, aDepartureMayEndTheAttemptThatReportedIt) {
  Meshes(1, TransportChoice::kTcp).join(0, 1, {0});  // opens descriptors that the process keeps
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
        world.all[1]->progress();  // answers rank 0's attempt, and begins its own
    }
    EXPECT(world.turnUntil([&] { return receiving[0].isDone() && receiving[1].isDone(); }));
    EXPECT(got[0] == 8 && got[1] == 7);
    EXPECT(hasCrossed);
  }
  EXPECT_EQ(test::openDescriptors(), before);  // no attempt outlives its mesh
}

TEST(Leaving, aPeerWithoutACommonGroupIsNotLost) {
  forBothLinks([](TransportChoice transport) {
    Meshes world(2, transport);
    for (int process : {0, 1}) world.join(process, 1, {0, 1});
    world.leave(1, 1);
    Word word(world, 0, 1, 1);
    EXPECT(world.turnUntil([&] { return word.transfer.isDone(); }, 3000));
    EXPECT_CONTAINS(word.transfer.status(), "has left the group");
    EXPECT(world.turnUntil([&] { return !world.all[0]->hasPending(); }, 3000));
    EXPECT_OK(world.at(0, 1).listener.failure());
    EXPECT(!world.all[0]->hasLost(world.addresses[1]));
  });
}

// The error of a message of a collective names the rank that has left, too.
TEST(Leaving, anErrorOfASendNamesTheRankThatHasLeft) {
  forBothLinks([](TransportChoice transport) {
    for (const size_t bytes :
         {size_t{4}, size_t{1} << 20}) {  // sent immediately, or when asked for
      Meshes world(2, transport);
      for (int process : {0, 1}) world.join(process, 1, {0, 1});
      world.leave(1, 1);
      std::vector<char> data(bytes);
      Transfer sending;
      world.at(0, 1).mailbox->send(sending, 1, MessageClass::kCollective, 0, Meshes::word(bytes),
                                   {data.data(), bytes});
      EXPECT(world.turnUntil([&] { return sending.isDone(); }, 3000));
      EXPECT(sending.status().message().starts_with("mycoll group 'g1': "));
      EXPECT_CONTAINS(sending.status(), "rank 1 (");
    }
  });
}

namespace {

// More bytes than a link holds, and than are sent in one turn.
constexpr size_t kLarge = size_t{64} << 20;

// A message that cannot be sent completely before its receiver takes part of it.
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
    EXPECT_CONTAINS(receiving.status(), "has left the group");
    EXPECT_OK(world.at(1, 1).listener.failure());
    EXPECT(!world.all[1]->hasPending());
  }
  Meshes& world;
  std::vector<char> sent = std::vector<char>(kLarge, 1), got = std::vector<char>(kLarge, 0);
  Transfer sending, receiving;
};

}  // namespace

// The sender leaves before its message is received. The receive ends with an error.
TEST(Leaving, aMessageWithoutAReceiveIsLostWithItsSender) {
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

TEST(Leaving, aMessageUnderWayIsLostWithItsSender) {
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

// A message that was sent arrives, even if the receiver reads its link late and has been notified
// of the sender's departure and end before.
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

// A network that delivers nothing while `isHere` is false.
class Late final : public LinkTap {
 public:
  bool isHere = false;
  std::unique_ptr<LinkSender> tap(std::unique_ptr<LinkSender> link) override { return link; }
  std::unique_ptr<LinkReceiver> tap(std::unique_ptr<LinkReceiver> link) override {
    return std::make_unique<Receiver>(*this, std::move(link));
  }

 private:
  class Receiver final : public test::PassingReceiver {
   public:
    Receiver(Late& late, std::unique_ptr<LinkReceiver> link)
        : PassingReceiver(std::move(link)), late_(late) {}
    ssize_t read(void* data, size_t bytes, bool streaming) override {
      return late_.isHere ? link_->read(data, bytes, streaming) : 0;
    }
    bool maybeReadable() const override { return late_.isHere && link_->maybeReadable(); }

   private:
    Late& late_;
  };
};

}  // namespace

// The end of the connection is reported before the last message and the goodbye can be read.
TEST(Leaving, theLastBytesOverTcpAreRead) {
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

// A rank joins its only group later than the limit for strangers. The connection is tried again,
// and uses shared memory then.
TEST(Leaving, theOnlyGroupIsJoinedLate) {
  Meshes world(2, TransportChoice::kAuto);
  world.join(0, 1, {0, 1});
  Word word(world, 0, 1, 1);
  EXPECT(!world.turnUntil([&] { return word.transfer.isDone(); }, 5500));
  world.join(1, 1, {0, 1});
  EXPECT(world.turnUntil([&] { return word.transfer.isDone(); }, 3000));
  EXPECT_OK(word.transfer.status());
  EXPECT(world.isShm(0, 1));  // not TCP instead
}

// Rank 0 sends a goodbye to rank 1 and has no connection to rank 2. Rank 2, which waits for another
// rank, asks rank 0 and cannot reach it. That is no failure, until rank 2 needs rank 0.
TEST(Leaving, aPeerThatCannotBeReachedMayHaveLeft) {
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
    EXPECT_CONTAINS(listener.failure(), "rank 0 (");
    EXPECT(world.turnUntil([&] { return !world.at(1, 1).listener.failure().ok(); }, 3000));
  });
}

// As above, but rank 2 has a receive from rank 0, or a message for it.
TEST(Leaving, aPeerThatIsNeededIsLostImmediately) {
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

// A group that a rank joins after the loss of a peer fails, too, while another group still contains
// that peer.
TEST(Leaving, aGroupThatIsJoinedLaterKnowsTheLoss) {
  forBothLinks([](TransportChoice transport) {
    Meshes world(3, transport);
    for (int process : {0, 1, 2}) world.join(process, 1, {0, 1, 2});
    ASSERT(world.talk(0, 1, 1, 0, 1));
    int got = 0;
    Transfer receiving;
    world.at(0, 1).mailbox->receive(receiving, 1, kMessages, 77, Meshes::word(4), {&got, 4});
    world.end(1);
    EXPECT(world.turnUntil([&] { return receiving.isDone(); }, 3000));
    EXPECT_EQ(receiving.status().code(), Code::kPeerLost);
    EXPECT_EQ(world.at(0, 1).listener.failure().code(), Code::kPeerLost);
    world.join(0, 2, {2, 0, 1});
    world.turn(1);
    EXPECT(world.at(0, 2).listener.failure().code() == Code::kPeerLost);
    EXPECT(world.at(0, 2).listener.failure().message().find("rank 2 (") != std::string::npos);
    world.join(0, 3, {2, 0});
    world.turn(1);
    EXPECT_OK(world.at(0, 3).listener.failure());
  });
}

// Rank 0 ends because of a failure during the handshake with rank 2, and rank 1 sends the cause a
// moment later. Rank 2 reports that cause, and not that rank 0 does not answer.
TEST(Leaving, theFirstCauseIsReportedDuringTheHandshake) {
  forBothLinks([](TransportChoice transport) {
    for (const int turns : {0, 2000}) {  // before and after rank 0 has read rank 2's hello
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

// Rank 1 knows of a failure and leaves without a connection to rank 0. When rank 0 connects, it
// receives the cause of the failure before the goodbye.
TEST(Leaving, theFirstCauseIsSentBeforeTheGoodbye) {
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

// Without a connection when a rank leaves a group, its goodbye is sent over the first connection
// for another group, whichever of the two connects. Then the end of its process is no loss to the
// group.
TEST(Leaving, goodbyesAreKeptForTheFirstConnection) {
  forBothLinks([](TransportChoice transport) {
    for (const bool connects : {true, false}) {
      Meshes world(2, transport);
      for (uint64_t context : {1, 2}) {
        for (int process : {0, 1}) world.join(process, context, {0, 1});
      }
      world.leave(1, 2);
      EXPECT(connects ? world.talk(0, 1, 1, 0, 1) : world.talk(1, 0, 1, 1, 0));
      const test::Listener& listener = world.at(0, 2).listener;
      EXPECT(world.turnUntil([&] { return !listener.gone().empty(); }, 3000));
      world.leave(1, 1);
      world.turn();
      world.end(1);
      world.turn();
      for (const uint64_t context : {1, 2}) {
        EXPECT_OK(world.at(0, context).listener.failure());
        EXPECT(world.at(0, context).listener.gone() == std::vector<int>{1});
      }
    }
  });
}

// Not all goodbyes of many groups are kept. A rank that still waits in one of the older groups is
// notified when it asks.
TEST(Leaving, aGoodbyeThatWasNotKeptIsSentOnRequest) {
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
    // A message that is sent when its receiver asks for it.
    std::vector<char> large(4 * 1024 * 1024);
    Transfer sending;
    world.at(0, kFirst + 1)
        .mailbox->send(sending, 1, kMessages, 77, Meshes::word(large.size()),
                       {large.data(), large.size()});
    EXPECT(world.turnUntil([&] { return sending.isDone(); }, 3000));
    EXPECT_CONTAINS(sending.status(), "has left the group");
  });
}

// The ranks of a host share an arena, and most pairs of them have no connection.
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
      if (i % 100 == 0) meet();  // no rank is far ahead of the others
      if (i == groups / 2) measure(&before);
      const auto group = Communicator::derive(*stays, " " + std::to_string(i), false);
      group->close(Deadline::after(std::chrono::seconds(2)));
    }
    measure(&after);
    stays->close(Deadline::after(std::chrono::seconds(2)));
  });
  if (!test::kKeepsFreedMemory) EXPECT(after <= before + 3);
}

// Rank 0 leaves its last group at any moment of the handshake with rank 2, which only asks for its
// state, and ends soon after. Rank 2 receives the goodbye over the connection, or finds that rank 0
// no longer accepts connections.
TEST(Leaving, aRankMayLeaveDuringTheHandshake) {
  auto ask = [](Meshes& world) {
    for (int process : {0, 1, 2}) world.join(process, 1, {0, 1, 2});
    world.at(2, 1).listener.agreement().begin(0, Meshes::word(4));
    world.at(2, 1).listener.agreement().sendArrived({});
  };
  forBothLinks([&](TransportChoice transport) {
    int last = 0;  // the turn in which rank 0 has been asked, and answers
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

// The connection to a peer that has ended is closed and forgotten, whether the peer ended before or
// after the last group with it was left.
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
