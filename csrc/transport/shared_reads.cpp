#include "transport/shared_reads.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "kernels/copy.h"
#include "transport/connection.h"
#include "transport/mailbox.h"
#include "transport/mesh.h"

namespace mycoll {

void SharedReads::offer(Transfer& request, Connection& connection, OutItem* item) {
  const bool isOpen = connection.state() == Connection::State::kOpen && connection.isShm();
  if (!isOpen || request.attached_) return;
  const SharedPlace place = SharedHeap::process().find(request.data_);
  if (place.region == 0) return;
  if (!connection.regions().offer(place.region, &request.attached_)) return;
  request.isShared_ = true;
  item->owned.assign(reinterpret_cast<const char*>(&place), sizeof(place));
  item->header.payloadBytes = sizeof(place);
}

bool SharedReads::begin(Transfer& request, const FrameHeader& came, const SharedPlace& place,
                        Connection& connection) {
  const size_t bytes = request.data_.bytes;
  if (bytes == 0 || bytes != came.messageBytes) return false;
  Reading reading{&request, came, place, connection.regions().find(place.region), nullptr};
  if (reading.segment) reading.from = SharedHeap::memoryAt(*reading.segment, place.offset, bytes);
  if (!reading.from) return false;
  request.isShared_ = true;
  readings_.push_back(std::move(reading));
  return true;
}

void SharedReads::end(const Transfer& request) {
  if (request.isReceive_) {
    std::erase_if(readings_, [&](const Reading& each) { return each.request == &request; });
  } else {
    SharedHeap::process().revoke(SharedHeap::process().find(request.data_));
  }
}

bool SharedReads::read(size_t bytes) {
  if (readings_.empty()) return false;
  Reading reading = std::move(readings_.front());
  readings_.pop_front();
  Transfer& request = *reading.request;
  const Span& data = request.data_;
  const size_t piece = std::min(bytes, data.bytes - request.transferred_);
  copy(data.begin() + request.transferred_, reading.from + request.transferred_, piece,
       data.bytes >= kStreamingBytes);
  request.transferred_ += piece;
  if (request.transferred_ < data.bytes) {
    readings_.push_back(std::move(reading));
    return true;
  }
  // After all of it was read: see SharedHeap::revoke().
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const RegionHead& head = SharedHeap::headOf(*reading.segment);
  const bool isValid =
      head.revocations.load(std::memory_order_relaxed) == reading.place.revocations;
  request.mailbox_->onRead(request, reading.header, isValid);
  return true;
}

}  // namespace mycoll
