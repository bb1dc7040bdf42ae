// Includes MYCOLL_KERNEL_FILE once for every instruction set, each time in a namespace of its own:
// mycoll::baseline, mycoll::avx2, mycoll::avx512. No include guard: this is a loop.
//
// Include what MYCOLL_KERNEL_FILE needs before this file. It must not use templates and inline
// functions of the standard library: the linker could keep the copy that was compiled for AVX-512
// for the whole program.

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kernels/isa.h"

#define MYCOLL_VECTOR_BYTES 16
#define MYCOLL_HAS_F16C 0
namespace mycoll::baseline {
#include "kernels/vector.inc"
#include MYCOLL_KERNEL_FILE
}  // namespace mycoll::baseline
#undef MYCOLL_VECTOR_BYTES
#undef MYCOLL_HAS_F16C

#if MYCOLL_HAS_ISAS

#define MYCOLL_HAS_F16C 1

#define MYCOLL_VECTOR_BYTES 32
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
namespace mycoll::avx2 {
#include "kernels/vector.inc"
#include MYCOLL_KERNEL_FILE
}  // namespace mycoll::avx2
#pragma GCC pop_options
#undef MYCOLL_VECTOR_BYTES

#define MYCOLL_VECTOR_BYTES 64
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512cd,avx512dq,avx512vl,f16c,prefer-vector-width=512")
namespace mycoll::avx512 {
#include "kernels/vector.inc"
#include MYCOLL_KERNEL_FILE
}  // namespace mycoll::avx512
#pragma GCC pop_options
#undef MYCOLL_VECTOR_BYTES

#undef MYCOLL_HAS_F16C

#define MYCOLL_CALL_ISA(isa, function, ...)                                  \
  ((isa) == ::mycoll::Isa::kAvx512 ? ::mycoll::avx512::function(__VA_ARGS__) \
   : (isa) == ::mycoll::Isa::kAvx2 ? ::mycoll::avx2::function(__VA_ARGS__)   \
                                   : ::mycoll::baseline::function(__VA_ARGS__))

#else

#define MYCOLL_CALL_ISA(isa, function, ...) ((void)(isa), ::mycoll::baseline::function(__VA_ARGS__))

#endif
