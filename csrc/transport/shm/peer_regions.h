// PeerRegions: the regions of shared tensors (SharedHeap) that this process and one other of its
// host have given to each other. The descriptor of a region is sent once, with the first message
// that refers to it, and is mapped for reading only.
//
// Thread contract: the mesh's I/O lock.
// Lifetime: that of the connection. A reader of a region holds its segment.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "base/deadline.h"
#include "transport/io_lock.h"
#include "transport/shm/segment.h"
#include "transport/shm/shared_heap.h"

namespace mycoll {

class PeerRegions {
 public:
  // One of the two may have no descriptor or no memory left at the moment: a region that could not
  // be read is given again after this time.
  static constexpr std::chrono::milliseconds kTryAgain = grace(500);

  // Maps a region of this size.
  static Status map(Fd fd, size_t bytes, std::shared_ptr<Segment>* result);

  // Whether a message to the peer may refer to this process's region, or to memory of the process
  // (SharedPlace). *attached: set if the descriptor of the region must be sent with the message.
  bool offer(uint64_t region, std::shared_ptr<const Segment>* attached) REQUIRES(ioRole);
  // The peer could not read it.
  void takeBack(uint64_t region) REQUIRES(ioRole);
  // The peer has given a region of this size.
  void add(uint64_t region, size_t bytes, Fd fd) REQUIRES(ioRole);
  // A region that the peer has given. Null if it could not be mapped.
  std::shared_ptr<Segment> find(uint64_t region) const REQUIRES(ioRole);

 private:
  // By number. never(): given. Else it was taken back, and may be given again from then on.
  std::map<uint64_t, Deadline> given_ GUARDED_BY(ioRole);
  // By number.
  std::map<uint64_t, std::shared_ptr<Segment>> known_ GUARDED_BY(ioRole);
};

}  // namespace mycoll
