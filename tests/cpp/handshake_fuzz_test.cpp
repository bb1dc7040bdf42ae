// Invalid handshakes from seeds and files (handshake_script.h), with a mesh that accepts and with a
// mesh that connects. A peer without the secret never gets a link. A peer with the secret gets one
// if and only if it sends a complete and valid handshake. Afterwards the mesh still serves its
// members, and has no more descriptors and memory than before.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "corpus.h"
#include "handshake_script.h"
#include "handshake_wire.h"
#include "listener.h"
#include "passing_link.h"
#include "resident.h"
#include "transport/mailbox.h"
#include "transport/mesh.h"
#include "transport/shm/link.h"
#include "transport/tcp/address.h"

using namespace mycoll;
using test::bytesOf;
using test::cutOut;
using test::kKeepsFreedMemory;
using test::Line;
using test::LinkCounter;
using test::residentMiB;
using test::Script;
using test::Wire;

namespace {

constexpr uint64_t kContext = 42;
const std::string kSecret(32, 's');
const std::string kGuess(32, 'g');

MeshOptions optionsFor(bool isUnix, bool isTls, std::shared_ptr<LinkTap> tap) {
  MeshOptions options;
  options.transport = isUnix ? TransportChoice::kShm : TransportChoice::kTcp;
  options.storeHost = "127.0.0.1";
  options.tap = std::move(tap);
  if (isTls) ASSERT_OK(Tls::make("a secret of the job", &options.tls));
  return options;
}

GroupAddress groupOf(uint64_t context, int rank, std::vector<PeerAddress> peers) {
  GroupAddress group;
  group.context = context;
  group.name = "fuzz";
  group.secret = kSecret;
  group.rank = rank;
  group.peers = std::move(peers);
  return group;
}

// The uid of a rank that does not exist, and in whose name scripts connect.
std::string strangerUid() {
  unsigned char random[16];
  ASSERT_OK(randomBytes(random, sizeof(random)));
  return toHex(random, sizeof(random));
}

// ---- scripts that connect ----------------------------------------------------------------------

// A mesh that accepts connections. It has a group with a rank that does not exist, and a group for
// each visitor.
struct Server {
  Server(bool isUnix, bool isTls) : isUnix(isUnix), isTls(isTls) {
    ASSERT_OK(Mesh::create(optionsFor(isUnix, isTls, counter), &mesh));
    stranger.uid = strangerUid();
    join();
  }

  // A stranger that has got a link counts as lost when it disconnects. In a new group it may
  // connect again.
  void join() {
    mailbox.reset();
    mailbox = listener.join(mesh, groupOf(kContext, 1, {stranger, mesh->address()}));
  }
  void forgetStranger() {
    const Deadline deadline = Deadline::after(std::chrono::seconds(60));
    while (!mesh->hasLost(stranger) && !deadline.expired()) mesh->progress();
    EXPECT(mesh->hasLost(stranger));
    join();
  }

  Fd connect() const {
    Fd socket;
    if (isUnix) {
      bool isFull = false;
      EXPECT_OK(connectUnix(mesh->address().uid, &socket, &isFull));
    } else {
      EXPECT_OK(startConnect(mesh->address().tcp.front().address, mesh->address().tcp.front().port,
                             nullptr, &socket));
    }
    return socket;
  }

  Hello hello() const {
    Hello result;
    result.isShm = isUnix;
    result.context = kContext;
    result.source = 0;
    result.destination = 1;
    std::memcpy(result.sourceUid, stranger.uid.data(), sizeof(result.sourceUid));
    std::memcpy(result.destinationUid, mesh->address().uid.data(), sizeof(result.destinationUid));
    EXPECT_OK(randomBytes(result.nonce, sizeof(result.nonce)));
    return result;
  }

