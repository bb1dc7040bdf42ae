// A network that misbehaves by a seed: bytes that come late and in pieces, links that overtake each
// other, connections that break, ranks that die at every step, bits that flip. Whatever it does,
// each operation ends with the right bits or with an error that names the cause, on every survivor.
//
//   simulation_test                                   a few seeds of each kind
//   SIMULATION_SEEDS=5000 simulation_test             many
//   SIMULATION_SEED=1234 simulation_test              one again, as a failure names it
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "engine/window.h"
#include "test.h"
#include "transport/frame.h"
#include "transport/link.h"
#include "transport/shm/shared_heap.h"
#include "world.h"

using namespace mycoll;
using namespace std::chrono_literals;

namespace {

constexpr int kRanks = 3;

unsigned number(const char* variable, unsigned otherwise) {
  const char* text = std::getenv(variable);
  return text ? static_cast<unsigned>(std::strtoul(text, nullptr, 10)) : otherwise;
}

void forSeeds(unsigned few, const std::function<void(unsigned seed)>& body) {
  if (std::getenv("SIMULATION_SEED")) return body(number("SIMULATION_SEED", 0));
  const unsigned count = number("SIMULATION_SEEDS", few);
  for (unsigned seed = 1; seed <= count; ++seed) body(seed);
}

// One rank's network. Called under the mesh's I/O lock, but for kill().
class Weather final : public LinkTap {
 public:
  Weather(unsigned seed, int rank) : random_(seed * 31 + static_cast<unsigned>(rank)) {
    hindrance_ = random_() % 4;  // of 8 moves: how many come to nothing, or stop half way
  }
  // At the so many-th move of this rank: one connection breaks, or all (the rank dies).
  void planBreak(uint64_t move) { breakAt_ = move; }
  void planDeath(uint64_t move) { dieAt_ = move; }
  // A bit of what comes in by the so many-th read of at least so many bytes.
  void planFlip(uint64_t read, size_t bytes) { flipAt_ = read, flipBytes_ = bytes; }
  void mayFlip(void* data, ssize_t bytes) {
    if (bytes <= 0 || static_cast<size_t>(bytes) < flipBytes_ || --flipAt_ != 0) return;
    static_cast<unsigned char*>(data)[random_() % static_cast<size_t>(bytes)] ^=
        static_cast<unsigned char>(1u << random_() % 8);
  }
  bool isDead() const { return isDead_.load(); }

  std::unique_ptr<LinkSender> tap(std::unique_ptr<LinkSender> link) override;
  std::unique_ptr<LinkReceiver> tap(std::unique_ptr<LinkReceiver> link) override;

  // What becomes of a move of so many bytes: fewer, or none now; or -1, and the link is broken.
  ssize_t allowed(size_t bytes, int fd) {
    const uint64_t move = ++moves_;
    if (move == dieAt_) isDead_.store(true);
    if (isDead_.load() || move == breakAt_) {
      ::shutdown(fd, SHUT_RDWR);
      return -1;
    }
    const unsigned dice = random_() % 8;
    if (dice >= hindrance_) return static_cast<ssize_t>(bytes);
    return dice % 2 ? 0 : static_cast<ssize_t>(1 + random_() % bytes);
  }

 private:
  std::mt19937 random_;
  unsigned hindrance_;
  uint64_t moves_ = 0;
  uint64_t breakAt_ = ~uint64_t{0};
  uint64_t dieAt_ = ~uint64_t{0};
  uint64_t flipAt_ = ~uint64_t{0};
  size_t flipBytes_ = 0;
  std::atomic<bool> isDead_{false};
};

class Sender final : public LinkSender {
 public:
  Sender(Weather& weather, std::unique_ptr<LinkSender> link)
      : weather_(weather), link_(std::move(link)) {}
  ssize_t write(const Span* parts, int count) override {
    const ssize_t allowed = weather_.allowed(parts[0].bytes, link_->fd());
    if (allowed <= 0 || isBroken_) return isBroken_ |= allowed < 0, isBroken_ ? -1 : 0;
    if (static_cast<size_t>(allowed) == parts[0].bytes) return link_->write(parts, count);
    const Span part{parts[0].data, static_cast<size_t>(allowed)};
    return link_->write(&part, 1);
  }
  void setAsleep(bool asleep) override { link_->setAsleep(asleep); }
  int fd() const override { return link_->fd(); }
  bool sendFd(int fd, const std::string& cookie) override { return link_->sendFd(fd, cookie); }

