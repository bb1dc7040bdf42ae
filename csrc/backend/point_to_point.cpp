// send, and recv from one rank or from any.
#include <c10/util/StringUtil.h>

#include <limits>

#include "backend/mycoll_backend.h"

namespace mycoll {
namespace {

void checkTag(const CallSite& site, int tag) {
  if (tag >= 0) [[likely]] {
    return;
  }
  refuse(site, c10::str("tag must not be negative, but it is ", tag));
}

}  // namespace

MycollBackend::WorkPtr MycollBackend::send(Tensors& tensors, int destination, int tag) {
  const CallSite site = enter("send");
  const at::Tensor& tensor = single(site, "tensor", tensors);
  checkRank(site, "dst", destination);
  checkTag(site, tag);
  checkTensor(site, Argument{"tensor"}, tensor);
  Request request(site, c10d::OpType::SEND, "mycoll:send", c10d::kUnsetTimeout, /*isAsync=*/true);
  request.peer = destination;
  request.tag = static_cast<uint64_t>(tag);
  const Span span = request.input(tensor);
  request.addCall(OpKind::kSend, tensor).in.push_back(span);
  return run(request, tensors, tensors);
}

MycollBackend::WorkPtr MycollBackend::recv(Tensors& tensors, int source, int tag) {
  const CallSite site = enter("recv");
  checkRank(site, "src", source);
  return receive(site, c10d::OpType::RECV, "mycoll:recv", tensors, source, tag);
}

MycollBackend::WorkPtr MycollBackend::recvAnysource(Tensors& tensors, int tag) {
  return receive(enter("recv"), c10d::OpType::RECVANYSOURCE, "mycoll:recvAnySource", tensors,
                 kAnySource, tag);
}

MycollBackend::WorkPtr MycollBackend::receive(const CallSite& site, c10d::OpType type,
                                              const char* title, Tensors& tensors, int source,
                                              int tag) {
  const at::Tensor& tensor = single(site, "tensor", tensors);
  checkTag(site, tag);
  checkOutput(site, Argument{"tensor"}, tensor);
  Request request(site, type, title, c10d::kUnsetTimeout, /*isAsync=*/true);
  request.peer = source;
  request.tag = static_cast<uint64_t>(tag);
  const Span span = request.output(tensor);
  request.addCall(OpKind::kRecv, tensor).out.push_back(span);
  return run(request, tensors, tensors);
}

}  // namespace mycoll
