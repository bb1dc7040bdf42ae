// Collectives that only move data, over messages.
#include <algorithm>
#include <cstring>

#include "collectives/net/batch.h"
#include "collectives/net/collectives.h"
#include "kernels/copy.h"

namespace mycoll {
namespace {

// Up to here a tree of whole messages is fastest; beyond, the root's link would carry them all.
constexpr size_t kTreeBytes = 64 * 1024;

void copySelf(Span to, Span from) {
  if (to.bytes && to.data != from.data) copy(to.data, from.data, to.bytes);
}

}  // namespace

Task netCollective(NetGroup group, const Call& call) {
  switch (call.kind) {
    case OpKind::kBroadcast: return netBroadcast(group, call);
    case OpKind::kAllReduce:
    case OpKind::kReduce: return netReduce(group, call);
    case OpKind::kAllGather: return netAllGather(group, call);
    case OpKind::kGather: return netGather(group, call);
    case OpKind::kScatter: return netScatter(group, call);
    case OpKind::kReduceScatter: return netReduceScatter(group, call);
    case OpKind::kAllToAll: return netAllToAll(group, call);
    case OpKind::kMonitoredBarrier: return netMonitoredBarrier(group);
    default: return netBarrier(group);
  }
}

// Dissemination: in round k every rank hears from the one 2^k before it, and so, in the end, of
// all.
Task netBarrier(NetGroup group) {
  Mailbox& mailbox = group.mailbox;
  const int ranks = mailbox.ranks();
  const Signature& signature = group.signature;
  uint64_t step = 0;
  for (int distance = 1; distance < ranks; distance *= 2, ++step) {
    Batch batch(mailbox, group.sequence, signature);
    batch.receive((mailbox.rank() - distance + ranks) % ranks, {}, step);
    batch.send((mailbox.rank() + distance) % ranks, {}, step);
    co_await batch;
    MYCOLL_CO_RETURN_IF_ERROR(batch.status());
  }
  co_return Status();
}

Task netMonitoredBarrier(NetGroup group) {
  Mailbox& mailbox = group.mailbox;
  const Signature& signature = group.signature;
  const bool isRoot = mailbox.rank() == 0;
  Batch arrivals(mailbox, group.sequence, signature);
  Batch releases(mailbox, group.sequence, signature);
  for (int rank = 1; rank < mailbox.ranks() && isRoot; ++rank) arrivals.receive(rank, {});
  if (!isRoot) arrivals.send(0, {});
  co_await arrivals;
  MYCOLL_CO_RETURN_IF_ERROR(arrivals.status());
  for (int rank = 1; rank < mailbox.ranks() && isRoot; ++rank) releases.send(rank, {}, 1);
  if (!isRoot) releases.receive(0, {}, 1);
  co_await releases;
  co_return releases.status();
}

// Small: a binomial tree. Large: the root deals out slices, and everybody passes its own on.
Task netBroadcast(NetGroup group, const Call& call) {
  Mailbox& mailbox = group.mailbox;
  const int ranks = mailbox.ranks();
  const int self = mailbox.rank();
  const Signature& signature = group.signature;
  const bool isRoot = self == call.root;
  const Span data = isRoot && !call.in.empty() ? call.in[0] : call.out[0];
  const int position = (self - call.root + ranks) % ranks;

  if (data.bytes <= kTreeBytes || ranks == 2) {
    int distance = 1;
    while (distance < ranks && !(position & distance)) distance *= 2;
    if (!isRoot) {
      Batch fromParent(mailbox, group.sequence, signature);
      fromParent.receive((position - distance + call.root) % ranks, data);
      co_await fromParent;
      MYCOLL_CO_RETURN_IF_ERROR(fromParent.status());
    }
    Batch toChildren(mailbox, group.sequence, signature);
    for (distance /= 2; distance > 0; distance /= 2) {
      if (position + distance < ranks) {
        toChildren.send((position + distance + call.root) % ranks, data);
      }
    }
    co_await toChildren;
    co_return toChildren.status();
  }

  // Slices are numbered by position; the root (position 0) has all and owns none.
  const size_t slice = (data.bytes + ranks - 2) / (ranks - 1);
  auto sliceOf = [&](int owner) {
    const size_t begin = std::min(data.bytes, static_cast<size_t>(owner - 1) * slice);
    return Span{data.begin() + begin, std::min(slice, data.bytes - begin)};
  };
  auto rankAt = [&](int at) { return (at + call.root) % ranks; };
  Batch batch(mailbox, group.sequence, signature);
  if (isRoot) {
    for (int at = 1; at < ranks; ++at) batch.send(rankAt(at), sliceOf(at));
    co_await batch;
    co_return batch.status();
  }
  Batch mine(mailbox, group.sequence, signature);
  mine.receive(call.root, sliceOf(position));
  for (int at = 1; at < ranks; ++at) {
    if (at != position) batch.receive(rankAt(at), sliceOf(at));
  }
  co_await mine;
  MYCOLL_CO_RETURN_IF_ERROR(mine.status());
  for (int step = 1; step < ranks; ++step) {
    const int at = (position + step) % ranks;
    if (at != 0 && at != position) batch.send(rankAt(at), sliceOf(position));
  }
  co_await batch;
  co_return batch.status();
}

Task netAllGather(NetGroup group, const Call& call) {
  Mailbox& mailbox = group.mailbox;
  const int ranks = mailbox.ranks();
  const int self = mailbox.rank();
  const Signature& signature = group.signature;
  Batch batch(mailbox, group.sequence, signature);
  for (int step = 1; step < ranks; ++step) {
    const int from = (self - step + ranks) % ranks;
    batch.receive(from, call.out[from]);
  }
  for (int step = 1; step < ranks; ++step) batch.send((self + step) % ranks, call.in[0]);
  copySelf(call.out[self], call.in[0]);
  co_await batch;
  co_return batch.status();
}

Task netGather(NetGroup group, const Call& call) {
  Mailbox& mailbox = group.mailbox;
  const Signature& signature = group.signature;
  Batch batch(mailbox, group.sequence, signature);
  if (mailbox.rank() == call.root) {
    for (int rank = 0; rank < mailbox.ranks(); ++rank) {
      if (rank != call.root) batch.receive(rank, call.out[rank]);
    }
    copySelf(call.out[call.root], call.in[0]);
  } else {
    batch.send(call.root, call.in[0]);
  }
  co_await batch;
  co_return batch.status();
}

Task netScatter(NetGroup group, const Call& call) {
  Mailbox& mailbox = group.mailbox;
  const Signature& signature = group.signature;
  Batch batch(mailbox, group.sequence, signature);
  if (mailbox.rank() == call.root) {
    for (int rank = 0; rank < mailbox.ranks(); ++rank) {
      if (rank != call.root) batch.send(rank, call.in[rank]);
    }
    copySelf(call.out[0], call.in[call.root]);
  } else {
    batch.receive(call.root, call.out[0]);
  }
  co_await batch;
  co_return batch.status();
}

Task netAllToAll(NetGroup group, const Call& call) {
  Mailbox& mailbox = group.mailbox;
  const int ranks = mailbox.ranks();
  const int self = mailbox.rank();
  const Signature& signature = group.signature;
  Batch batch(mailbox, group.sequence, signature);
  for (int step = 1; step < ranks; ++step) {
    const int from = (self - step + ranks) % ranks;
    batch.receive(from, call.out[from]);
  }
  for (int step = 1; step < ranks; ++step) {
    const int to = (self + step) % ranks;
    batch.send(to, call.in[to]);
  }
  copySelf(call.out[self], call.in[self]);
  co_await batch;
  co_return batch.status();
}

}  // namespace mycoll
