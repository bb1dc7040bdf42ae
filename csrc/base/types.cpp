#include "base/types.h"

#include <iterator>

namespace mycoll {

namespace {

struct Element {
  size_t bytes;
  const char* name;
};

// By DType.
constexpr Element kElements[] = {
    {4, "float32"},     {8, "float64"},     {2, "float16"}, {2, "bfloat16"}, {1, "float8_e4m3fn"},
    {1, "float8_e5m2"}, {1, "int8"},        {1, "uint8"},   {2, "int16"},    {2, "uint16"},
    {4, "int32"},       {4, "uint32"},      {8, "int64"},   {8, "uint64"},   {1, "bool"},
    {8, "complex64"},   {16, "complex128"},
};
static_assert(std::size(kElements) == static_cast<size_t>(DType::kCount));

// By ReduceOp.
constexpr const char* kReduceOps[] = {"SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR"};
static_assert(std::size(kReduceOps) == static_cast<size_t>(ReduceOp::kCount));

// By OpKind.
constexpr const char* kOperations[] = {
    "barrier",     "broadcast",
    "all_reduce",  "reduce",
    "all_gather",  "gather",
    "scatter",     "reduce_scatter",
    "all_to_all",  "monitored_barrier",
    "send",        "recv",
    "put",         "signal",
    "wait_signal", "window",
};
static_assert(std::size(kOperations) == static_cast<size_t>(OpKind::kCount));

}  // namespace

size_t elementSize(DType dtype) {
  return dtype < DType::kCount ? kElements[static_cast<size_t>(dtype)].bytes : 0;
}

const char* name(DType dtype) {
  if (dtype < DType::kCount) return kElements[static_cast<size_t>(dtype)].name;
  // kOpaque + n: a type that is only moved.
  return dtype >= DType::kOpaque ? "opaque" : "unknown dtype";
}

const char* name(ReduceOp op) {
  return op < ReduceOp::kCount ? kReduceOps[static_cast<size_t>(op)] : "unknown reduce op";
}

bool isSupported(DType dtype, ReduceOp op) {
  if (dtype >= DType::kCount || op >= ReduceOp::kCount) return false;
  const bool isBitwise = op == ReduceOp::kBAnd || op == ReduceOp::kBOr || op == ReduceOp::kBXor;
  switch (dtype) {
    case DType::kFloat32:
    case DType::kFloat64:
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2: return !isBitwise;
    case DType::kComplex64:
    case DType::kComplex128:
      return op == ReduceOp::kSum || op == ReduceOp::kProduct || op == ReduceOp::kAvg;
    case DType::kBool: return op != ReduceOp::kAvg;
    default: return true;  // the integers
  }
}

const char* name(OpKind kind) {
  return kind < OpKind::kCount ? kOperations[static_cast<size_t>(kind)] : "unknown operation";
}

}  // namespace mycoll
