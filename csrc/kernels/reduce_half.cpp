#include <cstddef>
#include <cstdint>

#include "kernels/fold.h"

#define MYCOLL_KERNEL_FILE "kernels/fold_half.inc"
#include "kernels/foreach_isa.h"

namespace mycoll {

Conversion conversionForHalf(Isa isa, DType dtype) {
  return MYCOLL_CALL_ISA(isa, conversionForHalf, dtype);
}

Fold foldForHalf(Isa isa, DType dtype, ReduceOp op) {
  return MYCOLL_CALL_ISA(isa, foldForHalf, dtype, op);
}

}  // namespace mycoll
