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

// A broadcast has one span, which the root reads and the others write.
Spans readsOf(const Call& call, int rank) {
  if (call.kind != OpKind::kBroadcast) return call.in;
  return call.root == rank ? call.out : Spans();
}

Spans writesOf(const Call& call, int rank) {
  return call.kind == OpKind::kBroadcast && call.root == rank ? Spans() : call.out;
}

// The same on all ranks, whatever each one reads and writes; at most the longest part, in whole
// pages.
size_t chunkBytesOf(const Call& call, uint64_t longest, int ranks) {
  size_t parts = 1;
  switch (call.kind) {
    case OpKind::kAllGather:
    case OpKind::kGather:
    case OpKind::kScatter:
    case OpKind::kReduceScatter:
    case OpKind::kAllToAll: parts = static_cast<size_t>(ranks); break;
    default: break;
  }
  const uint64_t pages = (longest + kChunkAlignment - 1) / kChunkAlignment;
  const uint64_t most = kHostChunkBytes / parts / kChunkAlignment;
  return std::max<size_t>(std::min(pages, most), 1) * kChunkAlignment;
}

// One call, cut into chunks. longest: the longest part on any rank.
class Chunks {
 public:
  Chunks(const HostCollective& all, const Call& call, uint64_t longest)
      : all_(all),
        call_(call),
        reads_(readsOf(call, all.rank)),
        writes_(writesOf(call, all.rank)),
        bytes_(chunkBytesOf(call, longest, all.ranks)),
        count_(std::max<uint64_t>(1, (longest + bytes_ - 1) / bytes_)) {}

  uint64_t count() const { return count_; }
  HostStaging::Buffer& buffer(uint64_t chunk) const { return all_.staging->buffers[chunk % 2]; }

  Status copyIn(uint64_t chunk) const {
    return copyingFor(*all_.operation, all_.stream, [&] {
      HostStaging::Buffer& to = buffer(chunk);
      grow(to.in, reads_.size() * bytes_);
      for (size_t i = 0; i < reads_.size(); ++i) {
        const Span part = partOf(reads_[i], bytes_, chunk);
        if (part.bytes == 0) continue;
        slice(to.in, i * bytes_, part.bytes)
            .copy_(bytesOnDevice(part, all_.operation->device()), /*non_blocking=*/true);
      }
      return to.copiedIn = recordEvent(all_.stream);
    });
  }

  Status copyOut(uint64_t chunk) const {
    return copyingFor(*all_.operation, all_.stream, [&] {
      HostStaging::Buffer& from = buffer(chunk);
      for (size_t i = 0; i < writes_.size(); ++i) {
        const Span part = partOf(writes_[i], bytes_, chunk);
        if (part.bytes == 0) continue;
        bytesOnDevice(part, all_.operation->device())
            .copy_(slice(from.out, i * bytes_, part.bytes), /*non_blocking=*/true);
      }
      return from.copiedOut = recordEvent(all_.stream);
    });
  }

  // The call of the engine for a chunk, once all copies from its `out` are over.
  Status callOf(uint64_t chunk, Call* chunked) const {
    return copying(all_.operation->device(), [&] {
      HostStaging::Buffer& at = buffer(chunk);
      grow(at.out, writes_.size() * bytes_);
      const auto place = [&](const Spans& spans, const at::Tensor& buffer) {
        Spans placed;
        for (size_t i = 0; i < spans.size(); ++i) {
          const size_t bytes = partOf(spans[i], bytes_, chunk).bytes;
          char* memory =
              bytes == 0 ? nullptr : static_cast<char*>(buffer.mutable_data_ptr()) + i * bytes_;
          placed.push_back({memory, bytes});
        }
        return placed;
      };
      *chunked = call_;
      if (call_.kind == OpKind::kBroadcast) {
        chunked->out = reads_.empty() ? place(writes_, at.out) : place(reads_, at.in);
      } else {
        chunked->in = place(call_.in, at.in);
        chunked->out = place(call_.out, at.out);
      }
    });
  }

 private:
  const HostCollective& all_;
  const Call& call_;
  const Spans reads_;  // of the device's memory, as `writes`
  const Spans writes_;
  const size_t bytes_;  // of a chunk's part
  const uint64_t count_;
};

// The status of the event, with the text that the other ranks receive.
Status deviceError(const HostCollective& all, const EventPassed& event) {
  const Status& error = event.status();
  if (error.ok()) return error;
  return error.withMessage("rank " + std::to_string(all.rank) + ": " + all.operation->what() +
                           ": " + error.message());
}

Task runCall(const HostCollective& all, const Call& call, CollectiveRunner& runner) {
  uint64_t longest = longestOf(call);
  if (sizesDifferByPair(call.kind)) {
    Call agree;
    agree.kind = OpKind::kAllReduce;
    agree.dtype = DType::kUInt64;
    agree.elementBytes = sizeof(uint64_t);
    agree.reduceOp = ReduceOp::kMax;
    agree.in = agree.out = {spanOf(longest)};
    MYCOLL_CO_RETURN_IF_ERROR(co_await runner.run(std::move(agree)));
  }
  const Chunks chunks(all, call, longest);
  MYCOLL_CO_RETURN_IF_ERROR(chunks.copyIn(0));
  for (uint64_t chunk = 0; chunk < chunks.count(); ++chunk) {
    if (chunk + 1 < chunks.count()) MYCOLL_CO_RETURN_IF_ERROR(chunks.copyIn(chunk + 1));
    EventPassed isIn(chunks.buffer(chunk).copiedIn);
    co_await isIn;
    MYCOLL_CO_RETURN_IF_ERROR(deviceError(all, isIn));
    EventPassed isFree(chunks.buffer(chunk).copiedOut);
    co_await isFree;
    MYCOLL_CO_RETURN_IF_ERROR(deviceError(all, isFree));
    Call chunked;
    MYCOLL_CO_RETURN_IF_ERROR(chunks.callOf(chunk, &chunked));
    MYCOLL_CO_RETURN_IF_ERROR(co_await runner.run(std::move(chunked)));
    MYCOLL_CO_RETURN_IF_ERROR(chunks.copyOut(chunk));
  }
  co_return Status();
}

Status end(const HostCollective& all) {
  return copyingFor(*all.operation, all.stream, [&] {
    copyBackOnDevice(all.copyBacks);
    EventPtr ended = recordEvent(all.stream, all.operation->isTimed());
    all.operation->setEnqueued(all.stream, ended);
    return ended;
  });
}

}  // namespace

Task runThroughHost(std::shared_ptr<const HostCollective> all, CollectiveRunner& runner) {
  MYCOLL_CO_RETURN_IF_ERROR(
      copying(all->operation->device(), [&] { block(*all->ready, all->stream); }));
  for (const Call& call : all->calls) {
    MYCOLL_CO_RETURN_IF_ERROR(co_await runCall(*all, call, runner));
  }
  co_return end(*all);
}

}  // namespace mycoll
