// A thread that gets no memory while it ends a communicator: each of its allocations fails once.
#include <atomic>
#include <cstdlib>
#include <new>

#include "nccl/comm.h"
#include "nccl_world.h"

namespace {

// The so many-th allocation of this thread fails. 0: none.
thread_local int failing = 0;

void* allocate(std::size_t bytes) {
  if (failing > 0 && --failing == 0) throw std::bad_alloc();
  if (void* const block = std::malloc(bytes)) return block;
  throw std::bad_alloc();
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes); }
void* operator new[](std::size_t bytes) { return allocate(bytes); }
void operator delete(void* block) noexcept { std::free(block); }
void operator delete[](void* block) noexcept { std::free(block); }
void operator delete(void* block, std::size_t) noexcept { std::free(block); }
void operator delete[](void* block, std::size_t) noexcept { std::free(block); }

namespace mycoll::nccl::world {
namespace {

TEST(NcclMemoryShort, everyAllocationOfACloseMayFail) {
  StandIn& standIn = StandIn::full();
  const int64_t comms = standIn.count("comms");
  bool isOver = false;
  for (int number = 1; !isOver && number < 100; ++number) {
    World world(standIn, 1);
    const auto comm = world[0].comm;
    failing = number;
    try {
      (void)comm->close(patient());
    } catch (const std::bad_alloc&) {
    }
    isOver = std::exchange(failing, 0) > 0;
    EXPECT_OK(comm->abort(patient(), Status(Code::kAborted, "out of memory")));
    EXPECT(eventually([&] { return standIn.count("comms") == comms; }));
  }
  EXPECT(isOver);
  // No thread counts as left behind: another one ends in good order.
  const World world(standIn, 1);
}

}  // namespace
}  // namespace mycoll::nccl::world
