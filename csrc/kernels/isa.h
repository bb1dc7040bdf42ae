// The instruction set of the kernels. Every kernel is compiled once for each set, and chosen once
// per process. All [any thread].
#pragma once

// Whether the kernels are compiled for more than the baseline.
#ifdef MYCOLL_BASELINE  // set by CMakeLists.txt
#define MYCOLL_HAS_ISAS 0
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MYCOLL_HAS_ISAS 1
#else
#define MYCOLL_HAS_ISAS 0
#endif

namespace mycoll {

enum class Isa {
  kBaseline,  // what the compiler may always use: SSE2 on x86-64, NEON on aarch64
  kAvx2,      // with F16C
  kAvx512,    // F, BW, CD, DQ, VL
};

const char* name(Isa isa);

// The best that this processor and kernel support.
Isa detectIsa();

// The instruction set that kernels use.
Isa activeIsa();

// For tests and benchmarks. Must not exceed detectIsa().
void setActiveIsa(Isa isa);

}  // namespace mycoll
