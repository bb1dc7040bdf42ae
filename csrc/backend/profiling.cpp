// The events that torch.profiler sees for an operation: a record_param_comms event around its
// submission, and an event "mycoll:<function>" from its start to its end.
#include <ATen/record_function.h>

#include <optional>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <tuple>

#include "backend/mycoll_backend.h"
#include "backend/torch_version.h"

namespace mycoll {
namespace {

int64_t elementsOf(const Request& request, Spans Call::* side) {
  int64_t elements = 0;
  for (const Call& call : request.calls) {
    // As in NCCL's events, a broadcast has its tensor on both sides, on all ranks.
    const bool isBroadcast = call.kind == OpKind::kBroadcast;
    for (const Span& span : isBroadcast ? call.out : call.*side) {
      elements += static_cast<int64_t>(span.bytes / call.elementBytes);
    }
  }
  return elements;
}

// The value of "Rank": the other rank of a message, the root if there is one, or else this rank.
int rankOf(const Request& request) {
  if (request.peer >= 0) return request.peer;
  const bool hasRoot = !request.calls.empty() && request.calls.front().root >= 0;
  return hasRoot ? request.calls.front().root : request.caller.rank;
}

}  // namespace

// "mycoll:all_reduce"; in place of another backend, "gloo:all_reduce".
std::string MycollBackend::titleOf(const Request& request) const {
  return getBackendName() + ":" + request.title;
}

MycollBackend::WorkPtr MycollBackend::runProfiled(Request& request, at::TensorList results) {
  const Tensors outputs = results.vec();
  const Tensors inputs = request.given;  // launch() takes those of the request
  const std::vector<int64_t> noSplits;
  int globalStart = globalRanks_.empty() ? 0 : static_cast<int>(globalRanks_.front());
  int globalStride = 1;
  if (globalRanks_.size() > 1) globalStride = static_cast<int>(globalRanks_[1] - globalRanks_[0]);
  RECORD_PARAM_COMMS_DATA(
      std::make_tuple(static_cast<int64_t>(request.caller.communicator()->sequence()),
                      request.isMessage()),
      std::make_tuple(pg_uid_, pg_desc_), inputs, outputs, rankOf(request), request.caller.function,
      elementsOf(request, &Call::in), elementsOf(request, &Call::out),
      outputs.empty() ? at::kByte : outputs.front().scalar_type(), noSplits, noSplits, globalStart,
      globalStride, request.caller.ranks);

  std::optional<at::RecordFunction> span;  // async operations end theirs in MycollWork
  if (!request.async) {
    span.emplace(at::RecordScope::USER_SCOPE);
    if (span->isActive()) {
      span->_setAsync();  // as torch's own backends mark theirs
      const std::vector<c10::IValue> values(inputs.begin(), inputs.end());
      std::string title = titleOf(request);
#if MYCOLL_TORCH_HAS_COMM_NAME
      // dist.record_comm() names the operations of its block. Asynchronous ones take the name in
      // c10d::Work's constructor.
      const std::string& given = c10d::get_comm_profiling_name();
      if (!given.empty()) title = given;
#endif
      span->before(title, c10::ArrayRef<const c10::IValue>(values.data(), values.size()));
    }
  }
  return launch(request, outputs);
}

}  // namespace mycoll
