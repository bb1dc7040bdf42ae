// Windows: the memory of one rank of a group that other ranks write to without a receive, and the
// signals that they send.
//
// A put is read directly into its window, or discarded if the window has been closed. A signal is
// an empty message of the window's class: it matches a posted receive, or is counted, by window and
// source, until one is posted. A rank that writes beyond a window, or to one that never existed,
// has broken the protocol and fails the group.
//
// Thread contract: that of the mailbox. Lifetime: the mailbox owns it.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "base/call.h"
#include "base/status.h"
#include "base/types.h"
#include "transport/frame.h"
#include "transport/io_lock.h"
#include "transport/transfer.h"

namespace mycoll {

class Windows {
 public:
  explicit Windows(Mailbox& mailbox) : mailbox_(mailbox) {}

  // From now on other ranks may write to this memory, and signal. Window numbers only grow, and are
  // the same on all ranks. Each rank opens a window before any other rank can know that it has.
  void open(uint64_t window, Span memory);
  // Nothing is written to the window any more. Ends the requests posted for it with this status.
  void close(uint64_t window, const Status& status);
  // Posts, like Mailbox::send(), a write to a window of another rank, from this offset on. The
  // caller has checked that the data fits.
  void put(Transfer& request, int destination, uint64_t window, uint64_t offset,
           const Signature& signature, Span data);

  // ---- for the mailbox
  // Where the payload of a put or a signal goes.
  FrameTarget onFrame(const FrameHeader& came) REQUIRES(ioRole);
  // For a receive of a signal: returns true if it need not wait for one, and has been finished.
  bool finishNow(Transfer& request) REQUIRES(ioRole);

 private:
  struct Window {
    Span memory;
    std::vector<uint64_t> signals;  // by source: those without a receive
  };

  Mailbox& mailbox_;
  std::map<uint64_t, Window> open_ GUARDED_BY(ioRole);
  uint64_t last_ GUARDED_BY(ioRole) = 0;
};

}  // namespace mycoll
