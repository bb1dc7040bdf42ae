// Counts the allocations of a small call, which do not depend on the machine.
#include <atomic>
#include <vector>

#include "allocation_hook.h"
#include "calls.h"
#include "test.h"
#include "world.h"

namespace {

thread_local bool isCounting = false;
std::atomic<int> allocations{0};

}  // namespace

void test::beforeAllocation(std::size_t) {
  if (isCounting) allocations.fetch_add(1, std::memory_order_relaxed);
}

using namespace test;

// A call allocates one block, for the operation, and the queue allocates one now and then.
TEST(Allocations, ofASmallAllReduce) {
  runWorld(2, Links::kShm, [](Communicator& group) {
    std::vector<int32_t> value(1);
    Call c = call(OpKind::kAllReduce);
    const auto once = [&] {
      c.in = c.out = {span(value)};
      EXPECT_OK(run(group, std::move(c)));
      c = call(OpKind::kAllReduce);
    };
    for (int i = 0; i < 10; ++i) once();
    constexpr int kCalls = 1000;
    const int before = allocations.load();
    isCounting = group.rank() == 0;
    for (int i = 0; i < kCalls; ++i) once();
    isCounting = false;
    if (group.rank() == 0) EXPECT(allocations.load() - before <= kCalls * 3 / 2);
    if (group.rank() == 0) EXPECT(allocations.load() - before >= kCalls);
  });
}
