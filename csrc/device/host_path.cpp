#include "device/host_path.h"

#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>
#include <vector>

#include "backend/errors.h"
#include "device/copies.h"
#include "device/device_group.h"

namespace mycoll {
namespace {

// Part of the tag of further pieces, beside the number of their message; users' tags are smaller.
constexpr uint64_t kPieceTag = uint64_t{1} << 50;

// How a message of this size is cut and staged: one piece, or several, preceded by a number.
struct Cut {
  explicit Cut(size_t messageBytes)
      : bytes(messageBytes), header(messageBytes > kHostChunkBytes ? sizeof(uint64_t) : 0) {}

  const size_t bytes;   // of the message
  const size_t header;  // before it

  size_t staged() const { return header + bytes; }
  size_t pieces() const {
    return std::max<size_t>(1, (bytes + kHostChunkBytes - 1) / kHostChunkBytes);
  }
  // Where a piece begins in the message.
  size_t offset(size_t piece) const { return piece * kHostChunkBytes; }
  size_t length(size_t piece) const { return std::min(kHostChunkBytes, bytes - offset(piece)); }
  // The piece in the staging memory, as it is sent.
  Span span(const at::Tensor& staging, size_t piece) const {
    if (staged() == 0) return {nullptr, 0};
    char* const begin = static_cast<char*>(staging.mutable_data_ptr());
    if (piece == 0) return {begin, header + length(0)};
    return {begin + header + offset(piece), length(piece)};
  }
  at::Tensor data(const at::Tensor& staging, size_t piece) const {
    return staging.narrow(0, static_cast<int64_t>(header + offset(piece)),
                          static_cast<int64_t>(length(piece)));
  }
  Span part(const Span& whole, size_t piece) const {
    return {whole.begin() + offset(piece), length(piece)};
  }
};

// A message that is being received. Its pieces hold it.
struct Incoming {
  std::shared_ptr<Communicator> group;
  DeviceOperationPtr operation;
  Cut cut;
  Span target;  // on the device
  at::Tensor staging;
  c10::Stream stream;
  Message message;  // of its pieces, without the data
  std::chrono::milliseconds timeout{0};
  CopyBacks copyBacks;
  std::atomic<size_t> left;  // pieces that were not copied to the device

