// A link is this process's end of a connection with another: a LinkSender for outgoing bytes and a
// LinkReceiver for incoming bytes, reliably and in order. Both share one socket.
// Two implementations: shm/link.h inside a host, tcp/link.h between hosts.
//
// Thread contract: all calls under the mesh's I/O lock.
// Nothing here blocks. Data is accepted or delivered as far as there is room.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <string>

#include "base/fd.h"
#include "base/types.h"

namespace mycoll {

// Closed with the later of the sender and the receiver.
using Socket = std::shared_ptr<const Fd>;

class LinkSender {
 public:
  virtual ~LinkSender() = default;
  // Takes bytes from the parts in order. Returns their number (0: no room now), or -1 with errno if
  // the peer is gone.
  virtual ssize_t write(const Span* parts, int count) = 0;
  // The process is about to sleep (true), or awake again. While it sleeps and the link is short of
  // room, the peer must ring.
  virtual void setAsleep(bool asleep) = 0;
  virtual int fd() const = 0;
  // Sends a descriptor beside the bytes. Returns false if it could not be sent; some kinds of links
  // never can.
  virtual bool sendFd(int) { return false; }
  // Whether the peer has everything that was sent, so that this process may end.
  virtual bool hasArrived() const = 0;
};

class LinkReceiver {
 public:
  virtual ~LinkReceiver() = default;
  // Reads up to `bytes` into `data`. Returns their number (0: nothing there now), or -1 if the peer
  // is gone and everything it sent was read; errno is then the error, or 0 for a clean close.
  // streaming: this process will not read the destination soon.
  virtual ssize_t read(void* data, size_t bytes, bool streaming) = 0;
  // False only if read() would surely return 0. Cheap: no system call.
  virtual bool maybeReadable() const = 0;
  // The next read() asks the kernel, without waiting for an event.
  virtual void lookAgain() = 0;
  // The descriptor became readable, or its other end was closed.
  virtual void onEvent(bool isClosed) = 0;
  virtual void setAsleep(bool asleep) = 0;
  virtual int fd() const = 0;
  // Takes the next descriptor that sendFd() has sent; a closed one if this process had none left
  // when it arrived. Returns false if none has arrived.
  virtual bool takeFd(Fd*) { return false; }
};

struct Link {
  std::unique_ptr<LinkSender> sender;
  std::unique_ptr<LinkReceiver> receiver;
  bool isShm = false;
  // Over TCP: the identifier, at both ends, of the connection that this link began. Not 0.
  uint64_t id = 0;
};

// For tests: may wrap each new link of a mesh.
class LinkTap {
 public:
  virtual std::unique_ptr<LinkSender> tap(std::unique_ptr<LinkSender> link) = 0;
  virtual std::unique_ptr<LinkReceiver> tap(std::unique_ptr<LinkReceiver> link) = 0;

 protected:
  ~LinkTap() = default;
};

}  // namespace mycoll
