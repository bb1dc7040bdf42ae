// Connections between processes: how they are made, which addresses and names they use, and what
// happens when many are made at the same time or a process forks or ends.
#include <dlfcn.h>
#include <netdb.h>
#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstddef>
#include <fstream>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "base/topology.h"
#include "engine/engine.h"
#include "engine/group.h"
#include "meshes.h"
#include "passing_link.h"
#include "test.h"
#include "transport/connection.h"
#include "transport/handshake.h"
#include "transport/io_lock.h"
#include "transport/local.h"
#include "transport/shm/link.h"

using namespace mycoll;
using test::Meshes;

namespace {

constexpr auto kMessages = MessageClass::kPointToPoint;

// Called after each send().
std::function<void(const void* data, size_t bytes)> afterSend;

// Called by getaddrinfo(), on threads that have set it.
thread_local const std::function<void()>* onLookUp = nullptr;
// How often a file /proc/.../stat was opened.
std::atomic<int> statReads{0};
// How often usleep() was called.
int waits = 0;

}  // namespace

extern "C" int getaddrinfo(const char* name, const char* service, const addrinfo* hints,
                           addrinfo** found) {
  static const auto next =
      reinterpret_cast<decltype(&getaddrinfo)>(dlsym(RTLD_NEXT, "getaddrinfo"));
  if (onLookUp) (*onLookUp)();
  return next(name, service, hints, found);
}

extern "C" int open(const char* path, int flags, ...) {
  static const auto next =
      reinterpret_cast<int (*)(const char*, int, ...)>(dlsym(RTLD_NEXT, "open"));
  const std::string_view name(path);
  statReads += name.starts_with("/proc/") && name.ends_with("/stat");
  va_list rest;
  va_start(rest, flags);
  const int mode = va_arg(rest, int);
  va_end(rest);
  return next(path, flags, mode);
}

extern "C" int usleep(useconds_t microseconds) {
  static const auto next = reinterpret_cast<decltype(&usleep)>(dlsym(RTLD_NEXT, "usleep"));
  ++waits;
  return next(microseconds);
}

extern "C" ssize_t send(int fd, const void* data, size_t bytes, int flags) {
  static const auto next = reinterpret_cast<decltype(&send)>(dlsym(RTLD_NEXT, "send"));
  const ssize_t sent = next(fd, data, bytes, flags);
  if (afterSend) afterSend(data, bytes);
  return sent;
}

// Users can set a range of ports for firewalls, and an address that others connect to for NAT.
TEST(Connecting, listensOnTheGivenPortsAndAddress) {
  auto meshOn = [](PortRange ports, const std::string& advertised, std::shared_ptr<Mesh>* mesh) {
    MeshOptions options;
    options.transport = TransportChoice::kTcp;
    options.storeHost = "127.0.0.1";
    options.ports = ports;
    options.advertised.address = advertised;
    return Mesh::create(options, mesh);
  };
  std::shared_ptr<Mesh> any, first, second, none, known;
  ASSERT_OK(meshOn({}, "", &any));
  // These ports are most likely free, as the system assigns the next ones from here.
  const int port = 20'000 + any->address().tcp[0].port % 10'000;
  ASSERT_OK(meshOn({port, port + 1}, "", &first));
  ASSERT_OK(meshOn({port, port + 1}, "", &second));
  EXPECT(first->address().tcp[0].port != second->address().tcp[0].port);
  for (const auto& mesh : {first, second}) {
    const int chosen = mesh->address().tcp[0].port;
    EXPECT(chosen == port || chosen == port + 1);
  }
  const Status full = meshOn({port, port + 1}, "", &none);
  EXPECT_CONTAINS(full, "all ports of MYCOLL_PORTS=");
  ASSERT_OK(meshOn({}, "203.0.113.7", &known));
  EXPECT_EQ(known->address().tcp.size(), 1u);
  EXPECT_EQ(known->address().tcp[0].address, "203.0.113.7");
}