  // Copies a piece that has arrived to the device; the last one ends the operation.
  Status copyOut(size_t piece) {
    return copyingFor(*operation, stream, [&] {
      if (cut.length(piece) > 0) {
        bytesOnDevice(cut.part(target, piece), operation->device())
            .copy_(cut.data(staging, piece), /*non_blocking=*/true);
      }
      const bool isLast = left.fetch_sub(1, std::memory_order_acq_rel) == 1;
      if (isLast) copyBackOnDevice(copyBacks);
      EventPtr copied = recordEvent(stream, operation->isTimed());
      if (isLast) operation->setEnqueued(stream, copied);
      return copied;
    });
  }
};

void receivePiece(const std::shared_ptr<Incoming>& message, size_t piece) {
  Message wanted = message->message;
  wanted.data = message->cut.span(message->staging, piece);
  const OpPtr op = message->group->recv(wanted, std::make_shared<at::Tensor>(message->staging),
                                        /*willWait=*/false, message->timeout);
  message->operation->setEngineOp(message->group, op);
  op->onDone([message, piece, op] {
    const DeviceOperationPtr& operation = message->operation;
    if (!op->status().ok()) return operation->fail(op->status());
    if (piece == 0) {
      operation->setSource(op->sourceRank());
      uint64_t number = 0;
      if (message->cut.header > 0) {
        std::memcpy(&number, message->staging.const_data_ptr(), sizeof(number));
      }
      message->message.rank = op->sourceRank();
      message->message.tag = kPieceTag | number;
      for (size_t next = 1; next < message->cut.pieces(); ++next) receivePiece(message, next);
    }
    const Status status = message->copyOut(piece);
    if (!status.ok()) operation->fail(status);
  });
}

}  // namespace

// A piece that is being copied from the device before it is sent.
struct HostPath::Outgoing {
  DeviceOperationPtr operation;
  std::shared_ptr<std::atomic<size_t>> left;  // pieces of the message that were not sent
  c10::Stream stream;
  EventPtr copied;
  at::Tensor staging;
  Message message;  // its data is a part of `staging`
  std::chrono::milliseconds timeout{0};
};

DeviceOperationPtr HostPath::launch(DeviceGroup& group, Requests requests, bool isTimed) {
  const Request& first = *requests.front();
  const c10::Device device = first.device;
  const c10::Stream caller = currentStream(device);
  if (isCapturing(caller)) {
    refuse(first.caller,
           "a stream under graph capture cannot wait for host memory, through which this group's "
           "device tensors travel (see MYCOLL_CUDA)");
  }
  // All parts of a batch follow this event, so that it has passed when any of them has.
  const EventPtr ready = recordEvent(caller, isTimed);
  std::vector<DeviceOperationPtr> parts;
  for (Request* request : requests) parts.push_back(launchOne(group, *request, isTimed, ready));
  if (parts.size() == 1) return parts.front();
  // A batch ends with the last of its parts.
  auto whole = std::make_shared<DeviceOperation>("a batch", caller);
  if (isTimed) whole->setStarted(ready);
  auto left = std::make_shared<std::atomic<size_t>>(parts.size());
  const c10::Stream joint = sideStream(device);
  for (const DeviceOperationPtr& part : parts) {
    part->onEnqueued([parts, whole, left, joint, isTimed] {
      if (left->fetch_sub(1, std::memory_order_acq_rel) != 1) return;
      for (const DeviceOperationPtr& each : parts) {
        if (!each->status().ok()) return whole->fail(each->status());
      }
      const Status status = copying(joint.device(), [&] {
        for (const DeviceOperationPtr& each : parts) each->block(joint);
        whole->setEnqueued(joint, recordEvent(joint, isTimed));
      });
      if (!status.ok()) whole->fail(status);
    });
  }
  return whole;
}

DeviceOperationPtr HostPath::launchOne(DeviceGroup& group, Request& request, bool isTimed,
                                       EventPtr ready) {
  const c10::Stream caller = currentStream(request.device);
  auto operation = std::make_shared<DeviceOperation>(request.caller.function, caller);
  if (isTimed) operation->setStarted(ready);
  const OpKind kind = request.calls.front().kind;
  try {
    if (kind == OpKind::kSend) {
      send(request, operation, ready);
    } else if (kind == OpKind::kRecv) {
      receive(request, operation, std::move(ready));
    } else {
      launchCollective(request, operation, std::move(ready));
    }
  } catch (...) {
    operation->fail(Status(Code::kInternal, describeException()));  // it is not watched
    throw;
  }
  group.watch({.operation = operation, .isMessage = request.isMessage()});
  return operation;
}

void HostPath::launchCollective(Request& request, const DeviceOperationPtr& operation,
                                EventPtr ready) {
  operation->keep(request.takeKept());
  MutexLock lock(mutex_);
  const c10::Stream stream =
      streams_.try_emplace(request.device.index(), sideStream(request.device)).first->second;
  lock.unlock();
  const auto all = std::shared_ptr<HostCollective>(
      new HostCollective{staging_, operation, std::move(ready), place_.rank, place_.ranks,
                         std::vector<Call>(request.calls.begin(), request.calls.end()),
                         std::move(request.copyBacks), stream});
  const OpPtr op = place_.host->submitComposite(
      request.calls.front().kind,
      [all](CollectiveRunner& runner) { return runThroughHost(all, runner); }, operation,
      /*willWait=*/!request.async, place_.timeoutOf(request));
  if (const uint32_t site = callSiteOfCall()) op->record().setSite(site);
  operation->setEngineOp(place_.host, op);
  op->onDone([operation, op] {
    if (!op->status().ok()) operation->fail(op->status());
  });
}

void HostPath::send(Request& request, const DeviceOperationPtr& operation, const EventPtr& ready) {
  const Call& call = request.calls.front();
  const Span span = call.in.front();
  const Cut cut(span.bytes);
  const c10::Stream stream = sideStream(request.device);
  const at::Tensor staging = emptyPinned(cut.staged());
  uint64_t number = 0;
  if (cut.header > 0) {
    number = longMessages_.fetch_add(1, std::memory_order_relaxed);
    std::memcpy(staging.mutable_data_ptr(), &number, sizeof(number));
  }
  place_.host->diagnosis().noteOtherCallers();  // it leaves when the device has copied it
  const auto left = std::make_shared<std::atomic<size_t>>(cut.pieces());
  std::vector<std::shared_ptr<Outgoing>> pieces;
  operation->keep(request.takeKept());
  {
    DeviceOperation::StreamUse use(*operation);
    const PlainDispatch plain;
    const c10::StreamGuard guard(stream);
    block(*ready, stream);
    for (size_t piece = 0; piece < cut.pieces(); ++piece) {
      if (cut.length(piece) > 0) {
        cut.data(staging, piece)
            .copy_(bytesOnDevice(cut.part(span, piece), request.device), /*non_blocking=*/true);
      }
      pieces.push_back(std::make_shared<Outgoing>(
          Outgoing{operation, left, stream, recordEvent(stream, operation->isTimed()), staging,
                   Message{cut.span(staging, piece), request.peer,
                           piece == 0 ? request.tag : kPieceTag | number, call.dtype,
                           call.opaqueType, span.bytes},
                   place_.timeoutOf(request)}));
    }
    use.setEnd(pieces.back()->copied);
  }
  MutexLock lock(mutex_);
  outgoing_.insert(outgoing_.end(), pieces.begin(), pieces.end());
}

void HostPath::receive(Request& request, const DeviceOperationPtr& operation, EventPtr ready) {
  const Call& call = request.calls.front();
  const Span target = call.out.front();
  const Cut cut(target.bytes);
  const c10::Stream stream = sideStream(request.device);
  operation->keep(request.takeKept());
  block(*ready, stream);
  const auto message = std::shared_ptr<Incoming>(
      new Incoming{place_.host, operation, cut, target, emptyPinned(cut.staged()), stream,
                   Message{{}, request.peer, request.tag, call.dtype, call.opaqueType, cut.bytes},
                   place_.timeoutOf(request), std::move(request.copyBacks), cut.pieces()});
  receivePiece(message, 0);
}

// A piece waits for earlier pieces to the same rank, which keeps their order, but not for pieces to
// other ranks: their streams may wait for an answer of this piece's receiver.
bool HostPath::advance() {
  std::vector<std::shared_ptr<Outgoing>> pieces;
  {
    MutexLock lock(mutex_);
    pieces.assign(outgoing_.begin(), outgoing_.end());
  }
  std::set<int> waiting;  // ranks
  for (const std::shared_ptr<Outgoing>& piece : pieces) {
    if (waiting.count(piece->message.rank) != 0) continue;
    bool isCopied = false;
    const Status error = query(*piece->copied, &isCopied);
    if (!isCopied) {
      waiting.insert(piece->message.rank);
      continue;
    }
    {
      MutexLock lock(mutex_);
      std::erase(outgoing_, piece);
    }
    if (!error.ok()) {
      piece->operation->failByDevice(error);
      continue;
    }
    const OpPtr op = place_.host->send(piece->message, std::make_shared<at::Tensor>(piece->staging),
                                       /*willWait=*/false, piece->timeout);
    piece->operation->setEngineOp(place_.host, op);
    op->onDone([piece, op] {
      if (!op->status().ok()) return piece->operation->fail(op->status());
      const bool isLast = piece->left->fetch_sub(1, std::memory_order_acq_rel) == 1;
      if (isLast) piece->operation->setEnqueued(piece->stream, piece->copied);
    });
  }
  const bool hasCollectives = !place_.host->queue().isEmpty();
  if (hasCollectives) place_.host->advance();
  MutexLock lock(mutex_);
  return hasCollectives || !outgoing_.empty();
}

}  // namespace mycoll
