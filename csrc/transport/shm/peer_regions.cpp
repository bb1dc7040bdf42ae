#include "transport/shm/peer_regions.h"

#include <string>
#include <utility>

#include "base/log.h"
#include "transport/shm/link.h"

namespace mycoll {
namespace {

std::string cookieOf(uint64_t region) {
  std::string cookie = "region " + std::to_string(region);
  cookie.resize(kCookieBytes);
  return cookie;
}

}  // namespace

bool PeerRegions::give(uint64_t region, LinkSender& link) {
  const auto known = given_.find(region);
  if (known != given_.end() && !known->second.expired()) return known->second.isNever();
  const std::shared_ptr<Segment> segment = SharedHeap::process().segmentOf(region);
  if (!segment || !link.sendFd(segment->fd(), cookieOf(region))) return false;
  given_[region] = Deadline::never();
  return true;
}

void PeerRegions::takeBack(uint64_t region) { given_[region] = Deadline::after(kTryAgain); }

std::shared_ptr<Segment> PeerRegions::regionOf(uint64_t region, size_t bytes, LinkReceiver& link) {
  const auto [at, isNew] = known_.try_emplace(region);
  std::shared_ptr<Segment>& segment = at->second;
  if (segment) return segment;
  Fd fd = link.takeFd(cookieOf(region));
  if (!isNew && !fd.isOpen()) return nullptr;
  forgetDropped();
  Status status(Code::kNetwork, "the descriptor did not come");
  if (fd.isOpen() && bytes > SharedHeap::kHeadBytes) {
    status = Segment::adopt(std::move(fd), bytes, &segment, Segment::Access::kReadOnly,
                            /*useHugePages=*/true);
  }
  if (status.ok() && SharedHeap::headOf(*segment).magic != RegionHead::kMagic) {
    segment.reset();
    status = Status(Code::kNetwork, "the descriptor is another one");
  }
  if (!status.ok()) {
    MYCOLL_LOG_WARN("shared tensors of a peer are copied: %s", status.message().c_str());
  }
  return segment;
}

void PeerRegions::forgetDropped() {
  std::erase_if(known_, [](const auto& entry) {
    return entry.second &&
           SharedHeap::headOf(*entry.second).isDropped.load(std::memory_order_acquire) != 0;
  });
}

}  // namespace mycoll
