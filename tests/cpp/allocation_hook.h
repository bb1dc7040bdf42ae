// Replaces the program's operator new by one that first calls test::beforeAllocation(). Included by
// one source file of a program, which defines that function.
#pragma once

#include <cstdlib>
#include <new>

namespace test {

// May throw std::bad_alloc, and then nothing is allocated.
void beforeAllocation(std::size_t bytes);

inline void* allocate(std::size_t bytes) {
  beforeAllocation(bytes);
  if (void* const block = std::malloc(bytes)) return block;
  throw std::bad_alloc();
}

}  // namespace test

// Not inline, so that GCC does not see a free() of memory from operator new.
[[gnu::noinline]] void* operator new(std::size_t bytes) { return test::allocate(bytes); }
[[gnu::noinline]] void* operator new[](std::size_t bytes) { return test::allocate(bytes); }
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return std::malloc(bytes);
}
[[gnu::noinline]] void operator delete(void* block) noexcept { std::free(block); }
[[gnu::noinline]] void operator delete[](void* block) noexcept { std::free(block); }
[[gnu::noinline]] void operator delete(void* block, std::size_t) noexcept { std::free(block); }
[[gnu::noinline]] void operator delete[](void* block, std::size_t) noexcept { std::free(block); }
[[gnu::noinline]] void operator delete(void* block, const std::nothrow_t&) noexcept {
  std::free(block);
}
