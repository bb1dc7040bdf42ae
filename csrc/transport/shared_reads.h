// SharedReads: messages that their receiver reads in place, from a shared tensor of the sender.
//
//   sender                                    receiver
//   offer(): kRequestToSend with a place  ->  begin(), then read(), a piece at a time
//   finishes the request                  <-  kTaken, once all of it is read
//
// A sender that takes the message back meanwhile increments a counter in the tensor's region:
// end(). The receiver checks the counter after reading. If it has changed, the receiver discards
// the data and requests the message as any other (kClearToSend).
//
// Thread contract: the mesh's I/O lock. Lifetime: the mesh owns it. A request that is abandoned is
// removed by end().
#pragma once

#include <cstddef>
#include <deque>
#include <memory>

#include "transport/frame.h"
#include "transport/io_lock.h"
#include "transport/shm/segment.h"
#include "transport/shm/shared_heap.h"
#include "transport/transfer.h"

namespace mycoll {

class Connection;
struct OutItem;

class SharedReads {
 public:
  // The sender's side: adds the place of the message to its kRequestToSend, if the receiver at the
  // other end of this connection can read there.
  static void offer(Transfer& request, Connection& connection, OutItem* item) REQUIRES(ioRole);
  // The receiver's side: returns false if the message cannot be read in place. It arrived with this
  // header over this connection.
  bool begin(Transfer& request, const FrameHeader& header, const SharedPlace& place,
             Connection& connection) REQUIRES(ioRole);
  // Both sides: the request, which is shared, ends before the message was read.
  void end(const Transfer& request) REQUIRES(ioRole);

  // Reads up to this many bytes of one message. Returns false if there is none.
  bool read(size_t bytes) REQUIRES(ioRole);

 private:
  struct Reading {
    Transfer* request;
    FrameHeader header;
    SharedPlace place;
    std::shared_ptr<Segment> segment;
    const char* from;
  };
  std::deque<Reading> readings_ GUARDED_BY(ioRole);  // in turn
};

}  // namespace mycoll
