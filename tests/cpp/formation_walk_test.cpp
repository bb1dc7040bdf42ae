// Forms groups while faults happen that a seed chooses. The ranks are known from the store, from an
// earlier group with or without the store, or from handles. Some call late, and one of them may
// fail in one of many ways. Every rank must end soon, with an error that names the cause.
//
//   formation_walk_test                              runs some seeds
//   SIMULATION_SEEDS=5000 formation_walk_test        runs many seeds
//   SIMULATION_SEED=1234 formation_walk_test         runs the seed that a failure names
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
#include "passing_link.h"
#include "test.h"
#include "world.h"

using namespace mycoll;
using namespace std::chrono_literals;

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using test::MemoryStore;

constexpr milliseconds kTimeout = 20s;
// The longest time from the last event of a seed until all ranks have ended.
constexpr milliseconds kSoon = 6s;
constexpr int kAtOnce = 24;

// How the ranks know each other.
enum class Source { kStore, kParentAndStore, kParent, kHandles };
constexpr const char* kSourceNames[] = {"store", "parent and store", "parent", "handles"};

enum class Fault {
  kNone,
  kInterrupted,
  kImpatient,       // its timeout is short
  kDies,            // its network fails at some write
  kBreaks,          // one of its connections breaks at some write
  kLeaves,          // it leaves the parent and does not call; its process continues
  kLeavesAndCalls,  // it leaves the parent and calls; the others find it in the store
  kEnds,            // it does not call, as its process ends
  kOtherRoster,     // it calls with other ranks
  kOtherSettings,
  kCannotBegin,  // it calls reportAbsence()
};
constexpr const char* kFaultNames[] = {"none",         "interrupted",    "impatient",        "dies",
                                       "breaks",       "leaves",         "leaves and calls", "ends",
                                       "other roster", "other settings", "cannot begin"};

// One rank's network. Called under the mesh's I/O lock, except plan().
class Network final : public LinkTap {
 public:
  // Counting from now, all connections (isDeath) or one of them fail at this write.
  void plan(int write, bool isDeath) {
    isDeath_ = isDeath;
    left_ = write;
  }
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
        isBroken = true;
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

  std::atomic<bool> isDeath_{false}, isDead_{false};
  std::atomic<int> left_{0};
  std::set<Sender*> senders_;
};

// The store for a rank with other settings: it changes those in the handles.
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
  bool isMet = false;        // the job has made a call
  bool isStale = false;      // the store contains the handles of the job
  bool isDestroyed = false;  // a rank that leaves destroys its group, and does not only close it
  std::vector<milliseconds> delays;  // by rank
  int odd = 0;                       // the rank that fails
  milliseconds faultAt{0};
  int write = 0;                // at which kDies and kBreaks happen
  bool endsAfterwards = false;  // the process of a rank ends if its call fails

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
    write = 1 + below(below(2) ? 6 : 25);
    endsAfterwards = below(2);
    // A rank that rank 0 did not include cannot know whether rank 0 will call with it, too. With a
    // parent, a rank that uses the number of another rank cannot be reached.
    const bool isUnknown = (source != Source::kStore && odd == 0) ||
                           (hasParent() && odd == ranks() - 1) || ranks() < 3;
    if (fault == Fault::kOtherRoster && isUnknown) fault = Fault::kNone;
  }
  bool isPossible() const {
    switch (fault) {
      case Fault::kLeaves: return hasParent();
      case Fault::kLeavesAndCalls: return source == Source::kParentAndStore;
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
        std::to_string(faultAt.count()) + " ms, write " + std::to_string(write) +
        (endsAfterwards ? ", ends" : "") + (isMet ? ", met" : "") + (isStale ? ", stale" : "") +
        (isDestroyed ? ", destroyed" : "") + "; member@host+delay";
    for (int rank = 0; rank < ranks(); ++rank) {
      const auto member = static_cast<size_t>(members[rank]);
      text += " " + std::to_string(member) + "@" + std::to_string(hostOf[member]) +
              (transports[member] == TransportChoice::kTcp ? "t" : "s") + "+" +
              std::to_string(delays[rank].count());
    }
    return text + ")";
  }
};

