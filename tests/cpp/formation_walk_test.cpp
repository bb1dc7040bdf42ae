// Groups that are formed while something goes wrong, by a seed: from the store, from an earlier
// group with and without it, and from handles; ranks come late, and one of them fails in one of
// many ways. Whatever it is, every rank ends soon, and with an error that names the cause.
//
//   formation_walk_test                              some seeds
//   SIMULATION_SEEDS=5000 formation_walk_test        many
//   SIMULATION_SEED=1234 formation_walk_test         one again, as a failure names it
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <latch>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "calls.h"
#include "engine/endpoint.h"
#include "engine/formation.h"
#include "engine/roster.h"
#include "passing_sender.h"
#include "test.h"
#include "world.h"

using namespace mycoll;
using namespace std::chrono_literals;

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using test::MemoryStore;

constexpr milliseconds kTimeout = 20s;
// From the last event of a seed until all ranks have ended.
constexpr milliseconds kSoon = 6s;
constexpr int kAtOnce = 24;

unsigned number(const char* variable, unsigned otherwise) {
  const char* text = std::getenv(variable);
  return text ? static_cast<unsigned>(std::strtoul(text, nullptr, 10)) : otherwise;
}

// Where the ranks know each other from.
enum class Source { kStore, kParentAndStore, kParent, kHandles };
constexpr const char* kSourceNames[] = {"store", "parent and store", "parent", "handles"};

enum class Fault {
  kNone,
  kInterrupted,
  kImpatient,       // its timeout is short
  kDies,            // its network fails at a move
  kBreaks,          // one of its connections breaks at a move
  kLeaves,          // it leaves the parent, and does not come; its process lives
  kLeavesAndComes,  // ... and comes, by the store
  kEnds,            // it does not come: its process ends
  kOtherRoster,     // it calls with other ranks
  kOtherSettings,
  kCannotBegin,  // it calls reportAbsence()
};
constexpr const char* kFaultNames[] = {"none",         "interrupted",    "impatient",        "dies",
                                       "breaks",       "leaves",         "leaves and comes", "ends",
                                       "other roster", "other settings", "cannot begin"};

// One rank's network. Called under the mesh's I/O lock, but for plan().
class Network final : public LinkTap {
 public:
  // From now on, at the so many-th move: all connections fail, or one.
  void plan(int move, bool isDeath) {
    isDeath_ = isDeath;
    left_ = move;
  }
  bool hasFailed() const { return hasFailed_; }

  std::unique_ptr<LinkSender> tap(std::unique_ptr<LinkSender> link) override {
    auto sender = std::make_unique<Sender>(*this, std::move(link));
    if (isDead_) ::shutdown(sender->fd(), SHUT_RDWR);
    return sender;
  }
  std::unique_ptr<LinkReceiver> tap(std::unique_ptr<LinkReceiver> link) override { return link; }

 private:
  struct Sender final : test::PassingSender {
    Sender(Network& network, std::unique_ptr<LinkSender> link)
        : PassingSender(std::move(link)), owner(network) {
      owner.senders_.insert(this);
    }
    ~Sender() override { owner.senders_.erase(this); }
    ssize_t write(const Span* parts, int count) override {
      if (owner.left_ > 0 && --owner.left_ == 0) {
        owner.hasFailed_ = isBroken = true;
        owner.isDead_ = owner.isDeath_.load();
        ::shutdown(fd(), SHUT_RDWR);
        for (Sender* each : owner.senders_) {
          if (owner.isDead_) ::shutdown(each->fd(), SHUT_RDWR);
        }
      }
      return isBroken || owner.isDead_ ? -1 : link_->write(parts, count);
    }
    Network& owner;
    bool isBroken = false;
  };

  std::atomic<bool> isDeath_{false}, isDead_{false}, hasFailed_{false};
  std::atomic<int> left_{0};
  std::set<Sender*> senders_;
};

