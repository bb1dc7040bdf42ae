// Two meshes and their mailboxes in one thread, on each kind of link: what every link must do, and
// what unauthenticated processes must not be able to do.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <new>
#include <random>
#include <vector>

#include "base/deadline.h"
#include "frame_counter.h"
#include "meshes.h"
#include "test.h"
#include "transport/mailbox.h"
#include "transport/mesh.h"
#include "transport/shm/peer_regions.h"
#include "transport/shm/shared_heap.h"
#include "transport/shm/single_copy.h"

using namespace mycoll;
using test::forBothLinks;

namespace {

constexpr uint64_t kGroup = 42;

// Two ranks of one group, which the first `joined` of them have joined.
struct Pair : test::Meshes {
  explicit Pair(TransportChoice transport, const std::shared_ptr<LinkTap>& tap = nullptr,
                SingleCopyUse singleCopy = SingleCopyUse::kOff, int joined = 2)
      : Meshes(2, transport, {{0, tap}, {1, tap}},
               [&](MeshOptions& options) { options.singleCopy = singleCopy; }) {
    for (int rank = 0; rank < joined; ++rank) join(rank, kGroup, {0, 1});
  }
  Mailbox& mailbox(int rank) { return *at(rank, kGroup).mailbox; }
  test::Listener& listener(int rank) { return at(rank, kGroup).listener; }
  // Sends a few bytes from rank 0 to rank 1.
  bool talk(int milliseconds = 60'000) { return Meshes::talk(0, 1, kGroup, 0, 1, milliseconds); }
  bool pump(const std::function<bool()>& until, int milliseconds = 60'000) {
    return turnUntil(until, milliseconds);
  }
};

Signature message(size_t bytes) {
  Signature result;
  result.kind = OpKind::kSend;
  result.bytes = bytes;
  return result;
}

constexpr auto kMessages = MessageClass::kPointToPoint;

std::vector<char> pattern(size_t bytes, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<char> data(bytes);
  for (char& byte : data) byte = static_cast<char>(random());
  return data;
}

Span span(std::vector<char>& data) { return {data.data(), data.size()}; }

Fd connectTo(const TcpAddress& address) {
  Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in where{};
  where.sin_family = AF_INET;
  where.sin_port = htons(static_cast<uint16_t>(address.port));
  inet_pton(AF_INET, address.address.c_str(), &where.sin_addr);
  if (connect(socket.get(), reinterpret_cast<sockaddr*>(&where), sizeof(where)) != 0)
    socket.reset();
  return socket;
}

}  // namespace

TEST(Transport, carriesMessagesOfAllSizes) {
  forBothLinks([](TransportChoice transport) {
    Pair pair(transport);
    for (size_t bytes : {size_t{0}, size_t{1}, size_t{1000}, size_t{64 * 1024},
                         size_t{64 * 1024 + 1}, size_t{700'001}, size_t{5'000'000}}) {
      for (bool isPostedFirst : {true, false}) {
        std::vector<char> out = pattern(bytes, static_cast<unsigned>(bytes)), in(bytes);
        Transfer sending, receiving;
        auto post = [&] {
          pair.mailbox(1).receive(receiving, 0, kMessages, 7, message(bytes), span(in));
        };
        if (isPostedFirst) post();
        pair.mailbox(0).send(sending, 1, kMessages, 7, message(bytes), span(out));
        if (!isPostedFirst) {
          for (int i = 0; i < 50; ++i) pair.all[1]->progress();
          post();
        }
        ASSERT(pair.pump([&] { return sending.isDone() && receiving.isDone(); }));
        EXPECT_OK(sending.status());
        EXPECT_OK(receiving.status());
        EXPECT(in == out);
      }
    }
    EXPECT(!pair.all[0]->hasPending());
    EXPECT(!pair.all[1]->hasPending());
  });
}

TEST(Transport, matchesByTagAndInOrder) {
  forBothLinks([](TransportChoice transport) {
    Pair pair(transport);
    int values[4] = {1, 2, 3, 4}, got[4] = {};
    const uint64_t tags[4] = {5, 6, 5, 6};
    Transfer sending[4], receiving[4];
    for (int i = 0; i < 4; ++i) {
      pair.mailbox(0).send(sending[i], 1, kMessages, tags[i], message(4), {&values[i], 4});
    }
    // First the messages of tag 6, then those of tag 5 from any rank.
    const int order[4] = {1, 3, 0, 2};
    for (int i : order) {
      pair.mailbox(1).receive(receiving[i], tags[i] == 5 ? kFromAnyone : 0, kMessages, tags[i],
                              message(4), {&got[i], 4});
    }
    ASSERT(pair.pump([&] {
      return receiving[0].isDone() && receiving[1].isDone() && receiving[2].isDone() &&
             receiving[3].isDone();
    }));
    for (int i = 0; i < 4; ++i) EXPECT_EQ(got[i], values[i]);
    EXPECT_EQ(receiving[0].peer(), 0);
  });
}

TEST(Transport, refusesAnotherSize) {
  forBothLinks([](TransportChoice transport) {
    for (size_t bytes : {size_t{100}, size_t{100'000}}) {
      Pair pair(transport);
      std::vector<char> out(bytes), in(bytes / 2);
      Transfer sending, receiving;
      pair.mailbox(1).receive(receiving, 0, kMessages, 0, message(in.size()), span(in));
      pair.mailbox(0).send(sending, 1, kMessages, 0, message(bytes), span(out));
      ASSERT(pair.pump(
          [&] { return !pair.listener(0).failure().ok() && !pair.listener(1).failure().ok(); }));
      EXPECT_EQ(receiving.status().code(), Code::kMismatch);
    }
  });
}

TEST(Transport, cancelsWhatIsUnderWay) {
  forBothLinks([](TransportChoice transport) {
    Pair pair(transport);
    std::vector<char> out(3'000'000), in(3'000'000);
    {
      Transfer sending, receiving;
      pair.mailbox(1).receive(receiving, 0, kMessages, 0, message(in.size()), span(in));
      pair.mailbox(0).send(sending, 1, kMessages, 0, message(out.size()), span(out));
      for (int i = 0; i < 20; ++i) {
        pair.all[0]->progress();
        pair.all[1]->progress();
      }
    }
    EXPECT(pair.talk());  // the link still delivers frames
  });
}

// ---- messages that are read in place ------------------------------------------------------------

// Counts the bytes of payload between ranks 0 and 1.
std::shared_ptr<test::FrameCounter> payloadCounter() {
  return std::make_shared<test::FrameCounter>(std::vector<int>{0, 1});
}

// The memory of a sender: a shared tensor, or ordinary memory.
class Block {
 public:
  explicit Block(size_t bytes, bool isShared = true) : bytes_(bytes) {
    if (!isShared) own_.resize(bytes);
    data_ = isShared ? SharedHeap::process().allocate(bytes) : own_.data();
    ASSERT(data_ != nullptr);
  }
  ~Block() {
    if (own_.empty()) SharedHeap::process().free(data_);
  }
  Span span() const { return {data_, bytes_}; }
  void fill(const std::vector<char>& from) { std::memcpy(data_, from.data(), bytes_); }

 private:
  const size_t bytes_;
  std::vector<char> own_;
  void* data_;
};

// Two ranks that are connected and know none of each other's shared memory.
struct ConnectedPair : Pair {
  explicit ConnectedPair(TransportChoice transport, const std::shared_ptr<LinkTap>& tap = nullptr,
                         SingleCopyUse singleCopy = SingleCopyUse::kOn)
      : Pair(transport, tap, singleCopy) {
    ASSERT(talk());
  }
  // Sends `out` from rank 0 to rank 1, and returns what rank 1 receives.
  std::vector<char> pass(MessageClass kind, Span out) {
    std::vector<char> in(out.bytes);
    Transfer sending, receiving;
    mailbox(1).receive(receiving, 0, kind, 7, message(in.size()), span(in));
    mailbox(0).send(sending, 1, kind, 7, message(in.size()), out);
    EXPECT(pump([&] { return receiving.isDone() && sending.isDone(); }));
    return in;
  }
};

void forBothKinds(const std::function<void(bool isShared)>& body) {
  body(true);
  body(false);
}

TEST(Transport, readsMessagesInPlace) {
  const auto check = [](const std::vector<char>& out, TransportChoice transport, SingleCopyUse use,
                        bool isShared, bool isEarly) {
    const auto counter = payloadCounter();
    ConnectedPair pair(transport, counter, use);
    const size_t bytes = out.size();
    std::vector<char> in(bytes);
    Block block(bytes, isShared);
    block.fill(out);
    Transfer sending, receiving;
    counter->reset();
    const auto receive = [&] {
      pair.mailbox(1).receive(receiving, 0, kMessages, 7, message(bytes), span(in));
    };
    if (!isEarly) receive();
    pair.mailbox(0).send(sending, 1, kMessages, 7, message(bytes), block.span());
    if (isEarly) {
      pair.turn(10);
      receive();
    }
    ASSERT(pair.pump([&] { return receiving.isDone() && sending.isDone(); }));
    EXPECT_OK(receiving.status());
    EXPECT_OK(sending.status());
    EXPECT(in == out);
    const bool isInPlace = isShared || use == SingleCopyUse::kOn;
    EXPECT_EQ(counter->count().betweenHosts < 1000,
              isInPlace && transport != TransportChoice::kTcp);
  };
  for (const size_t bytes : {size_t{65'537}, size_t{1'000'003}, size_t{9'000'000}}) {
    const std::vector<char> out = pattern(bytes, static_cast<unsigned>(bytes));
    forBothLinks([&](TransportChoice transport) {
      for (const bool isEarly : {false, true}) {
        check(out, transport, SingleCopyUse::kOff, true, isEarly);
        check(out, transport, SingleCopyUse::kOff, false, isEarly);
        check(out, transport, SingleCopyUse::kOn, false, isEarly);
      }
    });
  }
}

// Messages of collectives are staged, and so are small ones.
TEST(Transport, onlyLargeMessagesBetweenTwoRanksAreReadFromAProcess) {
  const auto counter = payloadCounter();
  ConnectedPair pair(TransportChoice::kAuto, counter);
  const auto sentBytes = [&](MessageClass kind, size_t bytes) {
    std::vector<char> out = pattern(bytes, 3);
    counter->reset();
    EXPECT(pair.pass(kind, span(out)) == out);
    return counter->count().betweenHosts;
  };
  EXPECT(sentBytes(kMessages, 3'000'000) < 1000);
  EXPECT(sentBytes(MessageClass::kCollective, 3'000'000) >= 3'000'000);
  EXPECT(sentBytes(kMessages, SingleCopy::kLeastBytes) >= SingleCopy::kLeastBytes);
}

// Messages of each size are first sent both ways, staged and by single copy, and then in the faster
// way. Messages that are received at the same time, also of other sizes, are sent the same way.
TEST(Transport, theWayOfMessagesIsMeasured) {
  const auto counter = payloadCounter();
  constexpr size_t kBytes = 300'000;
  const SingleCopy::Case size = SingleCopy::caseOf(OpKind::kSend, 2, kBytes);
  const auto directOf = [&](ConnectedPair& pair, int messages) {
    std::vector<std::vector<char>> in(messages, std::vector<char>(kBytes));
    std::vector<std::vector<char>> out(messages);
    std::vector<Transfer> sending(messages), receiving(messages);
    counter->reset();
    for (int i = 0; i < messages; ++i) {
      out[i] = pattern(kBytes, i);
      pair.mailbox(1).receive(receiving[i], 0, kMessages, i, message(kBytes), span(in[i]));
      pair.mailbox(0).send(sending[i], 1, kMessages, i, message(kBytes), span(out[i]));
    }
    for (int i = 0; i < messages; ++i) {
      ASSERT(pair.pump([&] { return receiving[i].isDone() && sending[i].isDone(); }));
      EXPECT(in[i] == out[i]);
    }
    const size_t staged = counter->count().betweenHosts / kBytes;
    EXPECT(staged == 0 || staged == static_cast<size_t>(messages));
    return staged == 0;
  };
  ConnectedPair pair(TransportChoice::kAuto, counter, SingleCopyUse::kMeasured);
  for (int round = 0; round < 2 * (SingleCopy::kRounds + 1); ++round) {
    EXPECT(!SingleCopy::process().measured().contains(size));
    EXPECT_EQ(directOf(pair, 1 + round % 3), round % 2 == 1);
  }
  const SingleCopy::Measured result = SingleCopy::process().measured().at(size);
  EXPECT(result.stagedMicros > 0 && result.directMicros > 0);
  const auto stagedMicros = [&] { return SingleCopy::process().measured().at(size).stagedMicros; };
  // The process keeps the result, and later measures again whether single copy is still faster.
  SingleCopy::process().keep(size, {0, 0, SingleCopy::Choice::kDirect});
  ConnectedPair second(TransportChoice::kAuto, counter, SingleCopyUse::kMeasured);
  for (uint64_t i = 1; i < SingleCopy::Chosen::kFirstAgain; ++i) EXPECT(directOf(second, 1));
  for (int round = 0; round < 2 * (SingleCopy::kRounds + 1); ++round) {
    EXPECT_EQ(stagedMicros(), 0.0);
    EXPECT_EQ(directOf(second, 1), round % 2 == 1);
  }
  EXPECT(stagedMicros() > 0);
  SingleCopy::process().keep(size, {0, 0, SingleCopy::Choice::kStaged});
  ConnectedPair third(TransportChoice::kAuto, counter, SingleCopyUse::kMeasured);
  for (int i = 0; i < 50; ++i) EXPECT(!directOf(third, 1));
}

TEST(Transport, aMessageThatIsCancelledWhileItIsReadIsNotReceived) {
  forBothKinds([](bool isShared) {
    ConnectedPair pair(TransportChoice::kAuto);
    constexpr size_t kBytes = 4 * 1024 * 1024;
    Block block(kBytes, isShared);
    std::memset(block.span().data, 1, kBytes);
    std::vector<char> in(kBytes);
    Transfer receiving;
    pair.mailbox(1).receive(receiving, 0, kMessages, 7, message(kBytes), span(in));
    {
      Transfer sending;
      pair.mailbox(0).send(sending, 1, kMessages, 7, message(kBytes), block.span());
      ASSERT(pair.pump([&] { return in.front() == 1; }));
      EXPECT(in.back() == 0);  // rank 1 has not read all of it
    }
    std::memset(block.span().data, 2, kBytes);
    EXPECT(!pair.pump([&] { return receiving.isDone(); }, 200));
    // The link still works, and other messages in the same region are received.
    std::vector<char> other(kBytes);
    Transfer sending, second;
    pair.mailbox(1).receive(second, 0, kMessages, 8, message(kBytes), span(other));
    pair.mailbox(0).send(sending, 1, kMessages, 8, message(kBytes), block.span());
    ASSERT(pair.pump([&] { return second.isDone() && sending.isDone(); }));
    EXPECT(other == std::vector<char>(kBytes, 2));
    EXPECT(!receiving.isDone());
  });
}

// If a message is cancelled, its receiver learns only that some message of the region or process
// was. So it discards what it has read of another message, and asks for a copy.
TEST(Transport, aMessageBesideACancelledOneIsCopied) {
  forBothKinds([](bool isShared) {
    const auto counter = payloadCounter();
    ConnectedPair pair(TransportChoice::kAuto, counter);
    constexpr size_t kBytes = 4 * 1024 * 1024;
    const std::vector<char> out = pattern(kBytes, 5);
    Block block(kBytes, isShared);
    block.fill(out);
    std::vector<char> in(kBytes);
    Transfer sending, receiving;
    pair.mailbox(1).receive(receiving, 0, kMessages, 7, message(kBytes), span(in));
    pair.mailbox(0).send(sending, 1, kMessages, 7, message(kBytes), block.span());
    ASSERT(pair.pump([&] { return in.front() == out.front() && in[1] == out[1]; }));
    EXPECT(in != out);
    {
      Transfer other;
      pair.mailbox(0).send(other, 1, kMessages, 8, message(kBytes), block.span());
    }
    ASSERT(pair.pump([&] { return receiving.isDone() && sending.isDone(); }));
    EXPECT_OK(receiving.status());
    EXPECT(in == out);
    EXPECT(counter->count().betweenHosts >= kBytes);
  });
}

// The receive is cancelled, and then the receiver ends, while it reads a message.
TEST(Transport, readingStopsWithTheReceive) {
  forBothKinds([](bool isShared) {
    ConnectedPair pair(TransportChoice::kAuto);
    constexpr size_t kBytes = 4 * 1024 * 1024;
    Block block(kBytes, isShared);
    std::memset(block.span().data, 1, kBytes);
    auto in = std::make_unique<std::vector<char>>(kBytes);
    auto receiving = std::make_unique<Transfer>();
    Transfer sending;
    pair.mailbox(1).receive(*receiving, 0, kMessages, 7, message(kBytes), span(*in));
    pair.mailbox(0).send(sending, 1, kMessages, 7, message(kBytes), block.span());
    ASSERT(pair.pump([&] { return in->front() == 1; }));
    receiving.reset();
    in.reset();
    EXPECT(!pair.pump([&] { return sending.isDone(); }, 100));
    pair.mailbox(1).detach();
    pair.all[1].reset();
    pair.end(1);
    ASSERT(pair.pump([&] { return sending.isDone(); }));
    EXPECT(!sending.status().ok());
  });
}

// Each message has shared memory attached. One message is cancelled, and one arrives when the
// receiver has no descriptor left.
TEST(Transport, descriptorsArriveWithTheirMessages) {
  for (const bool isPostedFirst : {true, false}) {
    Pair pair(TransportChoice::kAuto);
    constexpr int kCount = 6, kCancelled = 2, kNoneLeft = 4;
    constexpr size_t kBytes = 4096;
    std::vector<std::shared_ptr<Segment>> segments(kCount);
    std::vector<std::vector<char>> in(kCount, std::vector<char>(8));
    std::vector<char> out(8, 'x');
    std::deque<Transfer> sending(kCount), receiving(kCount);
    const auto receive = [&](int i) {
      pair.mailbox(1).receive(receiving[i], 0, kMessages, i, message(8), span(in[i]));
    };
    rlimit before{};
    ASSERT(getrlimit(RLIMIT_NOFILE, &before) == 0);
    // The first one is sent before there is a connection.
    for (int i = kCount - 1; i >= 0; --i) {
      ASSERT_OK(Segment::create(kBytes, &segments[i]));
      segments[i]->data()[0] = static_cast<char>('0' + i);
      if (isPostedFirst) receive(i);
      if (i == kNoneLeft) {
        // There is a connection, and everything that was sent has arrived.
        ASSERT(pair.pump([&] { return sending[kCount - 1].isDone(); }));
        for (int turn = 0; turn < 50; ++turn) pair.all[1]->progress();
        const rlimit none{0, before.rlim_max};
        ASSERT(setrlimit(RLIMIT_NOFILE, &none) == 0);
      }
      pair.mailbox(0).send(sending[i], 1, kMessages, i, message(8), span(out), segments[i]);
      if (i == kCancelled) pair.mailbox(0).cancel(sending[i]);
      if (i == kNoneLeft) {
        for (int turn = 0; turn < 50; ++turn) pair.all[1]->progress();
        setrlimit(RLIMIT_NOFILE, &before);
      }
    }
    for (int i = 0; i < kCount; ++i) {
      if (!isPostedFirst) receive(i);
      if (i == kCancelled && !sending[i].status().ok()) continue;
      ASSERT(pair.pump([&] { return receiving[i].isDone(); }));
      EXPECT(in[i] == out);
      Fd fd = receiving[i].takeDescriptor();
      EXPECT_EQ(fd.isOpen(), i != kNoneLeft);
      if (!fd.isOpen()) continue;
      std::shared_ptr<Segment> mapped;
      ASSERT_OK(Segment::adopt(std::move(fd), kBytes, &mapped));
      EXPECT_EQ(mapped->data()[0] - '0', i);
    }
  }
}

// Messages that wait until they are asked for, and messages of a group that the receiver joins
// later.
TEST(Transport, descriptorsOfMessagesThatWait) {
  for (const size_t bytes : {size_t{8}, size_t{300'000}}) {
    for (const auto transport : {TransportChoice::kAuto, TransportChoice::kTcp}) {
      Pair pair(transport, nullptr, SingleCopyUse::kOff, /*joined=*/1);
      std::shared_ptr<Segment> segment;
      ASSERT_OK(Segment::create(4096, &segment));
      std::vector<char> out = pattern(bytes, 5), in(bytes);
      Transfer sending, receiving;
      pair.mailbox(0).send(sending, 1, kMessages, 7, message(bytes), span(out), segment);
      EXPECT(!pair.pump([&] { return sending.isDone() && bytes > 8; }, 20));
      pair.join(1, kGroup, {0, 1});
      pair.mailbox(1).receive(receiving, 0, kMessages, 7, message(bytes), span(in));
      ASSERT(pair.pump([&] { return sending.isDone() && receiving.isDone(); }));
      EXPECT(in == out);
      EXPECT_EQ(receiving.takeDescriptor().isOpen(), transport == TransportChoice::kAuto);
    }
  }
}

// The receiver has no descriptor left when a region is first sent to it, and has some later.
TEST(Transport, aRegionThatCouldNotBeMappedIsSentAgain) {
  constexpr size_t kBytes = 1'000'000;
  const auto counter = payloadCounter();
  ConnectedPair pair(TransportChoice::kAuto, counter);
  Block block(kBytes);
  const std::vector<char> out = pattern(kBytes, 3);
  block.fill(out);
  const auto sent = [&] {
    counter->reset();
    EXPECT(pair.pass(kMessages, block.span()) == out);
    return counter->count().betweenHosts;
  };
  rlimit before{};
  ASSERT(getrlimit(RLIMIT_NOFILE, &before) == 0);
  const rlimit none{0, before.rlim_max};
  ASSERT(setrlimit(RLIMIT_NOFILE, &none) == 0);
  const size_t copied = sent();
  setrlimit(RLIMIT_NOFILE, &before);
  EXPECT(copied >= kBytes);
  EXPECT(sent() >= kBytes);  // the region is not sent again immediately
  pair.pump([] { return false; }, static_cast<int>(PeerRegions::kTryAgain.count()) + 1);
  EXPECT(sent() < 1000);
}

// Places that a peer has sent are checked before they are used.
TEST(Transport, placesOfAPeerAreChecked) {
  constexpr size_t kBytes = 1024 * 1024;
  const uint64_t head = SharedHeap::headBytes();
  const auto isFound = [&](const SharedPlace& place, size_t bytes, bool isRegion = true,
                           bool hasArrived = true) {
    std::shared_ptr<Segment> made;
    ASSERT_OK(Segment::create(kBytes, &made));
    if (isRegion) new (made->data()) RegionHead;
    PeerRegions regions;
    regions.add(place.region, place.regionBytes, hasArrived ? Fd(dup(made->fd())) : Fd());
    const auto segment = regions.find(place.region);
    return segment && SharedHeap::memoryAt(*segment, place.offset, bytes) != nullptr;
  };
  EXPECT(isFound({1, head, kBytes, 0}, kBytes - head));
  EXPECT(!isFound({1, head, kBytes, 0}, kBytes - head + 1));
  EXPECT(!isFound({1, head, kBytes, 0}, ~size_t{0}));
  EXPECT(!isFound({1, head - 1, kBytes, 0}, 1));
  EXPECT(!isFound({1, kBytes + 1, kBytes, 0}, 1));
  EXPECT(!isFound({1, ~uint64_t{0}, kBytes, 0}, 2));
  EXPECT(!isFound({1, head, 2 * kBytes, 0}, 1));
  EXPECT(!isFound({1, head, 0, 0}, 1));
  EXPECT(!isFound({1, head, kBytes, 0}, 1, /*isRegion=*/false));
  EXPECT(!isFound({1, head, kBytes, 0}, 1, /*isRegion=*/true, /*hasArrived=*/false));
}

TEST(Transport, refusesAPeerWithoutTheSecret) {
  forBothLinks([](TransportChoice transport) {
    Pair pair(transport, nullptr, SingleCopyUse::kOff, /*joined=*/1);
    pair.join(1, kGroup, {0, 1}, std::string(32, 'x'));
    int value = 9, got = 0;
    Transfer sending, receiving;
    pair.mailbox(1).receive(receiving, 0, kMessages, 1, message(4), {&got, 4});
    pair.mailbox(0).send(sending, 1, kMessages, 1, message(4), {&value, 4});
    ASSERT(pair.pump([&] { return sending.isDone(); }));
    EXPECT(!sending.status().ok());
    EXPECT(!receiving.isDone() || !receiving.status().ok());
    EXPECT_EQ(got, 0);
  });
}

// Small messages without a receive do not fill the receiver's memory: after some number the others
// wait at the sender. All arrive in order when they are received.
TEST(Transport, messagesWithoutAReceiveAreBounded) {
  forBothLinks([](TransportChoice transport) {
    Pair pair(transport);
    constexpr size_t kBytes = 64 * 1024;
    constexpr int kMost = static_cast<int>(kMaxBufferedBytes / kBytes);
    constexpr int kCount = 4 * kMost;
    std::vector<char> out(kBytes), in(kBytes);
    // Over a connection from rank 1, rank 0 is notified in time that it must stop.
    ASSERT(pair.Meshes::talk(1, 0, kGroup, 1, 0));
    for (int round = 0; round < 2; ++round) {  // in the second one, rank 0 has been released again
      std::vector<std::unique_ptr<Transfer>> sending;
      std::vector<std::vector<char>> payloads;
      auto done = [&] {
        return std::count_if(sending.begin(), sending.end(),
                             [](const auto& each) { return each->isDone(); });
      };
      for (int i = 0; i < kCount; ++i) {
        payloads.emplace_back(kBytes, static_cast<char>(i));
        sending.push_back(std::make_unique<Transfer>());
        pair.mailbox(0).send(*sending.back(), 1, kMessages, 3, message(kBytes),
                             span(payloads.back()));
        for (auto& mesh : pair.all) mesh->progress();
      }
      EXPECT(pair.pump([&] { return done() >= kMost; }));
      EXPECT(!pair.pump([&] { return done() == kCount; }, 300));
      EXPECT(done() < 2 * kMost);
      for (int i = 0; i < kCount; ++i) {
        Transfer receiving;
        pair.mailbox(1).receive(receiving, 0, kMessages, 3, message(kBytes), span(in));
        ASSERT(pair.pump([&] { return receiving.isDone(); }));
        EXPECT(in == payloads[i]);
      }
      ASSERT(pair.pump([&] { return done() == kCount; }));
      // Small messages are sent immediately again.
      Transfer alone;
      pair.mailbox(0).send(alone, 1, kMessages, 4, message(kBytes), span(out));
      ASSERT(pair.pump([&] { return alone.isDone(); }));
      Transfer taking;
      pair.mailbox(1).receive(taking, 0, kMessages, 4, message(kBytes), span(in));
      ASSERT(pair.pump([&] { return taking.isDone(); }));
    }
  });
}

// A process makes groups with another one that starts again and again. The descriptors of the
// earlier processes are closed.
TEST(Transport, peersInNoGroupAreForgotten) {
  test::Meshes world(2, TransportChoice::kTcp);
  int before = 0;
  for (uint64_t i = 0; i < 40; ++i) {
    const MeshOptions options = world.all[1]->options();
    world.members.clear();
    world.end(1);
    ASSERT_OK(Mesh::create(options, &world.all[1]));
    world.addresses[1] = world.all[1]->address();
    for (const int process : {0, 1}) world.join(process, 100 + i, {0, 1});
    ASSERT(world.talk(0, 1, 100 + i, 0, 1));
    if (i == 5) before = test::openDescriptors();
  }
  EXPECT(test::openDescriptors() <= before + 4);
}

// An event between a thread's last check and its sleep ends the sleep.
TEST(Transport, anEventBeforeTheSleepEndsIt) {
  const auto napsThrough = [](const std::shared_ptr<Mesh>& mesh,
                              const std::function<void()>& event) {
    Sleeper& sleeper = mesh->sleeper();
    const Deadline deadline = Deadline::after(std::chrono::milliseconds(5000));
    Sleeper::Nap nap(sleeper, sleeper.generation());
    event();
    nap.sleep(deadline);
    return deadline.expired();
  };
  Pair pair(TransportChoice::kTcp);
  const std::shared_ptr<Mesh>& mesh = pair.all[0];
  EXPECT(!napsThrough(mesh, [&] { mesh->sleeper().wakeSleepers(); }));
  // Another thread, which waits for something else, has received the ring.
  EXPECT(!napsThrough(mesh, [&] {
    pair.all[1]->bellOf(mesh->address()).ring();
    for (int i = 0; i < 3000; ++i) mesh->progress();
  }));
}

// A thread that leads the sleepers runs out of memory. Afterwards another sleeper can lead.
TEST(Transport, aLeaderWithoutMemoryGivesUpTheLead) {
  int ends[2];
  ASSERT(pipe(ends) == 0);
  int events = 0;
  Sleeper sleeper;
  ASSERT_OK(sleeper.open([&](const epoll_event*, int) {
    if (++events == 1) throw std::bad_alloc();
  }));
  ASSERT_OK(sleeper.watch(ends[0]));
  bool isOut = false;
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(write(ends[1], "x", 1), 1);
    try {
      Sleeper::Nap nap(sleeper, sleeper.generation());
      nap.sleep(Deadline::after(std::chrono::milliseconds(500)));
    } catch (const std::bad_alloc&) {
      isOut = true;
    }
  }
  EXPECT(isOut);
  EXPECT_EQ(events, 2);
  for (const int end : ends) close(end);
}

// A rank fails while the ring to the other one is full. Its operations end immediately, and the
// other rank is woken when the notice of the failure arrives.
TEST(Transport, aFailureIsReportedThroughAFullRing) {
  ConnectedPair pair(TransportChoice::kAuto);
  std::vector<char> byte(1);
  std::vector<std::unique_ptr<Transfer>> sending;
  while (sending.empty() || sending.back()->isDone()) {
    pair.mailbox(0).send(*sending.emplace_back(std::make_unique<Transfer>()), 1, kMessages, 7,
                         message(1), span(byte));
  }
  pair.listener(0).membership().fail(Status(Code::kInternal, "for a test"));
  EXPECT(sending.back()->isDone());
  EXPECT(pair.all[0]->hasPending());
  // Rank 1 handles its ring and reads everything that there is.
  for (int i = 0; i < 3000; ++i) pair.all[1]->progress();
  EXPECT_OK(pair.listener(1).failure());
  Sleeper& sleeper = pair.all[1]->sleeper();
  const Deadline deadline = Deadline::after(std::chrono::milliseconds(5000));
  Sleeper::Nap nap(sleeper, sleeper.generation());
  pair.all[0]->progress();
  EXPECT(!pair.all[0]->hasPending());
  nap.sleep(deadline);
  EXPECT(!deadline.expired());
  EXPECT_CONTAINS(pair.listener(1).failure(), "for a test");
}

// More strangers connect than are admitted at a time, and send nothing. A member is still admitted.
// (What strangers send is tested in handshake_fuzz_test.)
TEST(Transport, silentStrangersDoNotKeepOutMembers) {
  Pair pair(TransportChoice::kTcp);
  std::vector<Fd> strangers;
  for (int i = 0; i < 200; ++i) {
    strangers.push_back(connectTo(pair.all[1]->address().tcp.front()));
    ASSERT(strangers.back().isOpen());
  }
  for (int i = 0; i < 3000; ++i) pair.all[1]->progress();
  EXPECT(pair.talk(3000));  // before the 5 s after which strangers are disconnected
}

TEST(Transport, waitsForDescriptors) {
  forBothLinks([](TransportChoice transport) {
    {
      // UBSan needs a descriptor when it checks the type of an object for the first time.
      Pair first(transport);
      ASSERT(first.talk(3000));
    }
    Pair pair(transport);
    rlimit before{};
    ASSERT(getrlimit(RLIMIT_NOFILE, &before) == 0);
    const rlimit few{static_cast<rlim_t>(test::openDescriptors() + 20), before.rlim_max};
    ASSERT(setrlimit(RLIMIT_NOFILE, &few) == 0);
    std::vector<Fd> taken;
    for (;;) {
      Fd next(dup(0));
      if (!next.isOpen()) break;
      taken.push_back(std::move(next));
    }
    // The connecting end has a descriptor; a ring needs another one for a moment.
    taken.pop_back();
    int value = 9, got = 0;
    Transfer sending, receiving;
    pair.mailbox(1).receive(receiving, 0, kMessages, 1, message(4), {&got, 4});
    pair.mailbox(0).send(sending, 1, kMessages, 1, message(4), {&value, 4});
    EXPECT(!pair.pump([&] { return receiving.isDone() || sending.isDone(); }, 100));
    taken.clear();
    EXPECT(pair.pump([&] { return receiving.isDone(); }, 3000));
    EXPECT_EQ(got, value);
    setrlimit(RLIMIT_NOFILE, &before);
  });
}
