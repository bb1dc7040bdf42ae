#include <cstddef>
#include <cstdint>

#include "kernels/fold.h"

#define MYCOLL_KERNEL_FILE "kernels/fold_float.inc"
#include "kernels/foreach_isa.h"

namespace mycoll {

Fold foldForFloat(Isa isa, DType dtype, ReduceOp op) {
  return MYCOLL_CALL_ISA(isa, foldForFloat, dtype, op);
}

}  // namespace mycoll
