// csrc/nccl over the host half of NVIDIA's NCCL: real init, connections, splits, aborts and ends
// between ranks, on the stand-in for CUDA, with kernels that do nothing (tests/standins/host_nccl).
// HOST_NCCL names the library, which `./dev nccl --source` builds.
#include <dlfcn.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "nccl_world.h"

extern char** environ;

namespace mycoll::nccl::world {
namespace {

using State = Comm::State;

bool isAbsent() { return std::getenv("HOST_NCCL") == nullptr; }
constexpr const char* kAbsent = "HOST_NCCL names no libnccl.so.2: ./dev nccl --source builds one";

class HostNccl {
 public:
  static HostNccl& get() {
    static HostNccl& one = *new HostNccl;
    return one;
  }
  const Library& library() const { return *library_; }
  // Kernels do not end by themselves meanwhile.
  class Held {
   public:
    Held() { get().hold_(1); }
    ~Held() { get().hold_(0); }
  };
  int64_t launches() const { return launches_(); }
  int64_t running() const { return running_(); }

 private:
  HostNccl() {
    const std::string file = std::getenv("HOST_NCCL");
    const std::string folder = file.substr(0, file.rfind('/'));
    // Both are found by their names afterwards.
    for (const std::string& needed :
         {std::string(STANDINS "/libmycoll_standin_cuda.so"), folder + "/libnvidia-ml.so.1"}) {
      if (dlopen(needed.c_str(), RTLD_NOW) == nullptr) test::fail(__FILE__, __LINE__, dlerror());
    }
    // Little memory for each connection; nothing but loopback; pinned memory by the runtime.
    const std::pair<const char*, std::string> settings[] = {
        {"NCCL_SOCKET_IFNAME", "lo"},
        {"NCCL_NET", "Socket"},
        {"NCCL_BUFFSIZE", "65536"},
        {"NCCL_MAX_NCHANNELS", "2"},
        {"NCCL_CUMEM_HOST_ENABLE", "0"},
        {"NCCL_RAS_ENABLE", "0"},
        {"NCCL_TOPO_FILE", folder + "/topology.xml"}};
    for (const auto& [name, value] : settings) setenv(name, value.c_str(), 0);
    const Status opened = Library::open(file, &library_);
    ASSERT_OK(opened);
    handle_ = dlopen(file.c_str(), RTLD_NOLOAD | RTLD_NOW);
    hold_ = reinterpret_cast<void (*)(int)>(dlsym(handle_, "hostNcclHoldKernels"));
    launches_ = reinterpret_cast<int64_t (*)()>(dlsym(handle_, "hostNcclLaunches"));
    running_ = reinterpret_cast<int64_t (*)()>(dlsym(handle_, "hostNcclRunning"));
  }

  const Library* library_ = nullptr;
  void* handle_ = nullptr;
  void (*hold_)(int) = nullptr;
  int64_t (*launches_)() = nullptr;
  int64_t (*running_)() = nullptr;
};

CommOptions blocking(bool isBlocking) {
  CommOptions options;
  options.nccl.isBlocking = isBlocking;
  return options;
}

UniqueId newId() {
  UniqueId id;
  ASSERT_OK(Comm::createId(HostNccl::get().library(), &id));
  return id;
}

std::shared_ptr<Comm> commOf(int rank, int ranks, const CommOptions& options,
                             const char* name = "host") {
  return std::make_shared<Comm>(HostNccl::get().library(), rank, ranks, name,
                                onDeviceOf(rank, options));
}

// Ranks are threads, each with a device.
class Ranks {
 public:
  Ranks(int ranks, const CommOptions& options) {
    const UniqueId id = newId();
    for (int rank = 0; rank < ranks; ++rank) {
      ranks_.push_back({commOf(rank, ranks, options), World::streamOf(rank)});
    }
    run([&](Rank& rank) { ASSERT_OK(rank.comm->connect(id, patient(), nullptr)); });
  }
  void run(const std::function<void(Rank& rank)>& body) {
    test::Threads(static_cast<int>(ranks_.size()), [&](int rank) {
      mycoll_standin_set_current_device(rank % 4);
      body(ranks_[rank]);
    });
  }
  void close() {
    run([](Rank& rank) {
      EXPECT_OK(rank.comm->close(patient()));
      EXPECT_EQ(rank.comm->state(), State::kClosed);
    });
  }
  Rank& operator[](int rank) { return ranks_[rank]; }