// What a rank with other settings sees: it publishes them, and reads the others'.
class OddStore final : public Store {
 public:
  explicit OddStore(std::shared_ptr<Store> store) : store_(std::move(store)) {}
  Status set(const std::string& key, const std::string& value) override {
    return store_->set(key, with(value, "odd"));
  }
  Status tryGet(const std::string& key, bool* found, std::string* value) override {
    MYCOLL_RETURN_IF_ERROR(store_->tryGet(key, found, value));
    *value = with(*value, "even");
    return Status();
  }
  Status compareSet(const std::string& key, const std::string& expected, const std::string& value,
                    std::string* now) override {
    const std::string odd = with(value, "odd");
    MYCOLL_RETURN_IF_ERROR(store_->compareSet(key, expected, odd, now));
    if (*now == odd) *now = value;
    return Status();
  }

 private:
  static std::string with(const std::string& value, const std::string& settings) {
    Handle handle;
    if (!Handle::decode(value, &handle).ok()) return value;
    handle.settings = settings;
    return handle.encode();
  }
  const std::shared_ptr<Store> store_;
};

struct Script {
  unsigned seed;
  std::mt19937 random;
  Source source;
  Fault fault = Fault::kNone;
  int jobRanks = 0;
  std::vector<int> members;  // of the job, or of all processes, by rank
  std::vector<int> hostOf;   // by rank of the job
  std::vector<TransportChoice> transports;
  bool isMet = false;                // the job has made a call
  bool isStale = false;              // the store holds the handles of the job
  bool isDestroyed = false;          // what is left is destroyed, not only closed
  std::vector<milliseconds> delays;  // by rank
  int odd = 0;
  milliseconds faultAt{0};
  int move = 0;
  bool endsAfterwards = false;  // the process of a rank that has failed

  int below(size_t bound) { return static_cast<int>(random() % bound); }
  int ranks() const { return static_cast<int>(members.size()); }
  bool hasParent() const { return source == Source::kParentAndStore || source == Source::kParent; }
  bool hasStore() const { return source == Source::kStore || source == Source::kParentAndStore; }

  explicit Script(unsigned seed) : seed(seed), random(seed) {
    source = static_cast<Source>(below(4));
    do {
      fault = static_cast<Fault>(below(std::size(kFaultNames)));
    } while (!isPossible());
    jobRanks = 2 + below(6);
    const int hosts = 1 + below(4), transport = below(3);
    for (int rank = 0; rank < jobRanks; ++rank) {
      hostOf.push_back(below(static_cast<size_t>(hosts)));
      const bool isTcp = transport == 0 || (transport == 1 && below(2));
      transports.push_back(isTcp ? TransportChoice::kTcp : TransportChoice::kAuto);
    }
    members.resize(static_cast<size_t>(jobRanks));
    std::iota(members.begin(), members.end(), 0);
    if (below(2)) std::shuffle(members.begin(), members.end(), random);
    if (hasParent()) members.resize(static_cast<size_t>(2 + below(members.size() - 1)));
    isMet = below(2);
    isStale = below(2);
    isDestroyed = below(2);
    constexpr int kDelays[] = {1, 5, 50, 400, 1500};
    const int delay = kDelays[below(std::size(kDelays))];
    for (int rank = 0; rank < ranks(); ++rank) {
      delays.emplace_back(below(3) ? below(static_cast<size_t>(delay)) : 0);
    }
    odd = below(members.size());
    if (below(3) == 0) odd = 0;
    faultAt = milliseconds(below(3) ? below(static_cast<size_t>(kDelays[below(5)])) : 0);
    move = 1 + below(below(2) ? 6 : 25);
    endsAfterwards = below(2);
    // A rank that rank 0 has not called with cannot know whether rank 0 will; and with a parent,
    // one that takes the number of another rank is not reached.
    const bool isUnknown = (source != Source::kStore && odd == 0) ||
                           (hasParent() && odd == ranks() - 1) || ranks() < 3;
    if (fault == Fault::kOtherRoster && isUnknown) fault = Fault::kNone;
  }
  bool isPossible() const {
    switch (fault) {
      case Fault::kLeaves: return hasParent();
      case Fault::kLeavesAndComes: return source == Source::kParentAndStore;
      case Fault::kEnds: return source != Source::kStore;
      case Fault::kOtherSettings:
      case Fault::kCannotBegin: return source == Source::kStore;
      default: return true;
    }
  }
  std::string words() const {
    std::string text =
        "seed " + std::to_string(seed) + " (" + kSourceNames[static_cast<int>(source)] + ", " +
        kFaultNames[static_cast<int>(fault)] + " " + std::to_string(odd) + " at " +
        std::to_string(faultAt.count()) + " ms, move " + std::to_string(move) +
        (endsAfterwards ? ", ends" : "") + (isMet ? ", met" : "") + (isStale ? ", stale" : "") +
        (isDestroyed ? ", destroyed" : "") + "; member@host+delay";
    for (int rank = 0; rank < ranks(); ++rank) {
      const auto member = static_cast<size_t>(members[static_cast<size_t>(rank)]);
      text += " " + std::to_string(member) + "@" + std::to_string(hostOf[member]) +
              (transports[member] == TransportChoice::kTcp ? "t" : "s") + "+" +
              std::to_string(delays[static_cast<size_t>(rank)].count());
    }
    return text + ")";
  }
};

