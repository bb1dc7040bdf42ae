// Meshes and mailboxes, two in one thread, on each kind of link: what every link must do, and
// what strangers must not be able to.
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
#include "listener.h"
#include "passing_sender.h"
#include "test.h"
#include "transport/handshake.h"
#include "transport/mailbox.h"
#include "transport/mesh.h"
#include "transport/shm/peer_regions.h"
#include "transport/shm/shared_heap.h"
#include "transport/shm/single_copy.h"

using namespace mycoll;

namespace {

// Two ranks.
struct Pair {
  explicit Pair(TransportChoice transport, const std::string& secondSecret = std::string(32, 's'),
                int count = 2, std::shared_ptr<LinkTap> tap = nullptr,
                SingleCopyUse singleCopy = SingleCopyUse::kOff) {
    MeshOptions options;
    options.tap = std::move(tap);
    options.singleCopy = singleCopy;
    options.transport = transport;
    options.storeHost = "127.0.0.1";
    ASSERT_OK(Mesh::create(options, &meshes[0]));
    ASSERT_OK(Mesh::create(options, &meshes[1]));
    for (int rank = 0; rank < count; ++rank) {
      join(rank, 42, rank == 0 ? std::string(32, 's') : secondSecret);
    }
  }

  void join(int rank, uint64_t context, const std::string& secret = std::string(32, 's')) {
    GroupAddress group;
    group.context = context;
    group.name = "pair";
    group.secret = secret;
    group.rank = rank;
    group.peers = {meshes[0]->address(), meshes[1]->address()};
    mailboxes[rank] = listeners[rank].join(meshes[rank], group);
  }

  bool pump(const std::function<bool()>& until, int milliseconds = 60'000) {
    const Deadline deadline = Deadline::after(std::chrono::milliseconds(milliseconds));
    while (!until()) {
      for (auto& mesh : meshes) {
        if (mesh) mesh->progress();
      }
      if (deadline.expired()) return false;
    }
    return true;
  }

  std::shared_ptr<Mesh> meshes[2];
  test::Listener listeners[2];
  std::unique_ptr<Mailbox> mailboxes[2];
};

Signature message(size_t bytes) {
  Signature result;
  result.kind = OpKind::kSend;
  result.bytes = bytes;
  return result;
}

constexpr auto kMessages = MessageClass::kPointToPoint;

void forBothLinks(const std::function<void(TransportChoice)>& body) {
  body(TransportChoice::kAuto);
  body(TransportChoice::kTcp);
}

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
          pair.mailboxes[1]->receive(receiving, 0, kMessages, 7, message(bytes), span(in));
        };
        if (isPostedFirst) post();
        pair.mailboxes[0]->send(sending, 1, kMessages, 7, message(bytes), span(out));
        if (!isPostedFirst) {
          for (int i = 0; i < 50; ++i) pair.meshes[1]->progress();
          post();
        }
        ASSERT(pair.pump([&] { return sending.isDone() && receiving.isDone(); }));
        EXPECT_OK(sending.status());
        EXPECT_OK(receiving.status());
        EXPECT(in == out);
      }
    }
    EXPECT(!pair.meshes[0]->hasPending());
    EXPECT(!pair.meshes[1]->hasPending());
  });
}

