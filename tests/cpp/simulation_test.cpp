// Runs worlds of ranks on a network that misbehaves according to a seed: bytes arrive late and in
// pieces, links overtake each other, connections break, and ranks die at any step. On every
// survivor, each operation must end with the right bits or with an error that names the cause.
//
//   simulation_test                                   runs some of the seeds of ./dev soak --short
//   SIMULATION_SEEDS=5000 simulation_test             runs many seeds
//   SIMULATION_SEED=1234 simulation_test              runs the seed that a failure names
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/deadline.h"
#include "engine/window.h"
#include "passing_link.h"
#include "test.h"
#include "transport/frame.h"
#include "transport/link.h"
#include "transport/shm/shared_heap.h"
#include "world.h"

using namespace mycoll;
using namespace std::chrono_literals;

namespace {

// Worlds that run at the same time. They compete for cores, which finds races that idle cores hide.
constexpr int kAtOnce = 4;

// Ranks read each other's ordinary tensors if the seed is odd. "auto" would depend on timing.
void forSeeds(int few, const std::function<void(unsigned seed)>& body) {
  const bool isOne = std::getenv("SIMULATION_SEED") != nullptr;
  const auto first = static_cast<unsigned>(test::numberFrom("SIMULATION_SEED", 1));
  const auto last =
      isOne ? first : static_cast<unsigned>(test::numberFrom("SIMULATION_SEEDS", few));
  for (const unsigned odd : {1U, 0U}) {
    const test::ScopedEnv singleCopy("MYCOLL_SINGLE_COPY", odd ? "on" : "off");
    std::atomic<unsigned> seed{first};
    test::Threads(kAtOnce, [&](int) {
      for (unsigned mine = seed++; mine <= last; mine = seed++) {
        if (mine % 2 == odd) body(mine);
      }
    });
  }
}

// One rank's network. Called under the mesh's I/O lock.
class Network final : public LinkTap {
 public:
  Network(unsigned seed, int rank) : random_(seed * 31 + static_cast<unsigned>(rank)) {
    hindrance_ = random_() % 4;  // how many of 8 moves transfer nothing or only a part
  }
  // At this move of this rank (a read or a write) one connection breaks, or all do: the rank dies.
  void planBreak(uint64_t move) { breakAt_ = move; }
  void planDeath(uint64_t move) { dieAt_ = move; }
  bool isDead() const { return isDead_.load(); }

  std::unique_ptr<LinkSender> tap(std::unique_ptr<LinkSender> link) override;
  std::unique_ptr<LinkReceiver> tap(std::unique_ptr<LinkReceiver> link) override;

  // Returns how many of the bytes a move may transfer, or -1 if the link is broken now.
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
  std::atomic<bool> isDead_{false};
};

class Sender final : public test::PassingSender {
 public:
  Sender(Network& network, std::unique_ptr<LinkSender> link)
      : PassingSender(std::move(link)), network_(network) {}
  ssize_t write(const Span* parts, int count) override {
    const ssize_t allowed = network_.allowed(parts[0].bytes, link_->fd());
    if (allowed <= 0 || isBroken_) return isBroken_ |= allowed < 0, isBroken_ ? -1 : 0;
    if (static_cast<size_t>(allowed) == parts[0].bytes) return link_->write(parts, count);
    const Span part{parts[0].data, static_cast<size_t>(allowed)};
    return link_->write(&part, 1);
  }

 private:
  Network& network_;
  bool isBroken_ = false;
};

class Receiver final : public test::PassingReceiver {
 public:
  Receiver(Network& network, std::unique_ptr<LinkReceiver> link)
      : PassingReceiver(std::move(link)), network_(network) {}
  ssize_t read(void* data, size_t bytes, bool streaming) override {
    if (bytes == 0) return 0;
    const ssize_t allowed = network_.allowed(bytes, link_->fd());
    if (allowed <= 0 || isBroken_) return isBroken_ |= allowed < 0, isBroken_ ? -1 : 0;
    return link_->read(data, static_cast<size_t>(allowed), streaming);
  }
  bool maybeReadable() const override { return isBroken_ || link_->maybeReadable(); }

