// The expected results of reduce(), computed one element at a time as the standards define them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "base/types.h"

namespace mycoll::reference {

// A small floating-point format: decodes with ldexp, and encodes by a search.
class Format {
 public:
  Format(int bits, int mantissaBits, bool hasInfinity, bool saturates)
      : bits_(bits), mantissaBits_(mantissaBits), hasInfinity_(hasInfinity), saturates_(saturates) {
    const uint32_t signBit = 1u << (bits - 1);
    const int exponentBits = bits - 1 - mantissaBits;
    const int bias = (1 << (exponentBits - 1)) - 1;
    // In a format with infinities, codes with the highest exponent are no numbers. In one without,
    // only the last code is none.
    const uint32_t end = hasInfinity ? ((1u << exponentBits) - 1) << mantissaBits : signBit - 1;
    for (uint32_t code = 0; code < end; ++code) {
      const int exponent = static_cast<int>(code >> mantissaBits);
      const int mantissa = static_cast<int>(code & ((1u << mantissaBits) - 1));
      const int implicit = exponent == 0 ? 0 : 1 << mantissaBits;
      magnitudes_.push_back(
          std::ldexp(mantissa + implicit, std::max(exponent, 1) - bias - mantissaBits));
    }
  }

  float decode(uint32_t code) const {
    const uint32_t signBit = 1u << (bits_ - 1);
    const uint32_t magnitude = code & (signBit - 1);
    double value = std::numeric_limits<double>::quiet_NaN();
    if (magnitude < magnitudes_.size()) {
      value = magnitudes_[magnitude];
    } else if (hasInfinity_ && magnitude == magnitudes_.size()) {
      value = std::numeric_limits<double>::infinity();
    }
    return static_cast<float>(code & signBit ? -value : value);
  }

  uint32_t encode(float value) const {
    const uint32_t signBit = 1u << (bits_ - 1);
    const uint32_t end = static_cast<uint32_t>(magnitudes_.size());
    const uint32_t sign = std::signbit(value) ? signBit : 0;
    if (std::isnan(value)) return sign | (signBit - 1);
    const double magnitude = std::fabs(static_cast<double>(value));
    // The number after the largest if the format had one. Overflow begins halfway to it.
    const double next = 2 * magnitudes_[end - 1] - magnitudes_[end - 2];
    const auto above = std::lower_bound(magnitudes_.begin(), magnitudes_.end(), magnitude);
    uint32_t code = static_cast<uint32_t>(above - magnitudes_.begin());
    if (code < end && magnitudes_[code] == magnitude) return sign | code;
    // The value is between the numbers of code - 1 and code.
    const double high = code < end ? magnitudes_[code] : next;
    const double low = magnitudes_[code - 1];
    if (magnitude - low < high - magnitude) {
      --code;
    } else if (magnitude - low == high - magnitude && code % 2 == 1) {
      --code;  // rounds to even
    }
    if (code >= end) code = hasInfinity_ ? end : saturates_ ? end - 1 : signBit - 1;
    return sign | code;
  }

  bool isNan(uint32_t code) const { return std::isnan(decode(code)); }

