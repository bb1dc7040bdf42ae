// What a peer says is nonsense, by a seed (corpus.h): its frames, where its shared tensors lie, and
// where its window. Nothing may crash, hang, write beyond what was posted, read what is not
// offered, or take memory without end; run under the sanitizers it says so. A kept input is what
// the peer says, to the byte (corpus/frames.py writes those that are not by seed). Handshakes:
// handshake_fuzz_test.cpp.
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
#include "listener.h"
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

// Mostly right frames from rank 0 to rank 1, with something wrong here and there.
std::string nonsense(std::mt19937& random) {
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
    // Where a message can be read, more or less: in a region that can be mapped.
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

// Says what the seed wants instead of what the peer has sent.
class Liar final : public LinkReceiver {
 public:
  Liar(std::unique_ptr<LinkReceiver> link, std::string bytes)
      : link_(std::move(link)), bytes_(std::move(bytes)) {}
  ssize_t read(void* data, size_t bytes, bool) override {
    const size_t taken = std::min(bytes, bytes_.size() - at_);
    std::memcpy(data, bytes_.data() + at_, taken);
    at_ += taken;
    return static_cast<ssize_t>(taken);
  }
  bool maybeReadable() const override { return at_ < bytes_.size(); }
  void lookAgain() override { link_->lookAgain(); }
  void onEvent(bool isClosed) override { link_->onEvent(isClosed); }
  void setAsleep(bool asleep) override { link_->setAsleep(asleep); }
  int fd() const override { return link_->fd(); }
  bool takeFd(Fd* fd) override {
    std::shared_ptr<Segment> region;
    ASSERT_OK(Segment::create(kRegionBytes, &region));
    new (region->data()) RegionHead;
    *fd = Fd(dup(region->fd()));
    return true;
  }

 private:
  std::unique_ptr<LinkReceiver> link_;
  std::string bytes_;
  size_t at_ = 0;
};

class Tongue final : public LinkTap {
 public:
  explicit Tongue(std::string bytes) : bytes_(std::move(bytes)) {}
  std::unique_ptr<LinkSender> tap(std::unique_ptr<LinkSender> link) override { return link; }
  std::unique_ptr<LinkReceiver> tap(std::unique_ptr<LinkReceiver> link) override {
    isUsed = true;
    return std::make_unique<Liar>(std::move(link), bytes_);
  }
  bool isUsed = false;

 private:
  std::string bytes_;
};

// Two ranks of a group, of this thread both. tap: of what comes to rank 1.
struct Pair {
  explicit Pair(TransportChoice transport, int flows = 1, std::shared_ptr<LinkTap> tap = nullptr) {
    for (int rank = 0; rank < 2; ++rank) {
      MeshOptions options;
      options.transport = transport;
      options.storeHost = "127.0.0.1";
      options.flows = flows;
      options.singleCopy = SingleCopyUse::kOn;
      if (rank == 1) options.tap = std::move(tap);
      ASSERT_OK(Mesh::create(options, &meshes[rank]));
    }
    for (int rank = 0; rank < 2; ++rank) {
      GroupAddress group;
      group.context = kContext;
      group.name = "fuzz";
      group.secret = std::string(32, 's');
      group.rank = rank;
      group.peers = {meshes[0]->address(), meshes[1]->address()};
      mailboxes[rank] = listeners[rank].join(meshes[rank], group);
    }
  }

  std::shared_ptr<Mesh> meshes[2];
  test::Listener listeners[2];
  std::unique_ptr<Mailbox> mailboxes[2];
};

// Rank 0 says this to rank 1, which waits for two messages and has a window, number 7.
void say(const std::string& bytes, TransportChoice transport, bool isGood, int flows = 1) {
  const auto tongue = std::make_shared<Tongue>(bytes);
  Pair pair(transport, flows, tongue);
  auto& [meshes, listeners, mailboxes] = pair;
  // Guarded on both sides: nothing may be written there. What has come is used at once.
  std::vector<char> memory(3 * kBytes, 'x'), other(3 * kBytes, 'x'), window(3 * kBytes, 'x');
  bool isUsed = false;
  mailboxes[1]->windows().open(7, {window.data() + kBytes, kBytes});
  char word[kBytes] = {};
  {
    Transfer sending, first, second;
    mailboxes[1]->receive(first, 0, MessageClass::kPointToPoint, 7, message(),
                          {memory.data() + kBytes, kBytes});
    mailboxes[1]->receive(second, 0, MessageClass::kCollective, 7, message(),
                          {other.data() + kBytes, kBytes});
    listeners[1].agreement().begin(1, message());
    mailboxes[0]->send(sending, 1, MessageClass::kPointToPoint, 7, message(), {word, kBytes});
    const Deadline deadline = Deadline::after(std::chrono::seconds(60));
    for (int quiet = 0; quiet < 20 && !deadline.expired();) {
      bool moved = meshes[0]->progress();
      moved |= meshes[1]->progress();
      quiet = moved || !tongue->isUsed ? 0 : quiet + 1;
      if (first.isDone() && !std::exchange(isUsed, true)) {
        std::fill_n(memory.begin() + kBytes, kBytes, 'u');
      }
    }
    EXPECT(tongue->isUsed);
    if (isGood) EXPECT(first.isDone() && first.status().ok());
  }
  for (size_t i = 0; i < kBytes; ++i) {
    EXPECT(memory[i] == 'x' && memory[2 * kBytes + i] == 'x');
    EXPECT(!isUsed || memory[kBytes + i] == 'u');
    EXPECT(other[i] == 'x' && other[2 * kBytes + i] == 'x');
    EXPECT(window[i] == 'x' && window[2 * kBytes + i] == 'x');
  }
}

// ---- where shared tensors lie -------------------------------------------------------------------

constexpr size_t kTensorBytes = PeerMemory::kLeastSharedReduce;
// With which each rank has a region of its own.
const size_t kBlockBytes = SharedHeap::kRegionBytes - SharedHeap::headBytes();
constexpr size_t kGuardBytes = 4096;

// A rank's shared memory: numbers, so that it shows where something was read, or zeros.
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

// What rank 1 says when it comes to a collective; what it publishes follows. In that, region 1 is
// the one that it has.
struct Lie {
  uint8_t operation = 0;  // of kOperations
  uint8_t isOffer = 1;
  uint16_t rounds = 0;
  uint32_t blobBytes = 0;  // as it claims
};
constexpr OpKind kOperations[] = {OpKind::kBroadcast, OpKind::kScatter,  OpKind::kGather,
                                  OpKind::kAllGather, OpKind::kAllToAll, OpKind::kReduceScatter,
                                  OpKind::kAllReduce};

std::string offersOfNonsense(std::mt19937& random) {
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
  Lie lie;
  lie.operation = static_cast<uint8_t>(random() % std::size(kOperations));
  lie.isOffer = random() % 8 > 0;
  if (random() % 6 == 0) lie.rounds = static_cast<uint16_t>(random() % 4);
  lie.blobBytes = static_cast<uint32_t>(spans.size() * sizeof(SharedSpan));
  if (random() % 6 == 0) lie.blobBytes = static_cast<uint32_t>(any());
  if (random() % 6 == 0) lie.blobBytes -= static_cast<uint32_t>(1 + random() % 24);
  std::string bytes(reinterpret_cast<const char*>(&lie), sizeof(lie));
  bytes.append(reinterpret_cast<const char*>(spans.data()), spans.size() * sizeof(SharedSpan));
  return bytes;
}

// Rank 0's part of it. Results come from `out` on; what rank 1 gives comes to *landing.
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

// Says it again as long as the ranks make new regions known to each other; then it has done all
// rounds.
Task tell(ShmGroup group, const Lie& lie, const std::string& blob) {
  Arena& arena = group.arena;
  bool isNew = true;
  for (int turn = 0; isNew && turn < 10; ++turn) {
    const size_t claimed = std::min<size_t>(lie.blobBytes, arena.shape().smallBytes);
    std::memcpy(arena.beginBlob(claimed), blob.data(), std::min(blob.size(), claimed));
    arena.arrive(group.signature, lie.blobBytes, lie.rounds, lie.isOffer != 0);
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

// As many as there are behind so many bytes.
template <typename T>
std::vector<T> valuesIn(const std::string& bytes, size_t from) {
  std::vector<T> values;
  for (; bytes.size() - from >= sizeof(T); from += sizeof(T)) {
    std::memcpy(&values.emplace_back(), bytes.data() + from, sizeof(T));
  }
  return values;
}

// Rank 1 says this when it comes to a collective in shared memory.
void offer(const test::Input& input) {
  Lie lie;
  if (input.bytes.size() < sizeof(lie)) return;
  std::memcpy(&lie, input.bytes.data(), sizeof(lie));
  Pair pair(TransportChoice::kAuto);
  Block in(false), out(false), theirs(true);
  std::vector<SharedSpan> spans = valuesIn<SharedSpan>(input.bytes, sizeof(lie));
  for (SharedSpan& span : spans) {
    if (span.region == 0) continue;
    span.region = span.region == 1 ? theirs.region() : span.region | uint64_t{1} << 32;
  }
  const std::string blob(reinterpret_cast<const char*>(spans.data()),
                         spans.size() * sizeof(SharedSpan));

  char* const result = out.tensor(kGuardBytes).begin();
  Span landing;
  const OpKind kind = kOperations[lie.operation % std::size(kOperations)];
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
  Task honest = shmCollective({{*pair.mailboxes[0], 1, signature}, arenas[0], memories[0]}, call);
  Task lying = tell({{*pair.mailboxes[1], 1, signature}, arenas[1], memories[1]}, lie, blob);
  for (auto& listener : pair.listeners) listener.agreement().begin(1, signature);
  const Deadline deadline = Deadline::after(std::chrono::milliseconds(20'000));
  while (!honest.finished() && !deadline.expired()) {
    step(honest);
    step(lying);
    for (auto& mesh : pair.meshes) mesh->progress();
  }
  ASSERT(honest.finished());
  if (input.name.starts_with("good-")) EXPECT_OK(honest.result());
  // What comes of it lies where it was said to be, in what the rank has shared.
  if (honest.result().ok() && lie.isOffer && lie.rounds == 0 && kind != OpKind::kAllReduce) {
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

// ---- where a window lies ------------------------------------------------------------------------

constexpr size_t kWindowBytes = 1000;

// One word of what a rank tells of its window is another one.
struct Change {
  uint64_t word = 0;
  uint64_t value = 0;
};

// The first byte: how the ranks are connected, and whose memory is shared.
std::string windowsOfNonsense(std::mt19937& random) {
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

// Runs what a rank runs to open a window, which begins with what it tells the others.
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

// Rank 1 says this of its window; rank 0 puts into it.
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

TEST(Fuzz, framesOfNonsense) {
  test::forInputs("frames", 150, nonsense, [](const test::Input& input) {
    // So that a change of the header's layout does not make the corpus worthless unseen.
    const bool isGood = input.name.starts_with("good-");
    say(input.bytes, TransportChoice::kAuto, isGood);
    say(input.bytes, TransportChoice::kTcp, isGood && !input.name.ends_with("-in-place"));
    // By all sockets the same.
    say(input.bytes, TransportChoice::kTcp, false, 3);
  });
}

// The address of an invitation's sender may be unknown, so that nothing can answer it.
TEST(Fuzz, onlyInvitationsComeToAReception) {
  struct Handler final : EventHandler {
    void handle(const Event& event) override REQUIRES(ioRole) {
      const auto* const lost = std::get_if<PeerLost>(&event);
      hasAnswered |= lost && lost->uid.empty();  // the answer found no address
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
      const auto tongue = std::make_shared<Tongue>(bytes);
      std::shared_ptr<Mesh> meshes[2];
      std::unique_ptr<Mailbox> mailboxes[2];
      for (int rank = 0; rank < 2; ++rank) {
        MeshOptions options;
        options.transport = transport;
        options.storeHost = "127.0.0.1";
        if (rank == 1) options.tap = tongue;
        ASSERT_OK(Mesh::create(options, &meshes[rank]));
      }
      for (int rank = 0; rank < 2; ++rank) {
        GroupAddress group;
        group.isInvitation = true;
        group.context = kContext;
        group.name = "invitation";
        group.secret = std::string(32, 's');
        group.rank = rank;
        group.peers = {rank == 0 ? meshes[0]->address() : PeerAddress(), meshes[1]->address()};
        mailboxes[rank] = std::make_unique<Mailbox>(meshes[rank], group, &handler);
        mailboxes[rank]->open();
      }
      mailboxes[0]->notify(1, FrameKind::kInvitation, "");
      const Deadline deadline = Deadline::after(std::chrono::seconds(60));
      for (int quiet = 0; quiet < 20 && !deadline.expired();) {
        const bool moved = meshes[0]->progress() | meshes[1]->progress();
        quiet = moved || !tongue->isUsed ? 0 : quiet + 1;
      }
      EXPECT(tongue->isUsed);
      EXPECT(!handler.hasAnswered);
    }
  }
}

TEST(Fuzz, noMessageIsReceivedByAFrameOfAnUnknownKind) {
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
              std::make_shared<Tongue>(
                  std::string(reinterpret_cast<const char*>(&frame), sizeof(frame))));
    char word[kBytes] = {};
    Transfer sending, receiving;
    pair.mailboxes[1]->receive(receiving, 0, MessageClass::kPointToPoint, 7, message(),
                               {word, kBytes});
    pair.mailboxes[0]->send(sending, 1, MessageClass::kPointToPoint, 7, message(), {word, kBytes});
    const Deadline deadline = Deadline::after(std::chrono::seconds(60));
    while (!receiving.isDone() && !deadline.expired()) {
      for (auto& mesh : pair.meshes) mesh->progress();
    }
    EXPECT(receiving.isDone() && receiving.status().code() == Code::kPeerLost);
  }
}

TEST(Fuzz, offersOfNonsense) { test::forInputs("offers", 100, offersOfNonsense, offer); }

TEST(Fuzz, windowsOfNonsense) { test::forInputs("windows", 60, windowsOfNonsense, describe); }
