// The making of a group through the store: what is believed of what others have written there.
#include <chrono>
#include <memory>
#include <string>

#include "base/topology.h"
#include "engine/card.h"
#include "test.h"
#include "world.h"

using namespace mycoll;
using std::chrono::milliseconds;

namespace {

// Cards that a stranger has written for rank 1: one that stands there at first, if any, then
// another. In the end it says yes to everything.
class Forgery final : public Store {
 public:
  Forgery(std::string earlier, const Card& card, milliseconds cardAfter, milliseconds yesAfter)
      : earlier_(std::move(earlier)),
        card_(card.encode()),
        cardAfter_(Deadline::after(cardAfter)),
        yesAfter_(Deadline::after(yesAfter)) {}

  Status set(const std::string& key, const std::string& value) override {
    if (key == "roster") (void)store_.set("ack/1", value.substr(0, value.find('\n')));
    if (key == "commit") (void)store_.set("done/1", value);
    return store_.set(key, value);
  }
  Status tryGet(const std::string& key, bool* found, std::string* value) override {
    if (key == "card/1") {
      *value = cardAfter_.expired() ? card_ : earlier_;
      *found = !value->empty();
      return Status();
    }
    if (key == "ack/1" && !yesAfter_.expired()) {
      *found = false;
      return Status();
    }
    return store_.tryGet(key, found, value);
  }

 private:
  const std::string earlier_;
  const std::string card_;
  const Deadline cardAfter_;
  const Deadline yesAfter_;
  test::MemoryStore store_;
};

Card cardOf(std::string uid) {
  Card card;
  EXPECT_OK(Card::freshNonce(&card.nonce));
  card.ranks = 2;
  card.settings = Card::settingsHere();
  card.address.uid = std::move(uid);
  card.address.hostIdentity = "elsewhere";
  card.address.pidSpace = "elsewhere";
  card.address.hostName = "elsewhere";
  card.address.pid = 1;
  return card;
}

Status meetStranger(const Card& card, const std::string& earlier = "",
                    milliseconds cardAfter = milliseconds(0),
                    milliseconds yesAfter = milliseconds(0)) {
  MeshOptions mesh;
  mesh.storeHost = "127.0.0.1";
  std::shared_ptr<Engine> engine;
  ASSERT_OK(Engine::create(mesh, &engine));
  GroupOptions options;
  options.name = "test";
  options.ranks = 2;
  options.timeout = milliseconds(5000);
  std::shared_ptr<Communicator> group;
  const Status status = Communicator::create(
      options, std::make_shared<Forgery>(earlier, card, cardAfter, yesAfter), engine, &group);
  if (group) group->abort("over");
  return status;
}

// Of a process that is no more, as far as this host's kernel shows it.
Card cardOfNobody() {
  Card card = cardOf(std::string(32, 'a'));
  card.address.hostName = hostName();
  card.address.pid = 999'999'999;
  card.address.startTicks = ~uint64_t{0} / 2;
  return card;
}

}  // namespace

// The names of sockets and the handshake have room for a uid of one length.
TEST(Meeting, namesOfStrangersAreNotCopied) {
  EXPECT_OK(meetStranger(cardOf(std::string(32, 'a'))));
  for (const std::string& uid :
       {std::string("a"), std::string(31, 'a'), std::string(33, 'a'), std::string(500, 'a'),
        std::string(32, 'A'), std::string(31, 'a') + '/', std::string(31, 'a') + '\0'}) {
    const Status status = meetStranger(cardOf(uid));
    EXPECT_EQ(status.code(), Code::kStore);
    EXPECT(status.message().find("mycoll did not write") != std::string::npos);
  }
}

// Ranks that differ there would plan differently.
TEST(Meeting, settingsThatDifferAreRefused) {
  Card card = cardOf(std::string(32, 'a'));
  card.settings = "MYCOLL_PARTIALS=rounded";
  const Status status = meetStranger(card);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT(status.message().find("has MYCOLL_PARTIALS=wide, rank 1 (") != std::string::npos);
  EXPECT(status.message().find("MYCOLL_PARTIALS=rounded: it must be the same") !=
         std::string::npos);
}

// In another pid namespace, or on a clone of this host: its name says nothing.
TEST(Meeting, aHiddenProcessIsNotDead) {
  const Card card = cardOfNobody();
  EXPECT_OK(meetStranger(card, "", milliseconds(200), milliseconds(2500)));
  EXPECT_OK(meetStranger(card, cardOfNobody().encode(), milliseconds(200), milliseconds(2500)));
}

TEST(Meeting, doesNotWaitForAProcessThatHasEnded) {
  Card card = cardOfNobody();
  card.address.pidSpace = pidSpace();
  for (const std::string& earlier : {std::string(), cardOfNobody().encode()}) {
    const Status status = meetStranger(card, earlier, milliseconds(200), milliseconds(30'000));
    EXPECT_EQ(status.code(), Code::kPeerLost);
    EXPECT(status.message().find("ended before its first call") != std::string::npos);
  }
}
