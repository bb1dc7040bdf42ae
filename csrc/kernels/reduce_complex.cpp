#include <cstddef>
#include <cstdint>

#include "kernels/fold.h"

// Fused multiply-adds round once where two instructions round twice: without them, a product has
// the same bits under every instruction set.
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif

#define MYCOLL_KERNEL_FILE "kernels/fold_complex.inc"
#include "kernels/foreach_isa.h"

namespace mycoll {

Fold foldForComplexProduct(Isa isa, DType dtype) {
  return MYCOLL_CALL_ISA(isa, foldForComplexProduct, dtype);
}

}  // namespace mycoll
