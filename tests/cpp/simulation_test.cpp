// A network that misbehaves by a seed: bytes that come late and in pieces, links that overtake each
// other, connections that break, ranks that die at every step, bits that flip. Whatever it does,
// each operation ends with the right bits or with an error that names the cause, on every survivor.
//
//   simulation_test                                   some of the 100 seeds of ./dev soak --short
//   SIMULATION_SEEDS=5000 simulation_test             many
//   SIMULATION_SEED=1234 simulation_test              one again, as a failure names it
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
#include "test.h"
#include "transport/frame.h"
#include "transport/link.h"
#include "transport/shm/shared_heap.h"
#include "world.h"

using namespace mycoll;
using namespace std::chrono_literals;

namespace {

// Worlds at a time: threads that get no core for a while find what others do not.
constexpr int kAtOnce = 4;

unsigned number(const char* variable, unsigned otherwise) {
  const char* text = std::getenv(variable);
  return text ? static_cast<unsigned>(std::strtoul(text, nullptr, 10)) : otherwise;
}

// Ranks read each other's ordinary tensors if the seed is odd. Not "auto": it depends on the time.
void forSeeds(unsigned few, const std::function<void(unsigned seed)>& body) {
  const bool isOne = std::getenv("SIMULATION_SEED") != nullptr;
  const unsigned first = isOne ? number("SIMULATION_SEED", 0) : 1;
  const unsigned last = isOne ? first : number("SIMULATION_SEEDS", few);
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

// One rank's network. Called under the mesh's I/O lock, but for kill().
class Weather final : public LinkTap {
 public:
  Weather(unsigned seed, int rank) : random_(seed * 31 + static_cast<unsigned>(rank)) {
    hindrance_ = random_() % 4;  // of 8 moves: how many come to nothing, or stop half way
  }
  // At the so many-th move of this rank: one connection breaks, or all (the rank dies).
  void planBreak(uint64_t move) { breakAt_ = move; }
  void planDeath(uint64_t move) { dieAt_ = move; }
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
  bool sendFd(int fd) override { return link_->sendFd(fd); }
  bool hasArrived() const override { return link_->hasArrived(); }

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
    return link_->read(data, static_cast<size_t>(allowed), streaming);
  }
  bool maybeReadable() const override { return isBroken_ || link_->maybeReadable(); }
  void lookAgain() override { link_->lookAgain(); }
  void onEvent(bool isClosed) override { link_->onEvent(isClosed); }
  void setAsleep(bool asleep) override { link_->setAsleep(asleep); }
  int fd() const override { return link_->fd(); }
  bool takeFd(Fd* fd) override { return link_->takeFd(fd); }

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

// What a rank has come to in a group: of the calls that it was to make, how many ended well; its
// error, if any; and whether what ended well is right.
struct Fate {
  int asked = 0;
  int done = 0;
  Status error;
  bool isWrong = false;
};

// Whether what this thread allocates now is memory that the ranks of a host share.
thread_local bool allocatesShared = false;

// A rank whose call has failed may use its memory immediately, while others may still read it: they
// notice it afterwards (PeerMemory). TSan would report that as a race, so it gets other memory:
// from then on the rank's blocks are freed at the end of the world.
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
// Of a collective: enough for messages that are cut into pieces where there are several sockets.
constexpr size_t kManyElements = 200'000;

int32_t element(int rank, int step, size_t index) {
  return static_cast<int32_t>(rank * 1'000'003 + step * 101 + static_cast<int>(index) * 7);
}

// What a rank gives for a step: its elements from there on.
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

// The number of elements that one rank has for another in a step, where not all have as many.
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

// A call with its memory, and what must have come of it.
struct Piece {
  Call call;
  Numbers in, out, wanted;
  const int32_t* put = nullptr;  // where it is put by another rank, not into `out`
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

// oddity: 0, or what sets apart the numbers of a rank that calls what no other one does.
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
      // Of the sizes between rank 0 and each.
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

// A window with room for what the rank before this one puts in each step.
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
  // Puts to the next rank, and waits for what the one before puts here.
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

// How a group ends before its time.
enum class Ending { kNone, kOddCall, kAbort, kLeaving };

// What the program of a seed does.
struct Script {
  unsigned seed = 0;
  int ranks = 0;
  bool isOneHost = false;  // and all ranks share memory there
  std::vector<int> hostOf;
  std::vector<std::vector<int>> groups;  // of all ranks, then of some, in any order
  bool hasWindow = false;                // the first group
  bool hasLarge = false;                 // steps of kManyElements
  Ending ending = Ending::kNone;
  int oddGroup = 0;  // which group it befalls, and by which rank of all, at which step
  int oddRank = 0;
  int oddStep = 0;

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
  // A number of moves that many networks make.
  uint64_t moveFor(uint64_t most) const { return 1 + seed * 7 % (isOneHost ? most / 4 : most); }
  const std::vector<int>& membersOf(int group) const { return groups[static_cast<size_t>(group)]; }
  // Its rank in a group; -1: it is no member.
  int rankIn(int group, int rank) const {
    const std::vector<int>& members = membersOf(group);
    const auto found = std::find(members.begin(), members.end(), rank);
    return found == members.end() ? -1 : static_cast<int>(found - members.begin());
  }
};

// What one rank does in one group. What it has begun it waits for later.
class Player {
 public:
  Player(std::shared_ptr<Communicator> group, const Script& script, bool isOdd)
      : group_(std::move(group)),
        script_(script),
        ending_(isOdd ? script.ending : Ending::kNone),
        own_(script.seed * 37 + static_cast<unsigned>(group_->rank())) {}

  const Fate& fate() const { return fate_; }
  void openWindow() {
    target_.emplace(*group_);
    fate_.error = target_->open(*group_);
  }
  // One step, the same on all ranks; but for the odd one, if it is the last.
  void play(const Step& step, unsigned kind, bool isLast) {
    if (isOver_) return;
    ++fate_.asked;
    if (!fate_.error.ok()) return;
    allocatesShared = own_() % 4 < script_.seed % 5;  // of no rank, of all, or of some
    if (isLast && ending_ != Ending::kNone) {
      end(step, kind);
    } else {
      call(step, kind);
    }
    if (own_() % 2) settle();
  }
  // What one rank has met by now reaches the others while they wait for it.
  void meetAgain() {
    if (isOver_ || !settle()) return;
    ++fate_.asked;
    begin(make(Step(), self_, ranks_));
    settle();
  }
  // Waits for all that is pending. False: one has failed, and this rank has left.
  bool settle() {
    for (const std::unique_ptr<Piece>& piece : pending_) {
      Status status = piece->refused;
      for (const OpPtr& op : piece->ops) {
        const Status ended = op ? group_->wait(op, Deadline::never()) : Status();
        if (status.ok()) status = ended;
      }
      if (fate_.error.ok()) fate_.error = status;
      fate_.isWrong |= status.ok() && piece->isWrong();
      fate_.done += status.ok();
    }
    hasFailed |= !fate_.error.ok();
    pending_.clear();
    if (!fate_.error.ok()) leave(fate_.error.message());
    return fate_.error.ok();
  }
  // As a program does that ends, with this error or none.
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

  // A message of so many elements to the next rank, and one from the rank before.
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
        group_->abort("the program is tired");
        settle();
        fate_.error = group_->error();
        break;
      case Ending::kLeaving:
        isOver_ = true;
        --fate_.asked;
        if (settle()) leave("");
        break;
    }
  }

  // Another call than the others make here: of another kind, size or root.
  Step another(const Step& step) {
    Step other = step;
    auto isAnother = [&] {
      if (other.kind != step.kind) return true;
      if (other.kind == OpKind::kBarrier) return false;
      if (hasRoot(other.kind) && other.root != step.root) return true;
      // A quarter of one element is nothing, as of none.
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
  const Ending ending_;  // by this rank
  const int self_ = group_->rank(), ranks_ = group_->ranks();
  std::mt19937 own_;
  std::optional<Target> target_;
  std::vector<std::unique_ptr<Piece>> pending_;
  bool isOver_ = false;  // by the script
  Fate fate_;
};

// What becomes of a rank, by group; no entry: it is not a member.
using Fates = std::map<int, Fate>;

// The members of the group that this thread is making, beside the first one.
thread_local const std::vector<int>* forming = nullptr;

// What one rank does.
Fates play(const std::shared_ptr<Communicator>& world, const Script& script) {
  Fates fates;
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
    fates[number].error =
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
    // Nobody compares what is put.
    if (isLast && script.ending == Ending::kOddCall && kind == 1) kind = 0;
    if (kind <= 1) step.count = std::min(step.count, kMostElements);  // a message, or in a window
    if (auto player = players.find(group); player != players.end()) {
      player->second.play(step, kind, isLast);
    }
  }
  for (auto& [number, player] : players) {
    if (number == script.oddGroup && script.ending != Ending::kNone) player.meetAgain();
    player.settle();
    fates[number] = player.fate();
  }
  for (auto& [number, player] : players) player.leave("");
  return fates;
}

// The weather of each rank.
using Climate = std::vector<std::shared_ptr<Weather>>;

Climate climateOf(const Script& script) {
  Climate climate;
  for (int rank = 0; rank < script.ranks; ++rank)
    climate.push_back(std::make_shared<Weather>(script.seed, rank));
  return climate;
}

// Inside a host: all over rings in shared memory, or all over sockets, or one rank in three.
// Between them: encrypted or not.
std::vector<Fates> runWorld(const Script& script, Climate& climate) {
  const unsigned seed = script.seed;
  std::shared_ptr<const Tls> tls;
  if (seed / 4 % 2) ASSERT_OK(Tls::make("a secret of the job", &tls));
  auto store = std::make_shared<test::MemoryStore>();
  const auto ranks = static_cast<size_t>(script.ranks);
  std::vector<Fates> fates(ranks);
  std::vector<std::vector<void*>> kept(ranks);
  std::vector<std::shared_ptr<Engine>> engines(ranks);
  std::atomic<int> running{script.ranks};
  // By rank: it could not make the first group, so it makes no other.
  std::vector<std::atomic<bool>> isOut(ranks);
  // Bytes that were held back raise no event: somebody has to look again.
  for (size_t rank = 0; rank < ranks; ++rank) {
    MeshOptions mesh;
    const bool isTcp = !script.isOneHost && (seed % 2 || rank % 3 == 1);
    mesh.transport = isTcp ? TransportChoice::kTcp : TransportChoice::kAuto;
    mesh.host = " host " + std::to_string(script.hostOf[rank]);
    mesh.storeHost = "127.0.0.1";
    mesh.eagerBytes = 16 * 1024;
    mesh.singleCopy = Env::process().singleCopy;  // see forSeeds()
    if (seed % 3 && !script.hasLarge) mesh.eagerInCollectives = 16 * 1024;
    mesh.tls = tls;
    if (seed % 4 < 2) mesh.flows = 3;
    mesh.tap = climate[rank];
    ASSERT_OK(Engine::create(mesh, &engines[rank]));
  }
  std::thread clock([&] {
    while (running.load() > 0) {
      std::this_thread::sleep_for(1ms);
      for (auto& engine : engines) engine->mesh()->sleeper().wakeAll();
    }
  });
  test::Threads(script.ranks, [&](int rank) {
    GroupOptions options;
    options.name = "storm";
    options.rank = rank;
    options.ranks = script.ranks;
    options.timeout = 200s;  // other programs may take the processor meanwhile
    options.interrupted = [&isOut] {
      return forming && std::any_of(forming->begin(), forming->end(), [&](int member) {
               return isOut[static_cast<size_t>(member)].load();
             });
    };
    options.mostNotifiedDirectly = script.seed / 2 % 2 ? 1 : 64;
    std::shared_ptr<Communicator> group;
    const Status met =
        Communicator::create(options, store, engines[static_cast<size_t>(rank)], &group);
    Fates& mine = fates[static_cast<size_t>(rank)];
    if (met.ok()) {
      mine = play(group, script);
    } else {
      mine[0].error = met;
      isOut[static_cast<size_t>(rank)] = true;
    }
    group.reset();
    kept[static_cast<size_t>(rank)] = std::move(keptBlocks);
    running.fetch_sub(1);
  });
  clock.join();
  for (const auto& blocks : kept) std::for_each(blocks.begin(), blocks.end(), freeBlock);
  return fates;
}

void expect(bool isMet, unsigned seed, int rank, const std::string& text) {
  if (!isMet) {
    EXPECT_EQ("seed " + std::to_string(seed) + ", rank " + std::to_string(rank) + ": " + text, "");
  }
}

void expectWell(const Fate& fate, unsigned seed, int rank) {
  expect(fate.error.ok() && !fate.isWrong && fate.done == fate.asked, seed, rank,
         fate.isWrong ? "wrong bits" : test::show(fate.error));
}

void expectAllWell(const Script& script) {
  Climate climate = climateOf(script);
  const std::vector<Fates> fates = runWorld(script, climate);
  for (int rank = 0; rank < script.ranks; ++rank) {
    for (const auto& [group, fate] : fates[static_cast<size_t>(rank)]) {
      expectWell(fate, script.seed, rank);
    }
  }
}

// As messages name it.
std::string nameOf(int rank) { return "rank " + std::to_string(rank) + " ("; }

// An error of this kind that has these words in it, or none at all.
void expectHeard(const Fate& fate, unsigned seed, int rank, Code code, const std::string& words) {
  expect(!fate.isWrong, seed, rank, "wrong bits");
  if (fate.error.ok()) return expect(fate.done == fate.asked, seed, rank, "ended early");
  // Hasty ranks may act before they receive the better explanation.
  if (MYCOLL_HASTE > 1 && fate.error.code() != Code::kTimeout) return;
  expect(fate.error.code() == code && fate.error.message().find(words) != std::string::npos, seed,
         rank, test::show(fate.error));
}

// Each seed's fault befalls one rank's network, and with it groups that this rank is in. Survivors
// hear of it: which rank is dead, or one of the two whose connection broke.
void expectFaultIsHeard(const std::function<void(Weather& weather, const Script& script)>& plan,
                        bool hasAlwaysWindow = false) {
  std::atomic<int> failed{0};
  forSeeds(25, [&](unsigned seed) {
    Script script(seed);
    script.hasWindow |= hasAlwaysWindow;
    Climate climate = climateOf(script);
    plan(*climate[static_cast<size_t>(script.oddRank)], script);
    const std::vector<Fates> fates = runWorld(script, climate);
    const bool isDead = climate[static_cast<size_t>(script.oddRank)]->isDead();
    for (int rank = 0; rank < script.ranks; ++rank) {
      for (const auto& [group, fate] : fates[static_cast<size_t>(rank)]) {
        const int odd = script.rankIn(group, script.oddRank);
        failed += !fate.error.ok();
        const auto& members = script.membersOf(group);
        const bool isIncomplete =
            group > 0 && std::any_of(members.begin(), members.end(), [&](int m) {
              return !fates[static_cast<size_t>(m)].contains(group);
            });
        if (isIncomplete && fate.error.code() == Code::kInterrupted) {
          expect(fate.done == 0, seed, rank, "calls in a group that was not made");
        } else if (odd < 0) {
          expectWell(fate, seed, rank);
        } else if (isDead && rank == script.oddRank) {
          expect(!fate.isWrong, seed, rank, "wrong bits");
        } else {
          // One whose network is dead still tells its host what it has seen, through shared memory.
          const std::string itsView = "(seen by rank " + std::to_string(odd) + ")";
          const bool isItsView = fate.error.message().find(itsView) != std::string::npos;
          expectHeard(fate, seed, rank, Code::kPeerLost,
                      isDead && !isItsView ? nameOf(odd) : "rank ");
        }
      }
    }
  });
  EXPECT(failed > 0 || std::getenv("SIMULATION_SEED"));  // the faults were not all too late
}

// What one rank does in a group reaches all others of it: this code, with these words and its name
// in the message. It does nothing to other groups.
void expectAllHearOf(Ending ending, Code code, const std::string& words) {
  forSeeds(25, [&](unsigned seed) {
    const Script script(seed, ending);
    Climate climate = climateOf(script);
    const std::vector<Fates> fates = runWorld(script, climate);
    const std::string odd = nameOf(script.rankIn(script.oddGroup, script.oddRank));
    for (int rank = 0; rank < script.ranks; ++rank) {
      for (const auto& [group, fate] : fates[static_cast<size_t>(rank)]) {
        if (group != script.oddGroup || (rank == script.oddRank && ending == Ending::kLeaving)) {
          expectWell(fate, seed, rank);
          continue;
        }
        expect(!fate.error.ok(), seed, rank, "has heard of nothing");
        expectHeard(fate, seed, rank, code, words);
        // Others leave because of it, and may be seen first.
        if (ending == Ending::kLeaving) continue;
        expectHeard(fate, seed, rank, code, odd);
      }
    }
  });
}

}  // namespace

TEST(Simulation, slowLinksChangeNothing) {
  forSeeds(25, [](unsigned seed) { expectAllWell(Script(seed)); });
}

TEST(Simulation, putsComeBeforeTheirSignals) {
  forSeeds(20, [](unsigned seed) {
    Script script(seed);
    script.hasWindow = true;
    expectAllWell(script);
  });
}

TEST(Simulation, allRanksHearOfABrokenConnection) {
  expectFaultIsHeard(
      [](Weather& weather, const Script& script) { weather.planBreak(script.moveFor(400)); });
}

TEST(Simulation, allRanksWithWindowsHearOfABrokenConnection) {
  expectFaultIsHeard(
      [](Weather& weather, const Script& script) { weather.planBreak(script.moveFor(400)); },
      /*hasAlwaysWindow=*/true);
}

TEST(Simulation, survivorsHearOfADeath) {
  expectFaultIsHeard(
      [](Weather& weather, const Script& script) { weather.planDeath(script.moveFor(400)); });
}

// Whatever it calls instead, and wherever it is: nobody takes a number from it.
TEST(Simulation, allRanksHearOfACallThatDiffers) {
  expectAllHearOf(Ending::kOddCall, Code::kMismatch, "MISMATCH");
}

TEST(Simulation, allRanksHearOfAnAbort) {
  expectAllHearOf(Ending::kAbort, Code::kAborted, "the program is tired");
}

TEST(Simulation, allRanksHearOfALeaving) {
  expectAllHearOf(Ending::kLeaving, Code::kPeerLost, "has left the group");
}
