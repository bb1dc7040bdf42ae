#include <cstddef>
#include <cstdint>

#include "kernels/fold.h"

#define MYCOLL_KERNEL_FILE "kernels/fold_float8.inc"
#include "kernels/foreach_isa.h"

namespace mycoll {

Conversion conversionForFloat8(Isa isa, DType dtype, bool saturates) {
  return MYCOLL_CALL_ISA(isa, conversionForFloat8, dtype, saturates);
}

Fold foldForFloat8(Isa isa, DType dtype, ReduceOp op, bool saturates) {
  return MYCOLL_CALL_ISA(isa, foldForFloat8, dtype, op, saturates);
}

}  // namespace mycoll