// What becomes of a rank.
struct Fate {
  bool isAsked = true;  // whether it has called
  Status formed, met;   // its call; then a barrier
  milliseconds took{0};
};

struct Process {
  std::shared_ptr<Network> network = std::make_shared<Network>();
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Communicator> job;
  std::unique_ptr<Endpoint> endpoint;
  std::atomic<int64_t> interruptAt{INT64_MAX};  // once
  bool isInterrupted() {
    const int64_t now = Clock::now().time_since_epoch().count();
    int64_t at = interruptAt;
    return now >= at && interruptAt.compare_exchange_strong(at, INT64_MAX);
  }
};

class World {
 public:
  explicit World(Script& script) : script_(script), all_(static_cast<size_t>(script.jobRanks)) {
    test::Threads(script.jobRanks, [&](int rank) { start(rank); });
    for (const int member : script.members) {
      const auto& endpoint = processOf(member).endpoint;
      if (endpoint) handles_.push_back(endpoint->handle());
    }
  }
  std::vector<Fate> run() {
    std::vector<Fate> fates(script_.members.size());
    std::latch isOver(script_.ranks());
    began_ = Clock::now();
    test::Threads(script_.ranks(), [&](int rank) {
      fates[static_cast<size_t>(rank)] = play(rank);
      isOver.arrive_and_wait();
    });
    return fates;
  }
  bool hasNetworkFailed() const {
    return std::any_of(all_.begin(), all_.end(),
                       [](const Process& each) { return each.network->hasFailed(); });
  }

 private:
  Process& processOf(int member) { return all_[static_cast<size_t>(member)]; }

  GroupOptions optionsOf(Process& process, const std::string& name, int rank, int ranks) const {
    GroupOptions options;
    options.name = name;
    options.rank = rank;
    options.ranks = ranks;
    options.timeout = kTimeout;
    options.interrupted = [&process] { return process.isInterrupted(); };
    return options;
  }

  void start(int rank) {
    Process& process = processOf(rank);
    MeshOptions mesh;
    mesh.storeHost = "127.0.0.1";
    mesh.host = " host " + std::to_string(script_.hostOf[static_cast<size_t>(rank)]);
    mesh.transport = script_.transports[static_cast<size_t>(rank)];
    mesh.tap = process.network;
    ASSERT_OK(Engine::create(mesh, &process.engine));
    const GroupOptions options = optionsOf(process, "job", rank, script_.jobRanks);
    if (script_.source == Source::kHandles) {
      ASSERT_OK(Endpoint::make(options, process.engine, &process.endpoint));
    }
    if (!script_.hasParent()) return;
    ASSERT_OK(Communicator::create(options, script_.isStale ? store_ : jobStore_, process.engine,
                                   &process.job));
    if (script_.isMet) EXPECT_OK(test::run(*process.job, test::call(OpKind::kBarrier)));
  }

