// A peer sends invalid data (corpus.h): frames, locations of shared tensors, and locations of
// windows. The receiver must not crash, hang, write beyond what was posted, read what was not
// offered, or use unlimited memory; the sanitizers check more of that. A kept input contains the
// exact bytes that the peer sends; corpus/frames.py writes those that are not from seeds.
// handshake_fuzz_test.cpp tests handshakes.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "collectives/shm/collectives.h"
#include "corpus.h"
#include "engine/window.h"
#include "meshes.h"
#include "passing_link.h"
#include "test.h"
#include "transport/mailbox.h"
#include "transport/mesh.h"
#include "transport/shm/shared_heap.h"
#include "world.h"

using namespace mycoll;

namespace {

constexpr uint64_t kContext = 42;
constexpr size_t kBytes = 64;
constexpr size_t kRegionBytes = 64 * 1024;

Signature message() {
  Signature result;
  result.kind = OpKind::kSend;
  result.bytes = kBytes;
  return result;
}

// Frames from rank 0 to rank 1 that are mostly valid, with some wrong fields.
std::string randomFrames(std::mt19937& random) {
  const uint64_t sizes[] = {0,     1,         kBytes,  kBytes + 1,        4096,
                            16384, 16384 + 1, 1 << 20, uint64_t{1} << 40, ~uint64_t{0}};
  std::string bytes;
  const unsigned frames = 1 + random() % 6;
  for (unsigned i = 0; i < frames; ++i) {
    FrameHeader header;
    header.kind = static_cast<FrameKind>(random() % 22);
    header.messageClass = static_cast<MessageClass>(random() % 5);
    header.source = 0;
    header.destination = 1;
    header.context = kContext;
    header.tag = random() % 3 ? 7 : (random() % 4) << kStepBits;
    header.signature = message();
    header.messageBytes = kBytes;
    header.payloadBytes = kBytes;
    header.senderRequest = random() % 4;
    header.receiverRequest = random() % 4;
    if (random() % 3 == 0) header.payloadBytes = sizes[random() % std::size(sizes)];
    if (random() % 3 == 0) header.messageBytes = sizes[random() % std::size(sizes)];
    if (random() % 5 == 0) header.offset = sizes[random() % std::size(sizes)];
    if (random() % 5 == 0) header.source = static_cast<int32_t>(random());
    if (random() % 5 == 0) header.context = random();
    if (random() % 4 == 0) header.hasDescriptor = 1;
    std::string payload(std::min<uint64_t>(header.payloadBytes, 20'000), 'a');
    for (char& byte : payload) {
      if (random() % 4 == 0) byte = static_cast<char>(random());
    }
    // The location of a message, mostly within a region that can be mapped.
    if (header.kind == FrameKind::kRequestToSend && random() % 4 > 0) {
      SharedPlace place{1 + random() % 2, SharedHeap::headBytes(), kRegionBytes, 0};
      if (random() % 3 == 0) place.offset = sizes[random() % std::size(sizes)];
      if (random() % 3 == 0) place.regionBytes = sizes[random() % std::size(sizes)];
      if (random() % 3 == 0) place.region = SharedPlace::kProcess + random() % 65;
      payload.assign(reinterpret_cast<const char*>(&place), sizeof(place));
      header.hasDescriptor = random() % 4 > 0;
      header.payloadBytes = sizeof(place);
    }
    bytes.append(reinterpret_cast<const char*>(&header), sizeof(header));
    bytes += payload;
  }
  for (unsigned flips = random() % 4; flips > 0; --flips) {
    bytes[random() % bytes.size()] ^= static_cast<char>(1 << random() % 8);
  }
  if (random() % 4 == 0) bytes.resize(random() % bytes.size());
  return bytes;
}

// Delivers these bytes instead of those that the peer has sent.
class ReplacingReceiver final : public test::PassingReceiver {
 public:
  ReplacingReceiver(std::unique_ptr<LinkReceiver> link, std::string bytes)
      : PassingReceiver(std::move(link)), bytes_(std::move(bytes)) {}
  ssize_t read(void* data, size_t bytes, bool) override {
    const size_t taken = std::min(bytes, bytes_.size() - at_);
    std::memcpy(data, bytes_.data() + at_, taken);
    at_ += taken;
    return static_cast<ssize_t>(taken);
  }
  bool maybeReadable() const override { return at_ < bytes_.size(); }
  bool takeFd(Fd* fd) override {
    std::shared_ptr<Segment> region;
    ASSERT_OK(Segment::create(kRegionBytes, &region));
    new (region->data()) RegionHead;
    *fd = Fd(dup(region->fd()));
    return true;
  }

 private:
  std::string bytes_;
  size_t at_ = 0;
};

class ReplacingTap final : public LinkTap {
 public:
  explicit ReplacingTap(std::string bytes) : bytes_(std::move(bytes)) {}
  std::unique_ptr<LinkSender> tap(std::unique_ptr<LinkSender> link) override { return link; }
  std::unique_ptr<LinkReceiver> tap(std::unique_ptr<LinkReceiver> link) override {
    isUsed = true;
    return std::make_unique<ReplacingReceiver>(std::move(link), bytes_);
  }
  bool isUsed = false;

 private:
  std::string bytes_;
};

// Two ranks of a group in this thread. tap: for what rank 1 receives.
struct Pair : test::Meshes {
  explicit Pair(TransportChoice transport, int flows = 1, std::shared_ptr<LinkTap> tap = nullptr)
      : Meshes(2, transport, {{1, std::move(tap)}}, [&](MeshOptions& options) {
          options.flows = flows;
          options.singleCopy = SingleCopyUse::kOn;
        }) {
    for (const int rank : {0, 1}) join(rank, kContext, {0, 1});
  }
  Mailbox& mailbox(int rank) { return *at(rank, kContext).mailbox; }
};

// Calls both meshes until they are idle, and `afterTurn` after each turn.
void turnUntilIdle(
    const std::vector<std::shared_ptr<Mesh>>& meshes, const ReplacingTap& tap,
    const std::function<void()>& afterTurn = [] {}) {
  const Deadline deadline = Deadline::after(std::chrono::seconds(60));
  for (int quiet = 0; quiet < 20 && !deadline.expired();) {
    const bool moved = meshes[0]->progress() | meshes[1]->progress();
    quiet = moved || !tap.isUsed ? 0 : quiet + 1;
    afterTurn();
  }
  EXPECT(tap.isUsed);
}

// Rank 0 sends these bytes to rank 1, which waits for two messages and has window 7.
void sendFrames(const std::string& bytes, TransportChoice transport, bool isGood, int flows = 1) {
  const auto tap = std::make_shared<ReplacingTap>(bytes);
  Pair pair(transport, flows, tap);
  // The memory before and after each buffer must not be written. A received message is overwritten
  // immediately, so that later writes show.
  std::vector<char> memory(3 * kBytes, 'x'), other(3 * kBytes, 'x'), window(3 * kBytes, 'x');
  bool isUsed = false;
  pair.mailbox(1).windows().open(7, {window.data() + kBytes, kBytes});
  char word[kBytes] = {};
  {
    Transfer sending, first, second;
    pair.mailbox(1).receive(first, 0, MessageClass::kPointToPoint, 7, message(),
                            {memory.data() + kBytes, kBytes});
    pair.mailbox(1).receive(second, 0, MessageClass::kCollective, 7, message(),
                            {other.data() + kBytes, kBytes});
    pair.at(1, kContext).listener.agreement().begin(1, message());
    pair.mailbox(0).send(sending, 1, MessageClass::kPointToPoint, 7, message(), {word, kBytes});
    turnUntilIdle(pair.all, *tap, [&] {
      if (first.isDone() && !std::exchange(isUsed, true)) {
        std::fill_n(memory.begin() + kBytes, kBytes, 'u');
      }
    });
    if (isGood) EXPECT(first.isDone() && first.status().ok());
  }
  for (size_t i = 0; i < kBytes; ++i) {
    EXPECT(memory[i] == 'x' && memory[2 * kBytes + i] == 'x');
    EXPECT(!isUsed || memory[kBytes + i] == 'u');
    EXPECT(other[i] == 'x' && other[2 * kBytes + i] == 'x');
    EXPECT(window[i] == 'x' && window[2 * kBytes + i] == 'x');
  }
}

// ---- locations of shared tensors ----------------------------------------------------------------

constexpr size_t kTensorBytes = PeerMemory::kLeastSharedReduce;
// A block of this size has a region of its own.
const size_t kBlockBytes = SharedHeap::kRegionBytes - SharedHeap::headBytes();
constexpr size_t kGuardBytes = 4096;

// A rank's shared memory: numbers, which show the location that was read, or zeros.
class Block {
 public:
  explicit Block(bool isNumbered)
      : words_(static_cast<uint32_t*>(SharedHeap::process().allocate(kBlockBytes))) {
    ASSERT(words_ != nullptr);
    for (size_t i = 0; i < 8 * kTensorBytes / 4; ++i) {
      words_[i] = isNumbered ? static_cast<uint32_t>(i) : 0;
    }
  }
  Block(const Block&) = delete;
  ~Block() { SharedHeap::process().free(words_); }

  Span tensor(size_t offset) const {
    return {reinterpret_cast<char*>(words_) + offset, kTensorBytes};
  }
  uint64_t region() const { return SharedHeap::process().find(tensor(0)).region; }

 private:
  uint32_t* const words_;
};

// The arrival of rank 1 at a collective, which the offers that it publishes follow. In those,
// region 1 is rank 1's own region.
struct Arrival {
  uint8_t operation = 0;  // of kOperations
  uint8_t isOffer = 1;
  uint16_t rounds = 0;
  uint32_t blobBytes = 0;  // the claimed size of the offers
};
constexpr OpKind kOperations[] = {OpKind::kBroadcast, OpKind::kScatter,  OpKind::kGather,
                                  OpKind::kAllGather, OpKind::kAllToAll, OpKind::kReduceScatter,
                                  OpKind::kAllReduce};

std::string randomOffers(std::mt19937& random) {
  const uint64_t values[] = {0,
                             1,
                             2,
                             kTensorBytes - 1,
                             SharedHeap::headBytes() - 1,
                             SharedHeap::headBytes(),
                             SharedHeap::kRegionBytes - kTensorBytes,
                             SharedHeap::kRegionBytes - kTensorBytes + 1,
                             SharedHeap::kRegionBytes,
                             uint64_t{1} << 40,
                             ~uint64_t{0},
                             ~uint64_t{0} - kTensorBytes + 1};
  const auto any = [&] { return values[random() % std::size(values)]; };
  std::vector<SharedSpan> spans(random() % 10 ? 1 + random() % 3 : random() % 200);
  for (SharedSpan& span : spans) {
    span = {1, SharedHeap::headBytes() + random() % 4 * kTensorBytes / 4, kTensorBytes};
    if (random() % 6 == 0) span.region = random() % 2 ? any() : random() % 100;
    if (random() % 3 == 0) span.offset = any();
    if (random() % 6 == 0) span.bytes = any();
  }
  Arrival arrival;
  arrival.operation = static_cast<uint8_t>(random() % std::size(kOperations));
  arrival.isOffer = random() % 8 > 0;
  if (random() % 6 == 0) arrival.rounds = static_cast<uint16_t>(random() % 4);
  arrival.blobBytes = static_cast<uint32_t>(spans.size() * sizeof(SharedSpan));
  if (random() % 6 == 0) arrival.blobBytes = static_cast<uint32_t>(any());
  if (random() % 6 == 0) arrival.blobBytes -= static_cast<uint32_t>(1 + random() % 24);
  std::string bytes(reinterpret_cast<const char*>(&arrival), sizeof(arrival));
  bytes.append(reinterpret_cast<const char*>(spans.data()), spans.size() * sizeof(SharedSpan));
  return bytes;
}

// Rank 0's call. Its results begin at `out`, and the data of rank 1 is received into *landing.
Call callOf(OpKind kind, const Block& in, char* out, Span* landing) {
  const Span give[] = {in.tensor(0), in.tensor(kTensorBytes)};
  const Span take[] = {{out, kTensorBytes}, {out + kTensorBytes, kTensorBytes}};
  const bool readsList = kind == OpKind::kAllToAll || kind == OpKind::kReduceScatter;
  const bool writesList =
      kind == OpKind::kAllToAll || kind == OpKind::kAllGather || kind == OpKind::kGather;
  Call call;
  call.kind = kind;
  call.dtype = DType::kInt32;
  call.elementBytes = 4;
  call.reduceOp = ReduceOp::kSum;
  if (kind == OpKind::kBroadcast || kind == OpKind::kScatter) {
    call.root = 1;
  } else {
    for (int i = 0; i <= readsList; ++i) call.in.push_back(give[i]);
  }
  if (kind == OpKind::kGather) call.root = 0;
  for (int i = 0; i <= writesList; ++i) call.out.push_back(take[i]);
  *landing = take[writesList];
  return call;
}

// Rank 1 arrives again while the ranks introduce new regions to each other, and then claims to have
// done all rounds.
Task arriveWith(ShmGroup group, const Arrival& arrival, const std::string& blob) {
  Arena& arena = group.arena;
  bool isNew = true;
  for (int turn = 0; isNew && turn < 10; ++turn) {
    const size_t claimed = std::min<size_t>(arrival.blobBytes, arena.shape().smallBytes);
    std::memcpy(arena.beginBlob(claimed), blob.data(), std::min(blob.size(), claimed));
    arena.arrive(group.signature, arrival.blobBytes, arrival.rounds, arrival.isOffer != 0);
    AllArrived arrived(arena, group.signature);
    co_await arrived;
    const PeerMemory::News news = group.memory.newsIn(arena);
    isNew = news.isAny();
    if (news.isRegion) MYCOLL_CO_RETURN_IF_ERROR(co_await group.memory.introduceRegions(group));
    if (news.isProcess) MYCOLL_CO_RETURN_IF_ERROR(co_await group.memory.introduceProcesses(group));
  }
  for (const Counter counter : {Counter::kFilled, Counter::kReduced, Counter::kDone}) {
    arena.publish(counter, uint64_t{1} << 40);
  }
  co_return Status();
}

void step(Task& task) {
  if (task.finished() || (task.waitingFor() && !task.waitingFor()->ready())) return;
  task.resume();
}

// Reads all complete values after the first `from` bytes.
template <typename T>
std::vector<T> valuesIn(const std::string& bytes, size_t from) {
  std::vector<T> values;
  for (; bytes.size() - from >= sizeof(T); from += sizeof(T)) {
    std::memcpy(&values.emplace_back(), bytes.data() + from, sizeof(T));
  }
  return values;
}

// Runs a collective in shared memory at which rank 1 arrives with this input.
void offer(const test::Input& input) {
  Arrival arrival;
  if (input.bytes.size() < sizeof(arrival)) return;
  std::memcpy(&arrival, input.bytes.data(), sizeof(arrival));
  Pair pair(TransportChoice::kAuto);
  Block in(false), out(false), theirs(true);
  std::vector<SharedSpan> spans = valuesIn<SharedSpan>(input.bytes, sizeof(arrival));
  for (SharedSpan& span : spans) {
    if (span.region == 0) continue;
    span.region = span.region == 1 ? theirs.region() : span.region | uint64_t{1} << 32;
  }
  const std::string blob(reinterpret_cast<const char*>(spans.data()),
                         spans.size() * sizeof(SharedSpan));

  char* const result = out.tensor(kGuardBytes).begin();
  Span landing;
  const OpKind kind = kOperations[arrival.operation % std::size(kOperations)];
  const Call call = callOf(kind, in, result, &landing);
  const Signature signature = call.signature();
  ArenaShape shape;
  shape.ranks = 2;
  shape.areas = 2;
  std::shared_ptr<Segment> segment;
  ASSERT_OK(Segment::create(shape.totalBytes(), &segment));
  Arena arenas[2] = {{segment, shape, 0, std::vector<Bell>(2), {0, 1}, DistanceChoice::kMeasured},
                     {segment, shape, 1, std::vector<Bell>(2), {0, 1}, DistanceChoice::kMeasured}};
  PeerMemory memories[2] = {{0, SingleCopyUse::kOff}, {1, SingleCopyUse::kOff}};
  Task honest = shmCollective({{pair.mailbox(0), 1, signature}, arenas[0], memories[0]}, call);
  Task faulty =
      arriveWith({{pair.mailbox(1), 1, signature}, arenas[1], memories[1]}, arrival, blob);
  for (const int rank : {0, 1}) pair.at(rank, kContext).listener.agreement().begin(1, signature);
  const Deadline deadline = Deadline::after(std::chrono::milliseconds(20'000));
  while (!honest.finished() && !deadline.expired()) {
    step(honest);
    step(faulty);
    pair.turn(1);
  }
  ASSERT(honest.finished());
  if (input.name.starts_with("good-")) EXPECT_OK(honest.result());
  // If the collective succeeds, its data is from the offered location in rank 1's region.
  if (honest.result().ok() && arrival.isOffer && arrival.rounds == 0 &&
      kind != OpKind::kAllReduce) {
    const auto whole = SharedHeap::process().segmentOf(theirs.region());
    const bool isHad =
        !spans.empty() && spans[0].region == theirs.region() && spans[0].bytes == kTensorBytes;
    const char* from =
        isHad ? SharedHeap::memoryAt(*whole, spans[0].offset, kTensorBytes) : nullptr;
    EXPECT(from && std::memcmp(landing.data, from, kTensorBytes) == 0);
  }
  for (const char* byte = result - kGuardBytes; byte < result; ++byte) EXPECT(*byte == 0);
  const char* const end = result + 2 * kTensorBytes;
  for (const char* byte = end; byte < end + kGuardBytes; ++byte) EXPECT(*byte == 0);
}

// ---- locations of windows -----------------------------------------------------------------------

constexpr size_t kWindowBytes = 1000;

// A change of one word in a rank's description of its window.
struct Change {
  uint64_t word = 0;
  uint64_t value = 0;
};

// The first byte determines how the ranks are connected, and whose memory is shared.
std::string randomWindows(std::mt19937& random) {
  const uint64_t values[] = {0,
                             1,
                             2,
                             SharedHeap::headBytes() - 1,
                             SharedHeap::headBytes(),
                             kWindowBytes - 1,
                             kWindowBytes + 1,
                             SharedHeap::kRegionBytes - kWindowBytes,
                             SharedHeap::kRegionBytes,
                             SharedHeap::kRegionBytes + 1,
                             uint64_t{1} << 40,
                             ~uint64_t{0},
                             ~uint64_t{0} - kWindowBytes};
  std::string bytes(1, static_cast<char>(random() % 8));
  for (unsigned changes = random() % 4; changes > 0; --changes) {
    const Change change{random() % (random() % 2 ? 4 : 8), values[random() % std::size(values)]};
    bytes.append(reinterpret_cast<const char*>(&change), sizeof(change));
  }
  return bytes;
}

// Runs the collectives with which a rank opens a window, and changes the first one's input, which
// is the description of the window.
class Distorted final : public CollectiveRunner {
 public:
  Distorted(CollectiveRunner& runner, const std::vector<Change>& changes)
      : runner_(runner), changes_(changes) {}
  Task run(Call call) override {
    for (const Change& change : std::exchange(changes_, {})) {
      ASSERT(change.word < call.in[0].bytes / 8);
      std::memcpy(call.in[0].begin() + change.word * 8, &change.value, 8);
    }
    Status status = co_await runner_.run(std::move(call));
    co_return status;
  }

 private:
  CollectiveRunner& runner_;
  std::vector<Change> changes_;
};

// Rank 1 describes its window with these changes, and rank 0 puts into it.
void describe(const test::Input& input) {
  if (input.bytes.empty()) return;
  const char places = input.bytes[0];
  const std::vector<Change> changes = valuesIn<Change>(input.bytes, 1);
  runWorld(2, places & 1 ? test::Links::kTcp : test::Links::kShm, [&](Communicator& group) {
    SharedHeap& heap = SharedHeap::process();
    const bool isShared = places & (group.rank() == 0 ? 2 : 4);
    std::vector<char> own(kWindowBytes);
    void* const block = heap.allocate(kWindowBytes);
    const auto window = std::make_shared<Window>(group.shared_from_this());
    const auto complete = [&](const OpPtr& op) { return group.wait(op, Deadline::never()); };
    Composite honest, opening;
    ASSERT_OK(window->open({isShared ? block : own.data(), kWindowBytes}, {}, nullptr, &honest));
    opening = [&](CollectiveRunner& runner) -> Task {
      Distorted distorted(runner, group.rank() == 1 ? changes : std::vector<Change>());
      Status status = co_await honest(distorted);
      co_return status;
    };
    const Status opened =
        complete(group.submitComposite(OpKind::kWindow, std::move(opening), nullptr, true));
    if (input.name.starts_with("good-")) EXPECT_OK(opened);
    OpPtr op;
    if (opened.ok() && group.rank() == 0) {
      uint64_t bytes = 0;
      Window::Description description;
      std::shared_ptr<Pages> pages;
      if (window->describe(1, &bytes, &description).ok() && window->map(1, &pages).ok() && pages) {
        EXPECT_EQ(pages->bytes(), bytes);
        EXPECT(bytes == 0 || heap.find({pages->data(), bytes}).region != 0);
      }
      char byte = 7;
      for (const uint64_t offset : {uint64_t{0}, bytes - 1, bytes}) {
        const Status put = window->put({&byte, 1}, 1, offset, nullptr, true, kGroupTimeout, &op);
        EXPECT(put.ok() || offset >= bytes || group.hasFailed());
        if (put.ok()) (void)complete(op);
      }
      if (window->signal(1, true, kGroupTimeout, &op).ok()) (void)complete(op);
    } else if (opened.ok() && window->waitSignal(0, true, kGroupTimeout, &op).ok()) {
      (void)complete(op);
    }
    EXPECT(heap.free(block));
  });
}

}  // namespace

TEST(Fuzz, invalidFrames) {
  test::forInputs("frames", 150, randomFrames, [](const test::Input& input) {
    // Good inputs must succeed. They fail if the layout of the header changes, and with it the
    // meaning of the corpus.
    const bool isGood = input.name.starts_with("good-");
    sendFrames(input.bytes, TransportChoice::kAuto, isGood);
    sendFrames(input.bytes, TransportChoice::kTcp, isGood && !input.name.ends_with("-in-place"));
    // All sockets deliver the same bytes.
    sendFrames(input.bytes, TransportChoice::kTcp, false, 3);
  });
}

// A reception may not know the address of the sender of an invitation, and then it cannot answer.
TEST(Fuzz, aReceptionAcceptsOnlyInvitations) {
  struct Handler final : EventHandler {
    void handle(const Event& event) override REQUIRES(ioRole) {
      const auto* const lost = std::get_if<PeerLost>(&event);
      hasAnswered |= lost && lost->uid.empty();  // an answer was sent to the unknown address
    }
    bool hasAnswered = false;
  } handler;
  for (const TransportChoice transport : {TransportChoice::kAuto, TransportChoice::kTcp}) {
    for (int kind = 0; kind <= static_cast<int>(kLastFrameKind) + 1; ++kind) {
      FrameHeader frame;
      frame.kind = static_cast<FrameKind>(kind);
      frame.source = 0;
      frame.destination = 1;
      frame.context = kContext;
      frame.tag = 7;
      const std::string bytes(reinterpret_cast<const char*>(&frame), sizeof(frame));
      const auto tap = std::make_shared<ReplacingTap>(bytes);
      const test::Meshes world(2, transport, {{1, tap}});
      std::unique_ptr<Mailbox> mailboxes[2];
      for (int rank = 0; rank < 2; ++rank) {
        GroupAddress group;
        group.isInvitation = true;
        group.context = kContext;
        group.name = "invitation";
        group.secret = std::string(32, 's');
        group.rank = rank;
        group.peers = {rank == 0 ? world.addresses[0] : PeerAddress(), world.addresses[1]};
        mailboxes[rank] = std::make_unique<Mailbox>(world.all[rank], group, &handler);
        mailboxes[rank]->open();
      }
      mailboxes[0]->notify(1, FrameKind::kInvitation, "");
      turnUntilIdle(world.all, *tap);
      EXPECT(!handler.hasAnswered);
    }
  }
}

TEST(Fuzz, framesOfUnknownKindsAreRefused) {
  for (const int kind : {0, static_cast<int>(kLastFrameKind) + 1, 255}) {
    FrameHeader frame;
    frame.kind = static_cast<FrameKind>(kind);
    frame.messageClass = MessageClass::kPointToPoint;
    frame.destination = 1;
    frame.context = kContext;
    frame.tag = 7;
    frame.signature = message();
    frame.messageBytes = kBytes;
    Pair pair(TransportChoice::kTcp, 1,
              std::make_shared<ReplacingTap>(
                  std::string(reinterpret_cast<const char*>(&frame), sizeof(frame))));
    char word[kBytes] = {};
    Transfer sending, receiving;
    pair.mailbox(1).receive(receiving, 0, MessageClass::kPointToPoint, 7, message(),
                            {word, kBytes});
    pair.mailbox(0).send(sending, 1, MessageClass::kPointToPoint, 7, message(), {word, kBytes});
    EXPECT(pair.turnUntil([&] { return receiving.isDone(); }));
    EXPECT_EQ(receiving.status().code(), Code::kPeerLost);
  }
}

TEST(Fuzz, invalidOffers) { test::forInputs("offers", 100, randomOffers, offer); }

TEST(Fuzz, invalidWindows) { test::forInputs("windows", 60, randomWindows, describe); }
