// SharedReads: messages that their receiver reads in place, from a shared tensor of the sender, or
// from any memory of its process through the kernel (SingleCopy).
//
//   sender                                    receiver
//   offer(): kRequestToSend with a place  ->  begin(), then read(), a piece at a time
//   finishes the request                  <-  kTaken, once all of it is read
//
// A sender that takes the message back meanwhile increments a counter in the tensor's region, or in
// its ProcessHead: end(). The receiver checks the counter after reading. If it has changed, or the
// process cannot be read, the receiver discards the data and requests the message as any other
// (kClearToSend). If staging is faster (CopyTrials), it does so without reading.
//
// Thread contract: the mesh's I/O lock. Lifetime: the mesh owns it. A request that is abandoned is
// removed by end().
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>

#include "transport/copy_trials.h"
#include "transport/frame.h"
#include "transport/io_lock.h"
#include "transport/local.h"
#include "transport/peer.h"
#include "transport/process_watch.h"
#include "transport/shm/segment.h"
#include "transport/shm/shared_heap.h"
#include "transport/transfer.h"

namespace mycoll {

class Connection;
struct OutItem;

// A process keeps this for the readers of its memory, at the address that its offers contain.
struct ProcessHead {
  char uid[PeerAddress::kUidLength] = {};  // of its mesh: no other process has it here
  std::atomic<uint64_t> revocations{0};    // as RegionHead's
};

class SharedReads {
 public:
  SharedReads(const Local& local, const ProcessWatch& watch) : local_(local), watch_(watch) {}

  // The number under which a receiver may refuse the places of such messages, for a while: that of
  // a region, or of a size.
  static uint64_t regionOf(const Span& data);
  // The sender's side: adds the place of the message to its kRequestToSend, if the receiver at the
  // other end of this connection can read there.
  void offer(Transfer& request, Connection& connection, OutItem* item) REQUIRES(ioRole);
  // The receiver's side: returns false if the message is not read in place. It arrived with this
  // header over this connection. Sets place->region to 0 if the sender is to offer the next one,
  // too.
  bool begin(Transfer& request, const FrameHeader& header, SharedPlace* place,
             Connection& connection) REQUIRES(ioRole);
  // Both sides: the request, which is shared, ends before the message was read.
  void end(const Transfer& request) REQUIRES(ioRole);
  // A message that begin() has timed begins to arrive, and has ended, in either way.
  void onData() REQUIRES(ioRole) { trials_.onData(); }
  void onTimed(const Transfer& request, bool isOk) REQUIRES(ioRole);

  // Reads up to this many bytes of one message. Returns false if there is none.
  bool read(size_t bytes) REQUIRES(ioRole);

 private:
  struct Reading {
    Transfer* request;
    FrameHeader header;
    SharedPlace place;
    std::shared_ptr<Segment> segment;
    const char* from;  // null: the place is in the peer's process
  };

  SharedPlace placeInProcess(const Transfer& request) REQUIRES(ioRole);
  bool copyPiece(const Reading& reading, size_t bytes) REQUIRES(ioRole);
  bool isStillOffered(const Reading& reading) const REQUIRES(ioRole);

  const Local& local_;
  const ProcessWatch& watch_;
  ProcessHead head_;
  CopyTrials trials_ GUARDED_BY(ioRole);
  std::deque<Reading> readings_ GUARDED_BY(ioRole);  // in turn
};

}  // namespace mycoll
