// The units of base/: status, task, types, env, log, fd, deadline, text, topology.
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/deadline.h"
#include "base/env.h"
#include "base/fd.h"
#include "base/log.h"
#include "base/os.h"
#include "base/status.h"
#include "base/task.h"
#include "base/text.h"
#include "base/topology.h"
#include "base/types.h"
#include "base/wait.h"
#include "test.h"

using namespace mycoll;
using test::ScopedEnv;
using test::ScopedFolder;

namespace {

std::string contents(const std::string& path) {
  std::ifstream file(path);
  return std::string((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != text.npos;
}

// Called by getenv(), on threads that have set it.
thread_local const std::function<void()>* onGetenv = nullptr;

// Whether body() returns in a child of fork(), whatever locks other threads of the parent hold.
bool endsInChild(const std::function<void()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    body();
    ::_exit(0);
  }
  int status = -1;
  for (int i = 0; i < 500 && ::waitpid(child, &status, WNOHANG) == 0; ++i) ::usleep(10'000);
  if (status == 0) return true;
  ::kill(child, SIGKILL);
  ::waitpid(child, &status, 0);
  return false;
}

// Made once in a process.
struct Slow {
  static inline thread_local const std::function<void()>* onMaking = nullptr;
  Slow() {
    if (onMaking) (*onMaking)();
  }
  int value = 0;
};

Status failsInside() {
  MYCOLL_RETURN_IF_ERROR(Status());
  MYCOLL_RETURN_IF_ERROR(Status(Code::kTimeout, "too late"));
  return Status();
}

}  // namespace

extern "C" char* getenv(const char* name) {
  static const auto next = reinterpret_cast<decltype(&getenv)>(::dlsym(RTLD_NEXT, "getenv"));
  if (onGetenv) (*onGetenv)();
  return next(name);
}

TEST(Base, aStatusHasACodeAndAMessage) {
  EXPECT(Status().ok());
  EXPECT_EQ(Status().message(), "");
  const Status status = failsInside();
  EXPECT(!status.ok());
  EXPECT(status.code() == Code::kTimeout);
  EXPECT_EQ(status.message(), "too late");
  const Status copy = status;
  EXPECT_EQ(copy.message(), "too late");
}

TEST(Base, statusOfAGroupBeginsWithItsName) {
  const auto text = [](Code code, const std::string& message) {
    return inGroup("7", Status(code, message)).message();
  };
  EXPECT(inGroup("7", Status()).ok());
  EXPECT_EQ(text(Code::kStore, "no"), "mycoll group '7': no");
  EXPECT_EQ(text(Code::kStore, "mycoll group '8': no"), "mycoll group '8': no");
  EXPECT_EQ(text(Code::kDeadlock, "mycoll: DEADLOCK: ..."), "mycoll: DEADLOCK: ...");
  Cause cause;
  cause.rank = 3;
  const Status named = inGroup("7", Status(Code::kTimeout, "late", cause));
  EXPECT(named.code() == Code::kTimeout && named.cause() == cause);
}

TEST(Base, typesHaveNamesAndSizes) {
  std::set<std::string> names;
  for (int d = 0; d < static_cast<int>(DType::kCount); ++d) {
    const DType dtype = static_cast<DType>(d);
    EXPECT(elementSize(dtype) >= 1 && elementSize(dtype) <= 16);
    names.insert(name(dtype));
    EXPECT(isSupported(dtype, ReduceOp::kSum));
    EXPECT(!isSupported(dtype, ReduceOp::kCount));
  }
  EXPECT_EQ(names.size(), static_cast<size_t>(DType::kCount));
  EXPECT_EQ(elementSize(static_cast<DType>(70)), size_t{0});
  EXPECT(!isSupported(DType::kOpaque, ReduceOp::kSum));
  EXPECT(!isSupported(static_cast<DType>(70), ReduceOp::kSum));
  EXPECT(!isSupported(DType::kBool, ReduceOp::kAvg));
  EXPECT(!isSupported(DType::kComplex64, ReduceOp::kMax));
  EXPECT(!isSupported(DType::kFloat32, ReduceOp::kBAnd));
  EXPECT(isSupported(DType::kInt8, ReduceOp::kAvg));
  EXPECT(isSupported(DType::kUInt64, ReduceOp::kBXor));
}

// An object of a thread that was made before its first task is destroyed after the thread's cache
// of task frames, and may still run tasks.
TEST(Base, tasksMayRunAfterTheThreadsCacheIsGone) {
  constexpr size_t kBytes = 200;
  static bool isDistinct;
  struct Late {
    ~Late() {
      // No other allocation happens in between, so memory that was freed twice is allocated twice.
      void* frame = detail::allocateFrame(kBytes);
      void* other = std::malloc(256);
      isDistinct = frame != other;
      std::free(other);
      detail::freeFrame(frame, kBytes);
    }
    bool isThere = true;
  };
  isDistinct = false;
  test::Threads(1, [&](int) {
    thread_local Late late;
    EXPECT(late.isThere);
    detail::freeFrame(detail::allocateFrame(kBytes), kBytes);
  });
  EXPECT(isDistinct);
}

TEST(Base, envDefaults) {
  EXPECT(Env::check().ok());
  const Env& env = Env::process();
  EXPECT(env.transport == TransportChoice::kAuto);
  EXPECT(env.cpu == CpuBackend::kEngine);
  EXPECT_EQ(env.spinMicros, -1);
  EXPECT_EQ(env.chunkBytes, size_t{0});
  EXPECT_EQ(env.smallBytes, size_t{32768});
  EXPECT_EQ(env.eagerBytes, size_t{65536});
  EXPECT(env.socketInterfaces.matches("anything"));
}

// The environment is read once. It is read again after an error, so that the next group can be
// made.
TEST(Base, envIsKept) {
  ScopedEnv spin("MYCOLL_SPIN_US", "5");
  EXPECT_EQ(Env::process().spinMicros, 5);
  ::setenv("MYCOLL_SPIN_US", "6", 1);
  EXPECT(Env::check().ok());
  EXPECT_EQ(Env::process().spinMicros, 5);
  {
    ScopedEnv wrong("MYCOLL_EAGER_BYTES", "nonsense");
    EXPECT(Env::check().code() == Code::kInvalidArgument);
    EXPECT(Env::check().code() == Code::kInvalidArgument);
    ::setenv("MYCOLL_EAGER_BYTES", "1K", 1);
    EXPECT(Env::check().ok());
    EXPECT_EQ(Env::process().eagerBytes, size_t{1024});
  }
}

TEST(Base, envValues) {
  ScopedEnv transport("MYCOLL_TRANSPORT", "tcp");
  ScopedEnv chunk("MYCOLL_CHUNK_BYTES", "1M");
  ScopedEnv spin("MYCOLL_SPIN_US", "0");
  ScopedEnv empty("MYCOLL_SMALL_BYTES", "");
  EXPECT(Env::check().ok());
  const Env& env = Env::process();
  EXPECT(env.transport == TransportChoice::kTcp);
  EXPECT_EQ(env.chunkBytes, size_t{1} << 20);
  EXPECT_EQ(env.spinMicros, 0);
  EXPECT_EQ(env.smallBytes, size_t{32768});
  for (const EnvEntry& entry : describeEnv()) {
    EXPECT(!entry.help.empty());
    if (entry.name == "MYCOLL_TRACE_FILE") continue;  // main.cpp sets it
    EXPECT_EQ(entry.isSet, entry.name == "MYCOLL_TRANSPORT" || entry.name == "MYCOLL_CHUNK_BYTES" ||
                               entry.name == "MYCOLL_SPIN_US");
    if (entry.name == "MYCOLL_CHUNK_BYTES") EXPECT_EQ(entry.value, "1M");
  }
}

TEST(Base, envRefusesInvalidValues) {
  const char* const cases[][2] = {
      {"MYCOLL_TRANSPORT", "rdma"},
      {"MYCOLL_TRANSPORT", "TCP"},
      {"MYCOLL_CPU", "nccl"},
      {"MYCOLL_LOG", "loud"},
      {"MYCOLL_LOG_FILE", "/tmp/%q"},
      {"MYCOLL_LOG_FILE", "/tmp/%"},
      {"MYCOLL_SPIN_US", "-2"},
      {"MYCOLL_SPIN_US", "1s"},
      {"MYCOLL_SPIN_US", "1000001"},
      {"MYCOLL_CHUNK_BYTES", "-4096"},
      {"MYCOLL_CHUNK_BYTES", "4097"},
      {"MYCOLL_CHUNK_BYTES", "K"},
      {"MYCOLL_CHUNK_BYTES", "9999999999999999999"},
      {"MYCOLL_SMALL_BYTES", "-1"},
      {"MYCOLL_EAGER_BYTES", "64 K"},
      {"MYCOLL_EAGER_BYTES", "9000000000G"},
      {"MYCOLL_TRACE_ENTRIES", "65537"},
      {"MYCOLL_EAGER_BYTES", "16777217"},
      {"MYCOLL_SOCKET_IFNAME", "eth0,"},
      {"MYCOLL_SOCKET_IFNAME", "^"},
      {"MYCOLL_SOCKET_IFNAME", "="},
      {"MYCOLL_SOCKET_IFNAME", "eth0,=eth1"},
  };
  for (const auto& [variable, value] : cases) {
    ScopedEnv scoped(variable, value);
    const Env& env = Env::process();
    const Status status = Env::check();
    EXPECT(status.code() == Code::kInvalidArgument);
    EXPECT_CONTAINS(status.message(), std::string(variable) + "=" + value);
    EXPECT_CONTAINS(status.message(), "expected ");
    EXPECT_EQ(env.chunkBytes, size_t{0});
    EXPECT_EQ(env.spinMicros, -1);
  }
}

TEST(Base, envInterfaceFilter) {
  const auto matches = [](const char* value, const char* interfaceName) {
    ScopedEnv scoped("MYCOLL_SOCKET_IFNAME", value);
    EXPECT(Env::check().ok());
    return Env::process().socketInterfaces.matches(interfaceName);
  };
  EXPECT(matches("eth", "eth0"));
  EXPECT(matches("ib,eth", "eth0"));
  EXPECT(!matches("ib", "eth0"));
  EXPECT(matches("=eth1", "eth1"));
  EXPECT(!matches("=eth1", "eth11"));
  EXPECT(!matches("^docker,lo", "lo"));
  EXPECT(!matches("^docker,lo", "docker0"));
  EXPECT(matches("^docker,lo", "eth0"));
  EXPECT(matches("^=eth1", "eth11"));
  EXPECT(!matches("^=eth1", "eth1"));
}

TEST(Base, logWritesToItsFile) {
  const ScopedFolder folder;
  setLogFile((folder.path() + "/%h.%p.%r.log").c_str());
  setLogLevel(LogLevel::kInfo);
  setLogRank(3);
  int evaluated = 0;
  errno = ENOENT;
  MYCOLL_LOG_INFO("hello %s %d", "world", ++evaluated);
  EXPECT_EQ(errno, ENOENT);
  MYCOLL_LOG_DEBUG("silent %d", ++evaluated);
  MYCOLL_LOG_ERROR("long %s", std::string(5000, 'x').c_str());
  EXPECT_EQ(evaluated, 1);
  const auto fileOf = [&](pid_t pid, int rank) {
    return folder.path() + "/" + hostName() + "." + std::to_string(pid) + "." +
           std::to_string(rank) + ".log";
  };
  const std::string text = contents(fileOf(getpid(), 3));
  EXPECT(text.starts_with("[mycoll "));
  EXPECT_CONTAINS(text, " rank 3 pid " + std::to_string(getpid()) + "] hello world 1\n");
  EXPECT_CONTAINS(text, std::string(5000, 'x') + "\n");
  EXPECT(!contains(text, "silent"));

  setLogRank(4);
  MYCOLL_LOG_WARN("elsewhere");
  EXPECT_CONTAINS(contents(fileOf(getpid(), 4)), "elsewhere");

  const pid_t child = ::fork();
  if (child == 0) {
    MYCOLL_LOG_INFO("child");
    ::_exit(0);
  }
  ::waitpid(child, nullptr, 0);
  EXPECT_CONTAINS(contents(fileOf(child, 4)), "child");

  setLogLevel(LogLevel::kOff);
  setLogFile("");
  setLogRank(-1);
}

// A thread forks while another one reads the environment. The child can read it.
TEST(Base, childrenReadTheEnvironment) {
  std::atomic<bool> isReading{false}, isOver{false};
  std::thread reader([&] {
    const std::function<void()> waits = [&] {
      isReading = true;
      while (!isOver) ::usleep(1000);
    };
    onGetenv = &waits;
    Env::readAgainForTest();
    onGetenv = nullptr;
  });
  while (!isReading) ::usleep(1000);
  EXPECT(endsInChild([] { Env::readAgainForTest(); }));
  isOver = true;
  reader.join();
}

// A thread forks while another one makes an object of the process.
TEST(Base, childrenMakeObjectsOfTheProcess) {
  std::atomic<bool> isMaking{false}, isOver{false};
  std::thread maker([&] {
    const std::function<void()> waits = [&] {
      isMaking = true;
      while (!isOver) ::usleep(1000);
    };
    Slow::onMaking = &waits;
    perProcess<Slow>().value += 2;
    Slow::onMaking = nullptr;
  });
  while (!isMaking) ::usleep(1000);
  EXPECT(endsInChild([] { (void)perProcess<Slow>(); }));
  perProcess<Slow>().value += 1;  // the other thread discards its own
  isOver = true;
  maker.join();
  EXPECT_EQ(perProcess<Slow>().value, 3);
  EXPECT(endsInChild([] {
    if (perProcess<Slow>().value != 0) ::abort();
  }));
}

TEST(Base, childrenLog) {
#if defined(__SANITIZE_THREAD__)
  SKIP("ThreadSanitizer does not know that a child's memory is its own");
#endif
  int ends[2];
  ASSERT(::pipe(ends) == 0);
  setLogFile(("/proc/self/fd/" + std::to_string(ends[1])).c_str());
  setLogLevel(LogLevel::kInfo);
  ASSERT(::fcntl(ends[1], F_SETFL, O_NONBLOCK) == 0);
  const std::string filling(4096, 'x');
  while (::write(ends[1], filling.data(), filling.size()) > 0) {
  }
  ASSERT(::fcntl(ends[1], F_SETFL, 0) == 0);
  std::thread logger([] { MYCOLL_LOG_INFO("to a full pipe"); });
  ::usleep(100'000);
  EXPECT(endsInChild([] {
    setLogFile("/dev/null");
    MYCOLL_LOG_INFO("from a child");
  }));
  std::string read(1 << 20, '\0');
  EXPECT(::read(ends[0], read.data(), read.size()) > 0);
  logger.join();
  setLogLevel(LogLevel::kOff);
  setLogFile("");
  for (const int end : ends) ::close(end);
}

TEST(Base, fdOwns) {
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  const auto isOpen = [](int fd) { return ::fcntl(fd, F_GETFD) >= 0; };
  {
    Fd reader(ends[0]);
    Fd moved(std::move(reader));
    EXPECT(!reader.isOpen());
    EXPECT_EQ(moved.get(), ends[0]);
    moved = Fd(ends[1]);
    EXPECT(!isOpen(ends[0]));
    EXPECT(isOpen(ends[1]));
    moved.reset(moved.get());
    EXPECT(isOpen(ends[1]));
  }
  EXPECT(!isOpen(ends[1]));
}

TEST(Base, deadlines) {
  using std::chrono::milliseconds;
  EXPECT(Deadline().isNever());
  EXPECT(!Deadline::never().expired());
  EXPECT(Deadline::never().remaining() == milliseconds::max());
  EXPECT_EQ(Deadline::never().pollMilliseconds(), -1);
  EXPECT(Deadline::after(milliseconds::max()).isNever());
  EXPECT(Deadline::after(milliseconds::max() - milliseconds(1)).isNever());
  EXPECT(Deadline::after(milliseconds(0)).expired());
  EXPECT(Deadline::after(milliseconds(-5)).expired());
  EXPECT(Deadline::after(milliseconds::min()).expired());
  EXPECT(Deadline::after(milliseconds(-5)).remaining() == milliseconds(0));
  const Deadline soon = Deadline::after(milliseconds(100000));
  EXPECT(!soon.expired());
  EXPECT(soon.remaining() > milliseconds(50000));
  EXPECT(soon.remaining() <= milliseconds(100000));
  EXPECT(soon < Deadline::never());
  EXPECT(earlier(Deadline::never(), soon).when() == soon.when());
}

TEST(Base, topologyIsStable) {
  EXPECT_EQ(hostIdentity(), hostIdentity());
  EXPECT_CONTAINS(hostIdentity(), "/net:");
  EXPECT(!hostName().empty());
  EXPECT_EQ(processId(), ::getpid());
  const uint64_t started = processStartTicks(::getpid());
  EXPECT(started > 0);
  EXPECT_EQ(processStartTicks(::getpid()), started);
  EXPECT_EQ(processStartTicks(0x7ffffff0), uint64_t{0});
}

// A child is reported as alive, stopped, and, after its death, as ending until its parent waits for
// it.
TEST(Base, theStateOfAProcessIsRead) {
  EXPECT(isLiving(lookAtProcess(::getpid(), processStartTicks(::getpid()))));
  EXPECT_EQ(lookAtProcess(::getpid(), 1), ProcessLife::kGone);
  const pid_t child = ::fork();
  if (child == 0) {
    for (;;) ::pause();
  }
  const uint64_t started = processStartTicks(child);
  auto becomes = [&](ProcessLife wanted) {
    for (int i = 0; i < 2000; ++i) {
      if (lookAtProcess(child, started) == wanted) return true;
      ::usleep(1000);
    }
    return false;
  };
  EXPECT(becomes(ProcessLife::kAlive));
  ::kill(child, SIGSTOP);
  EXPECT(becomes(ProcessLife::kStopped));
  ::kill(child, SIGKILL);
  EXPECT(becomes(ProcessLife::kEnding));
  ::waitpid(child, nullptr, 0);
  EXPECT_EQ(lookAtProcess(child, started), ProcessLife::kGone);
}

// If main() calls pthread_exit(), the process continues in its other threads.
TEST(Base, aProcessOutlivesItsFirstThread) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::thread([] {
      for (;;) ::pause();
    }).detach();
    ::syscall(SYS_exit, 0);  // of this thread only
  }
  const uint64_t started = processStartTicks(child);
  std::string stat;
  for (int i = 0; i < 2000 && !contains(stat, ") Z "); ++i) {
    ::usleep(1000);
    stat = contents("/proc/" + std::to_string(child) + "/stat");
  }
  EXPECT_CONTAINS(stat, ") Z ");
  EXPECT_EQ(lookAtProcess(child, started), ProcessLife::kAlive);
  ::kill(child, SIGKILL);
  for (int i = 0; i < 2000 && isLiving(lookAtProcess(child, started)); ++i) ::usleep(1000);
  EXPECT_EQ(lookAtProcess(child, started), ProcessLife::kEnding);
  ::waitpid(child, nullptr, 0);
}

TEST(Base, textFromOthersIsSanitised) {
  EXPECT_EQ(sanitized("rank 1:\tgone\n"), "rank 1:\tgone\n");
  EXPECT_EQ(sanitized("h\u00f6st \u20ac \U0001f310"), "h\u00f6st \u20ac \U0001f310");
  EXPECT_EQ(sanitized(std::string("a\0b\x1b[2J\x7f", 8)), "a?b?[2J?");
  // A lone continuation byte, a truncated character, an overlong encoding, a surrogate, a code
  // point beyond the last one, and a byte that UTF-8 never uses.
  EXPECT_EQ(sanitized("\x80|\xe2\x82|\xc0\xaf|\xed\xa0\x80|\xf4\x90\x80\x80|\xff"),
            "?|??|??|???|????|?");
  EXPECT(statusFromPeer(static_cast<int>(Code::kDeadlock), "x").code() == Code::kDeadlock);
  EXPECT(statusFromPeer(static_cast<int>(Code::kOk), "x").code() == Code::kInternal);
  EXPECT(statusFromPeer(-7, "x").code() == Code::kInternal);
  EXPECT(statusFromPeer(99, "x").code() == Code::kInternal);
}

TEST(Base, failuresAreEncodedAndDecoded) {
  Cause cause;
  cause.sequence = 7;
  cause.rank = 3;
  const Status failure(Code::kPeerLost, "rank 3 has ended\x1b", cause);
  Status decoded;
  EXPECT(decodeFailure(encode(failure), &decoded));
  EXPECT_EQ(decoded.code(), Code::kPeerLost);
  EXPECT(decoded.cause() == cause);
  EXPECT_EQ(decoded.message(), "rank 3 has ended?");
  const size_t head = encode(failure).size() - failure.message().size();
  EXPECT(decodeFailure(encode(failure, head + 4), &decoded));
  EXPECT_EQ(decoded.message(), "rank");
  EXPECT(!decodeFailure(encode(failure).substr(0, head - 1), &decoded));
}

TEST(Text, listsNumbersWithIntervals) {
  EXPECT_EQ(listNumbers({}), "");
  EXPECT_EQ(listNumbers({3}), "3");
  EXPECT_EQ(listNumbers({0, 1, 2}), "0, 1, 2");
  EXPECT_EQ(listNumbers({0, 2, 8, 9, 10, 11}), "0, 2, 8-11");
  EXPECT_EQ(listNumbers({0, 1, 2, 3, 5}), "0-3, 5");
}

TEST(Fd, raisesTheLimitForLargeGroupsOnly) {
  rlimit before{};
  ASSERT(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  rlimit low = before;
  low.rlim_cur = 1024;
  ASSERT(::setrlimit(RLIMIT_NOFILE, &low) == 0);
  auto limit = [] {
    rlimit now{};
    EXPECT(::getrlimit(RLIMIT_NOFILE, &now) == 0);
    return now.rlim_cur;
  };
  const rlim_t expected = std::min<rlim_t>(before.rlim_max, 4512);
  raiseDescriptorLimit(64);
  EXPECT_EQ(limit(), 1024u);
  raiseDescriptorLimit(1000);
  EXPECT_EQ(limit(), expected);
  raiseDescriptorLimit(2);
  EXPECT_EQ(limit(), expected);
  ASSERT(::setrlimit(RLIMIT_NOFILE, &before) == 0);
}
