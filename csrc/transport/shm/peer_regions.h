// PeerRegions: the regions of shared tensors (SharedHeap) that this process and one other of its
// host have made known to each other. A region's descriptor goes over once, ahead of the first
// message that says what lies there.
//
// Thread contract: the mesh's I/O lock.
// Lifetime: of the connection. Whoever reads a region holds its segment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>

#include "transport/io_lock.h"
#include "transport/link.h"
#include "transport/shm/segment.h"
#include "transport/shm/shared_heap.h"

namespace mycoll {

class PeerRegions {
 public:
  // The peer can read this process's region from here on. False: it cannot.
  bool give(uint64_t region, LinkSender& link) REQUIRES(ioRole);
  // Where something of the peer's can be read: in *segment. Null: it cannot, or is not there.
  const char* find(const SharedPlace& place, size_t bytes, LinkReceiver& link,
                   std::shared_ptr<Segment>* segment) REQUIRES(ioRole);

 private:
  void forgetDropped() REQUIRES(ioRole);

  std::set<uint64_t> given_ GUARDED_BY(ioRole);
  // By number. Null: it could not be mapped.
  std::map<uint64_t, std::shared_ptr<Segment>> known_ GUARDED_BY(ioRole);
};

}  // namespace mycoll
