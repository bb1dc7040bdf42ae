#include "kernels/isa.h"

#include <atomic>

namespace mycoll {
namespace {

std::atomic<Isa>& active() {
  static std::atomic<Isa> isa{detectIsa()};
  return isa;
}

}  // namespace

const char* name(Isa isa) {
  switch (isa) {
    case Isa::kBaseline: return "baseline";
    case Isa::kAvx2: return "avx2";
    case Isa::kAvx512: return "avx512";
  }
  return "unknown isa";
}

Isa detectIsa() {
#if MYCOLL_HAS_ISAS
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("f16c")) return Isa::kBaseline;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return Isa::kAvx512;
  }
  return Isa::kAvx2;
#else
  return Isa::kBaseline;
#endif
}

Isa activeIsa() { return active().load(std::memory_order_relaxed); }

void setActiveIsa(Isa isa) { active().store(isa, std::memory_order_relaxed); }

}  // namespace mycoll
