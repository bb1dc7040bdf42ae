// What follows an all_reduce between the layers of a transformer: the sum is added to the residual,
// and that is normalised. [any thread]
#pragma once

#include <cstddef>

#include "base/types.h"

namespace mycoll {

// Arrays of `rows` times `width` elements, row after row; weight has `width`. newResidual and out
// may each be `sum`, but not both; otherwise no array overlaps one that is written.
struct AddRmsNorm {
  const void* sum;
  const void* residual;
  const void* weight;
  void* newResidual;
  void* out;
  size_t rows;
  size_t width;
  float epsilon;
};

// For each row: newResidual = sum + residual, out = newResidual * weight / rms(newResidual), where
// rms(x) is the root of the mean of x * x, and epsilon. All of it in float, but newResidual is
// rounded to dtype, and it is as rounded that it is normalised; out is rounded once. Squares are
// summed in one order, so that the bits are the same under every instruction set.
// dtype: float32, float16 or bfloat16.
void addRmsNorm(DType dtype, const AddRmsNorm& arrays);

}  // namespace mycoll