 private:
  Network& network_;
  bool isBroken_ = false;
};

std::unique_ptr<LinkSender> Network::tap(std::unique_ptr<LinkSender> link) {
  return std::make_unique<Sender>(*this, std::move(link));
}
std::unique_ptr<LinkReceiver> Network::tap(std::unique_ptr<LinkReceiver> link) {
  return std::make_unique<Receiver>(*this, std::move(link));
}

// The result of one rank in one group.
struct Result {
  int calls = 0;         // that it was to make
  int done = 0;          // that succeeded
  Status error;          // the first one
  bool isWrong = false;  // a call succeeded with wrong data
};

// Whether this thread now allocates memory that the ranks of a host share.
thread_local bool allocatesShared = false;

// A rank whose call has failed may use its memory immediately, while others may still read it. They
// detect that afterwards (PeerMemory), but TSan would report a race. So under TSan, a rank's blocks
// are freed at the end of the world once one of its calls has failed.
#if defined(__SANITIZE_THREAD__)
constexpr bool kKeepsBlocks = true;
#else
constexpr bool kKeepsBlocks = false;
#endif
thread_local bool hasFailed = false;  // a call of this thread's rank
thread_local std::vector<void*> keptBlocks;

void freeBlock(void* block) {
  if (!SharedHeap::process().free(block)) ::operator delete(block);
}

template <typename T>
struct Anywhere {
  using value_type = T;
  T* allocate(size_t count) {
    const size_t bytes = count * sizeof(T);
    void* block = allocatesShared ? SharedHeap::process().allocate(bytes) : nullptr;
    return static_cast<T*>(block ? block : ::operator new(bytes));
  }
  void deallocate(T* block, size_t) {
    if (kKeepsBlocks && hasFailed) return keptBlocks.push_back(block);
    freeBlock(block);
  }
  bool operator==(const Anywhere&) const = default;
};

using Numbers = std::vector<int32_t, Anywhere<int32_t>>;

constexpr int kSteps = 10;
constexpr size_t kMostElements = 40'000;
// So many elements that messages are cut into pieces if there are several sockets.
constexpr size_t kManyElements = 200'000;

int32_t element(int rank, int step, size_t index) {
  return static_cast<int32_t>(rank * 1'000'003 + step * 101 + static_cast<int>(index) * 7);
}

// The input of a rank for a step, beginning with element `from`.
Numbers row(int rank, int step, size_t count, size_t from = 0) {
  Numbers values(count);
  for (size_t i = 0; i < count; ++i) values[i] = element(rank, step, from + i);
  return values;
}

Numbers sum(int ranks, int step, size_t count, size_t from = 0) {
  Numbers values(count);
  for (size_t i = 0; i < count; ++i) {
    uint32_t total = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      total += static_cast<uint32_t>(element(rank, step, from + i));
    }
    values[i] = static_cast<int32_t>(total);
  }
  return values;
}

// The number of elements that one rank sends to another in a step with uneven blocks.
size_t elementsBetween(size_t count, int step, int from, int to) {
  return count / static_cast<size_t>(1 + (step + 3 * from + 5 * to) % 4);
}

size_t elementsBefore(size_t count, int step, int from, int to) {
  size_t before = 0;
  for (int rank = 0; rank < to; ++rank) before += elementsBetween(count, step, from, rank);
  return before;
}

// A collective, the same on all ranks.
struct Step {
  int number = 0;
  OpKind kind = OpKind::kBarrier;
  size_t count = 0;
  int root = 0;
  bool isInPlace = false;
};

