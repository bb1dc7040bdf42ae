// The interface between reduce.cpp and the kernels of each family of types. Not for other folders.
#pragma once

#include <cstddef>

#include "base/types.h"
#include "kernels/isa.h"

namespace mycoll {

struct FoldArguments {
  char* out;
  const char* const* in;
  size_t inOffset;  // bytes to skip in every input (not in out)
  int n;            // inputs, at least 1
  size_t count;     // lanes: elements times Fold::lanesPerElement
  int divisor;      // of the accumulator; 1 for none. Ignored by integer kernels
  bool streaming;   // non-temporal stores, not fenced: the caller does that
  // Bytes to copy in the same loop (reduceAndCopy); any number.
  char* copyTo = nullptr;
  const char* copyFrom = nullptr;
  size_t copyBytes = 0;
};

using FoldFunction = void (*)(const FoldArguments& arguments);

// A kernel may treat one element as several lanes: complex sums are sums of twice as many floats,
// and the bitwise operations know only bytes.
struct Fold {
  FoldFunction function = nullptr;
  size_t lanesPerElement = 1;
};

// Conversions of `count` narrow floats to float, in order, and back with one rounding.
struct Conversion {
  void (*widen)(char* out, const char* in, size_t count);
  void (*narrow)(char* out, const char* in, size_t count);
};
Conversion conversionForHalf(Isa isa, DType dtype);
Conversion conversionForFloat8(Isa isa, DType dtype, bool saturates);

// The function is nullptr where the family does not support the pair.
Fold foldForFloat(Isa isa, DType dtype, ReduceOp op);  // float32, float64; sums of complex
Fold foldForHalf(Isa isa, DType dtype, ReduceOp op);   // float16, bfloat16
Fold foldForFloat8(Isa isa, DType dtype, ReduceOp op, bool saturates);
Fold foldForInteger(Isa isa, DType dtype, ReduceOp op);  // AVG: the sum, without its division
Fold foldForBool(Isa isa, DType dtype, ReduceOp op);
Fold foldForComplexProduct(Isa isa, DType dtype);

// In place, towards zero: the division of an AVG of integers, after the fold.
void divideIntegers(Isa isa, DType dtype, char* data, size_t count, int divisor);

}  // namespace mycoll
