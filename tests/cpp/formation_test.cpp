// How a group is formed: how often it uses the store, and what happens if a rank dies, exists
// twice, publishes something invalid, or does not call.
#include "engine/formation.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <latch>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/sha256.h"
#include "engine/invitation.h"
#include "engine/roster.h"
#include "engine/round.h"
#include "passing_link.h"
#include "test.h"
#include "world.h"

using namespace mycoll;
using std::chrono::milliseconds;

namespace {

using test::MemoryStore;
using test::Threads;

std::string keyOf(int rank) { return "handle/" + std::to_string(rank); }

// One rank's view of a store. It counts the operations, and calls `afterGet` after each tryGet():
// to delay it, to change the value, or to return an error.
class WatchedStore final : public Store {
 public:
  using AfterGet = std::function<Status(const std::string& key, std::string* value)>;
  explicit WatchedStore(std::shared_ptr<Store> store, AfterGet afterGet = nullptr)
      : store_(std::move(store)), afterGet_(std::move(afterGet)) {}

  Status set(const std::string& key, const std::string& value) override {
    ++operations;
    return store_->set(key, value);
  }
  Status tryGet(const std::string& key, bool* found, std::string* value) override {
    ++operations;
    MYCOLL_RETURN_IF_ERROR(store_->tryGet(key, found, value));
    if (!*found) value->clear();
    return afterGet_ ? afterGet_(key, value) : Status();
  }
  Status compareSet(const std::string& key, const std::string& expected, const std::string& value,
                    std::string* now) override {
    ++operations;
    return store_->compareSet(key, expected, value, now);
  }

  std::atomic<size_t> operations{0};

 private:
  const std::shared_ptr<Store> store_;
  const AfterGet afterGet_;
};

// A store that cannot be read any more once `isClosed`.
std::shared_ptr<Store> storeUntil(const std::atomic<bool>& isClosed) {
  return std::make_shared<WatchedStore>(
      std::make_shared<MemoryStore>(), [&isClosed](const std::string&, std::string*) {
        return isClosed ? Status(Code::kStore, "closed") : Status();
      });
}

// A view of the store in which the process of this rank cannot be seen, as from another host.
std::shared_ptr<Store> storeElsewhere(const std::shared_ptr<Store>& store, int rank = 0) {
  const auto hide = [rank](const std::string& key, std::string* value) {
    Handle handle;
    if (key != keyOf(rank) || value->empty()) return Status();
    MYCOLL_RETURN_IF_ERROR(Handle::decode(*value, &handle));
    handle.address.pidSpace = "elsewhere";
    *value = handle.encode();
    return Status();
  };
  return std::make_shared<WatchedStore>(store, hide);
}

std::shared_ptr<Engine> engineOn(const std::string& host,
                                 const std::shared_ptr<LinkTap>& tap = nullptr) {
  MeshOptions mesh;
  mesh.host = host;
  mesh.tap = tap;
  return test::makeEngine(mesh);
}

GroupOptions optionsOf(int rank, int ranks, int timeoutMs = 10'000) {
  return test::groupOptions(rank, ranks, timeoutMs);
}

void waitUntil(const std::function<bool()>& condition) { ASSERT(test::eventually(condition)); }

// The handle that a rank has published; one without a nonce if it has not.
Handle handleIn(Store& store, int rank) {
  bool found = false;
  std::string text;
  Handle handle;
  ASSERT_OK(store.tryGet(keyOf(rank), &found, &text));
  if (found) ASSERT_OK(Handle::decode(text, &handle));
  return handle;
}

Handle waitForHandle(Store& store, int rank) {
  waitUntil([&] { return !handleIn(store, rank).nonce.empty(); });
  return handleIn(store, rank);
}

// Waits until a rank has published that it has given up.
void waitForFailure(Store& store, int rank) {
  waitUntil([&] { return !handleIn(store, rank).why.empty(); });
}

// The roster of these ranks. A rank without a nonce is absent.
Roster rosterOf(uint64_t round, const std::vector<Handle>& handles) {
  Roster roster;
  roster.round = round;
  ASSERT_OK(Handle::freshNonce(&roster.number));
  std::vector<PeerAddress> peers;
  for (const Handle& handle : handles) {
    roster.members.emplace_back().nonce = handle.nonce;
    roster.members.back().isPublished = !handle.nonce.empty();
    peers.push_back(handle.address);
  }
  roster.peers = std::move(peers);
  return roster;
}

// Forms the group as one rank, and leaves it.
Status formAs(GroupOptions options, const std::shared_ptr<Store>& store,
              const std::string& host = "") {
  std::shared_ptr<Communicator> group;
  const Status status = Communicator::create(std::move(options), store, engineOn(host), &group);
  if (group) group->abort("over");
  return status;
}

// Can keep a process from sending anything.
class CuttingTap final : public LinkTap {
 public:
  std::unique_ptr<LinkSender> tap(std::unique_ptr<LinkSender> link) override {
    return std::make_unique<Sender>(*this, std::move(link));
  }
  std::unique_ptr<LinkReceiver> tap(std::unique_ptr<LinkReceiver> link) override { return link; }

  std::atomic<bool> isCut{false};

 private:
  struct Sender final : test::PassingSender {
    Sender(const CuttingTap& tap, std::unique_ptr<LinkSender> link)
        : PassingSender(std::move(link)), owner(tap) {}
    ssize_t write(const Span* parts, int count) override {
      return owner.isCut ? -1 : link_->write(parts, count);
    }
    const CuttingTap& owner;
  };
};

// A rank whose steps the test calls. Its destructor ends it like a process that has left its
// groups.
class Puppet {
 public:
  Puppet(int rank, int ranks, std::shared_ptr<Store> store, const std::string& host = "")
      : store_(std::move(store)), engine_(engineOn(host, tap_)) {
    EXPECT_OK(Handle::freshNonce(&handle.nonce));
    handle.rank = rank;
    handle.ranks = ranks;
    handle.settings = Handle::settingsHere();
    handle.address = engine_->mesh()->address();
  }