  Status form(int rank, std::shared_ptr<Communicator>* group) {
    const auto isOdd = [&](Fault fault) { return rank == script_.odd && script_.fault == fault; };
    Process& process = processOf(script_.members[static_cast<size_t>(rank)]);
    GroupOptions options = optionsOf(process, "next", rank, script_.ranks());
    if (isOdd(Fault::kImpatient)) options.timeout = 300ms;
    std::vector<int> members = script_.members;
    std::vector<std::string> handles = handles_;
    if (isOdd(Fault::kOtherRoster)) {
      const int last = script_.ranks() - 1;  // the highest rank other than this
      const int without = rank == last ? last - 1 : last;
      members.erase(members.begin() + without);
      if (!handles.empty()) handles.erase(handles.begin() + without);
      options.ranks -= 1;
      if (rank > without) options.rank -= 1;
    }
    std::shared_ptr<Store> store = store_;
    if (isOdd(Fault::kOtherSettings)) store = std::make_shared<OddStore>(store);
    switch (script_.source) {
      case Source::kParentAndStore:
        for (const int member : members) options.globalRanks.push_back(member);
        [[fallthrough]];
      case Source::kStore: return Communicator::create(options, store, process.engine, group);
      case Source::kParent:
        process.job->setTimeout(options.timeout);
        return Communicator::shrink(*process.job, " next", members, group);
      case Source::kHandles: return process.endpoint->form(1, handles, options.timeout, group);
    }
    return Status();
  }

  Fate play(int rank) {
    const auto isOdd = [&](Fault fault) { return rank == script_.odd && script_.fault == fault; };
    Process& process = processOf(script_.members[static_cast<size_t>(rank)]);
    Fate fate;
    const auto faultAt = began_ + script_.faultAt;
    if (isOdd(Fault::kLeaves) || isOdd(Fault::kLeavesAndComes) || isOdd(Fault::kEnds)) {
      std::this_thread::sleep_until(faultAt);
      if (process.job) process.job->close(Deadline::after(100ms), "its program ended");
      if (script_.isDestroyed || isOdd(Fault::kEnds)) process.job.reset();
      if (isOdd(Fault::kEnds)) end(process);
      fate.isAsked = isOdd(Fault::kLeavesAndComes);
      if (!fate.isAsked) return fate;
    }
    std::this_thread::sleep_until(began_ + script_.delays[static_cast<size_t>(rank)]);
    if (isOdd(Fault::kInterrupted)) process.interruptAt = faultAt.time_since_epoch().count();
    if (isOdd(Fault::kDies) || isOdd(Fault::kBreaks)) {
      process.network->plan(script_.move, isOdd(Fault::kDies));
    }
    if (isOdd(Fault::kCannotBegin)) {
      (void)reportAbsence(optionsOf(process, "next", rank, script_.ranks()), *store_,
                          Status(Code::kInvalidArgument, "no descriptors"));
      fate.isAsked = false;
      return fate;
    }
    std::shared_ptr<Communicator> group;
    fate.formed = form(rank, &group);
    process.interruptAt = INT64_MAX;
    if (group) group->setTimeout(kTimeout);
    if (group) fate.met = test::run(*group, test::call(OpKind::kBarrier));
    fate.took = std::chrono::duration_cast<milliseconds>(Clock::now() - began_);
    if (group) group->close(Deadline::after(100ms));
    if (!fate.formed.ok() && script_.endsAfterwards) end(process);
    return fate;
  }

  static void end(Process& process) {
    process.job.reset();
    process.endpoint.reset();
    process.engine.reset();
  }

  Script& script_;
  std::vector<Process> all_;
  std::vector<std::string> handles_;
  const std::shared_ptr<MemoryStore> store_ = std::make_shared<MemoryStore>();
  const std::shared_ptr<MemoryStore> jobStore_ = std::make_shared<MemoryStore>();
  Clock::time_point began_;
};

