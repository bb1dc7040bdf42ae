#include <cstddef>
#include <cstdint>

#include "kernels/fold.h"

#define MYCOLL_KERNEL_FILE "kernels/fold_integer.inc"
#include "kernels/foreach_isa.h"

namespace mycoll {

Fold foldForInteger(Isa isa, DType dtype, ReduceOp op) {
  return MYCOLL_CALL_ISA(isa, foldForInteger, dtype, op);
}

Fold foldForBool(Isa isa, DType dtype, ReduceOp op) {
  return MYCOLL_CALL_ISA(isa, foldForBool, dtype, op);
}

}  // namespace mycoll