// How one rank ends.
struct Result {
  bool hasCalled = true;
  Status formed, met;  // of the formation, and then of a barrier
  milliseconds took{0};
};

struct Process {
  std::shared_ptr<Network> network = std::make_shared<Network>();
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Communicator> job;
  std::unique_ptr<Endpoint> endpoint;
  std::atomic<int64_t> interruptAt{INT64_MAX};
  // Returns true once at that time.
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
  std::vector<Result> run() {
    std::vector<Result> results(script_.members.size());
    std::latch isOver(script_.ranks());
    began_ = Clock::now();
    test::Threads(script_.ranks(), [&](int rank) {
      results[rank] = play(rank);
      isOver.arrive_and_wait();
    });
    return results;
  }

 private:
  Process& processOf(int member) { return all_[member]; }

  GroupOptions optionsOf(Process& process, const std::string& name, int rank, int ranks) const {
    GroupOptions options = test::groupOptions(rank, ranks, kTimeout.count(), name);
    options.interrupted = [&process] { return process.isInterrupted(); };
    return options;
  }

  void start(int rank) {
    Process& process = processOf(rank);
    MeshOptions mesh;
    mesh.host = " host " + std::to_string(script_.hostOf[rank]);
    mesh.transport = script_.transports[rank];
    mesh.tap = process.network;
    process.engine = test::makeEngine(mesh);
    const GroupOptions options = optionsOf(process, "job", rank, script_.jobRanks);
    if (script_.source == Source::kHandles) {
      ASSERT_OK(Endpoint::make(options, process.engine, &process.endpoint));
    }
    if (!script_.hasParent()) return;
    ASSERT_OK(Communicator::create(options, script_.isStale ? store_ : jobStore_, process.engine,
                                   &process.job));
    if (script_.isMet) EXPECT_OK(test::barrier(*process.job));
  }