 private:
  Weather& weather_;
  std::unique_ptr<LinkSender> link_;
  bool isBroken_ = false;
};

class Receiver final : public LinkReceiver {
 public:
  Receiver(Weather& weather, std::unique_ptr<LinkReceiver> link)
      : weather_(weather), link_(std::move(link)) {}
  ssize_t read(void* data, size_t bytes, bool streaming) override {
    if (bytes == 0) return 0;
    const ssize_t allowed = weather_.allowed(bytes, link_->fd());
    if (allowed <= 0 || isBroken_) return isBroken_ |= allowed < 0, isBroken_ ? -1 : 0;
    const ssize_t got = link_->read(data, static_cast<size_t>(allowed), streaming);
    weather_.mayFlip(data, got);
    return got;
  }
  bool maybeReadable() const override { return isBroken_ || link_->maybeReadable(); }
  void onEvent(bool isClosed) override { link_->onEvent(isClosed); }
  void setAsleep(bool asleep) override { link_->setAsleep(asleep); }
  int fd() const override { return link_->fd(); }
  Fd takeFd(const std::string& cookie) override { return link_->takeFd(cookie); }

 private:
  Weather& weather_;
  std::unique_ptr<LinkReceiver> link_;
  bool isBroken_ = false;
};

std::unique_ptr<LinkSender> Weather::tap(std::unique_ptr<LinkSender> link) {
  return std::make_unique<Sender>(*this, std::move(link));
}
std::unique_ptr<LinkReceiver> Weather::tap(std::unique_ptr<LinkReceiver> link) {
  return std::make_unique<Receiver>(*this, std::move(link));
}

// What a rank has come to: how many operations ended well, and the error after them, if any.
struct Fate {
  int done = 0;
  Status error;
  bool isWrong = false;
};

int32_t element(int rank, int step, size_t index) {
  return static_cast<int32_t>(rank * 1'000'003 + step * 101 + static_cast<int>(index) * 7);
}

constexpr size_t kMostElements = 40'000;

// A window with room for what the rank before this one puts in each step.
struct Target {
  std::vector<int32_t> own;
  int32_t* memory = nullptr;  // own, or shared
  std::shared_ptr<Window> window;

  Target(Communicator& group, bool isShared) : window(Window::make(group.shared_from_this())) {
    constexpr size_t kElements = 10 * kMostElements;
    if (isShared) memory = static_cast<int32_t*>(SharedHeap::process().allocate(kElements * 4));
    if (!memory) own.resize(kElements), memory = own.data();
  }
  ~Target() {
    window.reset();
    if (own.empty()) SharedHeap::process().free(memory);
  }
  Target(const Target&) = delete;

