#include "backend/device/host_road.h"

#include <c10/core/StreamGuard.h>

#include <utility>

#include "backend/call_site.h"
#include "backend/device/copies.h"

namespace mycoll {

// A message that is being copied from the device before it is sent.
struct HostRoad::Outgoing {
  DeviceOperationPtr operation;
  c10::Stream stream;
  EventPtr copied;
  at::Tensor buffer;
  int peer = -1;
  uint64_t tag = 0;
  DType dtype = DType::kOpaque;
  uint8_t opaqueType = 0;
  std::chrono::milliseconds timeout{0};
};

HostRoad::HostRoad(const DevicePlace& place)
    : place_(place),
      staging_(std::make_shared<HostStaging>()),
      queued_(std::make_shared<std::atomic<int>>(0)) {}

DeviceOperationPtr HostRoad::carry(DeviceGroup& group, const std::vector<Request*>& requests,
                                   bool isTimed) {
  std::vector<DeviceOperationPtr> parts;
  for (Request* request : requests) parts.push_back(carryOne(group, *request, isTimed));
  if (parts.size() == 1) return parts.front();
  // A batch ends with the last of its parts.
  const c10::Device device = requests.front()->device;
  auto whole = std::make_shared<DeviceOperation>("a batch", currentStream(device));
  if (isTimed) whole->setStarted(recordEvent(currentStream(device), true));
  auto left = std::make_shared<std::atomic<size_t>>(parts.size());
  const c10::Stream joint = sideStream(device);
  for (const DeviceOperationPtr& part : parts) {
    part->onEnqueued([parts, whole, left, joint, isTimed] {
      if (left->fetch_sub(1, std::memory_order_acq_rel) != 1) return;
      for (const DeviceOperationPtr& each : parts) {
        if (!each->status().ok()) return whole->fail(each->status());
      }
      const Status status = copying([&] {
        for (const DeviceOperationPtr& each : parts) each->block(joint);
        whole->setEnqueued(joint, recordEvent(joint, isTimed));
      });
      if (!status.ok()) whole->fail(status);
    });
  }
  return whole;
}

DeviceOperationPtr HostRoad::carryOne(DeviceGroup& group, Request& request, bool isTimed) {
  const c10::Stream caller = currentStream(request.device);
  if (isCapturing(caller)) {
    refuse(request.site,
           "a stream under graph capture cannot wait for host memory, through which this group's "
           "device tensors travel (see MYCOLL_CUDA)");
  }
  auto operation = std::make_shared<DeviceOperation>(request.site.function, caller);
  EventPtr ready = recordEvent(caller, isTimed);
  operation->setTimed(isTimed);
  if (isTimed) operation->setStarted(ready);
  queued_->fetch_add(1, std::memory_order_relaxed);
  operation->onEnqueued([queued = queued_] { queued->fetch_sub(1, std::memory_order_relaxed); });
  const OpKind kind = request.calls.front().kind;
  if (kind == OpKind::kSend) {
    send(request, operation, ready);
  } else if (kind == OpKind::kRecv) {
    receive(request, operation, std::move(ready));
  } else {
    carryCollective(request, operation, std::move(ready));
  }
  Followed followed;
  followed.operation = operation;
  followed.isMessage = kind == OpKind::kSend || kind == OpKind::kRecv;
  group.follow(std::move(followed));
  return operation;
}

void HostRoad::carryCollective(Request& request, const DeviceOperationPtr& operation,
                               EventPtr ready) {
  auto collective = std::make_shared<HostCollective>(
      staging_, operation, std::move(ready), place_.rank, place_.ranks,
      std::vector<Call>(request.calls.begin(), request.calls.end()),
      std::vector<CopyBack>(request.copyBacks.begin(), request.copyBacks.end()));
  operation->keep(request.allTensors());
  const OpPtr op = place_.host->submitComposite(
      request.calls.front().kind,
      [collective](CollectiveRunner& runner) { return HostCollective::run(collective, runner); },
      operation, /*willWait=*/!request.async, place_.timeoutOf(request));
  if (const uint32_t site = callSiteOfCall()) op->record().setSite(site);
  operation->setEngineOp(place_.host, op);
  op->onDone([operation, op] {
    if (!op->status().ok()) operation->fail(op->status());
  });
}

void HostRoad::send(Request& request, const DeviceOperationPtr& operation, const EventPtr& ready) {
  const Call& call = request.calls.front();
  const Span span = call.in.front();
  const c10::Stream stream = sideStream(request.device);
  auto message = std::make_shared<Outgoing>(
      Outgoing{operation, stream, nullptr, emptyPinned(span.bytes), request.peer, request.tag,
               call.dtype, call.opaqueType, place_.timeoutOf(request)});
  {
    const PlainDispatch plain;
    const c10::StreamGuard guard(stream);
    ready->block(stream);
    if (span.bytes > 0) {
      message->buffer.copy_(bytesOnDevice(span, request.device), /*non_blocking=*/true);
    }
    message->copied = recordEvent(stream, operation->isTimed());
  }
  operation->keep(request.allTensors());
  std::lock_guard<std::mutex> lock(mutex_);
  outgoing_.push_back(std::move(message));
}

void HostRoad::dispatch(const Outgoing& message) {
  const at::Tensor& buffer = message.buffer;
  const Span span{buffer.nbytes() == 0 ? nullptr : buffer.mutable_data_ptr(), buffer.nbytes()};
  const OpPtr op = place_.host->send(span, message.peer, message.tag, message.dtype,
                                     message.opaqueType, std::make_shared<at::Tensor>(buffer),
                                     /*willWait=*/false, message.timeout);
  message.operation->setEngineOp(place_.host, op);
  op->onDone([operation = message.operation, stream = message.stream, copied = message.copied, op] {
    if (op->status().ok()) {
      operation->setEnqueued(stream, copied);
    } else {
      operation->fail(op->status());
    }
  });
}

void HostRoad::receive(Request& request, const DeviceOperationPtr& operation, EventPtr ready) {
  const Call& call = request.calls.front();
  const Span span = call.out.front();
  const at::Tensor buffer = emptyPinned(span.bytes);
  operation->keep(request.allTensors());
  const OpPtr op = place_.host->recv(
      {span.bytes == 0 ? nullptr : buffer.mutable_data_ptr(), span.bytes}, request.peer,
      request.tag, call.dtype, call.opaqueType, std::make_shared<at::Tensor>(buffer),
      /*willWait=*/false, place_.timeoutOf(request));
  operation->setEngineOp(place_.host, op);
  op->onDone([operation, op, span, buffer, ready = std::move(ready), device = request.device,
              copyBacks = std::move(request.copyBacks)] {
    if (!op->status().ok()) return operation->fail(op->status());
    operation->setSource(op->sourceRank());
    const Status status = copying([&] {
      const c10::Stream stream = sideStream(device);
      const c10::StreamGuard guard(stream);
      ready->block(stream);
      if (span.bytes > 0) bytesOnDevice(span, device).copy_(buffer, /*non_blocking=*/true);
      copyBackOnDevice(copyBacks);
      operation->setEnqueued(stream, recordEvent(stream, operation->isTimed()));
    });
    if (!status.ok()) operation->fail(status);
  });
}

bool HostRoad::advance() {
  for (;;) {
    std::shared_ptr<Outgoing> next;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!outgoing_.empty() && hasPassed(*outgoing_.front()->copied)) {
        next = std::move(outgoing_.front());
        outgoing_.pop_front();
      }
    }
    if (!next) break;
    dispatch(*next);
  }
  if (queued_->load(std::memory_order_relaxed) == 0) return false;
  place_.host->advance();
  return true;
}

}  // namespace mycoll
