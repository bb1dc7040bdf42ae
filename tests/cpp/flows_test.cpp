// Several sockets for one peer (MYCOLL_FLOWS): large messages are spread over them, and the
// guarantees of a connection with one socket still hold.
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "meshes.h"
#include "passing_link.h"
#include "test.h"
#include "transport/frame.h"
#include "transport/link.h"
#include "transport/tcp/address.h"

using namespace mycoll;

namespace {

constexpr int kFlows = 3;
constexpr size_t kLarge = 3'000'007;
// Larger than a piece, and not larger than what collectives send without asking.
constexpr size_t kCut = 900'001;

// Observes and controls the links of a mesh, in the order in which they were made.
class Links final : public LinkTap {
 public:
  // bytesPerSecond: the limit of each socket, as clouds have one for each flow; 0: no limit.
  explicit Links(unsigned bytesPerSecond = 0) : bytesPerSecond_(bytesPerSecond) {}

  std::vector<size_t> sent;                                          // bytes
  std::vector<bool> isHeldBack = std::vector<bool>(16);              // nothing can be read
  std::vector<size_t> budget = std::vector<size_t>(16, ~size_t{0});  // bytes that may be written
  std::vector<int> fds;

  std::unique_ptr<LinkSender> tap(std::unique_ptr<LinkSender> link) override {
    sent.push_back(0);
    fds.push_back(link->fd());
    if (bytesPerSecond_ > 0) {
      (void)setsockopt(link->fd(), SOL_SOCKET, SO_MAX_PACING_RATE, &bytesPerSecond_,
                       sizeof(bytesPerSecond_));
    }
    return std::make_unique<Sender>(*this, std::move(link), sent.size() - 1);
  }
  std::unique_ptr<LinkReceiver> tap(std::unique_ptr<LinkReceiver> link) override {
    return std::make_unique<Receiver>(*this, std::move(link), sent.size() - 1);
  }

 private:
  const unsigned bytesPerSecond_;

  class Sender final : public test::PassingSender {
   public:
    Sender(Links& links, std::unique_ptr<LinkSender> link, size_t number)
        : PassingSender(std::move(link)), links_(links), number_(number) {}
    ssize_t write(const Span* parts, int count) override {
      size_t& left = links_.budget[number_];
      const Span cut{parts[0].data, std::min(parts[0].bytes, left)};
      if (cut.bytes == 0) return 0;
      const ssize_t written =
          left == ~size_t{0} ? link_->write(parts, count) : link_->write(&cut, 1);
      if (written > 0) links_.sent[number_] += static_cast<size_t>(written);
      if (written > 0 && left != ~size_t{0}) left -= static_cast<size_t>(written);
      return written;
    }

   private:
    Links& links_;
    const size_t number_;
  };
  class Receiver final : public test::PassingReceiver {
   public:
    Receiver(Links& links, std::unique_ptr<LinkReceiver> link, size_t number)
        : PassingReceiver(std::move(link)), links_(links), number_(number) {}
    ssize_t read(void* data, size_t bytes, bool streaming) override {
      if (links_.isHeldBack[number_]) return keepArrived(), 0;
      if (kept_.empty()) return link_->read(data, bytes, streaming);
      const size_t taken = std::min(bytes, kept_.size());
      std::memcpy(data, kept_.data(), taken);
      kept_.erase(0, taken);
      return static_cast<ssize_t>(taken);
    }
    bool maybeReadable() const override { return !kept_.empty() || link_->maybeReadable(); }

   private:
    // Reads what has arrived, so that the sender can send everything.
    void keepArrived() {
      char buffer[64 * 1024];
      for (;;) {
        const ssize_t got = link_->read(buffer, sizeof(buffer), false);
        if (got <= 0) return;
        kept_.append(buffer, static_cast<size_t>(got));
      }
    }

    Links& links_;
    const size_t number_;
    std::string kept_;
  };
};

// Two processes that are connected by this many sockets.
struct Far {
  explicit Far(bool isEncrypted = false, size_t flows = kFlows, unsigned bytesPerSecond = 0)
      : links{std::make_shared<Links>(bytesPerSecond), std::make_shared<Links>(bytesPerSecond)},
        meshes(2, TransportChoice::kTcp, {{0, links[0]}, {1, links[1]}}, [&](MeshOptions& options) {
          options.flows = static_cast<int>(flows);
          if (isEncrypted) ASSERT_OK(Tls::make("a secret of the job", &options.tls));
        }) {
    meshes.join(0, 1, {0, 1});
    meshes.join(1, 1, {0, 1});
    EXPECT(meshes.talk(0, 1, 1, 0, 1));
    EXPECT(meshes.talk(1, 0, 1, 1, 0));
    EXPECT(meshes.turnUntil([&] { return links[1]->sent.size() == flows; }));
    meshes.turn(50);  // until the last socket has joined the connection on the other side, too
  }