 private:
  int bits_;
  int mantissaBits_;
  bool hasInfinity_;
  bool saturates_;
  std::vector<double> magnitudes_;  // of codes 0, 1, ..., in ascending order
};

inline const Format& formatOf(DType dtype) {
  static const Format kHalf(16, 10, true, false);
  static const Format kBFloat(16, 7, true, false);
  static const Format kE4M3(8, 3, false, true);
  static const Format kE5M2(8, 2, true, false);
  switch (dtype) {
    case DType::kFloat16: return kHalf;
    case DType::kBFloat16: return kBFloat;
    case DType::kFloat8E4M3: return kE4M3;
    default: return kE5M2;
  }
}

inline bool isFormat(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat8E4M3 ||
         dtype == DType::kFloat8E5M2;
}

template <typename T>
T at(const char* data, size_t index) {
  T value;
  std::memcpy(&value, data + index * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
void put(char* data, size_t index, T value) {
  std::memcpy(data + index * sizeof(T), &value, sizeof(T));
}

template <typename T>
T combine(ReduceOp op, T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    switch (op) {
      case ReduceOp::kProduct: return a * b;
      case ReduceOp::kMin: return std::isnan(b) || b < a ? b : a;
      case ReduceOp::kMax: return std::isnan(b) || b > a ? b : a;
      default: return a + b;
    }
  } else {
    using U = std::make_unsigned_t<T>;
    switch (op) {
      case ReduceOp::kProduct:
        return static_cast<T>(static_cast<uint64_t>(static_cast<U>(a)) * static_cast<U>(b));
      case ReduceOp::kMin: return std::min(a, b);
      case ReduceOp::kMax: return std::max(a, b);
      case ReduceOp::kBAnd: return static_cast<T>(a & b);
      case ReduceOp::kBOr: return static_cast<T>(a | b);
      case ReduceOp::kBXor: return static_cast<T>(a ^ b);
      default: return static_cast<T>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
    }
  }
}

using Inputs = std::vector<const char*>;

// MYCOLL_SUM_BLOCK.
inline size_t block = 1;

// Combines inputs lo to hi in the documented order: splits them at the largest power of two of
// blocks below their number, and a block before its last input.
template <typename Leaf, typename Join>
auto tree(size_t lo, size_t hi, const Leaf& leaf, const Join& join) -> decltype(leaf(lo)) {
  if (hi - lo == 1) return leaf(lo);
  size_t below = block;
  while (2 * below < hi - lo) below *= 2;
  if (hi - lo <= block) below = hi - lo - 1;
  const auto left = tree(lo, lo + below, leaf, join);
  return join(left, tree(lo + below, hi, leaf, join));
}

template <typename T>
void referenceElement(ReduceOp op, const Inputs& in, size_t i, int divisor, char* out) {
  T value = tree(
      0, in.size(), [&](size_t k) { return at<T>(in[k], i); },
      [&](T a, T b) { return combine(op, a, b); });
  if (op == ReduceOp::kAvg) value = static_cast<T>(value / static_cast<T>(divisor));
  put(out, i, value);
}

template <typename T>
void referenceComplex(ReduceOp op, const Inputs& in, size_t i, int divisor, char* out) {
  struct Number {
    T re, im;
  };
  auto leaf = [&](size_t k) { return Number{at<T>(in[k], 2 * i), at<T>(in[k], 2 * i + 1)}; };
  auto join = [&](Number x, Number y) {
    if (op != ReduceOp::kProduct) return Number{x.re + y.re, x.im + y.im};
    // volatile prevents fused multiply-adds, whatever this file is compiled for.
    const volatile T a = x.re * y.re, b = x.im * y.im, c = x.re * y.im, d = x.im * y.re;
    return Number{a - b, c + d};
  };
  const auto [re, im] = tree(0, in.size(), leaf, join);
  put(out, 2 * i, op == ReduceOp::kAvg ? re / static_cast<T>(divisor) : re);
  put(out, 2 * i + 1, op == ReduceOp::kAvg ? im / static_cast<T>(divisor) : im);
}

inline uint32_t codeAt(DType dtype, const char* data, size_t i) {
  return elementSize(dtype) == 2 ? at<uint16_t>(data, i) : at<uint8_t>(data, i);
}

inline void referenceFormat(DType dtype, ReduceOp op, const Inputs& in, size_t i, int divisor,
                            char* out) {
  const Format& format = formatOf(dtype);
  float value = tree(
      0, in.size(), [&](size_t k) { return format.decode(codeAt(dtype, in[k], i)); },
      [&](float a, float b) { return combine(op, a, b); });
  if (op == ReduceOp::kAvg) value /= static_cast<float>(divisor);
  const uint32_t code = format.encode(value);
  if (elementSize(dtype) == 2) {
    put(out, i, static_cast<uint16_t>(code));
  } else {
    put(out, i, static_cast<uint8_t>(code));
  }
}

inline void referenceBool(ReduceOp op, const Inputs& in, size_t i, char* out) {
  bool value = in[0][i] != 0;
  for (size_t k = 1; k < in.size(); ++k) {
    const bool other = in[k][i] != 0;
    switch (op) {
      case ReduceOp::kProduct:
      case ReduceOp::kMin:
      case ReduceOp::kBAnd: value = value && other; break;
      case ReduceOp::kBXor: value = value != other; break;
      default: value = value || other;
    }
  }
  out[i] = value ? 1 : 0;
}

// Writes element i of the result to out.
inline void reduceElement(DType dtype, ReduceOp op, const Inputs& in, size_t i, int divisor,
                          char* out) {
  switch (dtype) {
    case DType::kFloat32: return referenceElement<float>(op, in, i, divisor, out);
    case DType::kFloat64: return referenceElement<double>(op, in, i, divisor, out);
    case DType::kInt8: return referenceElement<int8_t>(op, in, i, divisor, out);
    case DType::kUInt8: return referenceElement<uint8_t>(op, in, i, divisor, out);
    case DType::kInt16: return referenceElement<int16_t>(op, in, i, divisor, out);
    case DType::kUInt16: return referenceElement<uint16_t>(op, in, i, divisor, out);
    case DType::kInt32: return referenceElement<int32_t>(op, in, i, divisor, out);
    case DType::kUInt32: return referenceElement<uint32_t>(op, in, i, divisor, out);
    case DType::kInt64: return referenceElement<int64_t>(op, in, i, divisor, out);
    case DType::kUInt64: return referenceElement<uint64_t>(op, in, i, divisor, out);
    case DType::kComplex64: return referenceComplex<float>(op, in, i, divisor, out);
    case DType::kComplex128: return referenceComplex<double>(op, in, i, divisor, out);
    case DType::kBool: return referenceBool(op, in, i, out);
    default: return referenceFormat(dtype, op, in, i, divisor, out);
  }
}

inline bool isNanAt(DType dtype, const char* data, size_t lane) {
  if (dtype == DType::kFloat32 || dtype == DType::kComplex64) {
    return std::isnan(at<float>(data, lane));
  }
  if (dtype == DType::kFloat64 || dtype == DType::kComplex128) {
    return std::isnan(at<double>(data, lane));
  }
  return isFormat(dtype) && formatOf(dtype).isNan(codeAt(dtype, data, lane));
}

// Equal bits, except that all NaNs are equal.
inline bool same(DType dtype, const char* got, const char* wanted, size_t count) {
  const size_t bytes = count * elementSize(dtype);
  if (bytes == 0 || std::memcmp(got, wanted, bytes) == 0) return true;
  const bool isComplex = dtype == DType::kComplex64 || dtype == DType::kComplex128;
  const size_t laneBytes = elementSize(dtype) / (isComplex ? 2 : 1);
  for (size_t lane = 0; lane < bytes / laneBytes; ++lane) {
    const size_t offset = lane * laneBytes;
    if (std::memcmp(got + offset, wanted + offset, laneBytes) == 0) continue;
    if (!isNanAt(dtype, got, lane) || !isNanAt(dtype, wanted, lane)) return false;
  }
  return true;
}

}  // namespace mycoll::reference