// All ranks of a job connect to one of them that has not made the group yet. They are more than the
// strangers that are admitted.
TEST(Connecting, allMembersConnectBeforeTheGroupIsMade) {
  constexpr int kRanks = 100;
  for (TransportChoice transport : {TransportChoice::kAuto, TransportChoice::kTcp}) {
    Meshes world(kRanks, transport);
    std::vector<int> processes(kRanks);
    std::iota(processes.begin(), processes.end(), 0);
    for (int rank = 1; rank < kRanks; ++rank) world.join(rank, 1, processes);
    std::vector<int> values(kRanks), got(kRanks);
    std::vector<std::unique_ptr<Transfer>> sending, receiving;
    for (int rank = 1; rank < kRanks; ++rank) {
      values[rank] = rank;
      sending.push_back(std::make_unique<Transfer>());
      world.at(rank, 1).mailbox->send(*sending.back(), 0, kMessages, 7, Meshes::word(4),
                                      {&values[rank], 4});
    }
    world.turn(20);
    world.join(0, 1, processes);
    for (int rank = 1; rank < kRanks; ++rank) {
      receiving.push_back(std::make_unique<Transfer>());
      world.at(0, 1).mailbox->receive(*receiving.back(), rank, kMessages, 7, Meshes::word(4),
                                      {&got[rank], 4});
    }
    for (auto& transfer : receiving) {
      EXPECT(world.turnUntil([&] { return transfer->isDone(); }));
      EXPECT_OK(transfer->status());
    }
    EXPECT(got == values);
    EXPECT_OK(world.at(0, 1).listener.failure());
  }
}

// Two processes connect to each other at the same time. They make one connection, and the messages
// of both arrive. With every other seed, one process runs while the other is in the middle of a
// step.
TEST(Connecting, bothSidesAtOnce) {
  for (TransportChoice transport : {TransportChoice::kAuto, TransportChoice::kTcp}) {
    for (unsigned seed = 1; seed <= 200; ++seed) {
      std::mt19937 random(seed);
      Meshes world(2, transport);
      for (int process : {0, 1}) world.join(process, 1, {0, 1});
      const int before = test::openDescriptors();
      int values[2] = {7, 8}, got[2] = {};
      Transfer sending[2], receiving[2];
      int moving = 0;
      bool isNested = seed % 2 == 0, hasAccepted[2] = {};
      auto move = [&](int process) {
        const int other = std::exchange(moving, process);
        world.all[process]->progress();
        moving = other;
      };
      afterSend = [&](const void* data, size_t bytes) {
        if (bytes == sizeof(Verdict) &&
            static_cast<const Verdict*>(data)->outcome == Outcome::kAccepted) {
          hasAccepted[moving] = true;
        }
        // The other process could accept this proof, and drop the attempt that was accepted here.
        if (bytes == sizeof(Proof)) EXPECT(!hasAccepted[moving]);
        if (std::exchange(isNested, true)) return;
        for (unsigned turns = random() % 3; turns > 0; --turns) move(1 - moving);
        isNested = false;
      };
      for (int rank : {0, 1}) {
        world.at(rank, 1).mailbox->receive(receiving[rank], 1 - rank, kMessages, 7, Meshes::word(4),
                                           {&got[rank], 4});
      }
      const int first = static_cast<int>(random() % 2);
      for (int rank : {first, 1 - first}) {
        moving = rank;
        world.at(rank, 1).mailbox->send(sending[rank], 1 - rank, kMessages, 7, Meshes::word(4),
                                        {&values[rank], 4});
        for (unsigned turns = random() % 12; turns > 0; --turns)
          move(static_cast<int>(random() % 2));
      }
      const Deadline deadline = Deadline::after(std::chrono::milliseconds(10'000));
      while (!(receiving[0].isDone() && receiving[1].isDone()) && !deadline.expired()) {
        move(static_cast<int>(random() % 2));
      }
      afterSend = nullptr;
      EXPECT(got[0] == values[1] && got[1] == values[0]);
      EXPECT(world.turnUntil([&] { return test::openDescriptors() == before + 2; }));
      for (int rank : {0, 1}) EXPECT_OK(world.at(rank, 1).listener.failure());
    }
  }
}

// A process that ends waits until what it has sent has arrived, but not if the peer has reset the
// connection, as a process that ends with unread bytes does.
TEST(Connecting, theEndOfAPeerIsNotWaitedFor) {
  int fewest = 1;  // the kernel may deliver the reset late
  for (int i = 0; i < 10; ++i) {
    Meshes world(2, TransportChoice::kTcp);
    for (int process : {0, 1}) world.join(process, 1, {0, 1});
    ASSERT(world.talk(0, 1, 1, 0, 1));
    int value = 7;
    Transfer sending;
    world.at(0, 1).mailbox->send(sending, 1, kMessages, 8, Meshes::word(4), {&value, 4});
    world.all[0]->progress();
    world.end(1);
    waits = 0;
    world.end(0);
    fewest = std::min(fewest, waits);
  }
  EXPECT_EQ(fewest, 0);
}

// The end of a peer may arrive with its last message of the handshake, before the socket belongs to
// the connection.
TEST(Connecting, theEndOfAPeerIsReportedAgain) {
  Local local{MeshOptions()};
  ASSERT_OK(local.sleeper.open([](const epoll_event*, int) {}));
  int sockets[2];
  ASSERT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, sockets) == 0);
  ASSERT_OK(local.sleeper.watch(sockets[0]));
  close(sockets[1]);
  epoll_event event;
  const auto next = [&] { return epoll_wait(local.sleeper.epollFd(), &event, 1, 0); };
  EXPECT_EQ(next(), 1);
  EXPECT_EQ(next(), 0);
  PeerAddress peer;
  peer.uid = "peer";
  IoMutex io;
  IoLock lock(io);
  Connection connection(local, peer);
  connection.open(local.makeLink(peer, Fd(sockets[0]), nullptr, RingSide::kMaker, nullptr));
  EXPECT_EQ(next(), 1);
  EXPECT_EQ(event.data.fd, sockets[0]);
  EXPECT(event.events & EPOLLRDHUP);
}