TEST(Transport, matchesByTagAndInOrder) {
  forBothLinks([](TransportChoice transport) {
    Pair pair(transport);
    int values[4] = {1, 2, 3, 4}, got[4] = {};
    const uint64_t tags[4] = {5, 6, 5, 6};
    Transfer sending[4], receiving[4];
    for (int i = 0; i < 4; ++i) {
      pair.mailboxes[0]->send(sending[i], 1, kMessages, tags[i], message(4), {&values[i], 4});
    }
    // The sixes first, then the fives from whoever sends one.
    const int order[4] = {1, 3, 0, 2};
    for (int i : order) {
      pair.mailboxes[1]->receive(receiving[i], tags[i] == 5 ? kFromAnyone : 0, kMessages, tags[i],
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
      pair.mailboxes[1]->receive(receiving, 0, kMessages, 0, message(in.size()), span(in));
      pair.mailboxes[0]->send(sending, 1, kMessages, 0, message(bytes), span(out));
      ASSERT(pair.pump(
          [&] { return !pair.listeners[0].failure().ok() && !pair.listeners[1].failure().ok(); }));
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
      pair.mailboxes[1]->receive(receiving, 0, kMessages, 0, message(in.size()), span(in));
      pair.mailboxes[0]->send(sending, 1, kMessages, 0, message(out.size()), span(out));
      for (int i = 0; i < 20; ++i) {
        pair.meshes[0]->progress();
        pair.meshes[1]->progress();
      }
    }
    // The link is still in step.
    int value = 9, got = 0;
    Transfer sending, receiving;
    pair.mailboxes[1]->receive(receiving, 0, kMessages, 1, message(4), {&got, 4});
    pair.mailboxes[0]->send(sending, 1, kMessages, 1, message(4), {&value, 4});
    ASSERT(pair.pump([&] { return receiving.isDone(); }));
    EXPECT_EQ(got, value);
  });
}

// ---- messages that are read in place ------------------------------------------------------------

// Counts what leaves.
class Scales final : public LinkTap {
 public:
  std::unique_ptr<LinkSender> tap(std::unique_ptr<LinkSender> link) override {
    return std::make_unique<Scale>(std::move(link), bytes);
  }
  std::unique_ptr<LinkReceiver> tap(std::unique_ptr<LinkReceiver> link) override { return link; }

  size_t bytes = 0;

 private:
  class Scale final : public test::PassingSender {
   public:
    Scale(std::unique_ptr<LinkSender> link, size_t& bytes)
        : PassingSender(std::move(link)), bytes_(bytes) {}
    ssize_t write(const Span* parts, int count) override {
      const ssize_t wrote = link_->write(parts, count);
      if (wrote > 0) bytes_ += static_cast<size_t>(wrote);
      return wrote;
    }

   private:
    size_t& bytes_;
  };
};

// Memory of a sender: of a shared tensor, or any other.
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

// Two ranks that are connected, and have sent each other nothing that is shared.
struct ConnectedPair : Pair {
  explicit ConnectedPair(TransportChoice transport, std::shared_ptr<LinkTap> tap = nullptr,
                         SingleCopyUse singleCopy = SingleCopyUse::kOn)
      : Pair(transport, std::string(32, 's'), 2, std::move(tap), singleCopy) {
    int value = 9, got = 0;
    Transfer sending, receiving;
    mailboxes[1]->receive(receiving, 0, kMessages, 1, message(4), {&got, 4});
    mailboxes[0]->send(sending, 1, kMessages, 1, message(4), {&value, 4});
    ASSERT(pump([&] { return receiving.isDone() && sending.isDone(); }));
  }
};

void forBothKinds(const std::function<void(bool isShared)>& body) {
  body(true);
  body(false);
}

TEST(Transport, readsMessagesInPlace) {
  const auto check = [](const std::vector<char>& out, TransportChoice transport, SingleCopyUse use,
                        bool isShared, bool isEarly) {
    const auto scales = std::make_shared<Scales>();
    ConnectedPair pair(transport, scales, use);
    const size_t bytes = out.size();
    std::vector<char> in(bytes);
    Block block(bytes, isShared);
    block.fill(out);
    Transfer sending, receiving;
    scales->bytes = 0;
    const auto receive = [&] {
      pair.mailboxes[1]->receive(receiving, 0, kMessages, 7, message(bytes), span(in));
    };
    if (!isEarly) receive();
    pair.mailboxes[0]->send(sending, 1, kMessages, 7, message(bytes), block.span());
    if (isEarly) {
      int turns = 0;
      pair.pump([&] { return ++turns > 10; });
      receive();
    }
    ASSERT(pair.pump([&] { return receiving.isDone() && sending.isDone(); }));
    EXPECT_OK(receiving.status());
    EXPECT_OK(sending.status());
    EXPECT(in == out);
    const bool isInPlace = isShared || use == SingleCopyUse::kOn;
    EXPECT_EQ(scales->bytes < 1000, isInPlace && transport != TransportChoice::kTcp);
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
  const auto scales = std::make_shared<Scales>();
  ConnectedPair pair(TransportChoice::kAuto, scales);
  const auto sentBytes = [&](MessageClass kind, size_t bytes) {
    std::vector<char> out = pattern(bytes, 3), in(bytes);
    Transfer sending, receiving;
    scales->bytes = 0;
    pair.mailboxes[1]->receive(receiving, 0, kind, 7, message(bytes), span(in));
    pair.mailboxes[0]->send(sending, 1, kind, 7, message(bytes), span(out));
    ASSERT(pair.pump([&] { return receiving.isDone() && sending.isDone(); }));
    EXPECT(in == out);
    return scales->bytes;
  };
  EXPECT(sentBytes(kMessages, 3'000'000) < 1000);
  EXPECT(sentBytes(MessageClass::kCollective, 3'000'000) > 3'000'000);
  EXPECT(sentBytes(kMessages, SingleCopy::kLeastBytes) > SingleCopy::kLeastBytes);
}

// Each size is tried both ways, and its messages then take one way. Messages that are received at
// the same time, of other sizes, too, take the same way.
TEST(Transport, theWayOfMessagesIsMeasured) {
  const auto scales = std::make_shared<Scales>();
  constexpr size_t kBytes = 300'000;
  const SingleCopy::Case size = SingleCopy::caseOf(OpKind::kSend, 2, kBytes);
  const auto directOf = [&](ConnectedPair& pair, int messages) {
    std::vector<std::vector<char>> in(messages, std::vector<char>(kBytes));
    std::vector<std::vector<char>> out(messages);
    std::vector<Transfer> sending(messages), receiving(messages);
    scales->bytes = 0;
    for (int i = 0; i < messages; ++i) {
      out[i] = pattern(kBytes, i);
      pair.mailboxes[1]->receive(receiving[i], 0, kMessages, i, message(kBytes), span(in[i]));
      pair.mailboxes[0]->send(sending[i], 1, kMessages, i, message(kBytes), span(out[i]));
    }
    for (int i = 0; i < messages; ++i) {
      ASSERT(pair.pump([&] { return receiving[i].isDone() && sending[i].isDone(); }));
      EXPECT(in[i] == out[i]);
    }
    const size_t staged = scales->bytes / kBytes;
    EXPECT(staged == 0 || staged == static_cast<size_t>(messages));
    return staged == 0;
  };
  ConnectedPair pair(TransportChoice::kAuto, scales, SingleCopyUse::kMeasured);
  for (int round = 0; round < 2 * (SingleCopy::kRounds + 1); ++round) {
    EXPECT(!SingleCopy::process().measured().contains(size));
    EXPECT_EQ(directOf(pair, 1 + round % 3), round % 2 == 1);
  }
  const SingleCopy::Measured result = SingleCopy::process().measured().at(size);
  EXPECT(result.stagedMicros > 0 && result.directMicros > 0);
  const auto stagedMicros = [&] { return SingleCopy::process().measured().at(size).stagedMicros; };
  // The process keeps the result, and measures again whether single copy is still the faster way.
  SingleCopy::process().keep(size, {0, 0, SingleCopy::Choice::kDirect});
  ConnectedPair second(TransportChoice::kAuto, scales, SingleCopyUse::kMeasured);
  for (uint64_t i = 1; i < SingleCopy::Chosen::kFirstAgain; ++i) EXPECT(directOf(second, 1));
  for (int round = 0; round < 2 * (SingleCopy::kRounds + 1); ++round) {
    EXPECT_EQ(stagedMicros(), 0.0);
    EXPECT_EQ(directOf(second, 1), round % 2 == 1);
  }
  EXPECT(stagedMicros() > 0);
  SingleCopy::process().keep(size, {0, 0, SingleCopy::Choice::kStaged});
  ConnectedPair third(TransportChoice::kAuto, scales, SingleCopyUse::kMeasured);
  for (int i = 0; i < 50; ++i) EXPECT(!directOf(third, 1));
}

TEST(Transport, aMessageThatIsTakenBackIsNotBelieved) {
  forBothKinds([](bool isShared) {
    ConnectedPair pair(TransportChoice::kAuto);
    constexpr size_t kBytes = 4 * 1024 * 1024;
    Block block(kBytes, isShared);
    std::memset(block.span().data, 1, kBytes);
    std::vector<char> in(kBytes);
    Transfer receiving;
    pair.mailboxes[1]->receive(receiving, 0, kMessages, 7, message(kBytes), span(in));
    {
      Transfer sending;
      pair.mailboxes[0]->send(sending, 1, kMessages, 7, message(kBytes), block.span());
      ASSERT(pair.pump([&] { return in.front() == 1; }));
      EXPECT(in.back() == 0);  // it is being read
    }
    std::memset(block.span().data, 2, kBytes);
    EXPECT(!pair.pump([&] { return receiving.isDone(); }, 200));
    // The link is still in step, and other messages of the region are believed.
    std::vector<char> other(kBytes);
    Transfer sending, second;
    pair.mailboxes[1]->receive(second, 0, kMessages, 8, message(kBytes), span(other));
    pair.mailboxes[0]->send(sending, 1, kMessages, 8, message(kBytes), block.span());
    ASSERT(pair.pump([&] { return second.isDone() && sending.isDone(); }));
    EXPECT(other == std::vector<char>(kBytes, 2));
    EXPECT(!receiving.isDone());
  });
}

// Another message of its region or process was taken back, and nobody can tell which.
TEST(Transport, aMessageInDoubtIsCopied) {
  forBothKinds([](bool isShared) {
    const auto scales = std::make_shared<Scales>();
    ConnectedPair pair(TransportChoice::kAuto, scales);
    constexpr size_t kBytes = 4 * 1024 * 1024;
    const std::vector<char> out = pattern(kBytes, 5);
    Block block(kBytes, isShared);
    block.fill(out);
    std::vector<char> in(kBytes);
    Transfer sending, receiving;
    pair.mailboxes[1]->receive(receiving, 0, kMessages, 7, message(kBytes), span(in));
    pair.mailboxes[0]->send(sending, 1, kMessages, 7, message(kBytes), block.span());
    ASSERT(pair.pump([&] { return in.front() == out.front() && in[1] == out[1]; }));
    EXPECT(in != out);
    {
      Transfer other;
      pair.mailboxes[0]->send(other, 1, kMessages, 8, message(kBytes), block.span());
    }
    ASSERT(pair.pump([&] { return receiving.isDone() && sending.isDone(); }));
    EXPECT_OK(receiving.status());
    EXPECT(in == out);
    EXPECT(scales->bytes > kBytes);
  });
}

// Both ends go while it is read.
TEST(Transport, aMessageIsNotReadForNobody) {
  forBothKinds([](bool isShared) {
    ConnectedPair pair(TransportChoice::kAuto);
    constexpr size_t kBytes = 4 * 1024 * 1024;
    Block block(kBytes, isShared);
    std::memset(block.span().data, 1, kBytes);
    auto in = std::make_unique<std::vector<char>>(kBytes);
    auto receiving = std::make_unique<Transfer>();
    Transfer sending;
    pair.mailboxes[1]->receive(*receiving, 0, kMessages, 7, message(kBytes), span(*in));
    pair.mailboxes[0]->send(sending, 1, kMessages, 7, message(kBytes), block.span());
    ASSERT(pair.pump([&] { return in->front() == 1; }));
    receiving.reset();
    in.reset();
    EXPECT(!pair.pump([&] { return sending.isDone(); }, 100));
    pair.mailboxes[1]->detach();
    pair.meshes[1].reset();
    pair.mailboxes[1].reset();
    ASSERT(pair.pump([&] { return sending.isDone(); }));
    EXPECT(!sending.status().ok());
  });
}

// Shared memory that is attached to messages, in any order of posting; one message is cancelled,
// and for one the receiver has no descriptor left.
TEST(Transport, descriptorsComeWithTheirMessages) {
  for (const bool isPostedFirst : {true, false}) {
    Pair pair(TransportChoice::kAuto);
    constexpr int kCount = 6, kCancelled = 2, kNoneLeft = 4;
    constexpr size_t kBytes = 4096;
    std::vector<std::shared_ptr<Segment>> segments(kCount);
    std::vector<std::vector<char>> in(kCount, std::vector<char>(8));
    std::vector<char> out(8, 'x');
    std::deque<Transfer> sending(kCount), receiving(kCount);
    const auto receive = [&](int i) {
      pair.mailboxes[1]->receive(receiving[i], 0, kMessages, i, message(8), span(in[i]));
    };
    rlimit before{};
    ASSERT(getrlimit(RLIMIT_NOFILE, &before) == 0);
    // Also before there is a connection.
    for (int i = kCount - 1; i >= 0; --i) {
      ASSERT_OK(Segment::create(kBytes, &segments[i]));
      segments[i]->data()[0] = static_cast<char>('0' + i);
      if (isPostedFirst) receive(i);
      if (i == kNoneLeft) {
        // The connection is made, and what was sent has arrived.
        ASSERT(pair.pump([&] { return sending[kCount - 1].isDone(); }));
        for (int turn = 0; turn < 50; ++turn) pair.meshes[1]->progress();
        const rlimit none{0, before.rlim_max};
        ASSERT(setrlimit(RLIMIT_NOFILE, &none) == 0);
      }
      pair.mailboxes[0]->send(sending[i], 1, kMessages, i, message(8), span(out), segments[i]);
      if (i == kCancelled) pair.mailboxes[0]->cancel(sending[i]);
      if (i == kNoneLeft) {
        for (int turn = 0; turn < 50; ++turn) pair.meshes[1]->progress();
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

// Messages that wait for permission, and messages of a group that the receiver makes later.
TEST(Transport, descriptorsOfMessagesThatWait) {
  for (const size_t bytes : {size_t{8}, size_t{300'000}}) {
    for (const auto transport : {TransportChoice::kAuto, TransportChoice::kTcp}) {
      Pair pair(transport, std::string(32, 's'), /*count=*/1);
      std::shared_ptr<Segment> segment;
      ASSERT_OK(Segment::create(4096, &segment));
      std::vector<char> out = pattern(bytes, 5), in(bytes);
      Transfer sending, receiving;
      pair.mailboxes[0]->send(sending, 1, kMessages, 7, message(bytes), span(out), segment);
      EXPECT(!pair.pump([&] { return sending.isDone() && bytes > 8; }, 20));
      pair.join(1, 42);
      pair.mailboxes[1]->receive(receiving, 0, kMessages, 7, message(bytes), span(in));
      ASSERT(pair.pump([&] { return sending.isDone() && receiving.isDone(); }));
      EXPECT(in == out);
      EXPECT_EQ(receiving.takeDescriptor().isOpen(), transport == TransportChoice::kAuto);
    }
  }
}

// What a peer says is looked at before it is used.
// One end has no descriptor left when it is given a region, and some later.
TEST(Transport, aRegionThatCouldNotBeReadIsGivenAgain) {
  constexpr size_t kBytes = 1'000'000;
  const auto scales = std::make_shared<Scales>();
  ConnectedPair pair(TransportChoice::kAuto, scales);
  Block block(kBytes);
  const std::vector<char> out = pattern(kBytes, 3);
  block.fill(out);
  const auto sent = [&] {
    std::vector<char> in(kBytes);
    Transfer sending, receiving;
    scales->bytes = 0;
    pair.mailboxes[1]->receive(receiving, 0, kMessages, 7, message(kBytes), span(in));
    pair.mailboxes[0]->send(sending, 1, kMessages, 7, message(kBytes), block.span());
    EXPECT(pair.pump([&] { return receiving.isDone() && sending.isDone(); }));
    EXPECT(in == out);
    return scales->bytes;
  };
  rlimit before{};
  ASSERT(getrlimit(RLIMIT_NOFILE, &before) == 0);
  const rlimit none{0, before.rlim_max};
  ASSERT(setrlimit(RLIMIT_NOFILE, &none) == 0);
  const size_t copied = sent();
  setrlimit(RLIMIT_NOFILE, &before);
  EXPECT(copied >= kBytes);
  EXPECT(sent() >= kBytes);  // not at once
  pair.pump([] { return false; }, static_cast<int>(PeerRegions::kTryAgain.count()) + 1);
  EXPECT(sent() < 1000);
}

TEST(Transport, placesOfAPeerAreJudged) {
  constexpr size_t kBytes = 1024 * 1024;
  const uint64_t head = SharedHeap::headBytes();
  const auto isFound = [&](const SharedPlace& place, size_t bytes, bool isRegion = true,
                           bool hasCome = true) {
    std::shared_ptr<Segment> made;
    ASSERT_OK(Segment::create(kBytes, &made));
    if (isRegion) new (made->data()) RegionHead;
    PeerRegions regions;
    regions.add(place.region, place.regionBytes, hasCome ? Fd(dup(made->fd())) : Fd());
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
  EXPECT(!isFound({1, head, kBytes, 0}, 1, /*isRegion=*/true, /*hasCome=*/false));
}

TEST(Transport, noticesThatAPeerHasGone) {
  forBothLinks([](TransportChoice transport) {
    Pair pair(transport);
    int value = 9, got = 0;
    Transfer sending, receiving, never;
    pair.mailboxes[1]->receive(receiving, 0, kMessages, 1, message(4), {&got, 4});
    pair.mailboxes[0]->send(sending, 1, kMessages, 1, message(4), {&value, 4});
    ASSERT(pair.pump([&] { return receiving.isDone(); }));
    pair.mailboxes[1]->receive(never, 0, kMessages, 1, message(4), {&got, 4});
    pair.mailboxes[0].reset();
    pair.meshes[0].reset();
    ASSERT(pair.pump([&] { return never.isDone(); }));
    EXPECT_EQ(never.status().code(), Code::kPeerLost);
    EXPECT_EQ(pair.listeners[1].failure().code(), Code::kPeerLost);
  });
}

TEST(Transport, aGoodbyeIsNoLoss) {
  forBothLinks([](TransportChoice transport) {
    Pair pair(transport);
    int value = 9, got = 0;
    Transfer sending, receiving;
    pair.mailboxes[1]->receive(receiving, 0, kMessages, 1, message(4), {&got, 4});
    pair.mailboxes[0]->send(sending, 1, kMessages, 1, message(4), {&value, 4});
    ASSERT(pair.pump([&] { return receiving.isDone() && sending.isDone(); }));
    // Over the connection that the other side has made.
    pair.listeners[1].membership().sendGoodbye(Status(Code::kAborted, "left"), "");
    pair.mailboxes[1].reset();
    pair.meshes[1].reset();
    ASSERT(pair.pump([&] { return pair.listeners[0].gone() == std::vector<int>{1}; }));
    for (int i = 0; i < 200; ++i) pair.meshes[0]->progress();
    EXPECT_OK(pair.listeners[0].failure());
  });
}

TEST(Transport, refusesAPeerWithoutTheSecret) {
  forBothLinks([](TransportChoice transport) {
    Pair pair(transport, std::string(32, 'x'));
    int value = 9, got = 0;
    Transfer sending, receiving;
    pair.mailboxes[1]->receive(receiving, 0, kMessages, 1, message(4), {&got, 4});
    pair.mailboxes[0]->send(sending, 1, kMessages, 1, message(4), {&value, 4});
    ASSERT(pair.pump([&] { return sending.isDone(); }));
    EXPECT(!sending.status().ok());
    EXPECT(!receiving.isDone() || !receiving.status().ok());
    EXPECT_EQ(got, 0);
  });
}

// Small messages that nobody receives do not fill the receiver's memory: from some number on they
// wait at the sender, and all arrive in order when they are wanted.
TEST(Transport, boundsWhatNobodyReceives) {
  forBothLinks([](TransportChoice transport) {
    Pair pair(transport);
    constexpr size_t kBytes = 64 * 1024;
    constexpr int kMost = static_cast<int>(kMaxBufferedBytes / kBytes);
    constexpr int kCount = 4 * kMost;
    std::vector<char> out(kBytes), in(kBytes);
    // The connection, by which the sender hears that it is to hold, takes its time to be made.
    Transfer there, here;
    pair.mailboxes[0]->receive(here, 1, kMessages, 1, message(kBytes), span(in));
    pair.mailboxes[1]->send(there, 0, kMessages, 1, message(kBytes), span(out));
    ASSERT(pair.pump([&] { return here.isDone(); }));
    // Twice, as it must be let go again.
    for (int turn = 0; turn < 2; ++turn) {
      std::vector<std::unique_ptr<Transfer>> sending;
      std::vector<std::vector<char>> payloads;
      auto done = [&] {
        return std::count_if(sending.begin(), sending.end(),
                             [](const auto& each) { return each->isDone(); });
      };
      for (int i = 0; i < kCount; ++i) {
        payloads.emplace_back(kBytes, static_cast<char>(i));
        sending.push_back(std::make_unique<Transfer>());
        pair.mailboxes[0]->send(*sending.back(), 1, kMessages, 3, message(kBytes),
                                span(payloads.back()));
        for (auto& mesh : pair.meshes) mesh->progress();
      }
      EXPECT(pair.pump([&] { return done() >= kMost; }));
      EXPECT(!pair.pump([&] { return done() == kCount; }, 300));
      EXPECT(done() < 2 * kMost);
      for (int i = 0; i < kCount; ++i) {
        Transfer receiving;
        pair.mailboxes[1]->receive(receiving, 0, kMessages, 3, message(kBytes), span(in));
        ASSERT(pair.pump([&] { return receiving.isDone(); }));
        EXPECT(in == payloads[i]);
      }
      ASSERT(pair.pump([&] { return done() == kCount; }));
      // Small ones travel at once again.
      Transfer alone;
      pair.mailboxes[0]->send(alone, 1, kMessages, 4, message(kBytes), span(out));
      ASSERT(pair.pump([&] { return alone.isDone(); }));
      Transfer taking;
      pair.mailboxes[1]->receive(taking, 0, kMessages, 4, message(kBytes), span(in));
      ASSERT(pair.pump([&] { return taking.isDone(); }));
    }
  });
}

// What comes before a group is made is kept for it; what there is no room for comes later.
TEST(Transport, keepsWhatComesEarly) {
  forBothLinks([](TransportChoice transport) {
    for (const size_t bytes : {size_t{4}, size_t{64 * 1024}}) {
      for (const int count : {100, 5000}) {
        Pair pair(transport);
        // The connection is made by another group.
        int value = 9, got = 0;
        Transfer first, taken;
        pair.mailboxes[1]->receive(taken, 0, kMessages, 1, message(4), {&got, 4});
        pair.mailboxes[0]->send(first, 1, kMessages, 1, message(4), {&value, 4});
        ASSERT(pair.pump([&] { return taken.isDone(); }));
        pair.join(0, 43);
        std::vector<char> out(bytes), in(bytes);
        std::vector<std::unique_ptr<Transfer>> sending;
        for (int i = 0; i < count; ++i) {
          sending.push_back(std::make_unique<Transfer>());
          pair.mailboxes[0]->send(*sending.back(), 1, kMessages, 3, message(bytes), span(out));
        }
        const bool hasRoom = count * bytes < 8 * 1024 * 1024;
        EXPECT_EQ(pair.pump([&] { return sending.back()->isDone(); }, hasRoom ? 10'000 : 100),
                  hasRoom);
        for (int i = 0; i < 100; ++i) pair.meshes[1]->progress();
        pair.join(1, 43);
        for (int i = 0; i < count; ++i) {
          Transfer receiving;
          pair.mailboxes[1]->receive(receiving, 0, kMessages, 3, message(bytes), span(in));
          ASSERT(pair.pump([&] { return receiving.isDone(); }));
          EXPECT_OK(receiving.status());
        }
      }
    }
  });
}

// One that makes its groups anew all the time, under a new name each time, leaves nothing behind.
TEST(Transport, forgetsPeersThatNoGroupNames) {
  Pair pair(TransportChoice::kTcp);
  int before = 0;
  for (int i = 0; i < 40; ++i) {
    MeshOptions options = pair.meshes[1]->options();
    pair.mailboxes[0].reset();
    pair.mailboxes[1].reset();
    pair.meshes[1].reset();
    ASSERT_OK(Mesh::create(options, &pair.meshes[1]));
    GroupAddress group;
    group.context = 100 + static_cast<uint64_t>(i);
    group.name = "pair";
    group.secret = std::string(32, 's');
    group.peers = {pair.meshes[0]->address(), pair.meshes[1]->address()};
    pair.mailboxes[0] = pair.listeners[0].join(pair.meshes[0], group);
    group.rank = 1;
    pair.mailboxes[1] = pair.listeners[1].join(pair.meshes[1], group);
    int value = 9, got = 0;
    Transfer sending, receiving;
    pair.mailboxes[1]->receive(receiving, 0, kMessages, 1, message(4), {&got, 4});
    pair.mailboxes[0]->send(sending, 1, kMessages, 1, message(4), {&value, 4});
    ASSERT(pair.pump([&] { return receiving.isDone(); }));
    if (i == 5) before = test::openDescriptors();
  }
  EXPECT(test::openDescriptors() <= before + 4);
}

// What is there, or comes, between a thread's last look and its sleep wakes it all the same.
TEST(Transport, newsBeforeTheSleepIsNotMissed) {
  const auto napsThrough = [](const std::shared_ptr<Mesh>& mesh,
                              const std::function<void()>& news) {
    Sleeper& sleeper = mesh->sleeper();
    const Deadline deadline = Deadline::after(std::chrono::milliseconds(5000));
    Sleeper::Nap nap(sleeper, sleeper.generation());
    news();
    nap.sleep(deadline);
    return deadline.expired();
  };
  Pair pair(TransportChoice::kTcp);
  const std::shared_ptr<Mesh>& mesh = pair.meshes[0];
  EXPECT(!napsThrough(mesh, [&] { mesh->sleeper().wakeSleepers(); }));
  // Another thread, which waits for something else, took the ringing of the bell.
  EXPECT(!napsThrough(mesh, [&] {
    pair.meshes[1]->bellOf(mesh->address()).ring();
    for (int i = 0; i < 3000; ++i) mesh->progress();
  }));
}

// Others sleep and lead as before.
TEST(Transport, aLeaderThatFindsNoMemoryGivesTheLeadBack) {
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

// The news of a failure waits for room in a ring, and the program of its receiver for nothing: the
// one comes back to it at once, and the other is rung when it is there.
TEST(Transport, aFailureLeavesAFullRingAtOnce) {
  ConnectedPair pair(TransportChoice::kAuto);
  std::vector<char> byte(1);
  std::vector<std::unique_ptr<Transfer>> sending;
  while (sending.empty() || sending.back()->isDone()) {
    pair.mailboxes[0]->send(*sending.emplace_back(std::make_unique<Transfer>()), 1, kMessages, 7,
                            message(1), span(byte));
  }
  pair.listeners[0].membership().fail(Status(Code::kInternal, "for a test"));
  EXPECT(sending.back()->isDone());
  EXPECT(pair.meshes[0]->hasPending());
  // It was rung; that is over, and so is what it had to read.
  for (int i = 0; i < 3000; ++i) pair.meshes[1]->progress();
  EXPECT_OK(pair.listeners[1].failure());
  Sleeper& sleeper = pair.meshes[1]->sleeper();
  const Deadline deadline = Deadline::after(std::chrono::milliseconds(5000));
  Sleeper::Nap nap(sleeper, sleeper.generation());
  pair.meshes[0]->progress();
  EXPECT(!pair.meshes[0]->hasPending());
  nap.sleep(deadline);
  EXPECT(!deadline.expired());
  EXPECT(pair.listeners[1].failure().message().find("for a test") != std::string::npos);
}

// Garbage, truncated handshakes, and connections that say nothing.
TEST(Transport, strangersChangeNothing) {
  Pair pair(TransportChoice::kTcp);
  const TcpAddress target = pair.meshes[1]->address().tcp.front();
  const int before = test::openDescriptors();
  std::mt19937 random(3);
  for (int i = 0; i < 300; ++i) {
    Fd socket = connectTo(target);
    ASSERT(socket.isOpen());
    Hello hello;
    std::memset(hello.sourceUid, 'a', sizeof(hello.sourceUid));
    std::memcpy(hello.destinationUid, pair.meshes[1]->address().uid.data(), 32);
    hello.context = 42;
    hello.destination = 1;
    std::vector<char> bytes = pattern(sizeof(hello), random());
    if (i % 3 == 0) std::memcpy(bytes.data(), &hello, sizeof(hello));
    if (i % 5 == 0) bytes.resize(random() % bytes.size());
    (void)!send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    pair.meshes[1]->progress();
  }
  int value = 9, got = 0;
  Transfer sending, receiving;
  pair.mailboxes[1]->receive(receiving, 0, kMessages, 1, message(4), {&got, 4});
  pair.mailboxes[0]->send(sending, 1, kMessages, 1, message(4), {&value, 4});
  ASSERT(pair.pump([&] { return receiving.isDone(); }));
  EXPECT_EQ(got, value);
  pair.pump([&] { return test::openDescriptors() <= before + 4; });
  EXPECT(test::openDescriptors() <= before + 4);
}

// More of them than are let in at a time, all silent and all connected.
TEST(Transport, strangersDoNotTakeTheMembersPlaces) {
  Pair pair(TransportChoice::kTcp);
  std::vector<Fd> strangers;
  for (int i = 0; i < 200; ++i) {
    strangers.push_back(connectTo(pair.meshes[1]->address().tcp.front()));
    ASSERT(strangers.back().isOpen());
  }
  for (int i = 0; i < 3000; ++i) pair.meshes[1]->progress();
  int value = 9, got = 0;
  Transfer sending, receiving;
  pair.mailboxes[1]->receive(receiving, 0, kMessages, 1, message(4), {&got, 4});
  pair.mailboxes[0]->send(sending, 1, kMessages, 1, message(4), {&value, 4});
  // They are thrown out after 5 s: it must not take that.
  ASSERT(pair.pump([&] { return receiving.isDone(); }, 3000));
  EXPECT_OK(receiving.status());
  EXPECT_EQ(got, value);
}

TEST(Transport, waitsForDescriptors) {
  forBothLinks([](TransportChoice transport) {
    {
      // UBSan needs a descriptor when it sees an object's type for the first time.
      Pair first(transport);
      int value = 9, got = 0;
      Transfer sending, receiving;
      first.mailboxes[1]->receive(receiving, 0, kMessages, 1, message(4), {&got, 4});
      first.mailboxes[0]->send(sending, 1, kMessages, 1, message(4), {&value, 4});
      ASSERT(first.pump([&] { return receiving.isDone() && sending.isDone(); }, 3000));
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
    // Room for the connecting end; a ring takes a descriptor for a moment.
    taken.pop_back();
    int value = 9, got = 0;
    Transfer sending, receiving;
    pair.mailboxes[1]->receive(receiving, 0, kMessages, 1, message(4), {&got, 4});
    pair.mailboxes[0]->send(sending, 1, kMessages, 1, message(4), {&value, 4});
    EXPECT(!pair.pump([&] { return receiving.isDone() || sending.isDone(); }, 100));
    taken.clear();
    EXPECT(pair.pump([&] { return receiving.isDone(); }, 3000));
    EXPECT_EQ(got, value);
    setrlimit(RLIMIT_NOFILE, &before);
  });
}
