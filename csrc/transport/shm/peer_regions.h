// PeerRegions: the regions of shared tensors (SharedHeap) that this process and one other of its
// host have made known to each other. A region's descriptor goes over once, ahead of the first
// message that speaks of it, and is mapped for reading only.
//
// Thread contract: the mesh's I/O lock.
// Lifetime: of the connection. Whoever reads a region holds its segment.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "base/deadline.h"
#include "transport/io_lock.h"
#include "transport/link.h"
#include "transport/shm/segment.h"
#include "transport/shm/shared_heap.h"

namespace mycoll {

class PeerRegions {
 public:
  // One of the two may have no descriptor or no memory left at that moment: after so long a region
  // that could not be read is given again.
  static constexpr std::chrono::milliseconds kTryAgain{500};

  // The peer can read this process's region from here on. False: it cannot, as yet.
  bool give(uint64_t region, LinkSender& link) REQUIRES(ioRole);
  // The peer could not read it.
  void takeBack(uint64_t region) REQUIRES(ioRole);
  // The peer's region of so many bytes, which it has given. Null: it cannot be mapped.
  std::shared_ptr<Segment> regionOf(uint64_t region, size_t bytes, LinkReceiver& link)
      REQUIRES(ioRole);

 private:
  void forgetDropped() REQUIRES(ioRole);

  // By number. never(): given. Else it was taken back, and may be given from then on.
  std::map<uint64_t, Deadline> given_ GUARDED_BY(ioRole);
  // By number. Null: it could not be mapped.
  std::map<uint64_t, std::shared_ptr<Segment>> known_ GUARDED_BY(ioRole);
};

}  // namespace mycoll