  Mailbox& mailbox(int rank) { return *meshes.at(rank, 1).mailbox; }
  // Messages of collectives are sent without asking first.
  void send(int from, Transfer& sending, std::vector<char>& data, uint64_t tag,
            MessageClass kind = MessageClass::kPointToPoint) {
    mailbox(from).send(sending, 1 - from, kind, tag, test::Meshes::word(data.size()), span(data));
  }
  void receive(int at, Transfer& receiving, std::vector<char>& data, uint64_t tag,
               MessageClass kind = MessageClass::kPointToPoint) {
    mailbox(at).receive(receiving, 1 - at, kind, tag, test::Meshes::word(data.size()), span(data));
  }
  static Span span(std::vector<char>& data) { return {data.data(), data.size()}; }

  const std::shared_ptr<Links> links[2];
  test::Meshes meshes;
};

std::vector<char> pattern(size_t bytes, int seed) {
  std::vector<char> data(bytes);
  for (size_t i = 0; i < bytes; ++i) {
    data[i] = static_cast<char>(i * 131 + i / 1000 + static_cast<size_t>(seed));
  }
  return data;
}

constexpr auto kCollective = MessageClass::kCollective;
uint64_t tagOf(uint64_t sequence) { return sequence << kStepBits; }

}  // namespace

TEST(Flows, largeMessagesUseAllSockets) {
  for (const bool isEncrypted : {false, true}) {
    Far far(isEncrypted);
    for (const int from : {0, 1}) {
      const std::vector<size_t> before = far.links[from]->sent;
      ASSERT(before.size() == kFlows);
      std::vector<char> out = pattern(kLarge, from), in(kLarge);
      Transfer sending, receiving;
      far.receive(1 - from, receiving, in, 9);
      far.send(from, sending, out, 9);
      ASSERT(far.meshes.turnUntil([&] { return receiving.isDone() && sending.isDone(); }));
      EXPECT_OK(receiving.status());
      EXPECT(in == out);
      for (int i = 0; i < kFlows; ++i) {
        EXPECT(far.links[from]->sent[i] - before[i] >= kLarge / kFlows / 4);
      }
    }
  }
}

// If each socket has a limit, several sockets together have a higher one.
TEST(Flows, theLimitsOfSocketsAddUp) {
  // Measures three messages, and on a busy machine more until one is within `most`. Returns the
  // least.
  auto secondsWith = [](size_t flows, double most) {
    constexpr size_t kBytes = 8'000'000;
    Far far(false, flows, 20'000'000);
    std::vector<char> out = pattern(kBytes, 3), in(kBytes);
    double least = 1e9;
    for (uint64_t tag = 1; tag <= 3 || (tag <= 20 && least > most); ++tag) {
      Transfer sending, receiving;
      far.receive(1, receiving, in, tag);
      const auto before = std::chrono::steady_clock::now();
      far.send(0, sending, out, tag);
      EXPECT(far.meshes.turnUntil([&] { return receiving.isDone() && sending.isDone(); }));
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - before;
      least = std::min(least, took.count());
    }
    EXPECT(in == out);
    return least;
  };
  const double one = secondsWith(1, 1e9);
  EXPECT(one > 0.3);  // the limit holds
  const double four = secondsWith(4, one / 2.5);
  EXPECT(one / four >= 2.5);
}

// Large messages of collectives are cut into pieces, too. They keep their order, whether they
// arrive before or after their receives are posted.
TEST(Flows, messagesOfCollectivesAreCutAndKeepTheirOrder) {
  Far far;
  for (const bool isPostedFirst : {true, false}) {
    constexpr int kMessages = 5;
    const std::vector<size_t> before = far.links[0]->sent;
    std::vector<std::vector<char>> out, in;
    Transfer sending[kMessages], receiving[kMessages];
    for (int i = 0; i < kMessages; ++i) {
      out.push_back(pattern(kCut, i));
      in.emplace_back(kCut);
    }
    const uint64_t tag = tagOf(isPostedFirst ? 1 : 2);
    for (int rank = 0; rank < 2; ++rank) {
      far.meshes.at(rank, 1).listener.agreement().begin(isPostedFirst ? 1 : 2,
                                                        test::Meshes::word(kCut));
    }
    auto post = [&] {
      for (int i = 0; i < kMessages; ++i) far.receive(1, receiving[i], in[i], tag, kCollective);
    };
    if (isPostedFirst) post();
    for (int i = 0; i < kMessages; ++i) far.send(0, sending[i], out[i], tag, kCollective);
    if (!isPostedFirst) {
      // They are sent and arrive before their receives are posted.
      ASSERT(far.meshes.turnUntil([&] { return sending[kMessages - 1].isDone(); }));
      far.meshes.turn(100);
      post();
    }
    // A later message may be complete first, as the pieces travel over different sockets.
    const auto isDone = [](const Transfer& transfer) { return transfer.isDone(); };
    ASSERT(
        far.meshes.turnUntil([&] { return std::all_of(receiving, std::end(receiving), isDone); }));
    for (int i = 0; i < kMessages; ++i) {
      EXPECT_OK(receiving[i].status());
      EXPECT(in[i] == out[i]);
    }
    for (int i = 0; i < kFlows; ++i) EXPECT(far.links[0]->sent[i] - before[i] >= kCut / 4);
  }
}

