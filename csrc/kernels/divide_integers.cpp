#include <cstddef>
#include <cstdint>

#include "kernels/fold.h"

#define MYCOLL_KERNEL_FILE "kernels/divide_integers.inc"
#include "kernels/foreach_isa.h"

namespace mycoll {

void divideIntegers(Isa isa, DType dtype, char* data, size_t count, int divisor) {
  MYCOLL_CALL_ISA(isa, divideIntegers, dtype, data, count, divisor);
}

}  // namespace mycoll