// All users of a host can list the names of sockets, and a process that knows a uid counts as a
// member.
TEST(Connecting, namesOfSocketsHideTheUid) {
  const auto names = [] {
    std::ifstream file("/proc/net/unix");
    return std::string((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  };
  Meshes world(1, TransportChoice::kAuto);
  const std::string uid = world.addresses[0].uid;
  EXPECT_CONTAINS(names(), "mycoll-bell-" + publicName(uid));
  EXPECT(names().find(uid) == std::string::npos);
  world.end(0);
  EXPECT(names().find(publicName(uid)) == std::string::npos);
}

// The children of a process do not keep its sockets open, so its peers detect its end.
TEST(Connecting, forkedChildrenHoldNoSocket) {
  int sockets[2];
  ASSERT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) == 0);
  Fd theirs(sockets[0]);
  Fd ours(sockets[1]);
  ours.keepFromChildren();
  Fd moved(std::move(ours));
  int hold[2];
  ASSERT(pipe(hold) == 0);
  const pid_t child = fork();
  if (child == 0) {
    struct stat entry{};
    char byte;
    const bool isReplaced = fstat(moved.get(), &entry) == 0 && S_ISCHR(entry.st_mode);
    const bool isShared = fstat(theirs.get(), &entry) == 0 && S_ISSOCK(entry.st_mode);
    (void)!read(hold[0], &byte, 1);
    _exit(isReplaced && isShared ? 0 : 1);
  }
  moved.reset();
  pollfd end{theirs.get(), POLLIN, 0};
  EXPECT_EQ(poll(&end, 1, 10'000), 1);  // while the child lives
  char byte;
  EXPECT_EQ(recv(theirs.get(), &byte, 1, MSG_DONTWAIT), 0);
  EXPECT_EQ(write(hold[1], "x", 1), 1);
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  for (int fd : hold) close(fd);
}

// If the backlog of a peer's local socket is full, a process tries again. A connection over TCP
// would be permanent, without shared memory.
TEST(Connecting, aFullBacklogIsTriedAgain) {
  const auto listenerOf = [](const PeerAddress& address) {
    for (int fd = 0; fd < 1024; ++fd) {
      sockaddr_un name{};
      socklen_t length = sizeof(name);
      if (getsockname(fd, reinterpret_cast<sockaddr*>(&name), &length) != 0) continue;
      int isListening = 0;
      socklen_t size = sizeof(isListening);
      getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &isListening, &size);
      const size_t bytes = length - offsetof(sockaddr_un, sun_path);
      if (name.sun_family == AF_UNIX && isListening &&
          std::string(name.sun_path, bytes).find(publicName(address.uid)) != std::string::npos) {
        return fd;
      }
    }
    return -1;
  };
  Meshes world(2, TransportChoice::kAuto);
  for (int process : {0, 1}) world.join(process, 1, {0, 1});
  ASSERT(listen(listenerOf(world.addresses[1]), 0) == 0);
  std::vector<Fd> waiting;
  bool isFull = false;
  while (!isFull) {
    Fd socket;
    const Status status = connectUnix(world.addresses[1].uid, &socket, &isFull);
    EXPECT_EQ(status.ok(), !isFull);
    if (status.ok()) waiting.push_back(std::move(socket));
    ASSERT(waiting.size() < 10);
  }
  int value = 7, got = 0;
  Transfer sending, receiving;
  world.at(1, 1).mailbox->receive(receiving, 0, kMessages, 77, Meshes::word(4), {&got, 4});
  world.at(0, 1).mailbox->send(sending, 1, kMessages, 77, Meshes::word(4), {&value, 4});
  for (int i = 0; i < 100; ++i) world.all[0]->progress();
  EXPECT(world.turnUntil([&] { return receiving.isDone(); }));
  EXPECT_EQ(got, value);
  EXPECT(world.isShm(0, 1));
}

// Processes see each other if they are in one pid namespace. The host names of containers do not
// matter, and two containers may have the same one.
TEST(Connecting, processesAreSeenByTheirPidSpace) {
  Meshes world(3, TransportChoice::kTcp);
  const PeerAddress here = world.addresses[0];
  world.addresses[1].hostName = "another name";
  world.addresses[2].pidSpace = "another space";
  world.join(0, 1, {0, 1, 2});
  EXPECT(world.addresses[1].isVisibleTo(here));
  EXPECT(!world.addresses[2].isVisibleTo(here));
  EXPECT(world.all[0]->descriptorOf(world.addresses[2]) == nullptr);

  PeerAddress pod = here;
  pod.hostName = "another name";
  pod.pidSpace = kernelIdentity() + "/pid:[1]";
  EXPECT(here.sharesKernelWith(pod));
  pod.hostName = here.hostName;
  pod.pidSpace = "another kernel/pid:[1]";
  EXPECT(!here.sharesKernelWith(pod));
  pod.pidSpace.clear();  // then the host names are compared
  EXPECT(here.sharesKernelWith(pod));
}

// A death is detected by one read of /proc. With a thousand peers on a host, one read for each of
// them takes 10 ms.
TEST(Connecting, aDeathTakesOneRead) {
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  Meshes world(2, TransportChoice::kAuto);
  PeerAddress& address = world.addresses[1];
  address.pid = child;
  address.startTicks = processStartTicks(child);
  world.join(0, 1, {0, 1});
  EXPECT(!world.all[0]->hasLost(address));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  const int before = statReads;
  while (statReads == before) world.all[0]->checkProcesses();
  EXPECT_EQ(statReads, before + 1);
  EXPECT(world.all[0]->hasLost(address));
}

// A thread forks while another one makes an engine and waits for a name server. The child can make
// an engine.
TEST(Connecting, childrenMakeEngines) {
#if defined(__SANITIZE_THREAD__)
  SKIP("a child of a process with threads may start none under ThreadSanitizer");
#endif
  std::atomic<bool> isLookingUp{false}, isOver{false};
  const auto make = [] {
    std::shared_ptr<Engine> engine;
    GroupOptions options;
    options.name = "group";
    options.storeHost = "127.0.0.1";
    return Engine::process(&options, &engine);
  };
  std::thread maker([&] {
    const std::function<void()> waits = [&] {
      isLookingUp = true;
      while (!isOver) usleep(1000);
    };
    onLookUp = &waits;
    EXPECT_OK(make());
    onLookUp = nullptr;
  });
  while (!isLookingUp) usleep(1000);
  const pid_t child = fork();
  if (child == 0) _exit(make().ok() ? 0 : 1);
  int status = -1;
  for (int i = 0; i < 500 && waitpid(child, &status, WNOHANG) == 0; ++i) usleep(10'000);
  EXPECT_EQ(status, 0);
  if (status == -1) {
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  }
  isOver = true;
  maker.join();
}

namespace {

// Breaks all connections of a process.
class BreakingTap final : public LinkTap {
 public:
  bool isBroken = false;

  std::unique_ptr<LinkSender> tap(std::unique_ptr<LinkSender> link) override {
    return std::make_unique<Sender>(*this, std::move(link));
  }
  std::unique_ptr<LinkReceiver> tap(std::unique_ptr<LinkReceiver> link) override { return link; }

 private:
  struct Sender final : test::PassingSender {
    Sender(const BreakingTap& tap, std::unique_ptr<LinkSender> link)
        : PassingSender(std::move(link)), owner(tap) {}
    ssize_t write(const Span* parts, int count) override {
      if (!owner.isBroken) return link_->write(parts, count);
      shutdown(fd(), SHUT_RDWR);
      return -1;
    }
    const BreakingTap& owner;
  };
};

}  // namespace

// Two processes have lost their connection. One of them has left their group since, and makes a
// connection for a new one. The other one refuses that as long as it has not left the first group.
TEST(Connecting, aLostConnectionIsMadeAgainWhenBothHaveForgottenIt) {
  for (const bool isForgotten : {false, true}) {
    const auto transport = isForgotten ? TransportChoice::kTcp : TransportChoice::kAuto;
    const auto tap = std::make_shared<BreakingTap>();
    Meshes world(2, transport, {{0, tap}});
    world.join(0, 1, {0, 1});
    world.join(1, 1, {0, 1});
    ASSERT(world.talk(0, 1, 1, 0, 1));
    tap->isBroken = true;
    EXPECT(!world.talk(0, 1, 1, 0, 1));
    ASSERT(world.turnUntil([&] {
      return world.all[0]->hasLost(world.addresses[1]) && world.all[1]->hasLost(world.addresses[0]);
    }));
    tap->isBroken = false;
    world.members.erase({0, 1});
    ASSERT(!world.all[0]->hasLost(world.addresses[1]));
    Mailbox& mailbox = *world.join(0, 2, {0, 1}).mailbox;
    world.join(1, 2, {0, 1});
    int value = 7;
    Transfer sending;
    mailbox.send(sending, 1, MessageClass::kPointToPoint, 77, Meshes::word(4), {&value, 4});
    world.turn();
    EXPECT(!sending.isDone());
    if (isForgotten) {
      world.members.erase({1, 1});
      world.members.erase({1, 2});
      world.join(1, 2, {0, 1});
    }
    ASSERT(world.turnUntil([&] { return sending.isDone(); }));
    if (isForgotten) {
      EXPECT_OK(sending.status());
      continue;
    }
    EXPECT_EQ(sending.status().code(), Code::kPeerLost);
    EXPECT(sending.status().message().find("has lost an earlier one") != std::string::npos);
  }
}
