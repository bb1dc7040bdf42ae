#include "transport/shared_reads.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <utility>

#include "kernels/copy.h"
#include "transport/connection.h"
#include "transport/mailbox.h"
#include "transport/mesh.h"
#include "transport/shm/single_copy.h"

namespace mycoll {

uint64_t SharedReads::regionOf(const Span& data) {
  const uint64_t region = SharedHeap::process().find(data).region;
  if (region != 0) return region;
  const SingleCopy::Case size = SingleCopy::caseOf(OpKind::kSend, 2, data.bytes);
  return SharedPlace::kProcess + static_cast<uint64_t>(size.logBytes);
}

void SharedReads::offer(Transfer& request, Connection& connection, OutItem* item) {
  const bool isOpen = connection.state() == Connection::State::kOpen && connection.isShm();
  if (!isOpen || request.attached_) return;
  SharedPlace place = SharedHeap::process().find(request.data_);
  if (place.region == 0) place = placeInProcess(request);
  if (place.region == 0 || !connection.regions().offer(place.region, &request.attached_)) return;
  if (place.isOfProcess() && !isReadableByOthers(request.data_)) return;
  request.isShared_ = true;
  item->owned.assign(reinterpret_cast<const char*>(&place), sizeof(place));
  item->header.payloadBytes = sizeof(place);
}

// Region 0 if the message is always staged. The kernel decides whether the receiver may read it.
SharedPlace SharedReads::placeInProcess(const Transfer& request) {
  const Span& data = request.data_;
  if (local_.options.singleCopy == SingleCopyUse::kOff ||
      request.messageClass_ != MessageClass::kPointToPoint ||
      data.bytes < SingleCopy::kLeastBytes) {
    return {};
  }
  permitReading();
  std::memcpy(head_.uid, local_.address.uid.data(), sizeof(head_.uid));
  return {regionOf(data), reinterpret_cast<uint64_t>(data.data), reinterpret_cast<uint64_t>(&head_),
          head_.revocations.load(std::memory_order_relaxed)};
}

bool SharedReads::begin(Transfer& request, const FrameHeader& came, SharedPlace* place,
                        Connection& connection) {
  const size_t bytes = request.data_.bytes;
  if (bytes == 0 || bytes != came.messageBytes) return false;
  Reading reading{&request, came, *place, nullptr, nullptr};
  if (place->isOfProcess()) {
    const SingleCopyUse use = local_.options.singleCopy;
    if (use == SingleCopyUse::kOff || !connection.isShm()) return false;
    if (use == SingleCopyUse::kMeasured &&
        trials_.begin(bytes, &request.isTimed_) == SingleCopy::Choice::kStaged) {
      if (request.isTimed_) place->region = 0;
      return false;
    }
    if (!isStillOffered(reading)) return false;
  } else {
    reading.segment = connection.regions().find(place->region);
    if (reading.segment) {
      reading.from = SharedHeap::memoryAt(*reading.segment, place->offset, bytes);
    }
    if (!reading.from) return false;
  }
  request.isShared_ = true;
  readings_.push_back(std::move(reading));
  return true;
}

void SharedReads::end(const Transfer& request) {
  if (request.isReceive_) {
    std::erase_if(readings_, [&](const Reading& each) { return each.request == &request; });
  } else {
    head_.revocations.fetch_add(1, std::memory_order_seq_cst);
    SharedHeap::process().revoke(SharedHeap::process().find(request.data_));
    std::atomic_thread_fence(std::memory_order_release);  // see SharedHeap::revoke()
  }
}

void SharedReads::onTimed(const Transfer& request, bool isOk) {
  using Choice = SingleCopy::Choice;
  try {
    trials_.end(request.isShared_ ? Choice::kDirect : Choice::kStaged, isOk);
  } catch (const std::bad_alloc&) {  // the round does not count: a request must end in any case
  }
}

bool SharedReads::copyPiece(const Reading& reading, size_t bytes) {
  const Transfer& request = *reading.request;
  const Span& data = request.data_;
  const size_t at = request.transferred_;
  if (!reading.from) {
    const pid_t pid = request.mailbox_->group().peers[request.peer_].pid;
    return readProcess(pid, data.begin() + at, reading.place.offset + at, bytes) == 0;
  }
  copy(data.begin() + at, reading.from + at, bytes, data.bytes >= kStreamingBytes);
  return true;
}

bool SharedReads::isStillOffered(const Reading& reading) const {
  const uint64_t offered = reading.place.revocations;
  if (reading.segment) {
    const RegionHead& head = SharedHeap::headOf(*reading.segment);
    return head.revocations.load(std::memory_order_relaxed) == offered;
  }
  const Transfer& request = *reading.request;
  const PeerAddress& peer = request.mailbox_->group().peers[request.peer_];
  ProcessHead head;
  return watch_.isRunning(peer.uid) &&
         readProcess(peer.pid, &head, reading.place.regionBytes, sizeof(head)) == 0 &&
         std::memcmp(head.uid, peer.uid.data(), sizeof(head.uid)) == 0 &&
         head.revocations.load(std::memory_order_relaxed) == offered;
}

bool SharedReads::read(size_t bytes) {
  if (readings_.empty()) return false;
  Reading reading = std::move(readings_.front());
  readings_.pop_front();
  Transfer& request = *reading.request;
  const Span& data = request.data_;
  const size_t piece = std::min(bytes, data.bytes - request.transferred_);
  if (request.isTimed_ && request.transferred_ == 0) onData();
  const bool isRead = copyPiece(reading, piece);
  request.transferred_ += piece;
  if (isRead && request.transferred_ < data.bytes) {
    readings_.push_back(std::move(reading));
    return true;
  }
  // After all of it was read: see SharedHeap::revoke().
  std::atomic_thread_fence(std::memory_order_seq_cst);
  request.mailbox_->onRead(request, reading.header, isRead && isStillOffered(reading));
  return true;
}

}  // namespace mycoll