  // A member connects, sends a message and leaves.
  bool serves() {
    ++visits;
    std::shared_ptr<Mesh> visitor;
    test::Listener listeners[2];
    ASSERT_OK(Mesh::create(optionsFor(isUnix, isTls, nullptr), &visitor));
    std::vector<PeerAddress> peers = {visitor->address(), mesh->address()};
    auto theirs = listeners[0].join(visitor, groupOf(kContext + visits, 0, peers));
    // Its process, which is this one, must not be watched, as that would keep a descriptor open.
    peers[0].pidSpace = "elsewhere";
    auto ours = listeners[1].join(mesh, groupOf(kContext + visits, 1, peers));
    Signature word;
    word.kind = OpKind::kSend;
    word.bytes = 4;
    int value = visits, got = 0;
    Transfer sending, receiving;
    ours->receive(receiving, 0, MessageClass::kPointToPoint, 1, word, {&got, 4});
    theirs->send(sending, 1, MessageClass::kPointToPoint, 1, word, {&value, 4});
    const Deadline deadline = Deadline::after(std::chrono::seconds(60));
    while (!receiving.isDone() && !deadline.expired()) {
      visitor->progress();
      mesh->progress();
    }
    return receiving.isDone() && receiving.status().ok() && got == value;
  }

  const bool isUnix, isTls;
  const std::shared_ptr<LinkCounter> counter = std::make_shared<LinkCounter>();
  test::Listener listener;
  std::shared_ptr<Mesh> mesh;
  PeerAddress stranger;
  std::unique_ptr<Mailbox> mailbox;
  std::string recordedHello, recordedProof;
  int visits = 0;
};

// Makes the memory that is sent with a proof. *isGood: whether the mesh must accept it.
std::vector<Fd> memoryFor(const Line& line, const char cookie[32], bool* isGood) {
  std::vector<Fd> found;
  auto ring = [&](size_t bytes, bool isSealed, bool hasCookie) {
    Fd fd(memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    (void)!ftruncate(fd.get(), static_cast<off_t>(bytes));
    if (hasCookie) (void)!pwrite(fd.get(), cookie, 32, offsetof(RingHeader, cookie));
    if (isSealed) (void)fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
    found.push_back(std::move(fd));
  };
  if (line.memory == "short") {
    ring(ringSegmentBytes() - 1, true, true);
  } else if (line.memory == "open") {
    ring(ringSegmentBytes(), false, true);
  } else if (line.memory == "stale") {
    ring(ringSegmentBytes(), true, false);
  } else if (line.memory == "file") {
    found.emplace_back(open("/dev/null", O_RDWR | O_CLOEXEC));
  } else if (line.memory != "none") {
    if (line.memory == "two") ring(ringSegmentBytes(), true, false);
    ring(ringSegmentBytes(), true, true);  // the last one counts
  }
  *isGood = line.memory == "good" || line.memory == "two";
  return found;
}

class Connector : public Wire {
 public:
  Connector(Server& server, const Script& script)
      : Wire(server.connect(), server.mesh, script), server_(server) {}

  void play() {
    for (const Line& line : script_.lines) {
      if (!sendNoise(line)) send(line);
      turn();
    }
  }

  // Whether the bytes that were sent are a valid handshake.
  bool isValid() const {
    Hello hello;
    Proof proof;
    if (!hasChallenge_ || !cutOut(sent, 0, &hello) || !cutOut(sent, sizeof(hello), &proof)) {
      return false;
    }
    const PeerList& peers = server_.mailbox->group().peers;
    const bool isMember = hello.source >= 0 && hello.source < 2 &&
                          std::memcmp(hello.sourceUid, peers[hello.source].uid.data(), 32) == 0;
    return hello.magic == kHandshakeMagic && hello.version == kProtocolVersion && isMember &&
           (hello.isShm != 0) == script_.isUnix && hello.context == kContext &&
           hello.destination == 1 && hello.joins == 0 &&  // there is nothing to join
           std::memcmp(hello.destinationUid, peers[1].uid.data(), 32) == 0 &&
           proof.mac == connectorProof(kSecret, hello, challenge_.nonce, proof.cookie) &&
           (!script_.isUnix ||
            (hasGoodMemory_ && std::memcmp(proof.cookie, cookie_, sizeof(cookie_)) == 0));
  }

  bool wasAccepted() {
    Verdict verdict;
    return hasChallenge_ && read(&verdict, sizeof(verdict)) &&
           verdict.outcome == Outcome::kAccepted;
  }

 private:
  void send(const Line& line) {
    std::string bytes;
    std::vector<Fd> memory;
    const std::string& secret = script_.isKnowing ? kSecret : kGuess;
    if (line.what == "hello") {
      bytes = bytesOf(server_.hello());
    } else if (line.what == "recorded-hello") {
      bytes = server_.recordedHello;
    } else if (line.what == "recorded-proof") {
      readChallenge();
      bytes = server_.recordedProof;
    } else if (line.what == "proof" || line.what == "reflected") {
      readChallenge();
      Hello hello;
      if (!cutOut(sent, 0, &hello)) hello = server_.hello();
      Proof proof;
      EXPECT_OK(randomBytes(proof.cookie, sizeof(proof.cookie)));
      proof.mac = line.what == "reflected"
                      ? challenge_.mac
                      : connectorProof(secret, hello, challenge_.nonce, proof.cookie);
      if (script_.isUnix) {
        // The mesh uses only memory that arrives with the proof.
        bool isGood = false;
        memory = memoryFor(line, proof.cookie, &isGood);
        if (sent.size() == sizeof(Hello)) {
          hasGoodMemory_ = isGood;
          std::memcpy(cookie_, proof.cookie, sizeof(cookie_));
        }
      }
      bytes = bytesOf(proof);
    } else {
      bytes = bytesOf(Challenge{}) + bytesOf(Verdict{});  // the messages of the other side
    }
    line.change(bytes);
    write(bytes, line, memory);
  }

  void readChallenge() {
    if (!hasChallenge_ && sent.size() >= sizeof(Hello)) {
      hasChallenge_ = read(&challenge_, sizeof(challenge_));
    }
  }

  Server& server_;
  Challenge challenge_{};
  bool hasChallenge_ = false;
  bool hasGoodMemory_ = false;
  char cookie_[32] = {};
};

void record(Server& server) {
  const Script good = Script::parse("as connector knowing\nhello\nproof");
  Script script = good;
  script.isUnix = server.isUnix;
  script.isTls = server.isTls;
  Connector connector(server, script);
  connector.play();
  ASSERT(connector.isValid());
  ASSERT(connector.turnUntil([&] { return server.counter->links == 1; }));
  ASSERT(connector.wasAccepted());
  connector.hangUp();
  server.forgetStranger();
  server.recordedHello = connector.sent.substr(0, sizeof(Hello));
  server.recordedProof = connector.sent.substr(sizeof(Hello));
}

// ---- scripts that are connected to -------------------------------------------------------------

class AcceptingSide {
 public:
  void play(const Script& script) {
    const auto counter = std::make_shared<LinkCounter>();
    test::Listener listener;
    PeerAddress stranger;
    stranger.uid = strangerUid();
    Fd service;
    std::shared_ptr<Mesh> mesh;
    ASSERT_OK(Mesh::create(optionsFor(script.isUnix, script.isTls, counter), &mesh));
    if (script.isUnix) {
      ASSERT_OK(listenUnix(stranger.uid, &service));
      stranger.hostIdentity = mesh->address().hostIdentity;
      stranger.pid = mesh->address().pid;
      stranger.startTicks = mesh->address().startTicks;
    } else {
      int port = 0;
      ASSERT_OK(listenOn({"lo", "127.0.0.1", false, true}, {}, &service, &port));
      stranger.tcp.push_back({"127.0.0.1", port});
    }
    auto mailbox = listener.join(mesh, groupOf(kContext, 0, {mesh->address(), stranger}));
    Signature word;
    word.kind = OpKind::kSend;
    word.bytes = 4;
    int value = 1;
    Transfer sending;
    mailbox->send(sending, 1, MessageClass::kPointToPoint, 1, word, {&value, 4});
    Fd socket(accept4(service.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    ASSERT(socket.isOpen());
    Wire wire(std::move(socket), mesh, script);
    Hello hello;
    ASSERT(wire.read(&hello, sizeof(hello)));
    for (const Line& line : script.lines) {
      if (wire.sendNoise(line)) continue;
      std::string bytes;
      if (line.what == "challenge") {
        Challenge challenge;
        EXPECT_OK(randomBytes(challenge.nonce, sizeof(challenge.nonce)));
        challenge.mac = acceptorProof(script.isKnowing ? kSecret : kGuess, hello, challenge.nonce);
        bytes = bytesOf(challenge);
      } else if (line.what == "verdict") {
        bytes = bytesOf(Verdict{Outcome::kAccepted, 0});
      } else {
        bytes = bytesOf(hello);  // returns the hello of the mesh
      }
      line.change(bytes);
      wire.write(bytes, line);
    }
    wire.turn(50);
    Challenge challenge;
    Verdict verdict;
    const bool isProven = cutOut(wire.sent, 0, &challenge) &&
                          challenge.outcome != Outcome::kNotYet &&
                          challenge.outcome != Outcome::kGone &&
                          challenge.mac == acceptorProof(kSecret, hello, challenge.nonce);
    const bool isLinked = isProven && cutOut(wire.sent, sizeof(challenge), &verdict) &&
                          verdict.outcome == Outcome::kAccepted;
    // A peer that has proven nothing must not get a proof, with which it could impersonate the
    // mesh.
    Proof proof;
    EXPECT_EQ(wire.read(&proof, sizeof(proof)), isProven);
    if (isLinked) wire.turnUntil([&] { return counter->links > 0; });
    EXPECT_EQ(counter->links.load(), isLinked ? 1 : 0);
    if (!script.isKnowing) EXPECT_EQ(counter->links.load(), 0);
  }
};

}  // namespace

TEST(Fuzz, handshakes) {
  Server servers[3] = {Server(false, false), Server(true, false), Server(false, true)};
  for (Server& server : servers) {
    record(server);
    ASSERT(server.serves());
  }
  const int descriptors = test::openDescriptors();
  size_t resident = 0;
  int runs = 0, accepted = 0;
  std::vector<std::unique_ptr<Connector>> silent;  // remain connected and send nothing more
  test::forInputs("handshake", 500, test::inventScript, [&](const test::Input& input) {
    const Script script = Script::parse(input.bytes);
    ++runs;
    if (!script.isConnector) {
      AcceptingSide().play(script);
    } else {
      Server& server = servers[script.isTls ? 2 : script.isUnix];
      const int links = server.counter->links;
      auto connector = std::make_unique<Connector>(server, script);
      connector->play();
      const bool isValid = connector->isValid();
      if (isValid) {
        connector->turnUntil([&] { return server.counter->links > links; });
      } else {
        connector->turn(100);
      }
      EXPECT_EQ(server.counter->links - links, isValid ? 1 : 0);
      EXPECT_EQ(connector->wasAccepted(), isValid);
      if (!script.isKnowing) EXPECT(!isValid);
      accepted += isValid;
      if (isValid) {
        connector->hangUp();
        server.forgetStranger();
      } else {
        silent.push_back(std::move(connector));
      }
      if (silent.size() > 200) silent.erase(silent.begin(), silent.begin() + 100);
    }
    if (runs % 100 == 0) EXPECT(servers[runs / 100 % 3].serves());
    if (runs == 300) resident = residentMiB();
  });
  if (std::getenv("FUZZ_SEED") == nullptr) EXPECT(accepted > 0);
  for (Server& server : servers) {
    EXPECT(server.serves());
    EXPECT(server.mailbox->group().peers.size() == 2);
  }
  silent.clear();
  const Deadline deadline = Deadline::after(std::chrono::seconds(60));
  while (test::openDescriptors() > descriptors && !deadline.expired()) {
    for (Server& server : servers) server.mesh->progress();
  }
  EXPECT(test::openDescriptors() <= descriptors);
  if (!kKeepsFreedMemory && resident > 0) EXPECT(residentMiB() <= resident + 8);
  std::printf("        %d handshakes, %d of them accepted\n", runs, accepted);
}
