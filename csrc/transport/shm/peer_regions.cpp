#include "transport/shm/peer_regions.h"

#include <utility>

#include "base/log.h"

namespace mycoll {

Status PeerRegions::map(Fd fd, size_t bytes, std::shared_ptr<Segment>* result) {
  if (!fd.isOpen() || bytes <= SharedHeap::headBytes()) {
    return Status(Code::kNetwork, "the descriptor did not come");
  }
  std::shared_ptr<Segment> segment;
  MYCOLL_RETURN_IF_ERROR(Segment::adopt(std::move(fd), bytes, &segment, Segment::Access::kReadOnly,
                                        /*useHugePages=*/true));
  if (SharedHeap::headOf(*segment).magic != RegionHead::kMagic) {
    return Status(Code::kNetwork, "the descriptor is another one");
  }
  *result = std::move(segment);
  return Status();
}

bool PeerRegions::offer(uint64_t region, std::shared_ptr<const Segment>* attached) {
  const auto known = given_.find(region);
  if (known != given_.end() && known->second.isNever()) return true;
  if (known != given_.end() && !known->second.expired()) return false;
  if (region >= SharedPlace::kProcess) return true;
  *attached = SharedHeap::process().segmentOf(region);
  if (*attached) given_[region] = Deadline::never();
  return *attached != nullptr;
}

void PeerRegions::takeBack(uint64_t region) { given_[region] = Deadline::after(kTryAgain); }

void PeerRegions::add(uint64_t region, size_t bytes, Fd fd) {
  std::erase_if(known_, [](const auto& entry) { return SharedHeap::isDropped(*entry.second); });
  std::shared_ptr<Segment> segment;
  const Status status = map(std::move(fd), bytes, &segment);
  if (status.ok()) {
    known_[region] = std::move(segment);
  } else {
    MYCOLL_LOG_WARN("shared tensors of a peer are copied: %s", status.message().c_str());
  }
}

std::shared_ptr<Segment> PeerRegions::find(uint64_t region) const {
  const auto found = known_.find(region);
  return found == known_.end() ? nullptr : found->second;
}

}  // namespace mycoll
