// Links inside a host deliver what is written, whatever the pieces, and while the laps of the ring
// grow.
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "test.h"
#include "transport/shm/link.h"

using namespace mycoll;

namespace {

// Both ends of a link in one thread, and a stream of known bytes between them.
struct Pair {
  explicit Pair(DistanceChoice distance) {
    ASSERT(Segment::create(ringSegmentBytes(), &segment).ok());
    int sockets[2];
    ASSERT(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
    sender = std::make_unique<ShmSender>(segment, RingSide::kMaker,
                                         std::make_shared<const Fd>(sockets[0]), Bell());
    receiver = std::make_unique<ShmReceiver>(
        segment, RingSide::kTaker, std::make_shared<const Fd>(sockets[1]), Bell(), distance);
  }

  // The stream repeats after a prime number of bytes.
  static constexpr size_t kPeriod = 1'000'003;
  // Returns at least kPeriod bytes of the stream, from this place.
  static char* from(uint64_t place) {
    static std::vector<char>* const kBytes = [] {
      auto* const bytes = new std::vector<char>(2 * kPeriod);
      std::mt19937 random(1);
      for (size_t i = 0; i < kPeriod; ++i) {
        (*bytes)[i] = (*bytes)[i + kPeriod] = static_cast<char>(random());
      }
      return bytes;
    }();
    return kBytes->data() + place % kPeriod;
  }

  size_t write(size_t bytes) {
    bytes = std::min(bytes, kPeriod);
    char* const data = from(written);
    const Span parts[2] = {{data, bytes / 3}, {data + bytes / 3, bytes - bytes / 3}};
    const ssize_t taken = sender->write(parts, 2);
    ASSERT(taken >= 0);
    written += static_cast<uint64_t>(taken);
    return static_cast<size_t>(taken);
  }

  size_t read(size_t bytes, bool isStreaming) {
    bytes = std::min(bytes, kPeriod);
    const ssize_t got = receiver->read(target.data(), bytes, isStreaming);
    ASSERT(got >= 0);
    wrong += std::memcmp(target.data(), from(consumed), static_cast<size_t>(got)) != 0;
    consumed += static_cast<uint64_t>(got);
    return static_cast<size_t>(got);
  }

  size_t memory() const {
    struct stat info;
    ASSERT(fstat(segment->fd(), &info) == 0);
    return static_cast<size_t>(info.st_blocks) * 512;
  }

  std::shared_ptr<Segment> segment;
  std::unique_ptr<ShmSender> sender;
  std::unique_ptr<ShmReceiver> receiver;
  uint64_t written = 0;
  uint64_t consumed = 0;
  uint64_t wrong = 0;  // the number of wrong reads
  std::vector<char> target = std::vector<char>(kPeriod);
};

constexpr size_t kHeader = 16 * 1024;  // the most bytes of the ring's header

}  // namespace

TEST(Ring, carriesEveryByteWhateverThePieces) {
  for (const DistanceChoice distance :
       {DistanceChoice::kNear, DistanceChoice::kFar, DistanceChoice::kMeasured}) {
    for (unsigned seed = 1; seed <= 12; ++seed) {
      std::mt19937 random(seed);
      const auto below = [&](size_t most) { return random() % most; };
      Pair link(distance);
      // Some seeds send mostly small pieces, some large ones; some readers are slow.
      const size_t most = size_t{1} << (8 + seed);
      while (link.written < 6 * kLongLap) {
        for (size_t i = below(4); i > 0; --i) link.write(below(most) + 1);
        for (size_t i = below(4); i > 0; --i) link.read(below(most) + 1, below(2) == 0);
      }
      while (link.consumed < link.written) ASSERT(link.read(most, false) > 0);
      EXPECT_EQ(link.wrong, uint64_t{0});
      EXPECT(!link.receiver->maybeReadable());
      if (link.wrong) std::fprintf(stderr, "seed %u\n", seed);
    }
  }
}

TEST(Ring, takesAtMostOneLap) {
  Pair link(DistanceChoice::kNear);
  const auto fill = [&] {
    size_t taken = 0;
    while (const size_t more = link.write(kLongLap)) taken += more;
    return taken;
  };
  const auto drain = [&] {
    size_t got = 0;
    while (const size_t more = link.read(kLongLap, false)) got += more;
    return got;
  };
  EXPECT_EQ(fill(), kShortLap);
  EXPECT_EQ(link.read(1, false), size_t{1});
  // At the end of a lap there is room and much data, so the next laps are long.
  EXPECT_EQ(fill(), kLongLap - kShortLap + 1);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(drain(), kLongLap);
    EXPECT_EQ(fill(), kLongLap);
  }
  EXPECT_EQ(link.wrong, uint64_t{0});
}

TEST(Ring, growsForLargeMessagesBetweenNearProcessesOnly) {
  const auto memoryAfter = [](DistanceChoice distance, size_t message) {
    Pair link(distance);
    while (link.written < 6 * kLongLap) {
      for (size_t left = message; left > 0;) {
        left -= link.write(left);
        while (link.read(kLongLap, false) > 0) continue;
      }
    }
    EXPECT_EQ(link.wrong, uint64_t{0});
    return link.memory();
  };
  EXPECT(memoryAfter(DistanceChoice::kFar, 300'000) <= kShortLap + kHeader);
  EXPECT(memoryAfter(DistanceChoice::kNear, 3'000) <= kShortLap + kHeader);
  EXPECT(memoryAfter(DistanceChoice::kNear, 300'000) > kShortLap + kHeader);
  EXPECT(memoryAfter(DistanceChoice::kNear, 300'000) <= ringSegmentBytes() + kHeader);
}

TEST(Ring, measuresHowNearItsEndsAre) {
#if defined(__SANITIZE_THREAD__)
  SKIP("a lap takes too long under TSan to distinguish near from far");
#endif
  // A thread is near itself, but another program may interrupt some laps.
  Pair link(DistanceChoice::kMeasured);
  const auto* const header = reinterpret_cast<const RingHeader*>(link.segment->data());
  EXPECT_EQ(header->areNear.load(), 0U);
  for (int i = 0; i < 1000 && header->areNear.load() == 0; ++i) {
    link.write(1);  // begins a lap
    link.read(1, false);
    for (size_t left = kShortLap - 1; left > 0;) left -= link.write(left);
    while (link.read(kShortLap, false) > 0) continue;
  }
  EXPECT_EQ(header->areNear.load(), 1U);
  EXPECT_EQ(link.wrong, uint64_t{0});
}

// If a peer writes invalid values into the header, no memory beyond the ring is read.
TEST(Ring, anInvalidHeaderReadsNothingBeyondTheRing) {
  for (const uint64_t head : {uint64_t{1} << 40, ~uint64_t{0}, uint64_t{kLongLap} * 3 + 5}) {
    Pair link(DistanceChoice::kMeasured);
    auto* const header = reinterpret_cast<RingHeader*>(link.segment->data());
    header->grownAt.store(kShortLap);
    header->head.store(head);
    std::vector<char> data(4 * kLongLap);
    for (int i = 0; i < 20; ++i) {
      const ssize_t got = link.receiver->read(data.data(), data.size(), false);
      EXPECT(got >= 0 && static_cast<size_t>(got) <= kLongLap);
    }
  }
}
