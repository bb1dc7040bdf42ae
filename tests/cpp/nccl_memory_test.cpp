// A thread that ends a communicator gets no memory: each of its allocations fails once.
#include "allocation_hook.h"
#include "nccl/comm.h"
#include "nccl_world.h"

namespace {

// The number of the allocation of this thread that fails; 0: none.
thread_local int failing = 0;

}  // namespace

void test::beforeAllocation(std::size_t) {
  if (failing > 0 && --failing == 0) throw std::bad_alloc();
}

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
  // No thread counts as abandoned, so another communicator can be closed.
  const World world(standIn, 1);
}

}  // namespace
}  // namespace mycoll::nccl::world
