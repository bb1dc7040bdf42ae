// What two ranks have noted of their messages, and what comes to light when they tell each other.
// The reference is a list: the n-th of one end against the n-th of the other.
#include "engine/message_notes.h"

#include <algorithm>
#include <random>
#include <vector>

#include "test.h"
#include "transport/frame.h"

namespace {

using namespace mycoll;
using Run = MessageNotes::Run;

ExternalMessage message(int peer, bool isSend, uint64_t bytes, DType dtype = DType::kFloat32,
                        uint64_t tag = 0, uint32_t lane = 0) {
  ExternalMessage made;
  made.peer = peer;
  made.isSend = isSend;
  made.lane = lane;
  made.dtype = dtype;
  made.bytes = bytes;
  made.tag = tag;
  return made;
}

// Two ranks; what one tells reaches the other.
struct Pair {
  MessageNotes ends[2] = {{0, 2}, {1, 2}};
  size_t bytes = 0;  // that were told

  void send(int from, const ExternalMessage& what) { ends[from].add(what); }
  void tell(int from) {
    for (const std::string& news : ends[from].takeNews(1 - from)) {
      bytes += news.size();
      ends[1 - from].hear(from, news);
    }
  }
};

TEST(MessageNotes, whatIsAlikeIsNoDifference) {
  Pair pair;
  for (uint64_t i = 0; i < 5000; ++i) {
    pair.send(0, message(1, true, 4 * (i % 7 == 0), DType::kFloat32, i % 11));
    pair.send(1, message(0, false, 4 * (i % 7 == 0), DType::kFloat32, i % 11));
    pair.send(1, message(0, true, 64));
    pair.send(0, message(1, false, 64));
    if (i % 50 == 0) pair.tell(0);
    if (i % 70 == 0) pair.tell(1);
    EXPECT(!pair.ends[0].compare() && !pair.ends[1].compare());
  }
}

TEST(MessageNotes, aProgramThatRepeatsItselfHasLittleToTell) {
  Pair pair;
  for (int i = 0; i < 100'000; ++i) pair.send(0, message(1, true, 4096));
  EXPECT(pair.ends[0].hasNews());
  pair.tell(0);
  EXPECT(!pair.ends[0].hasNews());
  EXPECT_EQ(pair.bytes, sizeof(Run));
}

TEST(MessageNotes, differencesAreFoundAtEitherEnd) {
  const ExternalMessage others[] = {message(0, false, 8), message(0, false, 4, DType::kInt32),
                                    message(0, false, 4, DType::kFloat32, 1)};
  for (const ExternalMessage& other : others) {
    for (int teller = 0; teller < 2; ++teller) {
      Pair pair;
      for (int i = 0; i < 3; ++i) pair.send(0, message(1, true, 4));
      for (int i = 0; i < 2; ++i) pair.send(1, message(0, false, 4));
      pair.send(1, other);
      pair.tell(teller);
      const auto found = pair.ends[1 - teller].compare();
      ASSERT(found.has_value());
      EXPECT_EQ(found->number, 2u);
      EXPECT_EQ(found->peer, teller);
      EXPECT_EQ(found->isSend, teller == 1);
      EXPECT_EQ((teller == 0 ? found->mine : found->theirs).bytes, other.bytes);
      EXPECT_EQ((teller == 0 ? found->mine : found->theirs).tag, other.tag);
      EXPECT(!pair.ends[1 - teller].compare());  // once
    }
  }
}

TEST(MessageNotes, lanesAndDirectionsAreOrdersOfTheirOwn) {
  Pair pair;
  pair.send(0, message(1, true, 4, DType::kFloat32, 0, 0));
  pair.send(0, message(1, true, 8, DType::kFloat32, 0, 1));
  pair.send(0, message(1, false, 16, DType::kFloat32, 0, 0));
  pair.send(1, message(0, true, 16, DType::kFloat32, 0, 0));
  pair.send(1, message(0, false, 8, DType::kFloat32, 0, 1));
  pair.send(1, message(0, false, 4, DType::kFloat32, 0, 0));
  for (int rank = 0; rank < 2; ++rank) pair.tell(rank);
  for (int rank = 0; rank < 2; ++rank) EXPECT(!pair.ends[rank].compare());
}

// Nobody knows how often a graph is replayed, and so which of the others meets which.
TEST(MessageNotes, whatAGraphHoldsEndsTheComparing) {
  for (int who = 0; who < 2; ++who) {
    Pair pair;
    pair.send(0, message(1, true, 4));
    pair.send(1, message(0, false, 4));
    pair.ends[who].stopComparing(1 - who, 0);
    for (int rank = 0; rank < 2; ++rank) {
      pair.tell(rank);
      pair.send(0, message(1, true, 8));
      pair.send(1, message(0, false, 12));
      pair.tell(1 - rank);
    }
    for (int rank = 0; rank < 2; ++rank) EXPECT(!pair.ends[rank].compare());
    // On another lane it goes on.
    pair.send(0, message(1, true, 8, DType::kFloat32, 0, 1));
    pair.send(1, message(0, false, 12, DType::kFloat32, 0, 1));
    pair.tell(0);
    EXPECT(pair.ends[1].compare().has_value());
  }
}

TEST(MessageNotes, whatIsToldOfFitsIntoFrames) {
  Pair pair;
  for (uint64_t i = 0; i < MessageNotes::kMaxRuns; ++i) {
    for (uint32_t lane = 0; lane < 5; ++lane) {
      pair.send(0, message(1, true, i, DType::kFloat32, 0, lane));
    }
  }
  size_t runs = 0;
  for (const std::string& news : pair.ends[0].takeNews(1)) {
    EXPECT(news.size() <= kMaxControlBytes && news.size() % sizeof(Run) == 0);
    runs += news.size() / sizeof(Run);
  }
  EXPECT_EQ(runs, 5 * MessageNotes::kMaxRuns);
}

// Ranks run ahead of each other, tell when they like, and some of it is lost or forgotten: where
// there is no difference none is found, and one that both remember is.
TEST(MessageNotes, walks) {
  const int failures = test::failureCount();
  for (unsigned seed = 0; seed < 400; ++seed) {
    std::mt19937 random(seed);
    const int count = 200 + static_cast<int>(random() % 2000);
    const int wrong = random() % 2 ? -1 : static_cast<int>(random() % count);
    const unsigned kinds = 1 + random() % 3;  // 1: all alike
    const bool loses = random() % 4 == 0;
    std::vector<uint64_t> sizes;
    for (int i = 0; i < count; ++i) sizes.push_back(4 * (random() % kinds));
    Pair pair;
    int done[2] = {0, 0};
    std::optional<MessageNotes::Difference> found;
    const bool isLevel = random() % 2;  // nobody is far ahead: nothing is forgotten
    while (done[0] < count || done[1] < count || pair.ends[0].hasNews() || pair.ends[1].hasNews()) {
      const int who = static_cast<int>(random() % 2);
      const int limit = isLevel ? std::min(count, done[1 - who] + 100) : count;
      for (int steps = static_cast<int>(random() % 60); steps > 0 && done[who] < limit; --steps) {
        const int i = done[who]++;
        const uint64_t bytes = sizes[i] + (who == 1 && i == wrong ? 2 : 0);
        pair.send(who, message(1 - who, who == 0, bytes));
      }
      if (random() % 3 == 0 || (done[0] == count && done[1] == count)) {
        if (loses && random() % 8 == 0) {
          (void)pair.ends[who].takeNews(1 - who);
        } else {
          pair.tell(who);
        }
      }
      for (MessageNotes& end : pair.ends) {
        if (auto difference = end.compare(); difference && !found) found = difference;
      }
      if (found) break;
    }
    if (wrong < 0) {
      EXPECT(!found.has_value());
    } else if (isLevel && !loses) {
      EXPECT(found.has_value());
    }
    if (found) EXPECT_EQ(found->number, static_cast<uint64_t>(wrong));
    if (test::failureCount() != failures) {
      test::fail(__FILE__, __LINE__, "seed " + std::to_string(seed));
      return;
    }
  }
}

// A receiver that is idle, and hears again and again of the same.
TEST(MessageNotes, whatIsToldInPiecesIsOneRun) {
  Pair pair;
  for (size_t i = 0; i < 3 * MessageNotes::kMaxRuns; ++i) {
    pair.send(0, message(1, true, 4));
    pair.tell(0);
  }
  pair.send(0, message(1, true, 8));
  pair.tell(0);
  for (size_t i = 0; i < 3 * MessageNotes::kMaxRuns + 1; ++i) pair.send(1, message(0, false, 4));
  const auto found = pair.ends[1].compare();
  ASSERT(found.has_value());
  EXPECT_EQ(found->number, 3 * MessageNotes::kMaxRuns);
}

TEST(MessageNotes, howFarTheyAre) {
  Pair pair;
  for (int i = 0; i < 5; ++i) pair.send(0, message(1, true, 4, DType::kFloat32, 0, 1));
  for (int i = 0; i < 3; ++i) pair.send(1, message(0, false, 4, DType::kFloat32, 0, 1));
  pair.tell(1);
  const auto counts = pair.ends[0].counts(1, true);
  ASSERT(counts.size() == 1);
  EXPECT_EQ(counts[0].lane, 1u);
  EXPECT_EQ(counts[0].mine, 5u);
  EXPECT_EQ(counts[0].theirs, 3u);
  EXPECT(pair.ends[0].counts(1, false).empty());
}

// Both ends say the same of who is too far away.
TEST(MessageNotes, onlyNeighboursAreTold) {
  constexpr int kRanks = 200;
  for (int rank : {0, 1, 77, 199}) {
    MessageNotes notes(rank, kRanks);
    for (int peer = 0; peer < kRanks; ++peer) {
      notes.add(message(peer, true, 4));
      MessageNotes other(peer, kRanks);
      other.add(message(rank, false, 4));
      EXPECT_EQ(notes.whoHasNews().count(peer), other.whoHasNews().count(rank));
    }
    EXPECT_EQ(notes.whoHasNews().size(), size_t{2 * MessageNotes::kMaxDistance + 1});
  }
  MessageNotes small(3, 8);
  for (int peer = 0; peer < 8; ++peer) small.add(message(peer, true, 4));
  EXPECT_EQ(small.whoHasNews().size(), 8u);
}

// Nothing that others say takes memory without end, or accuses anybody.
TEST(MessageNotes, nonsenseIsNotRemembered) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    MessageNotes notes(0, 100);
    for (int i = 0; i < 200; ++i) {
      std::string news(random() % 5 == 0 ? random() % 100 : sizeof(Run) * (random() % 9), '\0');
      for (char& byte : news) {
        if (random() % 2) byte = static_cast<char>(random());
      }
      const int peer = static_cast<int>(random() % 100);
      notes.hear(peer, news);
      (void)notes.compare();
    }
    size_t streams = 0;
    for (int peer = 0; peer < 100; ++peer) {
      for (bool isSend : {false, true}) streams += notes.counts(peer, isSend).size();
    }
    EXPECT(streams <= MessageNotes::kMaxStreams);
    EXPECT(!notes.hasNews());
  }
}

}  // namespace