Step draw(std::mt19937& random, int number, int ranks, bool hasLarge = false) {
  constexpr OpKind kKinds[] = {OpKind::kBarrier,       OpKind::kBroadcast, OpKind::kAllReduce,
                               OpKind::kReduce,        OpKind::kAllGather, OpKind::kGather,
                               OpKind::kReduceScatter, OpKind::kScatter,   OpKind::kAllToAll};
  constexpr size_t kCounts[] = {0, 1, 100, 3'000, kMostElements};
  Step step;
  step.number = number;
  step.kind = kKinds[random() % std::size(kKinds)];
  step.count = kCounts[random() % std::size(kCounts)];
  if (hasLarge && random() % 2) step.count = kManyElements;
  step.root = static_cast<int>(random() % static_cast<unsigned>(ranks));
  step.isInPlace = random() % 2;
  return step;
}

// A call with its memory and its expected result.
struct Piece {
  Call call;
  Numbers in, out, wanted;
  const int32_t* put = nullptr;  // where another rank puts the result, instead of `out`
  std::vector<OpPtr> ops;
  Status refused;
  bool isOdd = false;

  void give(size_t from, size_t count) { call.in.push_back({in.data() + from, count * 4}); }
  void take(size_t from, size_t count) { call.out.push_back({out.data() + from, count * 4}); }
  bool isWrong() const {
    if (put) return !std::equal(wanted.begin(), wanted.end(), put);
    return !isOdd && out != wanted;
  }
};

// oddity: 0, or a number that makes the input of a rank with a different call different, too.
std::unique_ptr<Piece> make(const Step& step, int self, int ranks, int oddity = 0) {
  auto piece = std::make_unique<Piece>();
  const int number = step.number;
  const size_t count = step.count;
  const bool isRoot = self == step.root;
  auto sizeTo = [&](int from, int to) { return elementsBetween(count, number, from, to); };
  auto placeOf = [&](int from, int to) { return elementsBefore(count, number, from, to); };
  auto append = [&](const Numbers& values) {
    piece->wanted.insert(piece->wanted.end(), values.begin(), values.end());
  };
  auto giveRow = [&](size_t elements) { piece->in = row(self, number + oddity, elements); };
  // A row of blocks, one from or for each rank.
  auto giveBlocks = [&](int sizesOf) {
    giveRow(placeOf(sizesOf, ranks));
    for (int to = 0; to < ranks; ++to) piece->give(placeOf(sizesOf, to), sizeTo(sizesOf, to));
  };
  auto takeBlocks = [&](const std::function<size_t(int from)>& sizeFrom) {
    piece->out.assign(piece->wanted.size(), -1);
    size_t place = 0;
    for (int from = 0; from < ranks; ++from) {
      piece->take(place, sizeFrom(from));
      place += sizeFrom(from);
    }
  };

  Call& call = piece->call;
  call.kind = step.kind;
  call.dtype = DType::kInt32;
  call.elementBytes = 4;
  piece->isOdd = oddity != 0;
  switch (step.kind) {
    case OpKind::kBroadcast:
      call.root = step.root;
      append(row(step.root, number, count));
      piece->out = isRoot ? row(self, number + oddity, count) : Numbers(count, -1);
      piece->take(0, count);
      break;
    case OpKind::kAllReduce:
    case OpKind::kReduce:
      if (step.kind == OpKind::kReduce) call.root = step.root;
      giveRow(count);
      piece->give(0, count);
      if (step.kind == OpKind::kReduce && !isRoot) break;
      append(sum(ranks, number, count));
      piece->out.assign(count, -1);
      if (step.isInPlace) piece->out = piece->in, call.in = {{piece->out.data(), count * 4}};
      piece->take(0, count);
      break;
    case OpKind::kAllGather:
    case OpKind::kGather:
      // Uses the sizes between rank 0 and each rank.
      giveRow(sizeTo(0, self));
      piece->give(0, piece->in.size());
      if (step.kind == OpKind::kGather) call.root = step.root;
      if (step.kind == OpKind::kGather && !isRoot) break;
      for (int from = 0; from < ranks; ++from) append(row(from, number, sizeTo(0, from)));
      takeBlocks([&](int from) { return sizeTo(0, from); });
      break;
    case OpKind::kScatter:
      call.root = step.root;
      append(row(step.root, number, sizeTo(step.root, self), placeOf(step.root, self)));
      if (isRoot) giveBlocks(self);
      piece->out.assign(piece->wanted.size(), -1);
      piece->take(0, piece->out.size());
      break;
    case OpKind::kReduceScatter:
      giveBlocks(0);
      append(sum(ranks, number, sizeTo(0, self), placeOf(0, self)));
      piece->out.assign(piece->wanted.size(), -1);
      piece->take(0, piece->out.size());
      break;
    case OpKind::kAllToAll:
      giveBlocks(self);
      for (int from = 0; from < ranks; ++from) {
        append(row(from, number, sizeTo(from, self), placeOf(from, self)));
      }
      takeBlocks([&](int from) { return sizeTo(from, self); });
      break;
    default: break;
  }
  return piece;
}

// A window with room for the data that the rank before this one puts in each step.
struct Target {
  Numbers memory = Numbers(kSteps * kMostElements);
  std::shared_ptr<Window> window;

  explicit Target(Communicator& group)
      : window(std::make_shared<Window>(group.shared_from_this())) {}

  Status open(Communicator& group) {
    Composite opening;
    MYCOLL_RETURN_IF_ERROR(window->open({memory.data(), memory.size() * 4}, {}, nullptr, &opening));
    const OpPtr op = group.submitComposite(OpKind::kWindow, std::move(opening), nullptr, true);
    return group.wait(op, Deadline::never());
  }
  int32_t* placeOf(int step) { return memory.data() + static_cast<size_t>(step) * kMostElements; }
  // Puts data to the next rank, and waits for the put of the rank before this one.
  Status exchange(Communicator& group, int step, Span data, std::vector<OpPtr>* ops) {
    const int next = (group.rank() + 1) % group.ranks();
    const int before = (group.rank() + group.ranks() - 1) % group.ranks();
    const uint64_t offset = static_cast<uint64_t>(step) * kMostElements * 4;
    ops->resize(3);
    MYCOLL_RETURN_IF_ERROR(
        window->put(data, next, offset, nullptr, false, kGroupTimeout, &ops->at(0)));
    MYCOLL_RETURN_IF_ERROR(window->signal(next, false, kGroupTimeout, &ops->at(1)));
    return window->waitSignal(before, false, kGroupTimeout, &ops->at(2));
  }
};

// How a rank ends a group early.
enum class Ending { kNone, kOddCall, kAbort, kLeaving };

// The program that all ranks run for a seed.
struct Script {
  unsigned seed = 0;
  int ranks = 0;
  bool isOneHost = false;  // and all ranks share memory there
  std::vector<int> hostOf;
  std::vector<std::vector<int>> groups;  // first all ranks, then some in any order
  bool hasWindow = false;                // the first group
  bool hasLarge = false;                 // steps of kManyElements
  Ending ending = Ending::kNone;
  int oddGroup = 0;  // the group that ends early
  int oddRank = 0;   // the rank of all ranks that ends it
  int oddStep = 0;   // the step in which it does

  explicit Script(unsigned seed, Ending ending = Ending::kNone) : seed(seed), ending(ending) {
    std::mt19937 random(seed);
    auto below = [&](size_t bound) { return static_cast<int>(random() % bound); };
    ranks = 2 + below(6);
    isOneHost = seed % 3 == 0;
    hasWindow = seed / 4 % 2;
    hasLarge = seed % 8 == 1;
    const int hosts = isOneHost ? 1 : 1 + below(4);
    for (int rank = 0; rank < ranks; ++rank) hostOf.push_back(below(static_cast<size_t>(hosts)));
    std::vector<int> members(static_cast<size_t>(ranks));
    std::iota(members.begin(), members.end(), 0);
    groups.push_back(members);
    for (int more = below(3); more > 0; --more) {
      std::shuffle(members.begin(), members.end(), random);
      groups.emplace_back(members.begin(), members.begin() + 2 + below(members.size() - 1));
    }
    oddGroup = below(groups.size());
    oddRank = membersOf(oddGroup)[random() % membersOf(oddGroup).size()];
    oddStep = below(kSteps);
  }
  // A number of moves that many networks reach.
  uint64_t moveFor(uint64_t most) const { return 1 + seed * 7 % (isOneHost ? most / 4 : most); }
  const std::vector<int>& membersOf(int group) const { return groups[group]; }
  // Returns the rank within a group, or -1 for a rank that is no member.
  int rankIn(int group, int rank) const {
    const std::vector<int>& members = membersOf(group);
    const auto found = std::find(members.begin(), members.end(), rank);
    return found == members.end() ? -1 : static_cast<int>(found - members.begin());
  }
};

// Runs the steps of one rank in one group. Waits later for the operations that it begins.
class Player {
 public:
  Player(std::shared_ptr<Communicator> group, const Script& script, bool isOdd)
      : group_(std::move(group)),
        script_(script),
        ending_(isOdd ? script.ending : Ending::kNone),
        own_(script.seed * 37 + static_cast<unsigned>(group_->rank())) {}

  const Result& result() const { return result_; }
  void openWindow() {
    target_.emplace(*group_);
    result_.error = target_->open(*group_);
  }
  // One step, which is the same on all ranks, except the last step of the odd rank.
  void play(const Step& step, unsigned kind, bool isLast) {
    if (isOver_) return;
    ++result_.calls;
    if (!result_.error.ok()) return;
    allocatesShared = own_() % 4 < script_.seed % 5;  // no rank, all ranks, or some
    if (isLast && ending_ != Ending::kNone) {
      end(step, kind);
    } else {
      call(step, kind);
    }
    if (own_() % 2) settle();
  }
  // A barrier, in which the ranks without an error receive that of the odd rank.
  void meetAgain() {
    if (isOver_ || !settle()) return;
    ++result_.calls;
    begin(make(Step(), self_, ranks_));
    settle();
  }
  // Waits for all pending operations. Returns false if one has failed; this rank has left then.
  bool settle() {
    for (const std::unique_ptr<Piece>& piece : pending_) {
      Status status = piece->refused;
      for (const OpPtr& op : piece->ops) {
        const Status ended = op ? group_->wait(op, Deadline::never()) : Status();
        if (status.ok()) status = ended;
      }
      if (result_.error.ok()) result_.error = status;
      result_.isWrong |= status.ok() && piece->isWrong();
      result_.done += status.ok();
    }
    hasFailed |= !result_.error.ok();
    pending_.clear();
    if (!result_.error.ok()) leave(result_.error.message());
    return result_.error.ok();
  }
  // Leaves the group as a program does that ends, with this error or none.
  void leave(const std::string& reason) {
    target_.reset();
    group_->close(Deadline::after(2000ms), reason);
  }

 private:
  void begin(std::unique_ptr<Piece> piece) {
    piece->ops.push_back(group_->submit(piece->call, nullptr, false));
    pending_.push_back(std::move(piece));
  }

  void call(const Step& step, unsigned kind) {
    if (kind > 1) return begin(make(step, self_, ranks_));
    if (kind == 1 && target_) return exchange(step);
    pass(step, step.count);
  }

  // Sends a message of this many elements to the next rank, and receives one from the rank before.
  void pass(const Step& step, size_t count) {
    auto piece = std::make_unique<Piece>();
    const int before = (self_ + ranks_ - 1) % ranks_;
    piece->in = row(self_, step.number, count);
    piece->out.assign(step.count, -1);
    piece->wanted = row(before, step.number, step.count);
    const Span in{piece->in.data(), count * 4}, out{piece->out.data(), step.count * 4};
    piece->ops = {group_->send({in, (self_ + 1) % ranks_, 5, DType::kInt32}, nullptr, false),
                  group_->recv({out, before, 5, DType::kInt32}, nullptr, false)};
    pending_.push_back(std::move(piece));
  }

  void exchange(const Step& step) {
    auto piece = std::make_unique<Piece>();
    piece->in = row(self_, step.number, step.count);
    piece->wanted = row((self_ + ranks_ - 1) % ranks_, step.number, step.count);
    piece->put = target_->placeOf(step.number);
    const Span data{piece->in.data(), step.count * 4};
    piece->refused = target_->exchange(*group_, step.number, data, &piece->ops);
    pending_.push_back(std::move(piece));
  }

  void end(const Step& step, unsigned kind) {
    switch (ending_) {
      case Ending::kNone: break;
      case Ending::kOddCall:
        if (kind > 1) return begin(make(another(step), self_, ranks_, 1'000));
        return pass(step, own_() % 2 ? step.count + 1 : kMostElements - step.count);
      case Ending::kAbort:
        if (own_() % 2) call(step, kind);
        group_->abort("aborted by the script");
        settle();
        result_.error = group_->error();
        break;
      case Ending::kLeaving:
        isOver_ = true;
        --result_.calls;
        if (settle()) leave("");
        break;
    }
  }

  // A call that differs from those of the others, in its kind, size or root.
  Step another(const Step& step) {
    Step other = step;
    auto isAnother = [&] {
      if (other.kind != step.kind) return true;
      if (other.kind == OpKind::kBarrier) return false;
      if (hasRoot(other.kind) && other.root != step.root) return true;
      // One element and none both give blocks without elements.
      return std::max(other.count, step.count) > 1 && other.count != step.count;
    };
    while (!isAnother()) {
      other = draw(own_, step.number, ranks_);
      if (own_() % 2) other.kind = step.kind;
    }
    return other;
  }

  static bool hasRoot(OpKind kind) {
    return kind == OpKind::kBroadcast || kind == OpKind::kReduce || kind == OpKind::kGather ||
           kind == OpKind::kScatter;
  }

  const std::shared_ptr<Communicator> group_;
  const Script& script_;
  const Ending ending_;  // caused by this rank
  const int self_ = group_->rank(), ranks_ = group_->ranks();
  std::mt19937 own_;
  std::optional<Target> target_;
  std::vector<std::unique_ptr<Piece>> pending_;
  bool isOver_ = false;  // the rank has left as the script says
  Result result_;
};

// The results of a rank, by group. There is no entry for groups that it is not in.
using Results = std::map<int, Result>;

// The members of the group that this thread is making, if it is not the first one.
thread_local const std::vector<int>* forming = nullptr;

// Runs the script as one rank.
Results play(const std::shared_ptr<Communicator>& world, const Script& script) {
  Results results;
  std::map<int, Player> players;
  const int self = world->rank();
  auto add = [&](int number, std::shared_ptr<Communicator> group) {
    const bool isOdd = number == script.oddGroup && self == script.oddRank;
    return &players.try_emplace(number, std::move(group), script, isOdd).first->second;
  };
  Player* const first = add(0, world);
  allocatesShared = script.seed % 4 > 1;
  if (script.hasWindow) first->openWindow();
  for (int number = 1; number < static_cast<int>(script.groups.size()); ++number) {
    if (script.rankIn(number, self) < 0) continue;
    std::shared_ptr<Communicator> group;
    forming = &script.membersOf(number);
    results[number].error =
        Communicator::shrink(*world, " " + std::to_string(number), *forming, &group);
    forming = nullptr;
    if (group) add(number, group);
  }

  std::mt19937 random(script.seed);  // the same on all ranks
  for (int number = 0; number < kSteps; ++number) {
    const bool isLast = script.ending != Ending::kNone && number == script.oddStep;
    auto group = static_cast<int>(random() % script.groups.size());
    if (isLast) group = script.oddGroup;
    Step step =
        draw(random, number, static_cast<int>(script.membersOf(group).size()), script.hasLarge);
    unsigned kind = random() % (script.hasWindow && group == 0 ? 4 : 6);
    // Puts are not compared.
    if (isLast && script.ending == Ending::kOddCall && kind == 1) kind = 0;
    if (kind <= 1) step.count = std::min(step.count, kMostElements);  // a message or a put
    if (auto player = players.find(group); player != players.end()) {
      player->second.play(step, kind, isLast);
    }
  }
  for (auto& [number, player] : players) {
    if (number == script.oddGroup && script.ending != Ending::kNone) player.meetAgain();
    player.settle();
    results[number] = player.result();
  }
  for (auto& [number, player] : players) player.leave("");
  return results;
}

// The network of each rank.
using Networks = std::vector<std::shared_ptr<Network>>;

Networks networksOf(const Script& script) {
  Networks networks;
  for (int rank = 0; rank < script.ranks; ++rank)
    networks.push_back(std::make_shared<Network>(script.seed, rank));
  return networks;
}

// Inside a host all ranks use shared memory, or all or a third of them use sockets. Connections
// between hosts are encrypted or not.
std::vector<Results> runWorld(const Script& script, Networks& networks) {
  const unsigned seed = script.seed;
  std::shared_ptr<const Tls> tls;
  if (seed / 4 % 2) ASSERT_OK(Tls::make("a secret of the job", &tls));
  auto store = std::make_shared<test::MemoryStore>();
  const auto ranks = static_cast<size_t>(script.ranks);
  std::vector<Results> results(ranks);
  std::vector<std::vector<void*>> kept(ranks);
  std::vector<std::shared_ptr<Engine>> engines(ranks);
  std::atomic<int> running{script.ranks};
  // By rank: whether it could not make the first group, and so makes no other.
  std::vector<std::atomic<bool>> isOut(ranks);
  for (size_t rank = 0; rank < ranks; ++rank) {
    MeshOptions mesh;
    const bool isTcp = !script.isOneHost && (seed % 2 || rank % 3 == 1);
    mesh.transport = isTcp ? TransportChoice::kTcp : TransportChoice::kAuto;
    mesh.host = " host " + std::to_string(script.hostOf[rank]);
    mesh.eagerBytes = 16 * 1024;
    mesh.singleCopy = Env::process().singleCopy;  // see forSeeds()
    if (seed % 3 && !script.hasLarge) mesh.eagerInCollectives = 16 * 1024;
    mesh.tls = tls;
    if (seed % 4 < 2) mesh.flows = 3;
    mesh.tap = networks[rank];
    engines[rank] = test::makeEngine(mesh);
  }
  // Bytes that were held back raise no event, so the sleepers are woken to read again.
  std::thread clock([&] {
    while (running.load() > 0) {
      std::this_thread::sleep_for(1ms);
      for (auto& engine : engines) engine->mesh()->sleeper().wakeAll();
    }
  });
  test::Threads(script.ranks, [&](int rank) {
    // The timeout is long, as other programs may use the processors.
    GroupOptions options = test::groupOptions(rank, script.ranks, 200'000);
    options.interrupted = [&isOut] {
      return forming && std::any_of(forming->begin(), forming->end(),
                                    [&](int member) { return isOut[member].load(); });
    };
    options.mostNotifiedDirectly = script.seed / 2 % 2 ? 1 : 64;
    std::shared_ptr<Communicator> group;
    const Status met = Communicator::create(options, store, engines[rank], &group);
    Results& mine = results[rank];
    if (met.ok()) {
      mine = play(group, script);
    } else {
      mine[0].error = met;
      isOut[rank] = true;
    }
    group.reset();
    kept[rank] = std::move(keptBlocks);
    running.fetch_sub(1);
  });
  clock.join();
  for (const auto& blocks : kept) std::for_each(blocks.begin(), blocks.end(), freeBlock);
  return results;
}

void expect(bool isMet, unsigned seed, int rank, const std::string& text) {
  if (!isMet) {
    EXPECT_EQ("seed " + std::to_string(seed) + ", rank " + std::to_string(rank) + ": " + text, "");
  }
}

void expectSuccess(const Result& result, unsigned seed, int rank) {
  expect(result.error.ok() && !result.isWrong && result.done == result.calls, seed, rank,
         result.isWrong ? "wrong bits" : test::show(result.error));
}

void expectAllSuccess(const Script& script) {
  Networks networks = networksOf(script);
  const std::vector<Results> results = runWorld(script, networks);
  for (int rank = 0; rank < script.ranks; ++rank) {
    for (const auto& [group, result] : results[rank]) {
      expectSuccess(result, script.seed, rank);
    }
  }
}

// The beginning of a rank's name in messages.
std::string nameOf(int rank) { return "rank " + std::to_string(rank) + " ("; }

// Expects an error with this code and these words, or success.
void expectErrorIfAny(const Result& result, unsigned seed, int rank, Code code,
                      const std::string& words) {
  expect(!result.isWrong, seed, rank, "wrong bits");
  if (result.error.ok()) return expect(result.done == result.calls, seed, rank, "ended early");
  // Hasty ranks may act before they receive the better explanation.
  if (MYCOLL_HASTE > 1 && result.error.code() != Code::kTimeout) return;
  expect(result.error.code() == code && result.error.message().find(words) != std::string::npos,
         seed, rank, test::show(result.error));
}

// With each seed, the network of one rank fails, and with it the groups that this rank is in. The
// survivors' errors name the dead rank, or one of the two whose connection broke.
void expectFaultIsReported(const std::function<void(Network& network, const Script& script)>& plan,
                           bool hasAlwaysWindow = false) {
  std::atomic<int> failed{0};
  forSeeds(25, [&](unsigned seed) {
    Script script(seed);
    script.hasWindow |= hasAlwaysWindow;
    Networks networks = networksOf(script);
    plan(*networks[script.oddRank], script);
    const std::vector<Results> results = runWorld(script, networks);
    const bool isDead = networks[script.oddRank]->isDead();
    for (int rank = 0; rank < script.ranks; ++rank) {
      for (const auto& [group, result] : results[rank]) {
        const int odd = script.rankIn(group, script.oddRank);
        failed += !result.error.ok();
        const auto& members = script.membersOf(group);
        const bool isIncomplete =
            group > 0 && std::any_of(members.begin(), members.end(),
                                     [&](int m) { return !results[m].contains(group); });
        if (isIncomplete && result.error.code() == Code::kInterrupted) {
          expect(result.done == 0, seed, rank, "calls in a group that was not made");
        } else if (odd < 0) {
          expectSuccess(result, seed, rank);
        } else if (isDead && rank == script.oddRank) {
          expect(!result.isWrong, seed, rank, "wrong bits");
        } else {
          // A rank whose network is dead still reports what it sees to its host by shared memory.
          const std::string itsView = "(seen by rank " + std::to_string(odd) + ")";
          const bool isItsView = result.error.message().find(itsView) != std::string::npos;
          expectErrorIfAny(result, seed, rank, Code::kPeerLost,
                           isDead && !isItsView ? nameOf(odd) : "rank ");
        }
      }
    }
  });
  EXPECT(failed > 0 || std::getenv("SIMULATION_SEED"));  // the faults were not all too late
}

// One rank ends a group early. All other ranks of that group get this code, and an error with these
// words and the rank's name. Other groups are not affected.
void expectEndingIsReported(Ending ending, Code code, const std::string& words) {
  forSeeds(25, [&](unsigned seed) {
    const Script script(seed, ending);
    Networks networks = networksOf(script);
    const std::vector<Results> results = runWorld(script, networks);
    const std::string odd = nameOf(script.rankIn(script.oddGroup, script.oddRank));
    for (int rank = 0; rank < script.ranks; ++rank) {
      for (const auto& [group, result] : results[rank]) {
        if (group != script.oddGroup || (rank == script.oddRank && ending == Ending::kLeaving)) {
          expectSuccess(result, seed, rank);
          continue;
        }
        expect(!result.error.ok(), seed, rank, "no error");
        expectErrorIfAny(result, seed, rank, code, words);
        // Other ranks leave because of it, and their departure may be detected first.
        if (ending == Ending::kLeaving) continue;
        expectErrorIfAny(result, seed, rank, code, odd);
      }
    }
  });
}

}  // namespace

TEST(Simulation, slowLinksChangeNothing) {
  forSeeds(25, [](unsigned seed) { expectAllSuccess(Script(seed)); });
}

TEST(Simulation, putsArriveBeforeTheirSignals) {
  forSeeds(20, [](unsigned seed) {
    Script script(seed);
    script.hasWindow = true;
    expectAllSuccess(script);
  });
}

TEST(Simulation, allRanksReportABrokenConnection) {
  expectFaultIsReported(
      [](Network& network, const Script& script) { network.planBreak(script.moveFor(400)); });
}

TEST(Simulation, allRanksWithWindowsReportABrokenConnection) {
  expectFaultIsReported(
      [](Network& network, const Script& script) { network.planBreak(script.moveFor(400)); },
      /*hasAlwaysWindow=*/true);
}

TEST(Simulation, survivorsReportADeath) {
  expectFaultIsReported(
      [](Network& network, const Script& script) { network.planDeath(script.moveFor(400)); });
}

// One rank calls something else, and no rank uses its data.
TEST(Simulation, allRanksReportACallThatDiffers) {
  expectEndingIsReported(Ending::kOddCall, Code::kMismatch, "MISMATCH");
}

TEST(Simulation, allRanksReportAnAbort) {
  expectEndingIsReported(Ending::kAbort, Code::kAborted, "aborted by the script");
}

TEST(Simulation, allRanksReportADeparture) {
  expectEndingIsReported(Ending::kLeaving, Code::kPeerLost, "has left the group");
}