 private:
  std::vector<Rank> ranks_;
};

// What a rank gives to its own Issue.
Status transfer(Rank& rank, const std::function<Status(Issue& issue)>& fill, bool isGroup = false) {
  Issue issue(*rank.comm);
  if (isGroup) MYCOLL_RETURN_IF_ERROR(issue.group());
  (void)fill(issue).ok();  // its failure is end()'s, too
  return issue.end();
}
Status sendTo(Rank& rank, const Buffer& data, int peer) {
  return transfer(rank, [&](Issue& issue) { return send(issue, data.span(), peer, rank.stream); });
}
Status receiveFrom(Rank& rank, const Buffer& data, int peer) {
  return transfer(rank,
                  [&](Issue& issue) { return receive(issue, data.span(), peer, rank.stream); });
}

bool isDrained(const Rank& rank) {
  return mycoll_standin_stream_synchronize(rank.stream) == nullptr;
}

// --- making and ending

TEST(HostNccl, connectsAndCloses) {
  if (isAbsent()) SKIP(kAbsent);
  for (const bool isBlocking : {true, false}) {
    for (const int count : {1, 2, 3, 4}) {
      Ranks ranks(count, blocking(isBlocking));
      ranks.run([](Rank& rank) { EXPECT_OK(rank.comm->check()); });
      ranks.close();
    }
  }
}

TEST(HostNccl, connectsUntilItsDeadline) {
  if (isAbsent()) SKIP(kAbsent);
  const auto comm = commOf(0, 2, blocking(false));  // rank 1 never comes
  const Status status = comm->connect(newId(), in(500), nullptr);
  EXPECT_EQ(status.code(), Code::kTimeout);
  EXPECT_EQ(comm->state(), State::kAborted);
  EXPECT_EQ(comm->handle(), static_cast<RawComm*>(nullptr));
  EXPECT_OK(comm->abort(patient(), status));  // NCCL has come back
}

TEST(HostNccl, saysWhatIsWrongWithOptions) {
  if (isAbsent()) SKIP(kAbsent);
  for (const bool isBlocking : {true, false}) {
    CommOptions options = blocking(isBlocking);
    options.nccl.minCtas = 9;
    options.nccl.maxCtas = 2;
    const Status status = commOf(0, 1, options)->connect(newId(), patient(), nullptr);
    EXPECT(contains(status, "ncclCommInitRankConfig failed on rank 0 of 1 in 'host'"));
    EXPECT(contains(status, "invalid argument"));
  }
}

// Of one process NCCL frees the communicators together, with the last that ends.
TEST(HostNccl, closesInAnyOrder) {
  if (isAbsent()) SKIP(kAbsent);
  for (const bool isBlocking : {true, false}) {
    Ranks ranks(3, blocking(isBlocking));
    ranks.run([](Rank& rank) {
      Buffer data(filled(1), rank.stream);
      ASSERT_OK(sum(rank, data));
      std::this_thread::sleep_for(std::chrono::milliseconds(200 * rank.comm->rank()));
      EXPECT_OK(rank.comm->close(patient()));
    });
  }
}

// What runs goes on: who wants to stop it aborts instead.
TEST(HostNccl, closesByItsDeadlineWhatDoesNotEnd) {
  if (isAbsent()) SKIP(kAbsent);
  for (const bool isBlocking : {true, false}) {
    Ranks ranks(2, blocking(isBlocking));
    {
      const HostNccl::Held held;
      ranks.run([](Rank& rank) {
        Buffer data(filled(1), rank.stream);
        ASSERT_OK(sum(rank, data));
        const Clock::time_point start = Clock::now();
        EXPECT_EQ(rank.comm->close(in(500)).code(), Code::kTimeout);
        EXPECT(secondsSince(start) < kSoon);
        EXPECT_EQ(rank.comm->state(), State::kAborted);
      });
    }
    ranks.run([](Rank& rank) { EXPECT(isDrained(rank)); });
  }
}

// --- operations, each of which connects

TEST(HostNccl, connectsWithTheFirstOfEachKind) {
  if (isAbsent()) SKIP(kAbsent);
  for (const bool isBlocking : {true, false}) {
    Ranks ranks(4, blocking(isBlocking));
    const int64_t before = HostNccl::get().launches();
    ranks.run([](Rank& rank) {
      Buffer small(filled(1, 16), rank.stream), large(filled(1, 1 << 20), rank.stream),
          four(filled(1, 64), rank.stream);
      for (const Buffer* data : {&small, &large, &small}) ASSERT_OK(sum(rank, *data));
      const Span all = four.span(), own = small.span();
      std::vector<Span> parts;
      for (int i = 0; i < 4; ++i) parts.push_back(four.part(64 * i, 64));
      for (const auto& [kind, in, out] :
           {std::tuple(OpKind::kAllGather, std::vector<Span>{own}, parts),
            {OpKind::kReduceScatter, parts, {own}},
            {OpKind::kAllToAll, parts, parts},
            {OpKind::kBroadcast, {all}, {all}},
            {OpKind::kReduce, {all}, {all}},
            {OpKind::kBarrier, {}, {small.part(0, 4)}}}) {
        for (const bool isFlat : {true, false}) {
          const Call call = callOf(kind, DType::kInt32, in, out, 0);
          const Status status = enqueue(*rank.comm, call, rank.stream, {isFlat, 90});
          if (!status.ok()) test::fail(__FILE__, __LINE__, status.toString());
        }
      }
      EXPECT(isDrained(rank));
      EXPECT_OK(rank.comm->check());
    });
    EXPECT(HostNccl::get().launches() >= before + 4 * 15);
    ranks.close();
  }
}

TEST(HostNccl, connectsPairs) {
  if (isAbsent()) SKIP(kAbsent);
  for (const bool isBlocking : {true, false}) {
    Ranks ranks(3, blocking(isBlocking));
    ranks.run([](Rank& rank) {
      const int own = rank.comm->rank();
      Buffer out(filled(own), rank.stream), back(filled(0), rank.stream);
      for (int round = 0; round < 2; ++round) {
        if (own == 0) ASSERT_OK(sendTo(rank, out, 1));
        if (own == 1) ASSERT_OK(receiveFrom(rank, back, 0));
        // A ring, as one group.
        ASSERT_OK(transfer(
            rank,
            [&](Issue& issue) {
              MYCOLL_RETURN_IF_ERROR(send(issue, out.span(), (own + 1) % 3, rank.stream));
              return receive(issue, back.span(), (own + 2) % 3, rank.stream);
            },
            true));
      }
      EXPECT(isDrained(rank));
    });
    ranks.close();
  }
}

// One communicator on several streams, and from several threads in turn.
TEST(HostNccl, takesSeveralStreamsAndThreads) {
  if (isAbsent()) SKIP(kAbsent);
  static void* const kSecond[] = {mycoll_standin_stream_create(0, 0),
                                  mycoll_standin_stream_create(1, 0)};
  Ranks ranks(2, blocking(true));
  ranks.run([](Rank& rank) {
    const int own = rank.comm->rank();
    Buffer data(filled(1), rank.stream);
    for (int round = 0; round < 10; ++round) {
      Rank onStream{rank.comm, round % 2 == 0 ? rank.stream : kSecond[own]};
      std::thread([&] {
        mycoll_standin_set_current_device(own);
        EXPECT_OK(sum(onStream, data));
      }).join();
    }
    EXPECT(isDrained(rank));
    (void)mycoll_standin_stream_synchronize(kSecond[own]);
  });
  ranks.close();
}

// --- children

TEST(HostNccl, splits) {
  if (isAbsent()) SKIP(kAbsent);
  for (const bool isBlocking : {true, false}) {
    Ranks ranks(4, blocking(isBlocking));
    std::vector<std::shared_ptr<Comm>> children(4);
    for (int rank = 0; rank < 3; ++rank) {  // {0, 2}, {1}; 3 takes no part
      const int size = rank == 1 ? 1 : 2;
      children[rank] = std::make_shared<Comm>(HostNccl::get().library(), rank / 2, size, "child",
                                              onDeviceOf(rank, blocking(isBlocking)));
    }
    ranks.run([&](Rank& rank) {
      const int own = rank.comm->rank();
      Buffer data(filled(1), rank.stream);
      ASSERT_OK(sum(rank, data));
      EXPECT(isDrained(rank));
      Comm* const child = children[own].get();
      ASSERT_OK(
          rank.comm->split(own == 3 ? kSplitNoColor : own % 2, own, child, patient(), nullptr));
      if (child != nullptr) {
        Rank inner{children[own], rank.stream};
        ASSERT_OK(sum(inner, data));
      }
      ASSERT_OK(sum(rank, data));
      EXPECT(isDrained(rank));
      // The parent first on some ranks.
      if (own % 2 == 0) EXPECT_OK(rank.comm->close(patient()));
      if (child != nullptr) EXPECT_OK(child->close(patient()));
      if (own % 2 == 1) EXPECT_OK(rank.comm->close(patient()));
    });
  }
}

TEST(HostNccl, abortsASplitThatWaits) {
  if (isAbsent()) SKIP(kAbsent);
  for (const bool isBlocking : {true, false}) {
    Ranks ranks(2, blocking(isBlocking));
    const auto child = commOf(0, 2, blocking(isBlocking), "child");
    ranks.run([&](Rank& rank) {
      if (rank.comm->rank() == 0) {  // rank 1 does not come
        EXPECT(!rank.comm->split(0, 0, child.get(), in(500), nullptr).ok());
      }
      EXPECT_OK(rank.comm->abort(patient(), Status(Code::kAborted, "enough")));
    });
    EXPECT_EQ(child->state(), State::kAborted);
  }
}

// --- aborting

TEST(HostNccl, abortsWhatRuns) {
  if (isAbsent()) SKIP(kAbsent);
  for (const bool isBlocking : {true, false}) {
    Ranks ranks(2, blocking(isBlocking));
    const HostNccl::Held held;
    ranks.run([](Rank& rank) {
      Buffer data(filled(1), rank.stream);
      ASSERT_OK(sum(rank, data));
      EXPECT(eventually([] { return HostNccl::get().running() > 0; }));
      EXPECT_OK(rank.comm->abort(patient(), Status(Code::kAborted, "enough")));
      EXPECT(isDrained(rank));
    });
  }
}

// The first call of a kind waits for the other ranks inside NCCL.
TEST(HostNccl, abortsUnderAThreadThatConnects) {
  if (isAbsent()) SKIP(kAbsent);
  for (const bool isBlocking : {true, false}) {
    Ranks ranks(2, blocking(isBlocking));
    std::atomic<bool> isInside{false};
    ranks.run([&](Rank& rank) {
      if (rank.comm->rank() == 1) {  // never calls it
        EXPECT(eventually([&] { return isInside.load(); }));
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        EXPECT_OK(rank.comm->abort(patient(), Status(Code::kAborted, "enough")));
        return;
      }
      Buffer data(filled(1), rank.stream);
      std::thread hanging([&] {
        mycoll_standin_set_current_device(0);
        isInside = true;
        EXPECT_EQ(sum(rank, data).message(), "enough");
      });
      EXPECT(eventually([&] { return isInside.load(); }));
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      EXPECT_OK(rank.comm->abort(patient(), Status(Code::kAborted, "enough")));
      hanging.join();
    });
  }
}

TEST(HostNccl, anEnqueueEndsByItsTimeout) {
  if (isAbsent()) SKIP(kAbsent);
  CommOptions options = blocking(false);
  options.issueTimeout = [] { return std::chrono::milliseconds(300); };
  Ranks ranks(2, options);
  ranks.run([](Rank& rank) {
    Buffer data(filled(1), rank.stream);
    if (rank.comm->rank() == 0) {
      const Status status = sum(rank, data);
      EXPECT_EQ(status.code(), Code::kTimeout);
      EXPECT_EQ(rank.comm->state(), State::kFailed);
    }
    EXPECT_OK(rank.comm->abort(patient(), Status(Code::kAborted, "enough")));
  });
}

// A child has resources of its own: what the parent runs goes on.
TEST(HostNccl, abortsAChildAlone) {
  if (isAbsent()) SKIP(kAbsent);
  for (const bool isBlocking : {true, false}) {
    Ranks ranks(2, blocking(isBlocking));
    std::shared_ptr<Comm> children[2];
    for (int rank : {0, 1}) children[rank] = commOf(rank, 2, blocking(isBlocking), "child");
    ranks.run([&](Rank& rank) {
      const int own = rank.comm->rank();
      ASSERT_OK(rank.comm->split(0, own, children[own].get(), patient(), nullptr));
    });
    {
      const HostNccl::Held held;
      ranks.run([&](Rank& rank) {
        Buffer data(filled(1), rank.stream);
        ASSERT_OK(sum(rank, data));
        EXPECT(eventually([] { return HostNccl::get().running() == 2; }));
        const auto child = children[rank.comm->rank()];
        EXPECT_OK(child->abort(patient(), Status(Code::kAborted, "enough")));
        EXPECT_OK(rank.comm->check());
      });
      EXPECT_EQ(HostNccl::get().running(), 2);
    }
    ranks.close();
  }
}

// What NCCL does to make communicators and connections waits for no kernel of another communicator.
TEST(HostNccl, connectsBesideAKernel) {
  if (isAbsent()) SKIP(kAbsent);
  static void* const kOther[] = {mycoll_standin_stream_create(0, 0),
                                 mycoll_standin_stream_create(1, 0)};
  for (const bool isBlocking : {true, false}) {
    Ranks ranks(2, blocking(isBlocking));
    const UniqueId id = newId();
    {
      const HostNccl::Held held;
      ranks.run([&](Rank& rank) {
        const int own = rank.comm->rank();
        Buffer data(filled(1), rank.stream), other(filled(1), kOther[own]);
        ASSERT_OK(sum(rank, data));
        EXPECT(eventually([] { return HostNccl::get().running() == 2; }));
        Rank second{commOf(own, 2, blocking(isBlocking), "second"), kOther[own]};
        ASSERT_OK(second.comm->connect(id, in(20000), nullptr));
        ASSERT_OK(sum(second, other));
        ASSERT_OK(own == 0 ? sendTo(second, other, 1) : receiveFrom(second, other, 0));
        EXPECT_OK(second.comm->abort(patient(), Status(Code::kAborted, "enough")));
        EXPECT(mycoll_standin_stream_synchronize(kOther[own]) == nullptr);
      });
      EXPECT_EQ(HostNccl::get().running(), 2);
    }
    ranks.close();
  }
}

// --- what is left

struct Left {
  int threads, descriptors;
  int64_t allocations, pinned;
};

Left left() {
  mycoll_standin_counts counts;
  mycoll_standin_count(&counts);
  int threads = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    threads += task.exists() ? 1 : 0;
  }
  // Each stream of the stand-in is a thread for good.
  return {threads - static_cast<int>(counts.streams), test::openDescriptors(),
          counts.liveAllocations, counts.pinnedBytes};
}

TEST(HostNccl, leavesNothingBehind) {
  if (isAbsent()) SKIP(kAbsent);
  for (const bool isBlocking : {true, false}) {
    for (const bool isAborted : {false, true}) {
      Left first{};
      for (int round = 0; round < 4; ++round) {
        Ranks ranks(2, blocking(isBlocking));
        ranks.run([&](Rank& rank) {
          const int own = rank.comm->rank();
          Buffer data(filled(1), rank.stream);
          ASSERT_OK(sum(rank, data));
          ASSERT_OK(own == 0 ? sendTo(rank, data, 1) : receiveFrom(rank, data, 0));
          EXPECT(isDrained(rank));
          if (isAborted) {
            EXPECT_OK(rank.comm->abort(patient(), Status(Code::kAborted, "enough")));
          } else {
            EXPECT_OK(rank.comm->close(patient()));
          }
        });
        if (round == 0) {
          first = left();
          continue;
        }
        EXPECT(eventually([&] { return left().threads <= first.threads; }));
        EXPECT(eventually([&] { return left().descriptors <= first.descriptors; }));
        EXPECT_EQ(left().allocations, first.allocations);
        EXPECT_EQ(left().pinned, first.pinned);
      }
    }
  }
}

// --- rules of groups

TEST(HostNccl, aFailedCallLeavesNoGroupOpen) {
  if (isAbsent()) SKIP(kAbsent);
  Ranks ranks(1, blocking(true));
  ranks.run([](Rank& rank) {
    Buffer data(filled(1), rank.stream);
    const Status status = transfer(
        rank, [&](Issue& issue) { return send(issue, data.span(), 7, rank.stream); }, true);
    EXPECT(contains(status, "invalid argument"));
    EXPECT_EQ(rank.comm->state(), State::kFailed);
    EXPECT(HostNccl::get().library().functions().groupEnd() == Result::kInvalidUsage);
    EXPECT_OK(rank.comm->abort(patient(), status));
  });
}

// --- memory

TEST(HostNccl, registersMemory) {
  if (isAbsent()) SKIP(kAbsent);
  Ranks ranks(2, blocking(true));
  ranks.run([](Rank& rank) {
    const Library& library = HostNccl::get().library();
    void* memory = nullptr;
    void* handle = nullptr;
    ASSERT_OK(Comm::allocate(library, 1 << 20, &memory));
    EXPECT_OK(rank.comm->registerBuffer(memory, 1 << 20, &handle));
    if (handle != nullptr) EXPECT_OK(rank.comm->deregisterBuffer(handle));
    EXPECT_OK(Comm::free(library, memory));
  });
  ranks.close();
}

// --- processes

std::string hex(const UniqueId& id) {
  std::string text;
  for (const char byte : id.bytes) {
    char two[3];
    std::snprintf(two, sizeof two, "%02x", static_cast<unsigned char>(byte));
    text += two;
  }
  return text;
}

// Rank 1 of the next tests, in a process of its own. HOST_NCCL_PEER holds the id, HOST_NCCL_MODE
// what it does when it has connected.
TEST(HostNcclProcess, peer) {
  const char* const text = std::getenv("HOST_NCCL_PEER");
  if (text == nullptr) SKIP("is started by the next tests");
  UniqueId id;
  for (size_t i = 0; i < sizeof id.bytes; ++i) {
    id.bytes[i] = static_cast<char>(std::stoi(std::string(text + 2 * i, 2), nullptr, 16));
  }
  const std::string mode = std::getenv("HOST_NCCL_MODE");
  const bool isBlocking = std::getenv("HOST_NCCL_BLOCKING") != nullptr;
  mycoll_standin_set_current_device(1);
  Rank rank{commOf(1, 2, blocking(isBlocking)), World::streamOf(1)};
  ASSERT_OK(rank.comm->connect(id, patient(), nullptr));
  if (mode == "waits") std::this_thread::sleep_for(std::chrono::minutes(2));
  Buffer data(filled(2), rank.stream);
  ASSERT_OK(sum(rank, data));
  ASSERT_OK(receiveFrom(rank, data, 0));
  EXPECT(isDrained(rank));
  if (mode == "dies") raise(SIGKILL);
  EXPECT_OK(rank.comm->close(patient()));
}

pid_t startPeer(const UniqueId& id, bool isBlocking, const char* mode) {
  setenv("HOST_NCCL_PEER", hex(id).c_str(), 1);
  setenv("HOST_NCCL_MODE", mode, 1);
  if (isBlocking) setenv("HOST_NCCL_BLOCKING", "1", 1);
  std::string self = "/proc/self/exe", filter = "HostNcclProcess.peer";
  char* arguments[] = {self.data(), filter.data(), nullptr};
  pid_t peer = -1;
  EXPECT(posix_spawn(&peer, self.c_str(), nullptr, nullptr, arguments, environ) == 0);
  for (const char* name : {"HOST_NCCL_PEER", "HOST_NCCL_MODE", "HOST_NCCL_BLOCKING"}) {
    unsetenv(name);
  }
  return peer;
}

TEST(HostNcclProcess, connectsClosesAndDies) {
  if (isAbsent()) SKIP(kAbsent);
  mycoll_standin_set_current_device(0);
  for (const bool isBlocking : {true, false}) {
    for (const bool dies : {false, true}) {
      const UniqueId id = newId();
      const pid_t peer = startPeer(id, isBlocking, dies ? "dies" : "closes");
      Rank rank{commOf(0, 2, blocking(isBlocking)), World::streamOf(0)};
      ASSERT_OK(rank.comm->connect(id, patient(), nullptr));
      Buffer data(filled(1), rank.stream);
      EXPECT_OK(sum(rank, data));
      EXPECT_OK(sendTo(rank, data, 1));
      EXPECT(isDrained(rank));
      int status = 0;
      if (dies) {
        waitpid(peer, &status, 0);
        EXPECT(WIFSIGNALED(status));
        const Clock::time_point start = Clock::now();
        EXPECT_OK(rank.comm->abort(patient(), Status(Code::kPeerLost, "rank 1 is dead")));
        EXPECT(secondsSince(start) < kSoon);
      } else {
        EXPECT_OK(rank.comm->close(patient()));
        waitpid(peer, &status, 0);
        EXPECT_EQ(status, 0);
      }
    }
  }
}

// The only one of its process, a communicator is freed at once: never under a thread that is
// inside.
TEST(HostNcclProcess, abortsUnderAThread) {
  if (isAbsent()) SKIP(kAbsent);
  mycoll_standin_set_current_device(0);
  for (const bool isBlocking : {true, false}) {
    for (const bool isSplit : {false, true}) {
      const UniqueId id = newId();
      const pid_t peer = startPeer(id, isBlocking, "waits");
      Rank rank{commOf(0, 2, blocking(isBlocking)), World::streamOf(0)};
      ASSERT_OK(rank.comm->connect(id, patient(), nullptr));
      Buffer data(filled(1), rank.stream);
      const auto child = commOf(0, 2, blocking(isBlocking), "child");
      Status status;
      std::thread hanging([&] {
        mycoll_standin_set_current_device(0);
        status =
            isSplit ? rank.comm->split(0, 0, child.get(), patient(), nullptr) : sum(rank, data);
      });
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
      const Clock::time_point start = Clock::now();
      EXPECT_OK(rank.comm->abort(patient(), Status(Code::kAborted, "enough")));
      hanging.join();
      EXPECT(secondsSince(start) < kSoon);
      EXPECT_EQ(status.message(), "enough");
      kill(peer, SIGKILL);
      waitpid(peer, nullptr, 0);
    }
  }
}

}  // namespace
}  // namespace mycoll::nccl::world
