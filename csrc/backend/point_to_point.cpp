// send, and recv from one rank or from any.
#include "backend/mycoll_backend.h"

namespace mycoll {
namespace {

void addMessage(Request& request, const std::vector<at::Tensor>& tensors, int peer, int tag) {
  const bool isSend = request.type == c10d::OpType::SEND;
  const at::Tensor& tensor = single(request.caller, "tensor", tensors);
  if (request.type != c10d::OpType::RECVANYSOURCE)
    checkRank(request.caller, isSend ? "dst" : "src", peer);
  if (tag < 0) refuse(request.caller, "tag must not be negative, but it is ", tag);
  checkOneOf(request.caller, Argument{"tensor"}, tensor, /*isOutput=*/!isSend);
  request.peer = peer;
  request.tag = static_cast<uint64_t>(tag);
  const Span span = isSend ? request.input(tensor) : request.output(tensor);
  Call& call = request.addCall(isSend ? OpKind::kSend : OpKind::kRecv, tensor);
  (isSend ? call.in : call.out).push_back(span);
}

}  // namespace

MycollBackend::WorkPtr MycollBackend::send(Tensors& tensors, int destination, int tag) {
  Request request(enter("send"), c10d::OpType::SEND, c10d::kUnsetTimeout, /*isAsync=*/true);
  addMessage(request, tensors, destination, tag);
  return run(request, tensors, tensors);
}

MycollBackend::WorkPtr MycollBackend::recv(Tensors& tensors, int source, int tag) {
  Request request(enter("recv"), c10d::OpType::RECV, c10d::kUnsetTimeout, /*isAsync=*/true);
  addMessage(request, tensors, source, tag);
  return run(request, tensors, tensors);
}

MycollBackend::WorkPtr MycollBackend::recvAnysource(Tensors& tensors, int tag) {
  Request request(enter("recv"), c10d::OpType::RECVANYSOURCE, c10d::kUnsetTimeout,
                  /*isAsync=*/true);
  request.title = "recvAnySource";
  addMessage(request, tensors, kAnySource, tag);
  return run(request, tensors, tensors);
}

}  // namespace mycoll
