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

const RegionHead& headOf(const Segment& segment) {
  return *reinterpret_cast<const RegionHead*>(segment.data());
}

}  // namespace

bool PeerRegions::give(uint64_t region, LinkSender& link) {
  if (given_.contains(region)) return true;
  const std::shared_ptr<Segment> segment = SharedHeap::process().segmentOf(region);
  if (!segment || !link.sendFd(segment->fd(), cookieOf(region))) return false;
  given_.insert(region);
  return true;
}

const char* PeerRegions::find(const SharedPlace& place, size_t bytes, LinkReceiver& link,
                              std::shared_ptr<Segment>* segment) {
  const auto [at, isNew] = known_.try_emplace(place.region);
  if (isNew) {
    forgetDropped();
    Status status(Code::kNetwork, "the descriptor did not come");
    Fd fd = link.takeFd(cookieOf(place.region));
    if (fd.isOpen() && place.regionBytes > SharedHeap::kHeadBytes) {
      status = Segment::adopt(std::move(fd), place.regionBytes, &at->second,
                              Segment::Access::kReadOnly, /*useHugePages=*/true);
    }
    if (!status.ok()) {
      MYCOLL_LOG_WARN("shared tensors of a peer are copied: %s", status.message().c_str());
    }
  }
  if (!at->second || headOf(*at->second).magic != RegionHead::kMagic) return nullptr;
  *segment = at->second;
  const size_t end = (*segment)->bytes();
  if (place.offset < SharedHeap::kHeadBytes || place.offset > end || bytes > end - place.offset) {
    return nullptr;
  }
  return (*segment)->data() + place.offset;
}

void PeerRegions::forgetDropped() {
  std::erase_if(known_, [](const auto& entry) {
    return entry.second && headOf(*entry.second).isDropped.load(std::memory_order_acquire) != 0;
  });
}

}  // namespace mycoll
