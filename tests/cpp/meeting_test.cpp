// The making of a group: what it asks of the store, and what becomes of it when a rank dies, comes
// twice, lies or does not come.
#include <poll.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/sha256.h"
#include "engine/card.h"
#include "engine/line.h"
#include "engine/rendezvous.h"
#include "test.h"
#include "transport/lobby.h"
#include "world.h"

using namespace mycoll;
using std::chrono::milliseconds;

namespace {

using test::MemoryStore;
using test::Threads;

// One rank's view of a store, counted.
class CountedStore final : public Store {
 public:
  explicit CountedStore(std::shared_ptr<Store> store) : store_(std::move(store)) {}

  Status set(const std::string& key, const std::string& value) override {
    ++operations;
    bytes += value.size();
    return store_->set(key, value);
  }
  Status tryGet(const std::string& key, bool* found, std::string* value) override {
    ++operations;
    const Status status = store_->tryGet(key, found, value);
    if (*found) bytes += value->size();
    return status;
  }
  Status wait(const std::string& key, milliseconds atMost, bool* found) override {
    ++operations;
    return store_->wait(key, atMost, found);
  }

  size_t operations = 0, bytes = 0;

 private:
  const std::shared_ptr<Store> store_;
};

std::shared_ptr<Engine> engineOn(const std::string& host) {
  MeshOptions mesh;
  mesh.storeHost = "127.0.0.1";
  mesh.host = host;
  std::shared_ptr<Engine> engine;
  ASSERT_OK(Engine::create(mesh, &engine));
  return engine;
}

GroupOptions optionsOf(int rank, int ranks, int timeoutMs = 10'000) {
  GroupOptions options;
  options.name = "test";
  options.rank = rank;
  options.ranks = ranks;
  options.timeout = milliseconds(timeoutMs);
  return options;
}

// A rank that only meets the others, and leaves.
Status meetAs(GroupOptions options, const std::shared_ptr<Store>& store,
              const std::string& host = "") {
  std::shared_ptr<Communicator> group;
  const Status status = Communicator::create(std::move(options), store, engineOn(host), &group);
  if (group) group->abort("over");
  return status;
}

bool says(const Status& status, const std::string& words) {
  const bool does = status.message().find(words) != std::string::npos;
  if (!does) test::fail(__FILE__, __LINE__, status.toString() + "\n  does not say: " + words);
  return does;
}

// A rank that is moved by hand.
class Puppet {
 public:
  Puppet(int rank, int ranks, std::shared_ptr<Store> store, const std::string& host = "")
      : store_(std::move(store)), engine_(engineOn(host)) {
    EXPECT_OK(Card::freshNonce(&card.nonce));
    card.rank = rank;
    card.ranks = ranks;
    card.settings = Card::settingsHere();
    card.address = engine_->mesh()->address();
  }
  ~Puppet() { closeLobby(); }