// The first socket may be slower than the others, so that pieces arrive before the beginning of
// their message.
TEST(Flows, piecesWaitForTheBeginningOfTheirMessage) {
  Far far;
  for (int rank = 0; rank < 2; ++rank) {
    far.meshes.at(rank, 1).listener.agreement().begin(1, test::Meshes::word(kCut));
  }
  std::vector<char> out = pattern(kCut, 5), in(kCut);
  Transfer sending, receiving;
  far.receive(1, receiving, in, tagOf(1), kCollective);
  far.links[1]->isHeldBack[0] = true;
  far.send(0, sending, out, tagOf(1), kCollective);
  far.meshes.turn(300);
  EXPECT(!receiving.isDone());
  far.links[1]->isHeldBack[0] = false;
  ASSERT(far.meshes.turnUntil([&] { return receiving.isDone(); }));
  EXPECT_OK(receiving.status());
  EXPECT(in == out);
}

// The sender leaves when everything is sent. Its goodbye uses a faster socket than some pieces.
TEST(Flows, aGoodbyeDoesNotOvertakePieces) {
  Far far;
  std::vector<char> out = pattern(kLarge, 6), in(kLarge);
  Transfer sending, receiving;
  far.receive(1, receiving, in, 9);
  far.links[1]->isHeldBack[1] = true;
  far.send(0, sending, out, 9);
  ASSERT(far.meshes.turnUntil([&] { return sending.isDone(); }));
  far.meshes.leave(0, 1);
  far.meshes.turn(500);
  EXPECT(!receiving.isDone());
  EXPECT(far.meshes.at(1, 1).listener.gone().empty());
  far.links[1]->isHeldBack[1] = false;
  ASSERT(far.meshes.turnUntil([&] { return receiving.isDone(); }));
  EXPECT_OK(receiving.status());
  EXPECT(in == out);
  EXPECT(far.meshes.turnUntil([&] { return !far.meshes.at(1, 1).listener.gone().empty(); }));
}

// A sender that leaves after a failure may have sent half of a piece. The receiver frees the
// message when it reads the goodbye. The rest of the piece arrives afterwards, over another socket.
TEST(Flows, aGoodbyeEndsAMessageThatHasPartlyArrived) {
  Far far;
  far.meshes.join(0, 2, {0, 1});
  far.meshes.join(1, 2, {0, 1});
  for (int rank = 0; rank < 2; ++rank) {
    far.meshes.at(rank, 1).listener.agreement().begin(1, test::Meshes::word(kCut));
  }
  std::vector<char> out(kCut, 'N');
  Transfer sending;
  far.links[0]->budget[1] = 1000;
  far.send(0, sending, out, tagOf(1), kCollective);
  far.meshes.turn(500);
  EXPECT(!sending.isDone());
  far.meshes.leave(0, 1);
  ASSERT(far.meshes.turnUntil([&] { return !far.meshes.at(1, 1).listener.gone().empty(); }));
  // These may reuse the memory of the message.
  std::vector<std::vector<char>> allocated;
  for (const size_t bytes : {kCut, kCut, size_t{1000}}) allocated.emplace_back(bytes, 'U');
  far.links[0]->budget[1] = ~size_t{0};
  far.meshes.turn(500);
  for (const std::vector<char>& each : allocated) {
    EXPECT_EQ(std::count(each.begin(), each.end(), 'U'), static_cast<ptrdiff_t>(each.size()));
  }
  EXPECT(!far.meshes.all[1]->hasLost(far.meshes.addresses[0]));
  EXPECT(far.meshes.talk(0, 1, 2, 0, 1));
  EXPECT(far.meshes.talk(1, 0, 2, 1, 0));
}

