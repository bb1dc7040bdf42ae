// The path through NCCL: calls of NCCL on the caller's stream (synchronous requests) or on the
// stream of a channel.
#include <c10/core/StreamGuard.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <utility>

#include "backend/errors.h"
#include "base/bytes.h"
#include "base/recycler.h"
#include "device/copies.h"
#include "device/device_group.h"
#include "nccl/collectives.h"
#include "nccl/library.h"

namespace mycoll {
namespace {

// One signature for a batch, which differs if any of its collectives does. Messages are left out,
// as they are between pairs of ranks.
Signature signatureOf(Requests requests) {
  Signature all;
  bool isFirst = true;
  for (const Request* request : requests) {
    if (request->isMessage()) continue;
    for (const Call& call : request->calls) {
      const Signature one = call.signature();
      if (std::exchange(isFirst, false)) {
        all = one;
        continue;
      }
      all.bytes += one.bytes;
      all.layout = fnv1a({reinterpret_cast<const char*>(&one), sizeof(one)}, all.layout);
    }
  }
  return all;
}

// Refuses what NCCL cannot do, before anything is sent. capability: of the oldest GPU.
void check(Requests requests, int capability) {
  for (const Request* request : requests) {
    if (request->type == c10d::OpType::RECVANYSOURCE) {
      refuse(request->caller,
             "NCCL cannot receive from any rank: name the source, or set MYCOLL_CUDA=host");
    }
    if (request->isMessage()) continue;
    for (const Call& call : request->calls) {
      const Status possible =
          nccl::check(*nccl::Library::loaded(), call, {request->isFlat(), capability});
      if (!possible.ok()) refuse(request->caller, possible.message());
    }
  }
}

// peer: of a message: its rank in the communicator.
void enqueue(nccl::Issue& issue, const Request& request, int peer, void* stream, int capability) {
  for (const Call& call : request.calls) {
    Status status;
    if (call.kind == OpKind::kSend) {
      status = nccl::send(issue, call.in.front(), peer, stream);
    } else if (call.kind == OpKind::kRecv) {
      status = nccl::receive(issue, call.out.front(), peer, stream);
    } else {
      status = nccl::enqueue(issue, call, stream, {request.isFlat(), capability});
    }
    if (!status.ok()) return;  // issue.end() returns it
  }
}

}  // namespace

void DeviceGroup::watchCollective(Requests requests, const DeviceOperationPtr& operation) {
  auto collective =
      place_.control->submitExternal(signatureOf(requests), place_.timeoutOf(*requests.front()));
  if (collective->done() && !collective->status().ok()) throwStatus(collective->status());
  if (const uint32_t site = callSiteOfCall()) collective->record().setSite(site);
  watch({.operation = operation, .collective = std::move(collective)});
}

DeviceOperationPtr DeviceGroup::launchOnNccl(Requests requests, bool isTimed, bool isBatch) {
  const int capability = choice_.capability();
  check(requests, capability);
  const Request& first = *requests.front();
  const bool isAlone = requests.size() == 1 && first.calls.size() == 1;
  const bool isMessage =
      std::all_of(requests.begin(), requests.end(), [](auto* each) { return each->isMessage(); });
  const bool isOfPair = isMessage && !isBatch;
  const Channel channel =
      isOfPair ? channels_.ofPair(first.device, first.peer) : channels_.ofGroup(first.device);

  const c10::Stream caller = currentStream(first.device);
  const bool isCaptured = isCapturing(caller);
  const c10::Stream stream = first.async ? channel.stream : caller;
  auto operation = std::allocate_shared<DeviceOperation>(Recycler<DeviceOperation>(),
                                                         first.caller.function, caller);
  operation->setCaptured(isCaptured);
  if (isMessage && isAlone) operation->setSource(first.peer);
  if (first.async) {
    Kept kept;
    for (Request* request : requests) kept.add(request->takeKept());
    operation->keep(std::move(kept));
  }
  DeviceOperation::StreamUse use(*operation);
  if (first.async) block(*recordEvent(caller, false, isCaptured), stream);
  if (isTimed) operation->setStarted(recordEvent(stream, true, isCaptured));
  if (!first.async) operation->setReliedOn();

  // Watched before NCCL is called: a call that hangs has a deadline, too.
  if (isCaptured) {
    watchCaptured(stream);
  } else if (isMessage) {
    watchMessages(operation, requests, isOfPair, /*isRecorded=*/true);
  }
  // If it is not enqueued, no thread will find its end.
  const auto failing = c10::make_scope_exit([&] {
    if (!operation->isEnqueued()) operation->fail(Status(Code::kInternal, "it was not enqueued"));
  });
  // Held to the end, so that the watched operations have NCCL's order, and the events of a stream,
  // too.
  nccl::Issue issue(*channel.comm);
  if (!isMessage && !isCaptured) watchCollective(requests, operation);
  if (!isAlone && issue.status().ok()) (void)issue.group();
  for (const Request* request : requests) {
    if (!issue.status().ok()) break;
    const int peer = isOfPair ? (place_.rank < request->peer ? 1 : 0) : request->peer;
    enqueue(issue, *request, peer, stream.native_handle(), capability);
  }
  const Status status = inGroup(place_.name, issue.end());
  // After a failure: follows what NCCL has enqueued.
  const auto endUse = [&] {
    if (isCaptured) return;
    (void)copying(first.device, [&] { use.setEnd(recordEvent(stream)); });
  };
  if (!status.ok()) {
    endUse();
    // Often a consequence of another rank's end: the engine may know the cause by now.
    const Status known = error();
    if (known.ok()) place_.control->fail(status);
    operation->fail(known.ok() ? status : known);
    throwStatus(known.ok() ? status : known);
  }

  EventPtr ended;
  try {
    for (const Request* request : requests) {
      if (request->copyBacks.empty()) continue;
      const c10::StreamGuard guard(stream);
      copyBackOnDevice(request->copyBacks);
    }
    ended = recordEvent(stream, isTimed, isCaptured);
  } catch (...) {
    endUse();
    throw;
  }
  use.setEnd(ended);
  operation->setEnqueued(stream, std::move(ended));
  return operation;
}

}  // namespace mycoll
