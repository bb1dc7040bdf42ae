// NVIDIA's NCCL on a machine without a GPU. tests/test_real_nccl.py sets REAL_NCCL to the path of a
// libnccl.so.2 if it finds one.
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

TEST(RealNccl, reportsItsVersionAndFunctions) {
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

// After the end of a communicator there are as many threads and descriptors as before it. The
// thread that NCCL starts with the first id, which listens for other ranks, remains.
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
        EXPECT_CONTAINS(status, words);
      }
      EXPECT_EQ(comm->state(), State::kAborted);
      EXPECT_EQ(comm->handle(), nullptr);
      EXPECT_EQ(comm->cause().message(), status.message());
      if (i == 0) std::printf("%s\n", status.message().c_str());
    }
    EXPECT(test::eventually([&] { return countThreads() <= threads; }));
    EXPECT_EQ(countThreads(), threads);
    EXPECT_EQ(test::openDescriptors(), descriptors);
  }
}

TEST(RealNccl, givesNoMemoryWithoutAGpu) {
  if (isAbsent()) SKIP(kAbsent);
  void* memory = nullptr;
  const Status status = Comm::allocate(library(), 1 << 21, &memory);
  EXPECT(!status.ok());
  EXPECT_CONTAINS(status, "ncclMemAlloc");
}

}  // namespace
}  // namespace mycoll::nccl