  // Reads where rank 0 is, and goes there.
  Answer join(const std::string& secret = "") {
    std::string text;
    for (bool found = false; !found;) ASSERT_OK(store_->wait("root", milliseconds(100), &found));
    bool found = false;
    ASSERT_OK(store_->tryGet("root", &found, &text));
    ASSERT_OK(Card::decode(text, &root));
    openLobby(root.nonce, secret);
    Answer answer;
    Fd socket;
    std::string why;
    ASSERT_OK(knock(
        *engine_->mesh(), root.address, *lobby_, Deadline::after(milliseconds(5000)),
        [] { return Status(); }, &answer, &socket, &why));
    if (answer == Answer::kIn) {
      up = std::make_unique<Line>(std::move(socket));
      up->send({Note::kCard, card.rank, card.encode()});
    }
    return answer;
  }
  void openLobby(const std::string& meeting, const std::string& secret = "") {
    closeLobby();
    uint64_t number;
    const Digest digest = sha256("mycoll meeting " + meeting), plain = sha256(meeting);
    std::memcpy(&number, digest.data(), sizeof(number));
    lobby_ = std::make_unique<Lobby>(
        number,
        secret.empty() ? std::string(reinterpret_cast<const char*>(plain.data()), 32) : secret);
    ASSERT_OK(lobby_->open());
    engine_->mesh()->openLobby(lobby_.get());
  }
  void closeLobby() {
    if (lobby_) engine_->mesh()->closeLobby(*lobby_);
    lobby_.reset();
  }
  // The next note, of one of these kinds.
  Note hear(Note::Kind kind, Note::Kind orKind = Note::Kind{}) {
    Note note;
    const Deadline deadline = Deadline::after(milliseconds(10'000));
    while (!up->take(&note)) {
      ASSERT(!up->hasEnded() && !deadline.expired());
      pollfd entry{up->fd(), POLLIN, 0};
      (void)poll(&entry, 1, 50);
      up->read();
    }
    EXPECT(note.kind == kind || note.kind == orKind);
    return note;
  }
  std::unique_ptr<Line> letIn() {
    const Deadline deadline = Deadline::after(milliseconds(10'000));
    for (;;) {
      for (Fd& socket : lobby_->takeAll()) return std::make_unique<Line>(std::move(socket));
      ASSERT(!deadline.expired());
      std::this_thread::sleep_for(milliseconds(5));
    }
  }
  void publish(const std::string& key = "root") { ASSERT_OK(store_->set(key, card.encode())); }

  Card card, root;
  std::unique_ptr<Line> up;

 private:
  const std::shared_ptr<Store> store_;
  const std::shared_ptr<Engine> engine_;
  std::unique_ptr<Lobby> lobby_;
};

std::vector<Status> meetAll(int ranks, const std::shared_ptr<Store>& store, int without = -1,
                            int timeoutMs = 10'000) {
  std::vector<Status> found(ranks);
  Threads(ranks, [&](int rank) {
    if (rank != without) found[rank] = meetAs(optionsOf(rank, ranks, timeoutMs), store);
  });
  return found;
}

}  // namespace

// The store is asked twice by each rank, however many there are.
TEST(Meeting, aThousandRanksAskTheStoreTwiceEach) {
  constexpr int kRanks = 1000, kOnEach = 8;
  const auto store = std::make_shared<MemoryStore>();
  std::vector<size_t> operations(kRanks), bytes(kRanks);
  std::atomic<int> met{0};
  const auto began = std::chrono::steady_clock::now();
  Threads(kRanks, [&](int rank) {
    const std::shared_ptr<Engine> engine = engineOn(" host " + std::to_string(rank / kOnEach));
    // A rank that comes before rank 0 waits in steps, and each step counts.
    while (rank != 0 && store->operations() < 2) std::this_thread::sleep_for(milliseconds(1));
    const auto counted = std::make_shared<CountedStore>(store);
    std::shared_ptr<Communicator> group;
    EXPECT_OK(Communicator::create(optionsOf(rank, kRanks, 120'000), counted, engine, &group));
    operations[rank] = counted->operations;
    bytes[rank] = counted->bytes;
    // The time that the slowest has.
    if (++met == kRanks) {
      const auto took = std::chrono::steady_clock::now() - began;
      printf("    %d ranks, engines included: %.2f s\n", kRanks,
             std::chrono::duration<double>(took).count());
    }
    while (met < kRanks) std::this_thread::sleep_for(milliseconds(5));
    if (group) group->close(Deadline::after(milliseconds(100)));
  });
  EXPECT(bytes[0] <= 300 || operations[0] > 2);
  for (int rank = 1; rank < kRanks; ++rank) {
    EXPECT_EQ(operations[rank], 2);
    EXPECT(bytes[rank] <= 300);
  }
}

namespace {

// Makes a group of these ranks of the job on each of them. Counts what they ask of the store.
size_t askedOfTheStore(const std::vector<std::shared_ptr<Engine>>& engines,
                       const std::vector<int64_t>& members, const std::string& name,
                       milliseconds late = milliseconds(0)) {
  const auto store = std::make_shared<MemoryStore>();
  std::atomic<size_t> asked{0};
  Threads(static_cast<int>(members.size()), [&](int rank) {
    const auto counted = std::make_shared<CountedStore>(store);
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
    asked += counted->operations;
  });
  return asked;
}

}  // namespace

TEST(Meeting, whoKnowsTheOthersDoesNotAskTheStore) {
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
  // On a busy machine it may take a second, after which the store is asked: then once more.
  const auto isAsked = [&](const std::vector<int64_t>& members, const std::string& name,
                           int lateMs = 0) {
    for (int attempt = 0; attempt < 5; ++attempt) {
      if (askedOfTheStore(engines, members, name, milliseconds(lateMs)) == 0) return false;
    }
    return true;
  };
  EXPECT(!isAsked({1, 3, 4, 7}, "1"));
  // Again by the same name, with rank 0 late, and in another order.
  EXPECT(!isAsked({1, 3, 4, 7}, "1", 300));
  EXPECT(!isAsked({5, 0, 2}, "2"));
  EXPECT(!isAsked({0, 1, 2, 3, 4, 5, 6, 7}, "3"));
  // Rank 0 does not come.
  GroupOptions options = optionsOf(1, 2, 300);
  options.name = "never";
  options.globalRanks = {6, 2};
  std::shared_ptr<Communicator> never;
  const Status late = Communicator::create(options, store, engines[2], &never);
  EXPECT_EQ(late.code(), Code::kTimeout);
  EXPECT(says(late, "missing: 0"));
  // It cannot: it has written so to the store.
  const auto told = std::make_shared<MemoryStore>();
  options.rank = 0;
  stayAway(options, *told, Status(Code::kNetwork, "no network here"));
  options.rank = 1;
  options.timeout = milliseconds(10'000);
  EXPECT(says(Communicator::create(options, told, engines[2], &never), "no network here"));
  // Those that have left the job's group know nobody.
  job[3]->close(Deadline::after(milliseconds(100)));
  EXPECT(askedOfTheStore(engines, {0, 3}, "4") > 0);
  EXPECT(askedOfTheStore(engines, {3, 0}, "5") > 0);
}

TEST(Meeting, twoGroupsOfOneName) {
  const auto store = std::make_shared<MemoryStore>();
  for (int life = 0; life < 3; ++life) {
    for (const Status& status : meetAll(4, store)) EXPECT_OK(status);
  }
}

// In the same processes: who was rank 0 finds its own card, and must not be found by it.
TEST(Meeting, ranksMayChangePlaces) {
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

// What a job has left that was killed: nobody is there any more.
TEST(Meeting, aStaleStoreIsWaitedOut) {
  const auto store = std::make_shared<MemoryStore>();
  {
    Puppet(0, 5, store).publish();
  }
  std::vector<Status> found(3);
  Threads(3, [&](int rank) {
    if (rank == 0) std::this_thread::sleep_for(milliseconds(500));
    found[rank] = meetAs(optionsOf(rank, 3), store);
  });
  for (const Status& status : found) EXPECT_OK(status);
}

TEST(Meeting, theMissingAreNamed) {
  const std::vector<Status> found = meetAll(4, std::make_shared<MemoryStore>(), 2, 3000);
  for (const int rank : {0, 1, 3}) {
    EXPECT_EQ(found[rank].code(), Code::kTimeout);
    EXPECT(says(found[rank], "waited for the other ranks of 4; missing: 2."));
  }
  EXPECT(says(meetAs(optionsOf(1, 2, 300), std::make_shared<MemoryStore>()), "missing: 0."));
}

// Ten times a second by each rank would be much where there are thousands: 30 times here.
TEST(Meeting, aLateRankIsAskedForLessAndLess) {
  const auto counted = std::make_shared<CountedStore>(std::make_shared<MemoryStore>());
  EXPECT_EQ(meetAs(optionsOf(1, 2, 3000), counted).code(), Code::kTimeout);
  EXPECT(counted->operations <= 24);
}

// A first deadline ends it for all: nobody waits for who does not wait.
TEST(Meeting, theFirstDeadlineEndsItForAll) {
  const auto store = std::make_shared<MemoryStore>();
  std::vector<Status> found(2);
  std::latch areThere(2);
  Threads(2, [&](int rank) {
    areThere.arrive_and_wait();
    found[rank] = meetAs(optionsOf(rank, 3, rank == 1 ? 500 : 60'000), store);
  });
  for (const Status& status : found) EXPECT(says(status, "after 500ms: rank 1 waited"));
}

// The names of sockets and the handshake have room for a uid of one length.
TEST(Meeting, namesOfStrangersAreNotCopied) {
  for (const std::string& uid :
       {std::string("a"), std::string(31, 'a'), std::string(33, 'a'), std::string(500, 'a'),
        std::string(32, 'A'), std::string(31, 'a') + '/', std::string(31, 'a') + '\0'}) {
    const auto store = std::make_shared<MemoryStore>();
    Puppet stranger(0, 2, store);
    stranger.card.address.uid = uid;
    stranger.publish();
    const Status status = meetAs(optionsOf(1, 2), store);
    EXPECT_EQ(status.code(), Code::kStore);
    EXPECT(says(status, "mycoll did not write"));
  }
}

// Ranks that differ there would plan differently.
TEST(Meeting, settingsThatDifferAreRefused) {
  const auto store = std::make_shared<MemoryStore>();
  Status status;
  Threads(2, [&](int rank) {
    if (rank == 0) {
      status = meetAs(optionsOf(0, 2), store);
      return;
    }
    Puppet other(1, 2, store);
    other.card.settings = "MYCOLL_PARTIALS=rounded";
    EXPECT(other.join() == Answer::kIn);
    EXPECT(other.hear(Note::kFailed).contents.find("must be the same") != std::string::npos);
  });
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT(says(status, "has '" + Card::settingsHere() + "', rank 1 ("));
  EXPECT(says(status, "'MYCOLL_PARTIALS=rounded': it must be the same"));
}

// Its handshake may be another one, and then it cannot be asked.
TEST(Meeting, anotherVersionOfMycollIsNamed) {
  const auto store = std::make_shared<MemoryStore>();
  Puppet other(0, 2, store);
  other.card.settings = "mycoll 0.0.1/1";
  other.publish();
  const Status status = meetAs(optionsOf(1, 2), store);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT(says(status, "has 'mycoll 0.0.1/1', rank 1 ("));
  EXPECT(says(status, "'" + Card::settingsHere() + "': it must be the same"));
  Card last;  // and rank 0 can read why
  std::string text;
  bool found = false;
  ASSERT_OK(store->tryGet("root", &found, &text));
  ASSERT_OK(Card::decode(text, &last));
  EXPECT_EQ(last.rank, 1);
  EXPECT(last.why.find("mycoll 0.0.1/1") != std::string::npos);
}

TEST(Meeting, worldSizesThatDifferAreTold) {
  const auto store = std::make_shared<MemoryStore>();
  std::vector<Status> found(3);
  Threads(3, [&](int rank) { found[rank] = meetAs(optionsOf(rank, rank == 0 ? 2 : 3), store); });
  for (const Status& status : found) EXPECT(says(status, "the world sizes must be equal"));
}

TEST(Meeting, aRankTwiceIsToldToAll) {
  for (const int twice : {0, 1}) {
    const auto store = std::make_shared<MemoryStore>();
    std::vector<Status> found(3);
    Threads(3, [&](int index) {
      const int rank = index == 2 ? twice : index;
      found[index] = meetAs(optionsOf(rank, 3), store);
    });
    for (const Status& status : found) {
      EXPECT_EQ(status.code(), Code::kStore);
      EXPECT(says(status, "rank " + std::to_string(twice) + " is taken by"));
    }
  }
}

// A rank knows that another one is lost, as a group of theirs has failed of it.
TEST(Meeting, aLossThatIsPassedOnKeepsItsReason) {
  const auto store = std::make_shared<MemoryStore>();
  Status found;
  Threads(2, [&](int rank) {
    if (rank == 0) {
      found = meetAs(optionsOf(0, 3), store);
    } else {
      Puppet knows(1, 3, store);
      EXPECT(knows.join() == Answer::kIn);
      knows.hear(Note::kStay);
      knows.up->send({Note::kLoss, 2, knows.card.address.uid + "\nit was killed"});
      knows.hear(Note::kFailed);
    }
  });
  EXPECT(says(found, "the group cannot be made with rank 2: it was killed"));
}

// Its connection ends: that is all that there is to see of a process elsewhere.
TEST(Meeting, aRankThatEndsIsNotWaitedFor) {
  const auto store = std::make_shared<MemoryStore>();
  std::vector<Status> found(2);
  Threads(3, [&](int rank) {
    if (rank < 2) {
      found[rank] = meetAs(optionsOf(rank, 4, 30'000), store);
    } else {
      Puppet dies(2, 4, store, " elsewhere");
      EXPECT(dies.join() == Answer::kIn);
      dies.hear(Note::kStay);
    }
  });
  for (const Status& status : found) {
    EXPECT_EQ(status.code(), Code::kPeerLost);
    EXPECT(says(status, "rank 2 ("));
    EXPECT(says(status, "ended before its first call"));
  }
}

// Also when it had confirmed all that it was asked.
TEST(Meeting, aRankThatEndsAtTheLastStep) {
  const auto store = std::make_shared<MemoryStore>();
  std::vector<Status> found(3);
  Threads(4, [&](int rank) {
    if (rank == 1) {
      Puppet dies(1, 4, store, " elsewhere");
      EXPECT(dies.join() == Answer::kIn);
      dies.hear(Note::kStay);
      dies.hear(Note::kRoster);
      return;
    }
    found[rank == 0 ? 0 : rank - 1] = meetAs(optionsOf(rank, 4), store);
  });
  for (const Status& status : found) {
    EXPECT_EQ(status.code(), Code::kPeerLost);
    EXPECT(says(status, "rank 1 ("));
  }
}

TEST(Meeting, aRankMayComeAgain) {
  const auto store = std::make_shared<MemoryStore>();
  std::vector<Status> found(3);
  Threads(3, [&](int rank) {
    if (rank == 1) {
      Puppet first(1, 3, store);
      EXPECT(first.join() == Answer::kIn);
      first.hear(Note::kStay);
    }
    found[rank] = meetAs(optionsOf(rank, 3), store);
  });
  for (const Status& status : found) EXPECT_OK(status);
}

// A rank that others of its host were sent to is gone, and comes again: they find their way.
TEST(Meeting, whoLosesItsPlaceTakesAnother) {
  const auto store = std::make_shared<MemoryStore>();
  std::vector<Status> found(3);
  std::atomic<bool> isFirst{false};
  Threads(3, [&](int rank) {
    if (rank == 2) {
      while (!isFirst) std::this_thread::sleep_for(milliseconds(1));
    }
    if (rank != 1) {
      found[rank] = meetAs(optionsOf(rank, 3), store, rank == 0 ? "" : " elsewhere");
      return;
    }
    Puppet leader(1, 3, store, " elsewhere");
    EXPECT(leader.join() == Answer::kIn);
    leader.hear(Note::kStay);
    isFirst = true;
    leader.letIn();       // and it is sent away again
    leader.closeLobby();  // the next time there is nobody to let it in
    for (Note note; note.kind != Note::kCommit;) {
      note = leader.hear(Note::kRoster, Note::kCommit);
      if (note.kind == Note::kRoster) {
        leader.up->send({Note::kConfirm, 1, note.contents.substr(0, 16)});
      }
    }
  });
  for (const Status& status : found) EXPECT_OK(status);
}

// It can be told from a leftover: its process is alive.
TEST(Meeting, whoCannotStartIsHeard) {
  for (const int culprit : {0, 1}) {
    const auto store = std::make_shared<MemoryStore>();
    Status found;
    Puppet fails(culprit, 2, store);
    fails.card.why = "no descriptors";
    fails.publish();
    const Status status = meetAs(optionsOf(1 - culprit, 2), store);
    EXPECT_EQ(status.code(), Code::kStore);
    EXPECT(says(status, "rank " + std::to_string(culprit) + " ("));
    EXPECT(says(status, "has given up: no descriptors"));
  }
}

// Rank 0 has found nothing at root, and writes there after the one that gives up.
TEST(Meeting, whoCannotStartIsHeardThoughRankZeroWritesOverIt) {
  class OverwritingStore final : public Store {
   public:
    explicit OverwritingStore(std::shared_ptr<Store> store) : store_(std::move(store)) {}
    Status set(const std::string& key, const std::string& value) override {
      if (key == "root" && !isWriting.exchange(true)) {
        for (bool isThere = false; !isThere;) {
          MYCOLL_RETURN_IF_ERROR(store_->wait("root", milliseconds(100), &isThere));
        }
      }
      return store_->set(key, value);
    }
    Status tryGet(const std::string& key, bool* found, std::string* value) override {
      return store_->tryGet(key, found, value);
    }
    Status wait(const std::string& key, milliseconds atMost, bool* found) override {
      return store_->wait(key, atMost, found);
    }
    std::atomic<bool> isWriting{false};

   private:
    const std::shared_ptr<Store> store_;
  };

  const auto store = std::make_shared<MemoryStore>();
  const auto overwriting = std::make_shared<OverwritingStore>(store);
  Status found;
  Threads(2, [&](int rank) {
    if (rank == 0) {
      found = meetAs(optionsOf(0, 2), overwriting);
      return;
    }
    while (!overwriting->isWriting.load()) std::this_thread::sleep_for(milliseconds(1));
    stayAway(optionsOf(1, 2), *store, Status(Code::kInvalidArgument, "no descriptors"));
  });
  EXPECT(says(found, "has given up: no descriptors"));
}

TEST(Meeting, whoCannotConnectIsHeard) {
  const auto store = std::make_shared<MemoryStore>();
  Status found;
  Threads(2, [&](int rank) {
    if (rank == 0) {
      found = meetAs(optionsOf(0, 2), store);
      return;
    }
    Puppet fails(1, 2, store);
    for (bool isThere = false; !isThere;) {
      ASSERT_OK(store->wait("root", milliseconds(100), &isThere));
    }
    fails.card.why = "no route";
    fails.publish();
    std::this_thread::sleep_for(milliseconds(1500));
  });
  EXPECT(says(found, "has given up: no route"));
}

TEST(Meeting, aLeftoverOfWhoGaveUpIsOverwritten) {
  const auto store = std::make_shared<MemoryStore>();
  Puppet failed(1, 2, store);
  failed.card.why = "no descriptors";
  failed.card.address.pidSpace = "elsewhere";
  failed.publish();
  for (const Status& status : meetAll(2, store)) EXPECT_OK(status);
}

TEST(Meeting, anotherSecretIsRefused) {
  const auto store = std::make_shared<MemoryStore>();
  std::vector<Status> found(2);
  Threads(2, [&](int rank) {
    if (rank == 1) {
      Puppet stranger(1, 2, store);
      EXPECT(stranger.join(std::string(32, 'x')) == Answer::kDistrusted);
    }
    found[rank] = meetAs(optionsOf(rank, 2), store);
  });
  for (const Status& status : found) EXPECT_OK(status);

  Puppet other(0, 2, store);
  other.publish();
  other.openLobby(other.card.nonce, std::string(32, 'x'));
  EXPECT(says(meetAs(optionsOf(1, 2), store), "MYCOLL_SECRET_FILE must be the same"));
}

TEST(Meeting, isInterrupted) {
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
        found[index] = meetAs(options, store);
      });
      EXPECT_EQ(found[rank].code(), Code::kInterrupted);
      if (!isAlone) EXPECT(says(found[1 - rank], "interrupted"));
    }
  }
}
