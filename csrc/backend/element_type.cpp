#include "backend/element_type.h"

namespace mycoll {

DType toDType(at::ScalarType type) {
  switch (type) {
    case at::ScalarType::Float: return DType::kFloat32;
    case at::ScalarType::Double: return DType::kFloat64;
    case at::ScalarType::Half: return DType::kFloat16;
    case at::ScalarType::BFloat16: return DType::kBFloat16;
    case at::ScalarType::Float8_e4m3fn: return DType::kFloat8E4M3;
    case at::ScalarType::Float8_e5m2: return DType::kFloat8E5M2;
    case at::ScalarType::Char: return DType::kInt8;
    case at::ScalarType::Byte: return DType::kUInt8;
    case at::ScalarType::Short: return DType::kInt16;
    case at::ScalarType::UInt16: return DType::kUInt16;
    case at::ScalarType::Int: return DType::kInt32;
    case at::ScalarType::UInt32: return DType::kUInt32;
    case at::ScalarType::Long: return DType::kInt64;
    case at::ScalarType::UInt64: return DType::kUInt64;
    case at::ScalarType::Bool: return DType::kBool;
    case at::ScalarType::ComplexFloat: return DType::kComplex64;
    case at::ScalarType::ComplexDouble: return DType::kComplex128;
    default: return DType::kOpaque;
  }
}

namespace {

struct NameAndOp {
  const char* name;
  ReduceOp op;
};

NameAndOp nameAndOp(c10d::ReduceOp::RedOpType op) {
  switch (op) {
    case c10d::ReduceOp::SUM: return {"SUM", ReduceOp::kSum};
    case c10d::ReduceOp::AVG: return {"AVG", ReduceOp::kAvg};
    case c10d::ReduceOp::PRODUCT: return {"PRODUCT", ReduceOp::kProduct};
    case c10d::ReduceOp::MIN: return {"MIN", ReduceOp::kMin};
    case c10d::ReduceOp::MAX: return {"MAX", ReduceOp::kMax};
    case c10d::ReduceOp::BAND: return {"BAND", ReduceOp::kBAnd};
    case c10d::ReduceOp::BOR: return {"BOR", ReduceOp::kBOr};
    case c10d::ReduceOp::BXOR: return {"BXOR", ReduceOp::kBXor};
    case c10d::ReduceOp::PREMUL_SUM: return {"PREMUL_SUM", ReduceOp::kCount};
    default: return {"UNUSED", ReduceOp::kCount};
  }
}

}  // namespace

Call makeCall(OpKind kind, const at::Tensor& tensor) {
  const at::ScalarType type = tensor.scalar_type();
  Call call;
  call.kind = kind;
  call.dtype = toDType(type);
  call.elementBytes = tensor.itemsize();
  if (call.dtype == DType::kOpaque) call.opaqueType = static_cast<uint8_t>(type);
  return call;
}

ReduceOp toReduceOp(c10d::ReduceOp::RedOpType op) { return nameAndOp(op).op; }

const char* name(c10d::ReduceOp::RedOpType op) { return nameAndOp(op).name; }

}  // namespace mycoll
