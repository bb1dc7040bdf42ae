// Call describes a collective; Signature is the part of it that ranks compare to verify that they
// make the same call. Plain values: no threads, no ownership.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "base/types.h"

namespace mycoll {

// Compared between ranks before any payload is used; travels in the first frame of a message and
// in the arrival line of shared memory. Every field must be equal on all ranks of a collective.
struct Signature {
  OpKind kind = OpKind::kBarrier;
  DType dtype = DType::kOpaque;
  uint8_t opaqueType = 0;  // distinguishes the types that are only moved; 1: a sum of scaled inputs
  ReduceOp reduceOp = ReduceOp::kCount;  // kCount: none
  int32_t root = -1;
  uint64_t bytes = 0;   // of the part that all ranks know alike; 0 where sizes differ by rank
  uint64_t layout = 0;  // hash of per-rank sizes where all ranks know them all; else 0

  bool operator==(const Signature& other) const = default;
  // "all_reduce SUM float32 numel=1000", "broadcast float32 numel=8 root=2"
  std::string describe() const;
};
static_assert(sizeof(Signature) == 24);

uint64_t totalBytes(const Spans& spans);

// The error text for two ranks that made different calls. me, other: the ranks as messages name
// them.
std::string mismatchText(const std::string& group, const std::string& where, const std::string& me,
                         const Signature& mine, const std::string& other, const Signature& theirs);

// A collective on contiguous memory. `in` and `out` hold one span or one for each rank:
//   kind              in                          out
//   kBarrier          -                           -
//   kBroadcast        -                           [1] (root: read; others: written)
//   kAllReduce        [1]                         [1], the same memory or disjoint
//   kReduce           [1]                         root: [1], the same memory or disjoint; others: -
//   kAllGather        [1]                         [ranks]; out[rank] may be in[0] itself
//   kGather           [1]                         root: [ranks]; others: -
//   kScatter          root: [ranks]; others: -    [1]
//   kReduceScatter    [ranks]                     [1]; may be in[rank] itself
//   kAllToAll         [ranks]                     [ranks], disjoint from in
//   kMonitoredBarrier -                           -
// Sizes may differ by rank where there are [ranks] spans. For kAllGather and kReduceScatter every
// rank passes the same list of sizes; for kAllToAll, kGather and kScatter the two sides of each
// pair agree. All spans are whole elements.
struct Call {
  OpKind kind = OpKind::kBarrier;
  DType dtype = DType::kOpaque;
  uint8_t opaqueType = 0;  // which opaque type: any number below 256, the same on all ranks
  size_t elementBytes = 1;
  ReduceOp reduceOp = ReduceOp::kSum;
  bool isScaled = false;  // kSum of inputs that were multiplied by a factor: torch's PREMUL_SUM
  int root = -1;
  bool waitAllRanks = false;  // kMonitoredBarrier: name all missing ranks, not only the first
  Spans in;
  Spans out;

  Signature signature() const;
  // Whether `in` and `out` hold as many spans as the table says. For assertions.
  bool isFor(int rank, int ranks) const;
};

}  // namespace mycoll
