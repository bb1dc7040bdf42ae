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
  switch (op) {
    case ReduceOp::kSum: return "SUM";
    case ReduceOp::kProduct: return "PRODUCT";
    case ReduceOp::kMin: return "MIN";
    case ReduceOp::kMax: return "MAX";
    case ReduceOp::kAvg: return "AVG";
    case ReduceOp::kBAnd: return "BAND";
    case ReduceOp::kBOr: return "BOR";
    case ReduceOp::kBXor: return "BXOR";
    case ReduceOp::kCount: break;
  }
  return "unknown reduce op";
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
  switch (kind) {
    case OpKind::kBarrier: return "barrier";
    case OpKind::kBroadcast: return "broadcast";
    case OpKind::kAllReduce: return "all_reduce";
    case OpKind::kReduce: return "reduce";
    case OpKind::kAllGather: return "all_gather";
    case OpKind::kGather: return "gather";
    case OpKind::kScatter: return "scatter";
    case OpKind::kReduceScatter: return "reduce_scatter";
    case OpKind::kAllToAll: return "all_to_all";
    case OpKind::kMonitoredBarrier: return "monitored_barrier";
    case OpKind::kSend: return "send";
    case OpKind::kRecv: return "recv";
    case OpKind::kPut: return "put";
    case OpKind::kSignal: return "signal";
    case OpKind::kWaitSignal: return "wait_signal";
    case OpKind::kWindow: return "window";
    case OpKind::kCount: break;
  }
  return "unknown operation";
}

}  // namespace mycoll
