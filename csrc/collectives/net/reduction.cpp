// Collectives that compute, over messages.
#include <algorithm>
#include <memory>
#include <vector>

#include "collectives/net/batch.h"
#include "collectives/net/collectives.h"
#include "kernels/reduce.h"

namespace mycoll {
namespace {

// Up to here everybody sends everything to everybody: one exchange instead of two.
constexpr size_t kSymmetricBytes = 8 * 1024;
// Slices are exchanged in parts, some under way at a time: reducing one overlaps with receiving the
// next, and the memory for the others' inputs stays small, in cache.
constexpr int kWindow = 4;
constexpr size_t kInboxBytes = 2 * 1024 * 1024;
constexpr size_t kLeastPart = 64 * 1024;
constexpr size_t kLargestPart = 512 * 1024;
constexpr size_t kSliceUnit = 64;

size_t roundUp(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// Parts of a reduction travel with the steps from 0, results with these.
constexpr uint64_t kResultStep = uint64_t{1} << (kStepBits - 1);

// The same on all ranks. bytes: of the largest slice; there are steps for so many parts.
size_t partBytesFor(int ranks, size_t bytes) {
  const size_t share = kInboxBytes / kWindow / static_cast<size_t>(std::max(1, ranks - 1));
  const size_t least = roundUp(bytes / (kResultStep - 1) + 1, kLeastPart);
  return std::max(std::clamp(share & ~(kSliceUnit - 1), kLeastPart, kLargestPart), least);
}

// Memory for one part from each other rank, with the pointers as the kernels want them.
struct Inbox {
  Inbox(int ranks, int self, size_t bytesEach)
      : ownRank(self),
        stride(roundUp(bytesEach, kSliceUnit)),
        memory(new char[static_cast<size_t>(ranks - 1) * stride]),
        inputs(ranks) {}
  Span from(int rank, size_t bytes) {
    return {memory.get() + static_cast<size_t>(rank < ownRank ? rank : rank - 1) * stride, bytes};
  }
  const void* const* all(Span own) {
    for (int rank = 0; rank < static_cast<int>(inputs.size()); ++rank) {
      inputs[rank] = rank == ownRank ? own.data : from(rank, 0).data;
    }
    return inputs.data();
  }

  int ownRank;
  size_t stride;
  std::unique_ptr<char[]> memory;  // not zeroed
  std::vector<const void*> inputs;
};

// A part under way: its messages, and where they go.
struct Part {
  std::unique_ptr<Inbox> inbox;
  std::unique_ptr<Batch> batch;
};

Span part(Span whole, uint64_t index, size_t partBytes) {
  const size_t begin = std::min<size_t>(index * partBytes, whole.bytes);
  return {whole.begin() + begin, std::min(partBytes, whole.bytes - begin)};
}

uint64_t partsOf(size_t bytes, size_t partBytes) { return (bytes + partBytes - 1) / partBytes; }

// Reduces what is this rank's: its own input `mine`, the others' by messages, into `out`.
// pieceFor(rank): what this rank has to send to that owner. All pieces for one owner have one size.
// maxBytes: of the largest piece in the group, the same on all ranks.
// onReduced(part of `out`, its index): it holds the result.
template <typename PieceFor, typename OnReduced>
Task reduceToOwner(NetGroup group, const Call& call, const Signature& signature, PieceFor pieceFor,
                   Span out, size_t maxBytes, OnReduced onReduced) {
  Mailbox& mailbox = group.mailbox;
  const int ranks = mailbox.ranks();
  const int self = mailbox.rank();
  const size_t partBytes = partBytesFor(ranks, maxBytes);
  const uint64_t parts = partsOf(maxBytes, partBytes);
  const Span mine = pieceFor(self);
  Part window[kWindow];
  auto begin = [&](uint64_t index) {
    Part& slot = window[index % kWindow];
    const Span expected = part(mine, index, partBytes);
    if (!slot.inbox) slot.inbox = std::make_unique<Inbox>(ranks, self, expected.bytes);
    slot.batch = std::make_unique<Batch>(mailbox, group.sequence, signature);
    for (int step = 1; step < ranks && expected.bytes; ++step) {
      const int from = (self - step + ranks) % ranks;
      slot.batch->receive(from, slot.inbox->from(from, expected.bytes), index);
    }
    for (int step = 1; step < ranks; ++step) {
      const int owner = (self + step) % ranks;
      const Span piece = part(pieceFor(owner), index, partBytes);
      if (piece.bytes) slot.batch->send(owner, piece, index);
    }
  };
  for (uint64_t index = 0; index < std::min<uint64_t>(parts, kWindow); ++index) begin(index);
  for (uint64_t index = 0; index < parts; ++index) {
    Part& slot = window[index % kWindow];
    co_await *slot.batch;
    MYCOLL_CO_RETURN_IF_ERROR(slot.batch->status());
    const Span own = part(mine, index, partBytes);
    const Span result = part(out, index, partBytes);
    if (own.bytes) {
      reduce(call.dtype, call.reduceOp, result.data, slot.inbox->all(own), ranks,
             own.bytes / call.elementBytes, ranks, false);
      onReduced(result, index);
    }
    if (index + kWindow < parts) begin(index + kWindow);
  }
  co_return Status();
}

// Everybody reduces everything.
Task reduceEverywhere(NetGroup group, const Call& call, const Signature& signature) {
  const Span input = call.in[0];
  Status status = co_await reduceToOwner(
      group, call, signature, [&](int) { return input; }, call.out[0], input.bytes,
      [](Span, uint64_t) {});
  co_return status;
}

}  // namespace

Task netReduce(NetGroup group, const Call& call) {
  Mailbox& mailbox = group.mailbox;
  const int ranks = mailbox.ranks();
  const int self = mailbox.rank();
  const Signature& signature = group.signature;
  const Span input = call.in[0];
  const bool isAll = call.kind == OpKind::kAllReduce;
  const bool wantsResult = isAll || self == call.root;
  Span whole;
  if (wantsResult) whole = call.out[0];

  if (input.bytes == 0) {
    // Nothing to compute, but all are held to the same call.
    Status status = co_await netBarrier(group);
    co_return status;
  }
  // Between two ranks this also moves no byte more than slices would, in one exchange, not two.
  if (isAll && (input.bytes <= kSymmetricBytes || ranks == 2)) {
    Status status = co_await reduceEverywhere(group, call, signature);
    co_return status;
  }
  if (input.bytes <= kSymmetricBytes) {
    // To the root alone.
    auto pieceFor = [&](int owner) { return owner == call.root ? input : Span{}; };
    Status status = co_await reduceToOwner(group, call, signature, pieceFor, whole, input.bytes,
                                           [](Span, uint64_t) {});
    co_return status;
  }

  const size_t slice = roundUp((input.bytes + ranks - 1) / ranks, kSliceUnit);
  auto sliceOf = [&](Span whole, int owner) {
    const size_t begin = std::min(whole.bytes, static_cast<size_t>(owner) * slice);
    return Span{whole.begin() + begin, std::min(slice, whole.bytes - begin)};
  };
  // Who gets no result still reduces its slice, into memory of its own.
  std::unique_ptr<char[]> own(wantsResult ? nullptr : new char[slice]);
  const Span result =
      wantsResult ? sliceOf(whole, self) : Span{own.get(), sliceOf(input, self).bytes};

  const size_t partBytes = partBytesFor(ranks, slice);
  Batch results(mailbox, group.sequence, signature);
  for (uint64_t index = 0; index < partsOf(slice, partBytes) && wantsResult; ++index) {
    for (int step = 1; step < ranks; ++step) {
      const int owner = (self - step + ranks) % ranks;
      const Span theirs = part(sliceOf(whole, owner), index, partBytes);
      if (theirs.bytes) results.receive(owner, theirs, kResultStep + index);
    }
  }
  auto pieceFor = [&](int owner) { return sliceOf(input, owner); };
  auto sendResult = [&](Span reduced, uint64_t index) {
    for (int step = 1; step < ranks; ++step) {
      const int to = (self + step) % ranks;
      if (isAll || to == call.root) results.send(to, reduced, kResultStep + index);
    }
  };
  Status reduced =
      co_await reduceToOwner(group, call, signature, pieceFor, result, slice, sendResult);
  MYCOLL_CO_RETURN_IF_ERROR(reduced);
  co_await results;
  co_return results.status();
}

Task netReduceScatter(NetGroup group, const Call& call) {
  const Signature& signature = group.signature;
  size_t largest = 0;
  for (const Span& span : call.in) largest = std::max(largest, span.bytes);
  // Nothing to exchange but the proof that all were called for the same.
  if (largest == 0) co_return co_await netBarrier(group);
  auto pieceFor = [&](int owner) { return call.in[owner]; };
  Status status = co_await reduceToOwner(group, call, signature, pieceFor, call.out[0], largest,
                                         [](Span, uint64_t) {});
  co_return status;
}

}  // namespace mycoll
