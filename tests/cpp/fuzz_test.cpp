// Frames made of nonsense, by a seed (corpus.h). Nothing may crash, hang, write beyond what was
// posted, or take memory without end; run under the sanitizers it says so. A kept input is what a
// peer says on its link, to the byte (corpus/frames.py writes those that are not by seed).
// Handshakes: handshake_fuzz_test.cpp.
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <vector>

#include "base/crc32c.h"
#include "base/deadline.h"
#include "corpus.h"
#include "listener.h"
#include "test.h"
#include "transport/mailbox.h"
#include "transport/mesh.h"
#include "transport/shm/shared_heap.h"

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
    header.kind = static_cast<FrameKind>(1 + random() % 17);
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
    std::string payload(std::min<uint64_t>(header.payloadBytes, 20'000), 'a');
    for (char& byte : payload) {
      if (random() % 4 == 0) byte = static_cast<char>(random());
    }
    // Where a message can be read, more or less: in a region that can be mapped.
    if (header.kind == FrameKind::kRequestToSend && random() % 4 > 0) {
      SharedPlace place{1 + random() % 2, SharedHeap::kHeadBytes, kRegionBytes, 0};
      if (random() % 3 == 0) place.offset = sizes[random() % std::size(sizes)];
      if (random() % 3 == 0) place.regionBytes = sizes[random() % std::size(sizes)];
      payload.assign(reinterpret_cast<const char*>(&place), sizeof(place));
      header.payloadBytes = sizeof(place);
    }
    if (random() % 3 == 0) {
      header.magic = FrameHeader::kCheckedMagic;
      header.payloadCheck = crc32c(payload.data(), payload.size());
      header.headerCheck = header.check();
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
  void onEvent(bool isClosed) override { link_->onEvent(isClosed); }
  void setAsleep(bool asleep) override { link_->setAsleep(asleep); }
  int fd() const override { return link_->fd(); }
  Fd takeFd(const std::string&) override {
    std::shared_ptr<Segment> region;
    ASSERT_OK(Segment::create(kRegionBytes, &region));
    new (region->data()) RegionHead;
    return Fd(dup(region->fd()));
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

// Rank 0 says this to rank 1, which waits for two messages and has a window, number 7.
void say(const std::string& bytes, TransportChoice transport, bool isGood, int flows = 1) {
  Tongue tongue(bytes);
  std::shared_ptr<Mesh> meshes[2];
  test::Listener listeners[2];
  std::unique_ptr<Mailbox> mailboxes[2];
  for (int rank = 0; rank < 2; ++rank) {
    MeshOptions options;
    options.transport = transport;
    options.storeHost = "127.0.0.1";
    options.flows = flows;
    if (rank == 1) options.tap = &tongue;
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
  // Guarded on both sides: nothing may be written there.
  std::vector<char> memory(3 * kBytes, 'x'), window(3 * kBytes, 'x');
  mailboxes[1]->openWindow(7, {window.data() + kBytes, kBytes});
  char word[kBytes] = {};
  {
    Transfer sending, first, second;
    mailboxes[1]->receive(first, 0, MessageClass::kPointToPoint, 7, message(),
                          {memory.data() + kBytes, kBytes});
    mailboxes[1]->receive(second, 0, MessageClass::kCollective, 7, message(),
                          {memory.data() + kBytes, kBytes});
    listeners[1].agreement().begin(1, message());
    mailboxes[0]->send(sending, 1, MessageClass::kPointToPoint, 7, message(), {word, kBytes});
    const Deadline deadline = Deadline::after(std::chrono::milliseconds(2000));
    for (int quiet = 0; quiet < 20 && !deadline.expired();) {
      bool moved = meshes[0]->progress();
      moved |= meshes[1]->progress();
      quiet = moved || !tongue.isUsed ? 0 : quiet + 1;
    }
    EXPECT(tongue.isUsed);
    if (isGood) EXPECT(first.isDone() && first.status().ok());
  }
  for (size_t i = 0; i < kBytes; ++i) {
    EXPECT(memory[i] == 'x');
    EXPECT(memory[2 * kBytes + i] == 'x');
    EXPECT(window[i] == 'x' && window[2 * kBytes + i] == 'x');
  }
}

}  // namespace

TEST(Fuzz, framesOfNonsense) {
  test::forInputs("frames", 150, nonsense, [](const test::Input& input) {
    // So that a change of the header's layout does not make the corpus worthless unseen.
    const bool isGood = input.name.starts_with("good-");
    say(input.bytes, TransportChoice::kAuto, isGood);
    say(input.bytes, TransportChoice::kTcp, isGood);
    // By all sockets the same.
    say(input.bytes, TransportChoice::kTcp, false, 3);
  });
}
