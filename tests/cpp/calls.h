// Calls whose data is known: int32 elements that depend on their rank and place.
#pragma once

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/communicator.h"
#include "test.h"

namespace test {

using namespace mycoll;

inline int32_t element(int rank, size_t index) {
  return static_cast<int32_t>((static_cast<size_t>(rank) + 1) * 1000003 + index * 7);
}

inline std::vector<int32_t> input(int rank, size_t count, size_t from = 0) {
  std::vector<int32_t> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = element(rank, from + i);
  return values;
}

inline int32_t summed(int ranks, size_t index) {
  uint32_t total = 0;
  for (int rank = 0; rank < ranks; ++rank) total += static_cast<uint32_t>(element(rank, index));
  return static_cast<int32_t>(total);
}

inline Span span(std::vector<int32_t>& values) { return {values.data(), values.size() * 4}; }
inline Span span(std::vector<int32_t>& values, size_t from, size_t count) {
  return {values.data() + from, count * 4};
}

inline Spans spans(size_t count, const Span& each) {
  Spans all;
  for (size_t i = 0; i < count; ++i) all.push_back(each);
  return all;
}

inline Call call(OpKind kind) {
  Call result;
  result.kind = kind;
  result.dtype = DType::kInt32;
  result.elementBytes = 4;
  result.reduceOp = ReduceOp::kSum;
  return result;
}

inline Status run(Communicator& group, Call call, bool isAsync = false) {
  OpPtr op = group.submit(std::move(call), nullptr, !isAsync);
  return group.wait(op, Deadline::never());
}

inline Status barrier(Communicator& group) { return run(group, call(OpKind::kBarrier)); }

inline void expectSums(const std::vector<int32_t>& values, int ranks, size_t from = 0) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] != summed(ranks, from + i)) {
      EXPECT_EQ(values[i], summed(ranks, from + i));
      return;
    }
  }
}

inline void expectInput(std::span<const int32_t> values, int rank, size_t from = 0) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] != element(rank, from + i)) {
      EXPECT_EQ(values[i], element(rank, from + i));
      return;
    }
  }
}

}  // namespace test