// What a rank's error is expected to say; empty: no error.
bool isExpected(const Script& script, int rank, const Fate& fate) {
  const Status& status = fate.formed.ok() ? fate.met : fate.formed;
  const auto says = [&](const std::string& words) {
    return status.message().find(words) != std::string::npos;
  };
  // Hasty ranks may act before they receive the better explanation.
  if (MYCOLL_HASTE > 1) return status.code() != Code::kTimeout || script.fault == Fault::kImpatient;
  const bool namesOdd = says("rank " + std::to_string(script.odd));
  // It has left the new group, or the process is gone that would have said why.
  const bool hasLeftNew = status.code() == Code::kPeerLost &&
                          ((fate.formed.ok() && namesOdd) ||
                           (script.source == Source::kHandles && script.endsAfterwards));
  switch (script.fault) {
    case Fault::kNone:
    case Fault::kLeavesAndComes: return status.ok();
    case Fault::kInterrupted:
      if (rank == script.odd) return status.ok() || status.code() == Code::kInterrupted;
      return status.ok() || hasLeftNew || (namesOdd && (says("signal") || says("has left while")));
    case Fault::kImpatient:
      return status.ok() || hasLeftNew || (namesOdd && (says("300ms") || says("has left while")));
    case Fault::kDies:
    case Fault::kBreaks: return status.ok() || (status.code() != Code::kTimeout && says("rank "));
    case Fault::kLeaves: return namesOdd && says("left the group");
    case Fault::kEnds: return namesOdd && status.code() == Code::kPeerLost;
    case Fault::kOtherRoster:
      return status.code() == Code::kInvalidArgument || status.code() == Code::kStore;
    case Fault::kOtherSettings: return says("'odd'") || says("'even'");
    case Fault::kCannotBegin: return namesOdd && says("no descriptors");
  }
  return rank < 0;
}

std::atomic<int> failedWorlds{0};

void expectAll(unsigned seed) {
  Script script(seed);
  World world(script);
  const std::vector<Fate> fates = world.run();
  milliseconds last = script.faultAt;
  for (const milliseconds delay : script.delays) last = std::max(last, delay);
  bool isFormed = true, isMet = true, isBad = false;
  std::string text;
  for (int rank = 0; rank < script.ranks(); ++rank) {
    const Fate& fate = fates[static_cast<size_t>(rank)];
    if (!fate.isAsked) continue;
    isFormed &= fate.formed.ok();
    isMet &= fate.formed.ok() && fate.met.ok();
    // Nobody can know whether what the store holds is of an earlier start.
    const bool isUnclear =
        script.source == Source::kStore &&
        std::any_of(fates.begin(), fates.end(), [](const Fate& each) {
          return each.formed.message().find("may be of an earlier start") != std::string::npos;
        });
    const bool isLate = fate.took - last > kSoon && !isUnclear;
    const bool isOdd = !isExpected(script, rank, fate) && !isUnclear;
    isBad |= isLate || isOdd;
    text += "\n  rank " + std::to_string(rank) + " after " + std::to_string(fate.took.count()) +
            " ms" + (isLate ? " (LATE)" : "") + (isOdd ? " (UNEXPECTED)" : "") + ": " +
            test::show(fate.formed) + (fate.formed.ok() ? "; " + test::show(fate.met) : "");
  }
  // Ranks that have made the group without others learn of it at the first call.
  for (const Fate& fate : fates)
    isBad |= fate.isAsked && !isFormed && fate.formed.ok() && fate.met.ok();
  failedWorlds += !isMet;
  if (isBad) test::fail(__FILE__, __LINE__, script.words() + text);
}

}  // namespace

TEST(FormationWalk, everyRankEndsAndNamesTheCause) {
  const bool isOne = std::getenv("SIMULATION_SEED") != nullptr;
  const unsigned first = number("SIMULATION_SEED", 1);
  const unsigned last = isOne ? first : number("SIMULATION_SEEDS", 16);
  std::atomic<unsigned> next{first};
  test::Threads(kAtOnce, [&](int) {
    for (unsigned seed = next++; seed <= last; seed = next++) expectAll(seed);
  });
  EXPECT(isOne || failedWorlds > 0);
}
