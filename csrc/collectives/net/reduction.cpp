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
// Slices are exchanged in parts of at most this size, two under way at a time, so that memory for
// the others' inputs stays small and reducing one part overlaps with receiving the next.
constexpr size_t kPartBytes = 1024 * 1024;
constexpr size_t kSliceUnit = 64;

size_t roundUp(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// Memory for one part from each rank, with the pointers as the kernels want them.
struct Inbox {
  Inbox(int ranks, size_t bytesEach)
      : stride(roundUp(bytesEach, kSliceUnit)),
        memory(new char[static_cast<size_t>(ranks) * stride]),
        inputs(ranks) {}
  Span from(int rank, size_t bytes) {
    return {memory.get() + static_cast<size_t>(rank) * stride, bytes};
  }

  size_t stride;
  std::unique_ptr<char[]> memory;  // not zeroed
  std::vector<const void*> inputs;
};

Span part(Span whole, uint64_t index) {
  const size_t begin = std::min<size_t>(index * kPartBytes, whole.bytes);
  return {whole.begin() + begin, std::min(kPartBytes, whole.bytes - begin)};
}

// Reduces what is this rank's: its own input `mine`, the others' by messages, into `out`.
// pieceFor(rank): what this rank has to send to that owner. All pieces for one owner have one size.
// maxBytes: of the largest piece in the group, the same on all ranks.
template <typename PieceFor>
Task reduceToOwner(NetGroup group, const Call& call, const Signature& signature, PieceFor pieceFor,
                   Span out, size_t maxBytes) {
  Mailbox& mailbox = group.mailbox;
  const int ranks = mailbox.ranks();
  const int self = mailbox.rank();
  const uint64_t parts = (maxBytes + kPartBytes - 1) / kPartBytes;
  const Span mine = pieceFor(self);
  Inbox inboxes[2] = {Inbox(ranks, std::min(mine.bytes, kPartBytes)),
                      Inbox(ranks, parts > 1 ? std::min(mine.bytes, kPartBytes) : 0)};
  std::unique_ptr<Batch> batches[2];
  auto begin = [&](uint64_t index) {
    batches[index % 2] = std::make_unique<Batch>(mailbox, group.sequence, signature);
    Batch& batch = *batches[index % 2];
    const Span expected = part(mine, index);
    for (int step = 1; step < ranks && expected.bytes; ++step) {
      const int from = (self - step + ranks) % ranks;
      batch.receive(from, inboxes[index % 2].from(from, expected.bytes), index);
    }
    for (int step = 1; step < ranks; ++step) {
      const int owner = (self + step) % ranks;
      const Span piece = part(pieceFor(owner), index);
      if (piece.bytes) batch.send(owner, piece, index);
    }
  };
  if (parts > 0) begin(0);
  for (uint64_t index = 0; index < parts; ++index) {
    if (index + 1 < parts) begin(index + 1);
    Batch& batch = *batches[index % 2];
    co_await batch;
    MYCOLL_CO_RETURN_IF_ERROR(batch.status());
    const Span own = part(mine, index);
    if (own.bytes == 0) continue;
    Inbox& inbox = inboxes[index % 2];
    for (int rank = 0; rank < ranks; ++rank) {
      inbox.inputs[rank] = rank == self ? own.data : inbox.from(rank, own.bytes).data;
    }
    reduce(call.dtype, call.reduceOp, part(out, index).data, inbox.inputs.data(), ranks,
           own.bytes / call.elementBytes, ranks, false);
  }
  co_return Status();
}

// Parts of a reduction travel with the steps from 0, whole results with these.
constexpr uint64_t kResultStep = uint64_t{1} << (Mailbox::kStepBits - 1);

}  // namespace

Task netReduce(NetGroup group, const Call& call) {
  Mailbox& mailbox = group.mailbox;
  const int ranks = mailbox.ranks();
  const int self = mailbox.rank();
  const Signature signature = call.signature();
  const Span input = call.in[0];
  const bool isAll = call.kind == OpKind::kAllReduce;
  const bool wantsResult = isAll || self == call.root;

  if (input.bytes <= kSymmetricBytes) {
    Inbox inbox(ranks, wantsResult ? input.bytes : 0);
    Batch batch(mailbox, group.sequence, signature);
    for (int step = 1; step < ranks; ++step) {
      const int from = (self - step + ranks) % ranks;
      if (wantsResult) batch.receive(from, inbox.from(from, input.bytes));
    }
    for (int step = 1; step < ranks; ++step) {
      const int to = (self + step) % ranks;
      if (isAll || to == call.root) batch.send(to, input);
    }
    co_await batch;
    MYCOLL_CO_RETURN_IF_ERROR(batch.status());
    if (!wantsResult || input.bytes == 0) co_return Status();
    for (int rank = 0; rank < ranks; ++rank) {
      inbox.inputs[rank] = rank == self ? input.data : inbox.from(rank, input.bytes).data;
    }
    reduce(call.dtype, call.reduceOp, call.out[0].data, inbox.inputs.data(), ranks,
           input.bytes / call.elementBytes, ranks, false);
    co_return Status();
  }

  const size_t slice = roundUp((input.bytes + ranks - 1) / ranks, kSliceUnit);
  auto sliceOf = [&](Span whole, int owner) {
    const size_t begin = std::min(whole.bytes, static_cast<size_t>(owner) * slice);
    return Span{whole.begin() + begin, std::min(slice, whole.bytes - begin)};
  };
  // Who gets no result still reduces its slice, into memory of its own.
  const Span whole = wantsResult ? call.out[0] : Span{};
  std::unique_ptr<char[]> own(wantsResult ? nullptr : new char[slice]);
  const Span result =
      wantsResult ? sliceOf(whole, self) : Span{own.get(), sliceOf(input, self).bytes};
  auto pieceFor = [&](int owner) { return sliceOf(input, owner); };
  Status reduced = co_await reduceToOwner(group, call, signature, pieceFor, result, slice);
  MYCOLL_CO_RETURN_IF_ERROR(reduced);

  Batch batch(mailbox, group.sequence, signature);
  for (int step = 1; step < ranks && wantsResult; ++step) {
    const int owner = (self - step + ranks) % ranks;
    const Span theirs = sliceOf(whole, owner);
    if (theirs.bytes) batch.receive(owner, theirs, kResultStep);
  }
  for (int step = 1; step < ranks && result.bytes; ++step) {
    const int to = (self + step) % ranks;
    if (isAll || to == call.root) batch.send(to, result, kResultStep);
  }
  co_await batch;
  co_return batch.status();
}

Task netReduceScatter(NetGroup group, const Call& call) {
  const Signature signature = call.signature();
  size_t largest = 0;
  for (const Span& span : call.in) largest = std::max(largest, span.bytes);
  auto pieceFor = [&](int owner) { return call.in[owner]; };
  Status status = co_await reduceToOwner(group, call, signature, pieceFor, call.out[0], largest);
  co_return status;
}

}  // namespace mycoll