// If one socket breaks, it is unknown which bytes have arrived. Both sides report that soon, before
// the timeout of the network.
TEST(Flows, oneBrokenSocketEndsTheConnection) {
  for (int broken = 0; broken < kFlows; ++broken) {
    Far far;
    std::vector<char> in(kLarge);
    Transfer receiving;
    far.receive(0, receiving, in, 9);
    ::shutdown(far.links[1]->fds[broken], SHUT_RDWR);
    EXPECT(far.meshes.turnUntil([&] { return receiving.isDone(); }, 3'000));
    EXPECT_EQ(receiving.status().code(), Code::kPeerLost);
    EXPECT(
        far.meshes.turnUntil([&] { return !far.meshes.at(1, 1).listener.failure().ok(); }, 3'000));
  }
}

// No pieces are sent for a group that the receiver has not joined, as it could not assign them to a
// message.
TEST(Flows, theFirstMessageToANewGroupAsks) {
  Far far;
  far.meshes.join(0, 2, {0, 1});
  std::vector<char> out = pattern(kCut, 8), in(kCut);
  Transfer sending, receiving;
  far.meshes.at(0, 2).listener.agreement().begin(1, test::Meshes::word(kCut));
  far.meshes.at(0, 2).mailbox->send(sending, 1, kCollective, tagOf(1), test::Meshes::word(kCut),
                                    Far::span(out));
  far.meshes.turn(200);
  EXPECT(!sending.isDone());
  far.meshes.join(1, 2, {0, 1});
  far.meshes.at(1, 2).listener.agreement().begin(1, test::Meshes::word(kCut));
  far.meshes.at(1, 2).mailbox->receive(receiving, 0, kCollective, tagOf(1),
                                       test::Meshes::word(kCut), Far::span(in));
  ASSERT(far.meshes.turnUntil([&] { return receiving.isDone() && sending.isDone(); }));
  EXPECT_OK(receiving.status());
  EXPECT(in == out);
}

// Small messages would not be faster with several sockets.
TEST(Flows, smallMessagesStayOnTheFirstSocket) {
  Far far;
  const std::vector<size_t> before = far.links[0]->sent;
  for (int i = 0; i < 20; ++i) EXPECT(far.meshes.talk(0, 1, 1, 0, 1));
  EXPECT(far.links[0]->sent[0] > before[0]);
  for (int i = 1; i < kFlows; ++i) EXPECT_EQ(far.links[0]->sent[i], before[i]);
}

// A peer in the same subnet has one socket.
TEST(Flows, aNearPeerHasOneSocket) {
  const std::shared_ptr<Links> links[2] = {std::make_shared<Links>(), std::make_shared<Links>()};
  test::Meshes meshes(2, TransportChoice::kTcp, {{0, links[0]}, {1, links[1]}});
  meshes.join(0, 1, {0, 1});
  meshes.join(1, 1, {0, 1});
  EXPECT(meshes.talk(0, 1, 1, 0, 1));
  meshes.turn(200);
  EXPECT_EQ(links[0]->sent.size(), size_t{1});
  EXPECT_EQ(links[1]->sent.size(), size_t{1});
}

TEST(Flows, subnetsAreCompared) {
  const InterfaceAddress ten{"eth0", "10.1.2.3", false, false, 20};
  EXPECT(isInSubnetOf(ten, "10.1.0.1"));
  EXPECT(isInSubnetOf(ten, "10.1.15.255"));
  EXPECT(!isInSubnetOf(ten, "10.1.16.1"));
  EXPECT(!isInSubnetOf(ten, "fd00::1"));
  const InterfaceAddress six{"eth0", "fd21:3::1", true, false, 64};
  EXPECT(isInSubnetOf(six, "fd21:3::2"));
  EXPECT(!isInSubnetOf(six, "fd21:4::2"));
  EXPECT(!isInSubnetOf({"eth0", "10.1.2.3", false, false, 0}, "10.1.2.4"));
}

// All interfaces that the user names are used. With an exclusion, mycoll chooses one of the others.
TEST(Flows, allInterfacesThatAreNamedAreUsed) {
  const std::vector<InterfaceAddress> all = interfaceAddresses();
  InterfaceFilter filter;
  filter.isExact = true;
  for (const InterfaceAddress& each : all) filter.names.push_back(each.interfaceName);
  std::vector<InterfaceAddress> chosen;
  ASSERT_OK(chooseInterface(filter, "", &chosen));
  EXPECT_EQ(chosen.size(), all.size());
  filter.isExclusion = true;
  filter.names = {"no-such-interface"};
  const Status status = chooseInterface(filter, "", &chosen);
  if (!status.ok()) return;  // this machine has only loopback
  for (const InterfaceAddress& each : chosen) {
    EXPECT_EQ(each.interfaceName, chosen.front().interfaceName);
  }
}
