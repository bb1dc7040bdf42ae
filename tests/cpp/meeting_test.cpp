// The making of a group through the store: what is believed of what others have written there.
#include <chrono>
#include <memory>
#include <string>

#include "engine/card.h"
#include "test.h"
#include "world.h"

using namespace mycoll;

namespace {

// A card that a stranger has written for rank 1, who then says yes to everything.
class Forgery final : public Store {
 public:
  explicit Forgery(const Card& card) { (void)store_.set("card/1", card.encode()); }

  Status set(const std::string& key, const std::string& value) override {
    if (key == "roster") (void)store_.set("ack/1", value.substr(0, value.find('\n')));
    if (key == "commit") (void)store_.set("done/1", value);
    return store_.set(key, value);
  }
  Status tryGet(const std::string& key, bool* found, std::string* value) override {
    return store_.tryGet(key, found, value);
  }

 private:
  test::MemoryStore store_;
};

Card cardOf(std::string uid) {
  Card card;
  EXPECT_OK(Card::freshNonce(&card.nonce));
  card.ranks = 2;
  card.address.uid = std::move(uid);
  card.address.hostIdentity = "elsewhere";
  card.address.hostName = "elsewhere";
  card.address.pid = 1;
  return card;
}

Status meetStranger(const Card& card) {
  EndpointOptions endpoint;
  endpoint.storeHost = "127.0.0.1";
  std::shared_ptr<Engine> engine;
  ASSERT_OK(Engine::create(endpoint, &engine));
  GroupOptions options;
  options.name = "test";
  options.ranks = 2;
  options.timeout = std::chrono::milliseconds(20'000);
  std::shared_ptr<Communicator> group;
  const Status status =
      Communicator::create(options, std::make_shared<Forgery>(card), engine, &group);
  if (group) group->abort("over");
  return status;
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