  Status form(int rank, std::shared_ptr<Communicator>* group) {
    const auto isOdd = [&](Fault fault) { return rank == script_.odd && script_.fault == fault; };
    Process& process = processOf(script_.members[rank]);
    GroupOptions options = optionsOf(process, "next", rank, script_.ranks());
    if (isOdd(Fault::kImpatient)) options.timeout = 300ms;
    std::vector<int> members = script_.members;
    std::vector<std::string> handles = handles_;
    if (isOdd(Fault::kOtherRoster)) {
      const int last = script_.ranks() - 1;  // this rank omits the highest other one
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

  Result play(int rank) {
    const auto isOdd = [&](Fault fault) { return rank == script_.odd && script_.fault == fault; };
    Process& process = processOf(script_.members[rank]);
    Result result;
    const auto faultAt = began_ + script_.faultAt;
    if (isOdd(Fault::kLeaves) || isOdd(Fault::kLeavesAndCalls) || isOdd(Fault::kEnds)) {
      std::this_thread::sleep_until(faultAt);
      if (process.job) process.job->close(Deadline::after(100ms), "its program ended");
      if (script_.isDestroyed || isOdd(Fault::kEnds)) process.job.reset();
      if (isOdd(Fault::kEnds)) end(process);
      result.hasCalled = isOdd(Fault::kLeavesAndCalls);
      if (!result.hasCalled) return result;
    }
    std::this_thread::sleep_until(began_ + script_.delays[rank]);
    if (isOdd(Fault::kInterrupted)) process.interruptAt = faultAt.time_since_epoch().count();
    if (isOdd(Fault::kDies) || isOdd(Fault::kBreaks)) {
      process.network->plan(script_.write, isOdd(Fault::kDies));
    }
    if (isOdd(Fault::kCannotBegin)) {
      (void)reportAbsence(optionsOf(process, "next", rank, script_.ranks()), *store_,
                          Status(Code::kInvalidArgument, "no descriptors"));
      result.hasCalled = false;
      return result;
    }
    std::shared_ptr<Communicator> group;
    result.formed = form(rank, &group);
    process.interruptAt = INT64_MAX;
    if (group) group->setTimeout(kTimeout);
    if (group) result.met = test::barrier(*group);
    result.took = std::chrono::duration_cast<milliseconds>(Clock::now() - began_);
    if (group) group->close(Deadline::after(100ms));
    if (!result.formed.ok() && script_.endsAfterwards) end(process);
    return result;
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

// Whether the script allows this result of a rank.
bool isExpected(const Script& script, int rank, const Result& result) {
  const Status& status = result.formed.ok() ? result.met : result.formed;
  const auto says = [&](const std::string& words) {
    return status.message().find(words) != std::string::npos;
  };
  // Hasty ranks may act before they receive the better explanation.
  if (MYCOLL_HASTE > 1) return status.code() != Code::kTimeout || script.fault == Fault::kImpatient;
  const bool namesOdd = says("rank " + std::to_string(script.odd));
  // The rank has left the new group, or the process that would have sent the cause has ended.
  const bool hasLeftNew = status.code() == Code::kPeerLost &&
                          ((result.formed.ok() && namesOdd) ||
                           (script.source == Source::kHandles && script.endsAfterwards));
  switch (script.fault) {
    case Fault::kNone:
    case Fault::kLeavesAndCalls: return status.ok();
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
  const std::vector<Result> results = world.run();
  milliseconds last = script.faultAt;
  for (const milliseconds delay : script.delays) last = std::max(last, delay);
  bool isFormed = true, isMet = true, isBad = false;
  std::string text;
  for (int rank = 0; rank < script.ranks(); ++rank) {
    const Result& result = results[rank];
    if (!result.hasCalled) continue;
    isFormed &= result.formed.ok();
    isMet &= result.formed.ok() && result.met.ok();
    // A rank that knows the others only from the store cannot know whether a failure there is of an
    // earlier start. Hasty ranks do not wait for one that has left the parent and calls late.
    const bool isFromStore = script.source == Source::kStore ||
                             (MYCOLL_HASTE > 1 && script.fault == Fault::kLeavesAndCalls);
    const bool isUnclear =
        isFromStore && std::any_of(results.begin(), results.end(), [](const Result& each) {
          return each.formed.message().find("may be of an earlier start") != std::string::npos;
        });
    const bool isLate = result.took - last > kSoon && !isUnclear;
    const bool isOdd = !isExpected(script, rank, result) && !isUnclear;
    isBad |= isLate || isOdd;
    text += "\n  rank " + std::to_string(rank) + " after " + std::to_string(result.took.count()) +
            " ms" + (isLate ? " (LATE)" : "") + (isOdd ? " (UNEXPECTED)" : "") + ": " +
            test::show(result.formed) + (result.formed.ok() ? "; " + test::show(result.met) : "");
  }
  // If the formation failed on some ranks, the first call fails on those that have made the group.
  for (const Result& result : results)
    isBad |= result.hasCalled && !isFormed && result.formed.ok() && result.met.ok();
  failedWorlds += !isMet;
  if (isBad) test::fail(__FILE__, __LINE__, script.words() + text);
}

}  // namespace

TEST(FormationWalk, everyRankEndsAndNamesTheCause) {
  const bool isOne = std::getenv("SIMULATION_SEED") != nullptr;
  const auto first = static_cast<unsigned>(test::numberFrom("SIMULATION_SEED", 1));
  const auto last = isOne ? first : static_cast<unsigned>(test::numberFrom("SIMULATION_SEEDS", 16));
  std::atomic<unsigned> next{first};
  test::Threads(kAtOnce, [&](int) {
    for (unsigned seed = next++; seed <= last; seed = next++) expectAll(seed);
  });
  EXPECT(isOne || failedWorlds > 0);
}
