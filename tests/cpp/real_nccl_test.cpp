// NVIDIA's own NCCL where there is no GPU, as far as it goes: REAL_NCCL=/path/libnccl.so.2, which
// tests/test_real_nccl.py sets where it finds one.
#include <dirent.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <thread>

#include "nccl/comm.h"
#include "test.h"

namespace mycoll::nccl {
namespace {

using State = Comm::State;

int countThreads() {
  int count = 0;
  DIR* directory = opendir("/proc/self/task");
  while (const dirent* entry = readdir(directory)) count += entry->d_name[0] != '.' ? 1 : 0;
  closedir(directory);
  return count;
}

// True as soon as it is, within ten seconds.
bool eventually(const std::function<bool()>& holds) {
  for (int i = 0; i < 1000 && !holds(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return holds();
}

const Library& library() {
  static const Library* found = [] {
    const Library* opened = nullptr;
    const Status status = Library::open(std::getenv("REAL_NCCL"), &opened);
    if (!status.ok()) test::fail(__FILE__, __LINE__, test::show(status));
    return opened;
  }();
  ASSERT(found != nullptr);
  return *found;
}

bool isAbsent() { return std::getenv("REAL_NCCL") == nullptr; }
constexpr const char* kAbsent = "REAL_NCCL names no libnccl.so.2";

TEST(RealNccl, saysItsVersionAndWhatItHas) {
  if (isAbsent()) SKIP(kAbsent);
  EXPECT(library().version() >= Library::kOldestVersion);
  EXPECT_EQ(library().path(), std::getenv("REAL_NCCL"));
  EXPECT(library().functions().commSplit != nullptr);
  EXPECT(library().functions().memAlloc != nullptr);
  EXPECT(library().functions().commRegister != nullptr);
  std::printf("%s\n", library().describe().c_str());
}

TEST(RealNccl, makesIds) {
  if (isAbsent()) SKIP(kAbsent);
  UniqueId first{}, second{};
  ASSERT_OK(Comm::createId(library(), &first));
  ASSERT_OK(Comm::createId(library(), &second));
  EXPECT(!std::equal(std::begin(first.bytes), std::end(first.bytes), second.bytes));
}

// Each communicator's end leaves as many threads and descriptors as there were before; what NCCL
// starts for itself with the first id (it listens for the ranks that would come) stays.
TEST(RealNccl, refusesToConnectWithoutAGpu) {
  if (isAbsent()) SKIP(kAbsent);
  for (const bool isBlocking : {true, false}) {
    UniqueId id{};
    ASSERT_OK(Comm::createId(library(), &id));
    const int threads = countThreads(), descriptors = test::openDescriptors();
    for (int i = 0; i < 3; ++i) {
      CommOptions options;
      options.nccl.isBlocking = isBlocking;
      auto comm = std::make_shared<Comm>(library(), 0, 1, "alone", options);
      const Status status =
          comm->connect(id, Deadline::after(std::chrono::seconds(20)), Comm::Check());
      ASSERT(!status.ok());
      for (const char* words :
           {"ncclCommInitRankConfig", "rank 0 of 1 in 'alone'", "last error: ", "NCCL 2."}) {
        EXPECT(status.message().find(words) != std::string::npos);
      }
      EXPECT_EQ(comm->state(), State::kAborted);
      EXPECT_EQ(comm->handle(), nullptr);
      EXPECT_EQ(comm->cause().message(), status.message());
      if (i == 0) std::printf("%s\n", status.message().c_str());
    }
    EXPECT(eventually([&] { return countThreads() <= threads; }));
    EXPECT_EQ(countThreads(), threads);
    EXPECT_EQ(test::openDescriptors(), descriptors);
  }
}

TEST(RealNccl, givesNoMemoryWithoutAGpu) {
  if (isAbsent()) SKIP(kAbsent);
  void* memory = nullptr;
  const Status status = Comm::allocate(library(), 1 << 21, &memory);
  EXPECT(!status.ok());
  EXPECT(status.message().find("ncclMemAlloc") != std::string::npos);
}

}  // namespace
}  // namespace mycoll::nccl
