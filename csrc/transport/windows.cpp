#include "transport/windows.h"

#include <algorithm>
#include <string>
#include <utility>

#include "transport/mailbox.h"
#include "transport/mesh.h"

namespace mycoll {

void Windows::open(uint64_t window, Span memory) {
  IoLock lock(mailbox_.ioMutex());
  open_[window] = {memory, std::vector<uint64_t>(mailbox_.ranks())};
  last_ = std::max(last_, window);
}

void Windows::close(uint64_t window, const Status& status) {
  IoLock lock(mailbox_.ioMutex());
  if (open_.erase(window) == 0) return;
  mailbox_.mesh().discard([&](const FrameTarget& target) {
    return target.mailbox == &mailbox_ && target.window == window;
  });
  mailbox_.endAll(status, [window](const Transfer& request) {
    return request.messageClass_ == MessageClass::kWindow && request.tag_ == window;
  });
}

void Windows::put(Transfer& request, int destination, uint64_t window, uint64_t offset,
                  const Signature& signature, Span data) {
  IoLock lock(mailbox_.ioMutex());
  if (!mailbox_.postSend(request, destination, MessageClass::kWindow, window, signature, data) ||
      mailbox_.isEnding(MessageClass::kWindow, window)) {
    return;
  }
  OutItem item;
  item.header = mailbox_.header(FrameKind::kPut, request);
  item.header.offset = offset;
  item.message = data;
  item.request = &request;
  mailbox_.enqueue(destination, std::move(item));
}

FrameTarget Windows::onFrame(const FrameHeader& came) {
  FrameTarget target;
  const auto found = open_.find(came.tag);
  if (found == open_.end() && came.tag <= last_) return target;  // it is closed
  const bool isPut = came.kind == FrameKind::kPut;
  const size_t bytes = found == open_.end() ? 0 : found->second.memory.bytes;
  const bool fits = isPut ? came.offset <= bytes && came.payloadBytes <= bytes - came.offset
                          : came.kind == FrameKind::kEager && came.messageBytes == 0;
  if (found == open_.end() || !fits) {
    const std::string receiver = "rank " + std::to_string(mailbox_.rank());
    mailbox_.failBy(mailbox_.describeRank(came.source) +
                    (isPut ? " put " + std::to_string(came.payloadBytes) + " bytes where " +
                                 receiver + " has no window"
                           : " signalled a window that " + receiver + " does not have"));
    return target;
  }
  if (isPut) {
    target.data = found->second.memory.begin() + came.offset;
    target.window = came.tag;
    target.isStreaming = came.payloadBytes >= kStreamingBytes;
    return target;
  }
  target.request = mailbox_.matchPosted(came);
  if (target.request == nullptr) ++found->second.signals[came.source];
  return target;
}

bool Windows::finishNow(Transfer& request) {
  const auto window = open_.find(request.tag_);
  if (window == open_.end()) {
    mailbox_.finish(request, Status(Code::kInvalidArgument, "the window is closed"));
    return true;
  }
  uint64_t& signals = window->second.signals[request.peer_];
  if (signals == 0) return false;
  --signals;
  mailbox_.finish(request, Status());
  return true;
}

}  // namespace mycoll
