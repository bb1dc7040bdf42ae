// Which instruction set the kernels use. Every kernel is compiled once for each, and chosen once a
// process. All [any thread].
#pragma once

// Whether there are more than the baseline.
#ifdef MYCOLL_BASELINE  // by CMakeLists.txt
#define MYCOLL_HAS_ISAS 0
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MYCOLL_HAS_ISAS 1
#else
#define MYCOLL_HAS_ISAS 0
#endif

namespace mycoll {

enum class Isa {
  kBaseline,  // what the compiler may assume anyway: SSE2 on x86-64, NEON on aarch64
  kAvx2,      // with F16C
  kAvx512,    // F, BW, CD, DQ, VL
};

const char* name(Isa isa);

// The best that this processor and kernel have.
Isa detectIsa();

// What kernels run with.
Isa activeIsa();

// For tests and benchmarks. Not above detectIsa().
void setActiveIsa(Isa isa);

}  // namespace mycoll
