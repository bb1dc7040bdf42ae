#include "kernels/add_rms_norm.h"

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/fold.h"

// As for products of complex numbers: no fused multiply-adds, so that all instruction sets agree.
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif

#define MYCOLL_KERNEL_FILE "kernels/add_rms_norm.inc"
#include "kernels/foreach_isa.h"

namespace mycoll {

void addRmsNorm(DType dtype, const AddRmsNorm& arrays) {
  MYCOLL_CALL_ISA(activeIsa(), addRmsNorm, dtype, arrays);
}

}  // namespace mycoll