  void publish() { ASSERT_OK(store_->set(keyOf(handle.rank), handle.encode())); }
  void openReception() {
    ASSERT_OK(Reception::open(engine_->mesh(), handle.nonce, news, &reception_));
  }
  // Publishes settings with which the other ranks cannot form a group.
  void publishOtherSettings() {
    handle.settings = "MYCOLL_PARTIALS=rounded";
    openReception();
    publish();
  }
  // Calls the mesh until the condition holds.
  void drive(const std::function<bool()>& isDone) {
    const Deadline deadline = Deadline::after(milliseconds(10'000));
    while (!isDone()) {
      ASSERT(!deadline.expired());
      engine_->mesh()->progress();
      std::this_thread::sleep_for(milliseconds(1));
    }
  }
  // Publishes its handle, and waits for an invitation.
  Roster beInvited() {
    if (!reception_) {
      openReception();
      publish();
    }
    std::vector<InvitationMessage> messages;
    drive([&] { return !(messages = reception_->takeMessages()).empty(); });
    message_ = std::move(messages.back());
    Roster roster;
    ASSERT_OK(Roster::decode(message_->text, &roster));
    return roster;
  }
  // Joins the round of the last invitation.
  void join(const Roster& roster) {
    round.reset();
    ASSERT_OK(Round::open(engine_->mesh(), "test", handle.rank, *message_, roster, news, &round));
  }
  // Begins a round as rank 0.
  void begin(const Roster& roster) {
    InvitationMessage message(InvitationMessage::Content::kRoster, roster.encode());
    ASSERT_OK(Round::open(engine_->mesh(), "test", 0, std::move(message), roster, news, &round));
  }
  // Waits until the round has failed.
  Status failure() {
    drive([this] { return !round->state().failure.ok(); });
    return round->state().failure;
  }
  // Leaves its round without a report.
  void giveUp() {
    round.reset();
    reception_.reset();
  }
  // Ends like a process that was killed: it sends nothing more.
  void die() { tap_->isCut = true; }
  std::shared_ptr<Mesh> mesh() const { return engine_->mesh(); }

  Handle handle;
  Wakeup news;

 private:
  const std::shared_ptr<Store> store_;
  const std::shared_ptr<CuttingTap> tap_ = std::make_shared<CuttingTap>();
  const std::shared_ptr<Engine> engine_;
  std::unique_ptr<Reception> reception_;
  std::optional<InvitationMessage> message_;

 public:
  std::unique_ptr<Round> round;
};

std::vector<Status> formAll(int ranks, const std::shared_ptr<Store>& store, int without = -1,
                            int timeoutMs = 10'000) {
  std::vector<Status> found(ranks);
  Threads(ranks, [&](int rank) {
    if (rank != without) found[rank] = formAs(optionsOf(rank, ranks, timeoutMs), store);
  });
  return found;
}

}  // namespace

// Forms a group of a thousand ranks. A rank that does not wait long uses the store once.
TEST(Formation, aThousandRanks) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  constexpr int kRanks = 200, kOnEach = 8;
#else
  constexpr int kRanks = 1000, kOnEach = 8;
#endif
  const auto store = std::make_shared<MemoryStore>();
  std::vector<size_t> operations(kRanks);
  std::atomic<int> formed{0};
  const auto began = std::chrono::steady_clock::now();
  Threads(kRanks, [&](int rank) {
    const std::shared_ptr<Engine> engine = engineOn(" host " + std::to_string(rank / kOnEach));
    const auto counted = std::make_shared<WatchedStore>(store);
    std::shared_ptr<Communicator> group;
    const auto start = std::chrono::steady_clock::now();
    EXPECT_OK(Communicator::create(optionsOf(rank, kRanks, 120'000), counted, engine, &group));
    const auto took = std::chrono::steady_clock::now() - start;
    operations[rank] = counted->operations;
    // One that waits uses it at most twice a second.
    if (rank != 0) EXPECT(counted->operations <= 1 + static_cast<size_t>(took / milliseconds(450)));
    // Reports the time of the slowest rank.
    if (++formed == kRanks) {
      printf("    %d ranks, engines included: %.2f s\n", kRanks,
             std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
    }
    while (formed < kRanks) std::this_thread::sleep_for(milliseconds(5));
    if (group) group->close(Deadline::after(milliseconds(100)));
  });
  printf("    store operations: %zu\n",
         std::accumulate(operations.begin(), operations.end(), size_t{0}));
}

// Eight ranks on two hosts make seven connections: those of the control tree, which the group's
// first collective uses.
TEST(Formation, makesTheConnectionsOfTheControlTree) {
  constexpr int kRanks = 8;
  const auto store = std::make_shared<MemoryStore>();
  const auto counter = std::make_shared<test::LinkCounter>();
  std::atomic<size_t> operations{0};
  std::latch isFormed(kRanks), isOver(kRanks);
  Threads(kRanks, [&](int rank) {
    const std::shared_ptr<Engine> engine = engineOn(rank < 4 ? "" : " another host", counter);
    const auto counted = std::make_shared<WatchedStore>(store);
    std::shared_ptr<Communicator> group;
    ASSERT_OK(Communicator::create(optionsOf(rank, kRanks), counted, engine, &group));
    operations += counted->operations;
    isFormed.arrive_and_wait();
    if (rank == 0) {
      EXPECT_EQ(counter->links.load(), 2 * (kRanks - 1));
      const Shape shape(hostsOf(group->address()));
      const ControlTree tree(shape);
      for (const int child : tree.childrenOf(0, [](int) { return false; })) {
        EXPECT(group->mailbox().isConnectedTo(child));
      }
    }
    isOver.arrive_and_wait();
    group->close(Deadline::after(milliseconds(100)));
  });
  printf("    store operations: %zu\n", operations.load());
}

namespace {

// Makes a group of these ranks of the job. Returns how often they use the store.
size_t storeOperations(const std::vector<std::shared_ptr<Engine>>& engines,
                       const std::vector<int64_t>& members, const std::string& name,
                       milliseconds late = milliseconds(0)) {
  const auto store = std::make_shared<MemoryStore>();
  std::atomic<size_t> operations{0};
  Threads(static_cast<int>(members.size()), [&](int rank) {
    const auto counted = std::make_shared<WatchedStore>(store);
    GroupOptions options = optionsOf(rank, static_cast<int>(members.size()));
    options.name = name;
    options.globalRanks = members;
    if (rank == 0) std::this_thread::sleep_for(late);
    std::shared_ptr<Communicator> group;
    ASSERT_OK(Communicator::create(options, counted, engines[members[rank]], &group));
    for (size_t i = 0; i < members.size(); ++i) {
      EXPECT_EQ(group->address().peers[i].uid, engines[members[i]]->mesh()->address().uid);
    }
    Call call;
    call.kind = OpKind::kBarrier;
    EXPECT_OK(group->wait(group->submit(std::move(call), nullptr, true), Deadline::never()));
    operations += counted->operations;
  });
  return operations;
}

}  // namespace

TEST(Formation, ranksOfAGroupNeedNoStore) {
  constexpr int kRanks = 8;
  const auto store = std::make_shared<MemoryStore>();
  std::vector<std::shared_ptr<Engine>> engines;
  for (int rank = 0; rank < kRanks; ++rank) {
    engines.push_back(engineOn(rank % 2 ? " another host" : ""));
  }
  std::vector<std::shared_ptr<Communicator>> job(kRanks);
  Threads(kRanks, [&](int rank) {
    ASSERT_OK(Communicator::create(optionsOf(rank, kRanks), store, engines[rank], &job[rank]));
  });
  // A rank that waits for a second uses the store. As the machine may be busy, this tries again.
  const auto needsStore = [&](const std::vector<int64_t>& members, const std::string& name,
                              int lateMs = 0) {
    for (int attempt = 0; attempt < 5; ++attempt) {
      if (storeOperations(engines, members, name, milliseconds(lateMs)) == 0) return false;
    }
    return true;
  };
  EXPECT(!needsStore({1, 3, 4, 7}, "1"));
  // The same name again, with rank 0 late; then other orders.
  EXPECT(!needsStore({1, 3, 4, 7}, "1", 300));
  EXPECT(!needsStore({5, 0, 2}, "2"));
  EXPECT(!needsStore({0, 1, 2, 3, 4, 5, 6, 7}, "3"));
  // Rank 0 does not call.
  GroupOptions options = optionsOf(1, 2, 300);
  options.name = "never";
  options.globalRanks = {6, 2};
  std::shared_ptr<Communicator> never;
  const Status late = Communicator::create(options, store, engines[2], &never);
  EXPECT_EQ(late.code(), Code::kTimeout);
  EXPECT_CONTAINS(late, "missing: 0");
  // Rank 0 cannot call, and has written the reason to the store.
  const auto written = std::make_shared<MemoryStore>();
  options.rank = 0;
  EXPECT(!reportAbsence(options, *written, Status(Code::kNetwork, "no network here")).ok());
  options.rank = 1;
  options.timeout = milliseconds(10'000);
  EXPECT_CONTAINS(Communicator::create(options, written, engines[2], &never), "no network here");
  // A rank that has left the job's group has no addresses of the others.
  job[3]->close(Deadline::after(milliseconds(100)));
  EXPECT(storeOperations(engines, {0, 3}, "4") > 0);
  EXPECT(storeOperations(engines, {3, 0}, "5") > 0);
}

// A rank has left the job's group, and its process continues. The others report that, and do not
// wait for it.
TEST(Formation, aRankThatHasLeftTheJobIsReported) {
  constexpr int kRanks = 3;
  const auto began = std::chrono::steady_clock::now();
  for (const int leaver : {0, 2}) {
    for (const bool isApart : {false, true}) {
      const auto store = std::make_shared<MemoryStore>();
      std::vector<std::shared_ptr<Engine>> engines;
      std::vector<std::shared_ptr<Communicator>> job(kRanks);
      for (int rank = 0; rank < kRanks; ++rank) {
        engines.push_back(engineOn(isApart && rank == leaver ? " another host" : ""));
      }
      Threads(kRanks, [&](int rank) {
        ASSERT_OK(Communicator::create(optionsOf(rank, kRanks), store, engines[rank], &job[rank]));
        Call barrier;
        barrier.kind = OpKind::kBarrier;
        EXPECT_OK(job[rank]->wait(job[rank]->submit(std::move(barrier), nullptr, true),
                                  Deadline::never()));
      });
      job[leaver]->close(Deadline::after(milliseconds(100)), "its program ended");
      // The store may hold an earlier handle of that rank.
      const auto next = isApart ? store : std::make_shared<MemoryStore>();
      Threads(kRanks, [&](int rank) {
        if (rank == leaver) return;
        GroupOptions options = optionsOf(rank, kRanks, 30'000);
        options.name = "next";
        options.globalRanks = {0, 1, 2};
        std::shared_ptr<Communicator> group;
        const Status found = Communicator::create(options, next, engines[rank], &group);
        EXPECT_EQ(found.code(), Code::kPeerLost);
        EXPECT_CONTAINS(found, "made with rank " + std::to_string(leaver) + ": ");
        EXPECT_CONTAINS(found, "has left the group: its program ended");
      });
    }
  }
  EXPECT(std::chrono::steady_clock::now() - began < milliseconds(30'000));
}

TEST(Formation, aNameMayBeUsedAgain) {
  const auto store = std::make_shared<MemoryStore>();
  for (int life = 0; life < 3; ++life) {
    for (const Status& status : formAll(4, store)) EXPECT_OK(status);
  }
}

// Groups of the same name in the same processes, with other ranks each time. The store contains
// handles of the earlier groups, which must not be used.
TEST(Formation, processesMayChangeTheirRanks) {
  const auto store = std::make_shared<MemoryStore>();
  std::atomic<int> met{0};
  Threads(3, [&](int index) {
    const std::shared_ptr<Engine> engine = engineOn("");
    for (int life = 0; life < 3; ++life) {
      std::shared_ptr<Communicator> group;
      EXPECT_OK(Communicator::create(optionsOf((index + life) % 3, 3), store, engine, &group));
      for (++met; met < 3 * (life + 1);) std::this_thread::sleep_for(milliseconds(1));
      if (group) group->abort("over");
    }
  });
}

// The store contains a handle of a job that was killed. Its process has ended.
TEST(Formation, aStaleHandleIsIgnored) {
  const auto store = std::make_shared<MemoryStore>();
  {
    Puppet(0, 5, store).publish();
  }
  std::vector<Status> found(3);
  Threads(3, [&](int rank) {
    if (rank == 0) std::this_thread::sleep_for(milliseconds(500));
    found[rank] = formAs(optionsOf(rank, 3), store);
  });
  for (const Status& status : found) EXPECT_OK(status);
}

// The process that the handle names has answered, but this rank was stopped meanwhile.
TEST(Formation, aStaleHandleIsIgnoredIfItsAnswerIsReadLate) {
  const auto store = std::make_shared<MemoryStore>();
  Puppet predecessor(0, 5, store);
  predecessor.publish();
  GroupOptions options = optionsOf(1, 3, 1500);
  options.interrupted = [] {
    std::this_thread::sleep_for(milliseconds(600));
    return false;
  };
  EXPECT_EQ(formAs(options, store).code(), Code::kTimeout);
}

TEST(Formation, theMissingAreNamed) {
  const std::vector<Status> found = formAll(4, std::make_shared<MemoryStore>(), 2, 3000);
  for (const int rank : {0, 1, 3}) {
    EXPECT_EQ(found[rank].code(), Code::kTimeout);
    EXPECT_CONTAINS(found[rank], "waited for the other ranks of 4; missing: 2.");
  }
  EXPECT_CONTAINS(formAs(optionsOf(1, 2, 300), std::make_shared<MemoryStore>()), "missing: 0.");
}

// A rank that waits polls the store less and less often, because thousands of ranks may wait. Ten
// times a second would be 30 times here.
TEST(Formation, aWaitingRankPollsLessAndLess) {
  const auto counted = std::make_shared<WatchedStore>(std::make_shared<MemoryStore>());
  EXPECT_EQ(formAs(optionsOf(1, 2, 3000), counted).code(), Code::kTimeout);
  EXPECT(counted->operations <= 24);
}

// The first deadline of a rank ends the formation for all.
TEST(Formation, theFirstDeadlineEndsItForAll) {
  const auto store = std::make_shared<MemoryStore>();
  std::vector<Status> found(2);
  std::latch areThere(2);
  Threads(2, [&](int rank) {
    areThere.arrive_and_wait();
    found[rank] = formAs(optionsOf(rank, 3, rank == 1 ? 500 : 60'000), store);
  });
  for (const Status& status : found) EXPECT_CONTAINS(status, "after 500ms: rank 1 waited");
}

TEST(Formation, worldSizesThatDifferAreReported) {
  const auto store = std::make_shared<MemoryStore>();
  std::vector<Status> found(3);
  Threads(3, [&](int rank) { found[rank] = formAs(optionsOf(rank, rank == 0 ? 2 : 3), store); });
  for (const Status& status : found) EXPECT_CONTAINS(status, "the world sizes must be equal");
}

TEST(Formation, aRankTwiceIsReportedToAll) {
  for (const int twice : {0, 1}) {
    const auto store = std::make_shared<MemoryStore>();
    std::vector<Status> found(3);
    Threads(3, [&](int index) {
      const int rank = index == 2 ? twice : index;
      found[index] = formAs(optionsOf(rank, 3), store);
    });
    for (const Status& status : found) {
      EXPECT_EQ(status.code(), Code::kStore);
      EXPECT_CONTAINS(status, "rank " + std::to_string(twice) + " is taken by");
    }
  }
}

// The first of two processes with one rank gives up between two reads of the store by the second.
TEST(Formation, aRankTwiceIsReportedWhenTheFirstHasJustGivenUp) {
  const auto store = std::make_shared<MemoryStore>();
  std::atomic<bool> isLooking{false}, isFirstOver{false};
  std::vector<Status> found(3);
  Threads(3, [&](int index) {
    if (index == 1) {
      GroupOptions options = optionsOf(1, 3);
      options.interrupted = [&] {
        waitUntil([&] { return isLooking.load(); });
        return false;
      };
      found[1] = formAs(options, store);
      isFirstOver = true;
      return;
    }
    (void)waitForHandle(*store, 1);
    if (index == 2) {
      const auto delay = [&](const std::string& key, std::string*) {
        if (key != keyOf(1) || isFirstOver) return Status();
        isLooking = true;
        waitUntil([&] { return isFirstOver.load(); });
        std::this_thread::sleep_for(milliseconds(100));  // until the end of its engine is detected
        return Status();
      };
      found[2] = formAs(optionsOf(1, 3), std::make_shared<WatchedStore>(store, delay));
    } else {
      waitUntil([&] { return isFirstOver.load(); });
      found[0] = formAs(optionsOf(0, 3), store);
    }
  });
  for (const Status& status : found) EXPECT_CONTAINS(status, "rank 1 is taken by");
}

// The first of two processes with one rank answers later than the second one waits for an answer.
TEST(Formation, aRankTwiceIsReportedWhenTheFirstIsSlow) {
  for (const int twice : {0, 1}) {
    const auto store = std::make_shared<MemoryStore>();
    std::vector<Status> found(3);
    std::promise<std::string> nonce;  // of the first
    const std::shared_future<std::string> first = nonce.get_future().share();
    Threads(3, [&](int index) {
      GroupOptions options = optionsOf(index == 2 ? twice : index, 3);
      if (index != twice) {
        const Handle handle = waitForHandle(*store, twice);
        if (index == 2) nonce.set_value(handle.nonce);
        found[index] = formAs(options, store);
        return;
      }
      options.interrupted = [&] {
        if (handleIn(*store, twice).nonce.empty()) return false;
        waitUntil([&] { return handleIn(*store, twice).nonce != first.get(); });
        return false;
      };
      found[index] = formAs(options, store);
    });
    for (const Status& status : found) {
      EXPECT_CONTAINS(status, "rank " + std::to_string(twice) + " is taken by");
    }
  }
}

TEST(Formation, isInterrupted) {
  for (const bool isAlone : {false, true}) {
    for (const int rank : {0, 1}) {
      const auto store = std::make_shared<MemoryStore>();
      std::atomic<bool> isToEnd{false};
      std::vector<Status> found(2);
      Threads(3, [&](int index) {
        if (index == 2) {
          std::this_thread::sleep_for(milliseconds(400));
          isToEnd = true;
          return;
        }
        if (isAlone && index != rank) return;
        GroupOptions options = optionsOf(index, 3);
        if (index == rank) options.interrupted = [&] { return isToEnd.load(); };
        found[index] = formAs(options, store);
      });
      EXPECT_EQ(found[rank].code(), Code::kInterrupted);
      if (!isAlone) EXPECT_CONTAINS(found[1 - rank], "interrupted");
    }
  }
}

// The names of sockets and the handshake have room for a uid of one length.
TEST(Formation, aUidOfAnotherLengthIsRefused) {
  for (const std::string& uid :
       {std::string("a"), std::string(31, 'a'), std::string(33, 'a'), std::string(500, 'a'),
        std::string(32, 'A'), std::string(31, 'a') + '/', std::string(31, 'a') + '\0'}) {
    const auto store = std::make_shared<MemoryStore>();
    Puppet stranger(1, 2, store);
    stranger.handle.address.uid = uid;
    stranger.publish();
    const Status status = formAs(optionsOf(0, 2), store);
    EXPECT_EQ(status.code(), Code::kStore);
    EXPECT_CONTAINS(status, "mycoll did not write");
  }
}

// Ranks with different settings would make different plans.
TEST(Formation, settingsThatDifferAreRefused) {
  for (const int other : {0, 1}) {
    const auto store = std::make_shared<MemoryStore>();
    Puppet puppet(other, 2, store);
    puppet.publishOtherSettings();
    const Status status = formAs(optionsOf(1 - other, 2), store);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_CONTAINS(status, "rank 0 (");
    EXPECT_CONTAINS(status, "rank 1 (");
    EXPECT_CONTAINS(status, "'MYCOLL_PARTIALS=rounded'");
    EXPECT_CONTAINS(status, "'" + Handle::settingsHere() + "'");
    EXPECT_CONTAINS(status, "it must be the same on all ranks");
    // The other rank can read the reason in the store.
    EXPECT_CONTAINS(handleIn(*store, 1 - other).why, "MYCOLL_PARTIALS=rounded");
  }
}

// Rank 0 serves the store, and fails. A rank that polls the store as rarely as any does still reads
// the reason.
TEST(Formation, rankZeroKeepsTheStoreOpenForTheOthers) {
  std::atomic<bool> isClosed{false}, isHeldUp{false};
  const std::shared_ptr<Store> store = storeUntil(isClosed);
  Puppet puppet(1, 3, store);
  puppet.publishOtherSettings();
  std::vector<Status> found(3);
  Threads(3, [&](int index) {
    if (index == 1) return;
    GroupOptions options = optionsOf(index, 3);
    if (index == 2) {
      // It would read the store 500 ms after its call, and does so 900 ms after the failure.
      options.interrupted = [&, isOver = false]() mutable {
        if (isOver || handleIn(*store, 0).why.empty()) return false;
        const Deadline late = Deadline::after(milliseconds(900));
        while (!late.expired()) std::this_thread::sleep_for(milliseconds(5));
        // True if the machine is so busy that this thread overslept.
        isHeldUp = std::chrono::steady_clock::now() - late.when() > milliseconds(100);
        isOver = true;
        return false;
      };
    }
    found[index] = formAs(options, store);
    if (index == 0) isClosed = true;
  });
  EXPECT_CONTAINS(found[0], "MYCOLL_PARTIALS=rounded");
  if (!isHeldUp) EXPECT_CONTAINS(found[2], "MYCOLL_PARTIALS=rounded");
}

// Rank 0 serves the store, and fails before it has begun a round. The ranks that wait for its
// invitation read the error in the store.
TEST(Formation, ranksToBeInvitedReadWhyRankZeroFailed) {
  std::atomic<bool> isClosed{false};
  const std::shared_ptr<Store> store = storeUntil(isClosed);
  Puppet puppet(3, 4, store);
  puppet.publishOtherSettings();
  std::vector<Status> found(3);
  Threads(4, [&](int rank) {
    if (rank == 3) {
      // This rank finds the difference, too, and gives up.
      waitForFailure(*store, 0);
      puppet.handle.why = "the settings differ";
      puppet.publish();
      return;
    }
    for (const int other : {1, 2}) {
      if (rank == 0) (void)waitForHandle(*store, other);
    }
    found[rank] = formAs(optionsOf(rank, 4), store);
    if (rank == 0) isClosed = true;
  });
  for (const Status& each : found) EXPECT_CONTAINS(each, "MYCOLL_PARTIALS=rounded");
}

// A rank on another host calls just after rank 0 has failed, and cannot see that rank 0's process
// still runs.
TEST(Formation, rankZeroNotifiesRanksThatCannotSeeIt) {
  const auto store = std::make_shared<MemoryStore>();
  Puppet puppet(2, 3, store);
  puppet.publishOtherSettings();
  std::vector<Status> found(2);
  Threads(2, [&](int rank) {
    if (rank == 0) {
      found[0] = formAs(optionsOf(0, 3), store);
      return;
    }
    waitForFailure(*store, 0);
    found[1] = formAs(optionsOf(1, 3), storeElsewhere(store), " elsewhere");
  });
  for (const Status& each : found) EXPECT_CONTAINS(each, "MYCOLL_PARTIALS=rounded");
}

// As above, but rank 0 had begun a round, which the other rank had joined or not.
TEST(Formation, anInvitationShowsThatRankZeroIsNotStale) {
  for (const bool hasJoined : {false, true}) {  // before rank 0 leaves the round
    const auto store = std::make_shared<MemoryStore>();
    Status found;
    std::atomic<bool> isOver{false};
    Threads(2, [&](int rank) {
      if (rank == 1) {
        found = formAs(optionsOf(1, 3), store);
        isOver = true;
        return;
      }
      Puppet zero(0, 3, store, " elsewhere");
      zero.handle.address.pidSpace = "elsewhere";
      zero.begin(rosterOf(1, {zero.handle, waitForHandle(*store, 1), Handle()}));
      zero.drive([&] { return !hasJoined || zero.round->state().joined[1]; });
      zero.round.reset();
      zero.handle.why = "no descriptors";
      zero.publish();
      zero.drive([&] { return isOver.load(); });
    });
    EXPECT_CONTAINS(found, "has given up: no descriptors");
  }
}

// A rank with children in the control tree gives up while another rank is missing. Its process
// continues.
TEST(Formation, theSubtreeOfARankThatGivesUpIsNotified) {
  const auto store = std::make_shared<MemoryStore>();
  const std::vector<std::shared_ptr<Engine>> engines = {engineOn(""), engineOn(" elsewhere")};
  std::atomic<bool> hasJoined{false};
  std::vector<Status> found(2);
  Threads(3, [&](int rank) {
    if (rank < 2) {
      GroupOptions options = optionsOf(rank, 4);
      if (rank == 1) options.interrupted = [&] { return hasJoined.load(); };
      std::shared_ptr<Communicator> group;
      found[rank] = Communicator::create(options, store, engines[rank], &group);
      return;
    }
    Puppet child(2, 4, store, " elsewhere");
    do {
      child.join(child.beInvited());
    } while (child.round->parent() != 1);
    hasJoined = true;
    EXPECT_CONTAINS(child.failure(), "rank 1 (");
    EXPECT_CONTAINS(child.failure(), "was interrupted by a signal");
  });
  EXPECT_EQ(found[1].code(), Code::kInterrupted);
  EXPECT_EQ(found[0].code(), Code::kAborted);
  EXPECT_CONTAINS(found[0], "rank 1 (");
}

// A rank of a known group is interrupted before rank 0 begins, with a store or without. Its process
// continues.
TEST(Formation, rankZeroIsNotifiedByARankThatItHasNotInvited) {
  constexpr int kRanks = 3;
  for (const bool hasStore : {false, true}) {
    const auto store = std::make_shared<MemoryStore>();
    std::vector<std::shared_ptr<Engine>> engines;
    for (int rank = 0; rank < kRanks; ++rank) engines.push_back(engineOn(""));
    std::atomic<bool> isToEnd{false};
    std::latch isInterrupted(1), isOver(kRanks);
    Threads(kRanks, [&](int rank) {
      GroupOptions options = optionsOf(rank, kRanks);
      if (rank == 2) options.interrupted = [&] { return isToEnd.load(); };
      std::shared_ptr<Communicator> job, next;
      ASSERT_OK(Communicator::create(options, store, engines[rank], &job));
      if (rank == 2) isToEnd = true;
      if (rank != 2) isInterrupted.wait();
      Status found;
      if (hasStore) {
        options.name = "next";
        options.globalRanks = {0, 1, 2};
        found = Communicator::create(options, store, engines[rank], &next);
      } else {
        found = Communicator::shrink(*job, " next", {0, 1, 2}, &next);
      }
      if (rank == 2) isInterrupted.count_down();
      isOver.arrive_and_wait();
      if (rank == 2) {
        EXPECT_EQ(found.code(), Code::kInterrupted);
      } else {
        EXPECT_EQ(found.code(), Code::kAborted);
        EXPECT_CONTAINS(found, "rank 2 (");
        EXPECT_CONTAINS(found, "was interrupted by a signal");
      }
      job->close(Deadline::after(milliseconds(100)));
    });
  }
}

// A signal that arrives while rank 0 waits until the others have read its error.
TEST(Formation, isInterruptedAfterAFailure) {
  const auto store = std::make_shared<MemoryStore>();
  Puppet puppet(1, 2, store);
  puppet.publishOtherSettings();
  GroupOptions options = optionsOf(0, 2);
  options.interrupted = [&] { return !handleIn(*store, 0).why.empty(); };
  EXPECT(formAs(options, store).code() == Code::kInterrupted);
}

// A rank knows that another one is lost, because a group of the two has failed, and gives up.
TEST(Formation, aReportedLossKeepsItsReason) {
  const auto store = std::make_shared<MemoryStore>();
  Status found;
  Threads(2, [&](int rank) {
    if (rank == 0) {
      found = formAs(optionsOf(0, 3), store);
      return;
    }
    Puppet puppet(1, 3, store);
    puppet.join(puppet.beInvited());
    puppet.round->report({1, Round::Report::kGaveUp,
                          Status(Code::kPeerLost, "the group cannot be made with rank 2: killed")});
    EXPECT_CONTAINS(puppet.failure(), "rank 2: killed");
  });
  EXPECT_EQ(found.code(), Code::kPeerLost);
  EXPECT_CONTAINS(found, "the group cannot be made with rank 2: killed");
}

// The end of a process on another host is seen only as the end of its connection.
TEST(Formation, theEndOfARankIsReported) {
  for (const bool isLast : {false, true}) {
    const int ranks = isLast ? 3 : 4;
    const auto store = std::make_shared<MemoryStore>();
    std::vector<Status> found(2);
    Threads(3, [&](int rank) {
      if (rank < 2) {
        found[rank] = formAs(optionsOf(rank, ranks, 30'000), store);
        return;
      }
      Puppet puppet(2, ranks, store, " elsewhere");
      const Roster roster = puppet.beInvited();
      if (isLast) return puppet.die();  // before it joins, when all others have joined
      puppet.join(roster);
      std::this_thread::sleep_for(milliseconds(50));
      puppet.die();
    });
    for (const Status& status : found) {
      EXPECT_EQ(status.code(), Code::kPeerLost);
      EXPECT_CONTAINS(status, "rank 2 (");
      EXPECT_CONTAINS(status, "ended before its first call");
    }
  }
}

// All other ranks report the end of rank 0, even those that are not connected to it.
TEST(Formation, theEndOfRankZeroIsReported) {
  const auto store = std::make_shared<MemoryStore>();
  std::vector<Status> found(4);
  Threads(4, [&](int rank) {
    if (rank > 0) {
      found[rank] = formAs(optionsOf(rank, 5, 30'000), store, rank == 1 ? "" : " elsewhere");
      return;
    }
    Puppet puppet(0, 5, store);
    puppet.begin(rosterOf(1, {puppet.handle, waitForHandle(*store, 1), waitForHandle(*store, 2),
                              waitForHandle(*store, 3), Handle()}));
    puppet.drive([&] {
      const std::vector<bool> joined = puppet.round->state().joined;
      return std::count(joined.begin(), joined.end(), true) == 4;
    });
  });
  for (const int rank : {1, 2, 3}) {
    EXPECT_EQ(found[rank].code(), Code::kPeerLost);
    EXPECT_CONTAINS(found[rank], "rank 0 (");
    // Rank 1 sees that rank 0's process, which is its own, is alive.
    EXPECT_CONTAINS(found[rank],
                    rank == 1 ? "closed its connection" : "ended before its first call");
  }
  // Rank 0 may be alive and begin another round, in which it must not wait for its children.
  for (const int child : {1, 2}) EXPECT_CONTAINS(handleIn(*store, child).why, "rank 0 (");
}

// A rank gives up and its process continues. Its report was lost, because it was sent in a round
// that rank 0 had ended.
TEST(Formation, theHandleOfARankThatHasGivenUpIsNotStale) {
  const auto store = std::make_shared<MemoryStore>();
  std::latch isOver(3), hasGivenUp(1);
  std::vector<Status> found(3);
  Threads(3, [&](int rank) {
    if (rank == 1) {
      Puppet puppet(1, 3, store, " elsewhere");
      puppet.join(puppet.beInvited());
      std::this_thread::sleep_for(milliseconds(200));
      puppet.giveUp();
      hasGivenUp.count_down();
      isOver.arrive_and_wait();
      return;
    }
    if (rank == 2) hasGivenUp.wait();
    found[rank] = formAs(optionsOf(rank, 3), store);
    isOver.arrive_and_wait();
  });
  for (const int rank : {0, 2}) {
    EXPECT_EQ(found[rank].code(), Code::kPeerLost);
    EXPECT_CONTAINS(found[rank], "rank 1 (");
  }
}

TEST(Formation, aRankMayCallAgain) {
  const auto store = std::make_shared<MemoryStore>();
  std::vector<Status> found(3);
  Threads(3, [&](int rank) {
    if (rank == 1) {
      Puppet first(1, 3, store);
      first.beInvited();
    }
    found[rank] = formAs(optionsOf(rank, 3), store);
  });
  for (const Status& status : found) EXPECT_OK(status);
}

// Rank 0 invites the engine of an earlier group, which then closes its connection. The rank itself
// calls much later.
TEST(Formation, theEndOfAnEarlierEngineIsIgnored) {
  for (const char* host : {"", " elsewhere"}) {
    const auto store = std::make_shared<MemoryStore>();
    std::latch isPublished(1);
    std::vector<Status> found(3);
    Threads(3, [&](int rank) {
      if (rank == 1) {
        Puppet earlier(1, 3, store, host);
        earlier.openReception();
        earlier.publish();
        isPublished.count_down();
        earlier.beInvited();
      }
      isPublished.wait();
      if (rank == 1) std::this_thread::sleep_for(milliseconds(1500));
      found[rank] = formAs(optionsOf(rank, 3), store, rank == 1 ? host : "");
    });
    for (const Status& status : found) EXPECT_OK(status);
  }
}

// A rank is too slow to invite its children in the control tree. In the next round, rank 0 does.
TEST(Formation, aSlowRankDoesNotDelayOthers) {
  const auto store = std::make_shared<MemoryStore>();
  std::vector<Status> found(3);
  Threads(3, [&](int rank) {
    if (rank != 1) {
      found[rank] = formAs(optionsOf(rank, 3), store, rank == 0 ? "" : " elsewhere");
      return;
    }
    Puppet leader(1, 3, store, " elsewhere");
    EXPECT(!leader.beInvited().members[1].isSlow);
    const Roster roster = leader.beInvited();
    EXPECT(roster.members[1].isSlow);
    leader.join(roster);
    leader.drive([&] { return leader.round->state().isFormed; });
  });
  EXPECT_OK(found[0]);
  EXPECT_OK(found[2]);
}

// A rank with children in the control tree joins, and ends while another rank is missing.
TEST(Formation, theEndOfAParentIsReported) {
  const auto store = std::make_shared<MemoryStore>();
  std::vector<Status> found(3);
  Threads(3, [&](int rank) {
    if (rank != 1) {
      found[rank] = formAs(optionsOf(rank, 4, 30'000), store, rank == 0 ? "" : " elsewhere");
      return;
    }
    Puppet leader(1, 4, store, " elsewhere");
    do {
      leader.join(leader.beInvited());
    } while (leader.round->roster().members[2].isAbsent());
    leader.drive([&]() -> bool { return leader.round->state().joined[2]; });
    leader.die();
  });
  for (const int rank : {0, 2}) {
    EXPECT_EQ(found[rank].code(), Code::kPeerLost);
    EXPECT_CONTAINS(found[rank], "rank 1 (");
    EXPECT_CONTAINS(found[rank], "ended before its first call");
  }
}

// A rank writes to the store why it cannot call. Its process is alive, so that is not of an earlier
// group.
TEST(Formation, aRankThatCannotStartIsReported) {
  for (const int culprit : {0, 1}) {
    for (const bool isEarly : {true, false}) {
      const auto store = std::make_shared<MemoryStore>();
      Status found;
      Threads(2, [&](int index) {
        if (index == 0) {
          if (isEarly) std::this_thread::sleep_for(milliseconds(300));
          found = formAs(optionsOf(1 - culprit, 2), store);
          return;
        }
        if (!isEarly) std::this_thread::sleep_for(milliseconds(300));
        EXPECT(!reportAbsence(optionsOf(culprit, 2), *store,
                              Status(Code::kInvalidArgument, "no descriptors"))
                    .ok());
      });
      EXPECT_EQ(found.code(), Code::kStore);
      EXPECT_CONTAINS(found, "rank " + std::to_string(culprit) + " (");
      EXPECT_CONTAINS(found, "has given up: no descriptors");
    }
  }
}

// As above, but the others cannot see the rank's process. It waits until they have read the reason.
TEST(Formation, aRankElsewhereThatCannotStartIsReported) {
  for (const int culprit : {0, 1}) {
    const auto store = std::make_shared<MemoryStore>();
    std::vector<Status> found(3);
    Threads(3, [&](int rank) {
      if (rank == culprit) {
        const Status why(Code::kInvalidArgument, "no descriptors");
        EXPECT_EQ(reportAbsence(optionsOf(rank, 3), *store, why).message(), why.message());
        return;
      }
      std::this_thread::sleep_for(milliseconds(200));
      found[rank] = formAs(optionsOf(rank, 3), storeElsewhere(store, culprit), " elsewhere");
    });
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == culprit) continue;
      EXPECT_EQ(found[rank].code(), Code::kStore);
      EXPECT_CONTAINS(found[rank], "has given up: no descriptors");
    }
  }
}

// A reason in the store that may be of an earlier start is ignored until the timeout, which reports
// it.
TEST(Formation, aTimeoutReportsAFailureInTheStore) {
  for (const int culprit : {0, 1}) {
    const auto store = std::make_shared<MemoryStore>();
    Puppet failed(culprit, 2, store);
    failed.handle.why = "no descriptors";
    failed.handle.address.pidSpace = "elsewhere";
    failed.publish();
    const Status found = formAs(optionsOf(1 - culprit, 2, 1500), store);
    EXPECT_EQ(found.code(), Code::kTimeout);
    EXPECT_CONTAINS(found, "which may be of an earlier start: ");
    EXPECT_CONTAINS(found, "has given up: no descriptors");
  }
}

TEST(Formation, aHandleOfARankThatGaveUpIsOverwritten) {
  const auto store = std::make_shared<MemoryStore>();
  Puppet failed(1, 2, store);
  failed.handle.why = "no descriptors";
  failed.handle.address.pidSpace = "elsewhere";
  failed.publish();
  for (const Status& status : formAll(2, store)) EXPECT_OK(status);
}

// A rank may receive an invitation to the latest round, and then one to the round before, from
// another rank.
TEST(Formation, anOldInvitationIsIgnored) {
  const auto store = std::make_shared<MemoryStore>();
  Puppet zero(0, 2, store);
  zero.openReception();
  zero.publish();
  std::latch haveArrived(1);
  Status found;
  Threads(2, [&](int rank) {
    if (rank == 1) {
      GroupOptions options = optionsOf(1, 2);
      options.interrupted = [&] { return haveArrived.wait(), false; };
      found = formAs(options, store);
      return;
    }
    const Handle one = waitForHandle(*store, 1);
    const InvitationMessage first(InvitationMessage::Content::kRoster,
                                  rosterOf(1, {zero.handle, one}).encode());
    zero.begin(rosterOf(2, {zero.handle, one}));
    std::unique_ptr<Invitation> old, last;
    ASSERT_OK(Invitation::send(zero.mesh(), {one.address, one.nonce}, first, {}, &old));
    // Frames arrive in order, so when this one is refused, the others have arrived.
    std::string unknown;
    ASSERT_OK(Handle::freshNonce(&unknown));
    ASSERT_OK(Invitation::send(zero.mesh(), {one.address, unknown}, first, {}, &last));
    zero.drive([&] { return last->hasFailed(); });
    haveArrived.count_down();
    zero.drive([&] { return zero.round->state().isFormed; });
  });
  EXPECT_OK(found);
}

// An invitation with another nonce is ignored.
TEST(Formation, anInvitationWithoutTheNonceIsIgnored) {
  const auto store = std::make_shared<MemoryStore>();
  Puppet rank(1, 2, store), stranger(0, 2, store);
  rank.openReception();
  rank.publish();
  std::string other;
  ASSERT_OK(Handle::freshNonce(&other));
  std::unique_ptr<Invitation> invitation;
  ASSERT_OK(Invitation::send(stranger.mesh(), {rank.handle.address, other},
                             {InvitationMessage::Content::kRoster, "roster"}, {}, &invitation));
  const Deadline deadline = Deadline::after(milliseconds(5'000));
  while (!invitation->hasFailed() && !deadline.expired()) {
    stranger.mesh()->progress();
    rank.mesh()->progress();
  }
  EXPECT(invitation->hasFailed());
}

// Both ranks report that their MYCOLL_SECRET_FILE differs.
TEST(Formation, anotherSecretIsReported) {
  const auto store = std::make_shared<MemoryStore>();
  Puppet rank(1, 2, store);
  GroupAddress address;
  address.isInvitation = true;
  address.rank = 1;
  address.secret = std::string(32, 'x');
  address.peers = {PeerAddress(), rank.handle.address};
  const Digest number = sha256("mycoll invitation number " + rank.handle.nonce);
  std::memcpy(&address.context, number.data(), sizeof(address.context));
  struct Ignores final : EventHandler {
    void handle(const Event& /*event*/) override {}
  } handler;
  Mailbox mailbox(rank.mesh(), address, &handler);
  mailbox.open();
  rank.publish();
  const Status status = formAs(optionsOf(0, 2), store);
  mailbox.detach();
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_CONTAINS(status, "seen by rank 0");
  EXPECT_CONTAINS(status, "rank 1 (");
  EXPECT_CONTAINS(status, "cannot be reached");
  EXPECT_CONTAINS(status, "MYCOLL_SECRET_FILE must be the same");
  EXPECT_CONTAINS(formAs(optionsOf(1, 2), store), "MYCOLL_SECRET_FILE must be the same");
}

namespace {

// A store whose server stops answering.
class StoppedStore final : public Store {
 public:
  explicit StoppedStore(std::shared_ptr<Store> store) : store_(std::move(store)) {}
  Status set(const std::string& key, const std::string& value) override {
    stop();
    return store_->set(key, value);
  }
  Status tryGet(const std::string& key, bool* found, std::string* value) override {
    stop();
    return store_->tryGet(key, found, value);
  }
  std::atomic<bool> isStopped{false}, isAsked{false};

 private:
  void stop() {
    while (isStopped) {
      isAsked = true;
      std::this_thread::sleep_for(milliseconds(1));
    }
  }
  const std::shared_ptr<Store> store_;
};

}  // namespace

// A store that does not answer holds no rank longer than its timeout, whether the rank waits for
// others or comes first.
TEST(Formation, aStoreThatDoesNotAnswerIsReported) {
  for (const int rank : {0, 1}) {
    for (const bool isLater : {false, true}) {
      const auto store = std::make_shared<StoppedStore>(std::make_shared<MemoryStore>());
      store->isStopped = !isLater;
      std::thread stopper([&] {
        std::this_thread::sleep_for(milliseconds(50));
        store->isStopped = true;
      });
      const Status status = formAs(optionsOf(rank, 2, 300), store);
      stopper.join();
      store->isStopped = false;
      EXPECT_EQ(status.code(), Code::kTimeout);
      EXPECT_CONTAINS(status, "rank " + std::to_string(rank) + " waited for");
    }
  }
}

TEST(Formation, isInterruptedWhileTheStoreDoesNotAnswer) {
  const auto store = std::make_shared<StoppedStore>(std::make_shared<MemoryStore>());
  store->isStopped = true;
  GroupOptions options = optionsOf(1, 2, 60'000);
  std::atomic<bool> isSignalled{true};
  options.interrupted = [&] { return store->isAsked && isSignalled.exchange(false); };
  EXPECT_EQ(formAs(options, store).code(), Code::kInterrupted);
  store->isStopped = false;
}
