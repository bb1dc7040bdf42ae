#include "device/host_collective.h"

#include <algorithm>
#include <utility>

#include "device/copies.h"

namespace mycoll {
namespace {

constexpr size_t kChunkAlignment = 4096;

// Only the two ranks of a pair know these sizes, so no rank knows the largest one.
bool sizesDifferByPair(OpKind kind) {
  return kind == OpKind::kAllToAll || kind == OpKind::kGather || kind == OpKind::kScatter;
}

uint64_t longestOf(const Call& call) {
  uint64_t longest = 0;
  for (const Span& span : call.in) longest = std::max<uint64_t>(longest, span.bytes);
  for (const Span& span : call.out) longest = std::max<uint64_t>(longest, span.bytes);
  return longest;
}

// The part of a span that a chunk covers.
Span partOf(const Span& span, size_t chunkBytes, uint64_t chunk) {
  const size_t from = std::min<size_t>(span.bytes, chunk * chunkBytes);
  return {span.begin() + from, std::min(chunkBytes, span.bytes - from)};
}

void grow(at::Tensor& buffer, size_t bytes) {
  if (!buffer.defined() || buffer.nbytes() < bytes) buffer = emptyPinned(bytes);
}

at::Tensor slice(const at::Tensor& buffer, size_t offset, size_t bytes) {
  return buffer.narrow(0, static_cast<int64_t>(offset), static_cast<int64_t>(bytes));
}

}  // namespace

HostCollective::HostCollective(std::shared_ptr<HostStaging> staging, DeviceOperationPtr operation,
                               EventPtr ready, int rank, int ranks, std::vector<Call> calls,
                               CopyBacks copyBacks)
    : staging_(std::move(staging)),
      operation_(std::move(operation)),
      ready_(std::move(ready)),
      rank_(rank),
      ranks_(ranks),
      calls_(std::move(calls)),
      copyBacks_(std::move(copyBacks)),
      inward_(sideStream(operation_->device())),
      outward_(sideStream(operation_->device())) {}

Task HostCollective::run(std::shared_ptr<HostCollective> self, CollectiveRunner& runner) {
  MYCOLL_CO_RETURN_IF_ERROR(self->begin());
  for (const Call& call : self->calls_) {
    MYCOLL_CO_RETURN_IF_ERROR(co_await self->runCall(call, runner));
  }
  co_return self->end();
}

Task HostCollective::runCall(const Call& call, CollectiveRunner& runner) {
  uint64_t longest = longestOf(call);
  if (sizesDifferByPair(call.kind)) {
    uint64_t mine = longest;
    Call agree;
    agree.kind = OpKind::kAllReduce;
    agree.dtype = DType::kUInt64;
    agree.elementBytes = sizeof(uint64_t);
    agree.reduceOp = ReduceOp::kMax;
    agree.in = {{&mine, sizeof(mine)}};
    agree.out = {{&longest, sizeof(longest)}};
    MYCOLL_CO_RETURN_IF_ERROR(co_await runner.run(std::move(agree)));
  }
  const Sides sides = sidesOf(call);
  const size_t chunkBytes = chunkBytesOf(call, longest);
  const uint64_t chunks = std::max<uint64_t>(1, (longest + chunkBytes - 1) / chunkBytes);
  MYCOLL_CO_RETURN_IF_ERROR(copyIn(sides, chunkBytes, 0));
  for (uint64_t chunk = 0; chunk < chunks; ++chunk) {
    if (chunk + 1 < chunks) MYCOLL_CO_RETURN_IF_ERROR(copyIn(sides, chunkBytes, chunk + 1));
    EventPassed isIn(buffer(chunk).copiedIn);
    co_await isIn;
    MYCOLL_CO_RETURN_IF_ERROR(deviceError(isIn));
    EventPassed isFree(buffer(chunk).copiedOut);
    co_await isFree;
    MYCOLL_CO_RETURN_IF_ERROR(deviceError(isFree));
    Call chunked;
    MYCOLL_CO_RETURN_IF_ERROR(chunkOf(call, sides, chunkBytes, chunk, &chunked));
    MYCOLL_CO_RETURN_IF_ERROR(co_await runner.run(std::move(chunked)));
    MYCOLL_CO_RETURN_IF_ERROR(copyOut(sides, chunkBytes, chunk));
  }
  co_return Status();
}

// The status of the event, with the text that the other ranks receive.
Status HostCollective::deviceError(const EventPassed& event) const {
  const Status& error = event.status();
  if (error.ok()) return error;
  return error.withMessage("rank " + std::to_string(rank_) + ": " + operation_->what() + ": " +
                           error.message());
}

// A broadcast has one span, which the root reads and the others write.
HostCollective::Sides HostCollective::sidesOf(const Call& call) const {
  if (call.kind != OpKind::kBroadcast) return {call.in, call.out};
  return call.root == rank_ ? Sides{call.out, {}} : Sides{{}, call.out};
}

// The same on all ranks, whatever each one reads and writes; at most the longest part, in whole
// pages.
size_t HostCollective::chunkBytesOf(const Call& call, uint64_t longest) const {
  size_t parts = 1;
  switch (call.kind) {
    case OpKind::kAllGather:
    case OpKind::kGather:
    case OpKind::kScatter:
    case OpKind::kReduceScatter:
    case OpKind::kAllToAll: parts = static_cast<size_t>(ranks_); break;
    default: break;
  }
  const uint64_t pages = (longest + kChunkAlignment - 1) / kChunkAlignment;
  const uint64_t most = kHostChunkBytes / parts / kChunkAlignment;
  return std::max<size_t>(std::min(pages, most), 1) * kChunkAlignment;
}

Status HostCollective::begin() {
  return copying(operation_->device(), [&] {
    block(*ready_, inward_);
    block(*ready_, outward_);
  });
}

Status HostCollective::copyIn(const Sides& sides, size_t chunkBytes, uint64_t chunk) {
  return copyingFor(*operation_, inward_, [&] {
    HostStaging::Buffer& to = buffer(chunk);
    grow(to.in, sides.reads.size() * chunkBytes);
    for (size_t i = 0; i < sides.reads.size(); ++i) {
      const Span part = partOf(sides.reads[i], chunkBytes, chunk);
      if (part.bytes == 0) continue;
      slice(to.in, i * chunkBytes, part.bytes)
          .copy_(bytesOnDevice(part, operation_->device()), /*non_blocking=*/true);
    }
    to.copiedIn = recordEvent(inward_);
    return to.copiedIn;
  });
}

Status HostCollective::copyOut(const Sides& sides, size_t chunkBytes, uint64_t chunk) {
  return copyingFor(*operation_, outward_, [&] {
    HostStaging::Buffer& from = buffer(chunk);
    for (size_t i = 0; i < sides.writes.size(); ++i) {
      const Span part = partOf(sides.writes[i], chunkBytes, chunk);
      if (part.bytes == 0) continue;
      bytesOnDevice(part, operation_->device())
          .copy_(slice(from.out, i * chunkBytes, part.bytes), /*non_blocking=*/true);
    }
    from.copiedOut = recordEvent(outward_);
    return from.copiedOut;
  });
}

Status HostCollective::chunkOf(const Call& call, const Sides& sides, size_t chunkBytes,
                               uint64_t chunk, Call* chunked) {
  return copying(operation_->device(), [&] {
    HostStaging::Buffer& at = buffer(chunk);
    grow(at.out, sides.writes.size() * chunkBytes);  // all copies from it are over
    const auto place = [&](const Spans& spans, const at::Tensor& buffer) {
      Spans placed;
      for (size_t i = 0; i < spans.size(); ++i) {
        const size_t bytes = partOf(spans[i], chunkBytes, chunk).bytes;
        char* memory =
            bytes == 0 ? nullptr : static_cast<char*>(buffer.mutable_data_ptr()) + i * chunkBytes;
        placed.push_back({memory, bytes});
      }
      return placed;
    };
    *chunked = call;
    if (call.kind == OpKind::kBroadcast) {
      chunked->out = sides.reads.empty() ? place(sides.writes, at.out) : place(sides.reads, at.in);
    } else {
      chunked->in = place(call.in, at.in);
      chunked->out = place(call.out, at.out);
    }
  });
}

Status HostCollective::end() {
  return copyingFor(*operation_, outward_, [&] {
    // Before the caller may write to what was read.
    for (const HostStaging::Buffer& buffer : staging_->buffers) {
      if (buffer.copiedIn) block(*buffer.copiedIn, outward_);
    }
    copyBackOnDevice(copyBacks_);
    EventPtr ended = recordEvent(outward_, operation_->isTimed());
    operation_->setEnqueued(outward_, ended);
    return ended;
  });
}

}  // namespace mycoll
