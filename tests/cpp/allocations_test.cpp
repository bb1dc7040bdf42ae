// What a small call costs in blocks of memory from the system, which does not depend on the
// machine.
#include <atomic>
#include <cstdlib>
#include <new>
#include <vector>

#include "calls.h"
#include "test.h"
#include "world.h"

namespace {

thread_local bool isCounting = false;
std::atomic<int> allocations{0};

void* allocate(std::size_t bytes) {
  if (isCounting) allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* const block = std::malloc(bytes)) return block;
  throw std::bad_alloc();
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes); }
void* operator new[](std::size_t bytes) { return allocate(bytes); }
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return std::malloc(bytes); }
void operator delete(void* block) noexcept { std::free(block); }
void operator delete[](void* block) noexcept { std::free(block); }
void operator delete(void* block, std::size_t) noexcept { std::free(block); }
void operator delete[](void* block, std::size_t) noexcept { std::free(block); }

using namespace test;

// One, for the operation.
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
    // Now and then one for the queue.
    if (group.rank() == 0) EXPECT(allocations.load() - before <= kCalls * 3 / 2);
    if (group.rank() == 0) EXPECT(allocations.load() - before >= kCalls);
  });
}