  Status open(Communicator& group) {
    Composite opening;
    MYCOLL_RETURN_IF_ERROR(window->open({memory, 10 * kMostElements * 4}, {}, nullptr, &opening));
    const OpPtr op = group.submitComposite(OpKind::kWindow, std::move(opening), nullptr, true);
    return group.wait(op, Deadline::never());
  }
  // Puts to the next rank, and waits for what the one before puts here.
  std::vector<OpPtr> exchange(Communicator& group, int step, Span data) {
    const int self = group.rank(), ranks = group.ranks();
    const uint64_t offset = static_cast<uint64_t>(step) * kMostElements * 4;
    OpPtr putting, signalling, waiting;
    std::vector<OpPtr> ops;
    if (window->put(data, (self + 1) % ranks, offset, nullptr, false, kGroupTimeout, &putting).ok())
      ops.push_back(putting);
    if (window->signal((self + 1) % ranks, false, kGroupTimeout, &signalling).ok())
      ops.push_back(signalling);
    if (window->waitSignal((self + ranks - 1) % ranks, true, kGroupTimeout, &waiting).ok())
      ops.push_back(waiting);
    return ops;
  }
};

// A run of operations, the same on all ranks; each is checked when it ends well.
Fate play(Communicator& group, unsigned seed, bool hasWindow) {
  Fate fate;
  std::mt19937 random(seed);
  const int self = group.rank(), ranks = group.ranks();
  std::optional<Target> target;
  if (hasWindow) {
    target.emplace(group, /*isShared=*/seed % 4 > 1);
    fate.error = target->open(group);
    if (!fate.error.ok()) return fate;
  }
  for (int step = 0; step < 10; ++step) {
    const size_t sizes[] = {0, 1, 100, 3'000, kMostElements};
    const size_t count = sizes[random() % 5];
    const unsigned kind = random() % (hasWindow ? 6 : 4);
    const int root = static_cast<int>(random() % static_cast<unsigned>(ranks));
    std::vector<int32_t> in(count), out(count * static_cast<size_t>(kind == 2 ? ranks : 1));
    for (size_t i = 0; i < count; ++i) in[i] = element(self, step, i);
    auto span = [&](std::vector<int32_t>& of, size_t from) {
      return Span{of.data() + from, count * 4};
    };
    Call call;
    call.dtype = DType::kInt32;
    call.elementBytes = 4;
    std::vector<OpPtr> ops;
    if (kind == 0) {
      call.kind = OpKind::kAllReduce;
      call.in = {span(in, 0)};
      call.out = {span(out, 0)};
    } else if (kind == 1) {
      call.kind = OpKind::kBroadcast;
      call.root = root;
      if (self == root) out = in;
      call.out = {span(out, 0)};
    } else if (kind == 2) {
      call.kind = OpKind::kAllGather;
      call.in = {span(in, 0)};
      for (int rank = 0; rank < ranks; ++rank) {
        call.out.push_back(span(out, static_cast<size_t>(rank) * count));
      }
    } else if (kind >= 4) {
      ops = target->exchange(group, step, span(in, 0));
      if (ops.size() < 3) fate.error = group.error();
    } else {
      ops.push_back(
          group.send({span(in, 0), (self + 1) % ranks, 5, DType::kInt32}, nullptr, false));
      ops.push_back(
          group.recv({span(out, 0), (self + ranks - 1) % ranks, 5, DType::kInt32}, nullptr, true));
    }
    if (ops.empty()) ops.push_back(group.submit(call, nullptr, step % 2 == 0));
    for (const OpPtr& op : ops) {
      const Status status = group.wait(op, Deadline::never());
      if (fate.error.ok() && !status.ok()) fate.error = status;
    }
    if (!fate.error.ok()) return fate;
    if (kind >= 4) std::copy_n(target->memory + step * kMostElements, count, out.begin());
    for (size_t i = 0; i < out.size(); ++i) {
      uint32_t want = 0;
      for (int rank = 0; rank < ranks && kind == 0; ++rank) {
        want += static_cast<uint32_t>(element(rank, step, i));
      }
      if (kind == 1) want = static_cast<uint32_t>(element(root, step, i));
      if (kind == 2)
        want = static_cast<uint32_t>(element(static_cast<int>(i / count), step, i % count));
      if (kind >= 3) want = static_cast<uint32_t>(element((self + ranks - 1) % ranks, step, i));
      fate.isWrong |= out[i] != static_cast<int32_t>(want);
    }
    ++fate.done;
  }
  return fate;
}

// Runs the world of a seed. Mixed: ranks 0 and 2 over rings in shared memory, rank 1 over sockets.
std::vector<Fate> runWorld(unsigned seed, std::vector<std::unique_ptr<Weather>>& weather,
                           bool isChecked = false, bool hasWindow = false) {
  auto store = std::make_shared<test::MemoryStore>();
  std::vector<Fate> fates(kRanks);
  std::vector<std::shared_ptr<Engine>> engines(kRanks);
  std::atomic<int> running{kRanks};
  // Bytes that were held back raise no event: somebody has to look again.
  for (int rank = 0; rank < kRanks; ++rank) {
    MeshOptions mesh;
    const bool isTcp = seed % 2 || rank == 1;
    mesh.transport = isTcp ? TransportChoice::kTcp : TransportChoice::kAuto;
    mesh.storeHost = "127.0.0.1";
    mesh.eagerBytes = 16 * 1024;
    if (seed % 3) mesh.eagerInCollectives = 16 * 1024;
    mesh.isChecked = isChecked;
    if (seed % 4 < 2) mesh.flows = 3;
    mesh.tap = weather[static_cast<size_t>(rank)].get();
    ASSERT_OK(Engine::create(mesh, &engines[static_cast<size_t>(rank)]));
  }
  std::thread clock([&] {
    while (running.load() > 0) {
      std::this_thread::sleep_for(300us);
      for (auto& engine : engines) engine->mesh()->sleeper().wakeAll();
    }
  });
  test::Threads(kRanks, [&](int rank) {
    GroupOptions options;
    options.name = "storm";
    options.rank = rank;
    options.ranks = kRanks;
    options.timeout = 20s;
    std::shared_ptr<Communicator> group;
    const Status met =
        Communicator::create(options, store, engines[static_cast<size_t>(rank)], &group);
    if (met.ok()) {
      fates[static_cast<size_t>(rank)] = play(*group, seed, hasWindow);
      group->close(Deadline::after(2000ms));
    } else {
      fates[static_cast<size_t>(rank)].error = met;
    }
    group.reset();
    running.fetch_sub(1);
  });
  clock.join();
  return fates;
}

std::vector<std::unique_ptr<Weather>> weatherOf(unsigned seed) {
  std::vector<std::unique_ptr<Weather>> weather;
  for (int rank = 0; rank < kRanks; ++rank)
    weather.push_back(std::make_unique<Weather>(seed, rank));
  return weather;
}

void expect(bool isMet, unsigned seed, int rank, const std::string& text) {
  if (!isMet) {
    EXPECT_EQ("seed " + std::to_string(seed) + ", rank " + std::to_string(rank) + ": " + text, "");
  }
}

// The survivors' side of a fault: an error that blames a lost rank, or no error at all.
void expectHeard(const Fate& fate, unsigned seed, int rank) {
  expect(!fate.isWrong, seed, rank, "wrong bits");
  if (fate.error.ok()) return expect(fate.done == 10, seed, rank, "ended early");
  expect(fate.error.code() == Code::kPeerLost &&
             fate.error.message().find("rank ") != std::string::npos,
         seed, rank, fate.error.toString());
}

// Each seed's fault befalls one rank's network; all ranks live, and hear of it.
void expectAllHear(bool isChecked, const std::function<void(Weather& weather, unsigned seed)>& plan,
                   bool hasWindow = false) {
  int failed = 0;
  forSeeds(60, [&](unsigned seed) {
    auto weather = weatherOf(seed);
    plan(*weather[seed % kRanks], seed);
    const std::vector<Fate> fates = runWorld(seed, weather, isChecked, hasWindow);
    for (const Fate& fate : fates) failed += !fate.error.ok();
    for (int rank = 0; rank < kRanks; ++rank)
      expectHeard(fates[static_cast<size_t>(rank)], seed, rank);
  });
  EXPECT(failed > 0 || std::getenv("SIMULATION_SEED"));  // the faults were not all too late
}

}  // namespace

TEST(Simulation, slowLinksChangeNothing) {
  forSeeds(40, [](unsigned seed) {
    auto weather = weatherOf(seed);
    const std::vector<Fate> fates = runWorld(seed, weather);
    for (int rank = 0; rank < kRanks; ++rank) {
      const Fate& fate = fates[static_cast<size_t>(rank)];
      expect(fate.error.ok() && !fate.isWrong && fate.done == 10, seed, rank,
             fate.isWrong ? "wrong bits" : fate.error.toString());
    }
  });
}

TEST(Simulation, allRanksHearOfABrokenConnection) {
  expectAllHear(/*isChecked=*/false,
                [](Weather& weather, unsigned seed) { weather.planBreak(1 + seed * 7 % 400); });
}

TEST(Simulation, putsComeBeforeTheirSignals) {
  forSeeds(40, [](unsigned seed) {
    auto weather = weatherOf(seed);
    const std::vector<Fate> fates = runWorld(seed, weather, false, /*hasWindow=*/true);
    for (int rank = 0; rank < kRanks; ++rank) {
      const Fate& fate = fates[static_cast<size_t>(rank)];
      expect(fate.error.ok() && !fate.isWrong && fate.done == 10, seed, rank,
             fate.isWrong ? "wrong bits" : fate.error.toString());
    }
  });
}

TEST(Simulation, allRanksWithWindowsHearOfABrokenConnection) {
  expectAllHear(/*isChecked=*/false,
                [](Weather& weather, unsigned seed) { weather.planBreak(1 + seed * 7 % 400); },
                /*hasWindow=*/true);
}

TEST(Simulation, survivorsHearOfADeath) {
  int failed = 0;
  forSeeds(60, [&](unsigned seed) {
    auto weather = weatherOf(seed);
    weather[seed % kRanks]->planDeath(1 + seed * 7 % 400);
    const std::vector<Fate> fates = runWorld(seed, weather);
    for (const Fate& fate : fates) failed += !fate.error.ok();
    for (int rank = 0; rank < kRanks; ++rank) {
      if (weather[static_cast<size_t>(rank)]->isDead()) {
        expect(!fates[static_cast<size_t>(rank)].isWrong, seed, rank, "wrong bits");
      } else {
        expectHeard(fates[static_cast<size_t>(rank)], seed, rank);
      }
    }
  });
  EXPECT(failed > 0 || std::getenv("SIMULATION_SEED"));  // the faults were not all too late
}

TEST(Simulation, aFlippedBitIsNoticed) {
  expectAllHear(/*isChecked=*/true,
                [](Weather& weather, unsigned seed) { weather.planFlip(1 + seed * 7 % 100, 1); });
}

// What the test above stands on: without checksums a bit of a payload makes a wrong number.
TEST(Simulation, aFlippedBitIsAWrongNumberWithoutChecksums) {
  int wrong = 0;
  forSeeds(20, [&](unsigned seed) {
    auto weather = weatherOf(seed);
    weather[seed % kRanks]->planFlip(1 + seed % 5, sizeof(FrameHeader) + 1);
    for (const Fate& fate : runWorld(seed, weather)) wrong += fate.isWrong;
  });
  EXPECT(wrong > 0 || std::getenv("SIMULATION_SEED"));
}
