// A link is this process's end of a connection with another: a LinkSender for the bytes that leave,
// and a LinkReceiver for those that come, reliably and in order. Both share one socket.
// Two implementations: shm/link.h inside a host, tcp/link.h between hosts.
//
// Thread contract: all calls under the mesh's I/O lock, except where marked.
// Nothing here blocks. Data is accepted or delivered as far as there is room.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <string>

#include "base/fd.h"
#include "base/types.h"

namespace mycoll {

// Closed with the later of the two that hold it.
using Socket = std::shared_ptr<const Fd>;

class LinkSender {
 public:
  virtual ~LinkSender() = default;
  // Takes bytes from the parts in order. Returns how many (0: no room now), or -1 when the peer is
  // gone; errno says how.
  virtual ssize_t write(const Span* parts, int count) = 0;
  // About to sleep (true), or awake again: while asleep and short of room, the peer must ring.
  virtual void setAsleep(bool asleep) = 0;
  virtual int fd() const = 0;
  // Beside the bytes: hands the receiver a descriptor under a name of 32 bytes. False where links
  // of this kind cannot.
  virtual bool sendFd(int, const std::string& /*cookie*/) { return false; }
};

class LinkReceiver {
 public:
  virtual ~LinkReceiver() = default;
  // Up to `bytes` into `data`. Returns how many (0: nothing there now), or -1 when the peer has
  // gone and all it had sent was read; errno says how (0: in good order). streaming: the
  // destination will not be read soon by this process.
  virtual ssize_t read(void* data, size_t bytes, bool streaming) = 0;
  // False only if read() would surely return 0. Cheap: no system call.
  virtual bool maybeReadable() const = 0;
  // The next read() asks the kernel, without waiting to be told that there is something.
  virtual void lookAgain() {}
  // The descriptor became readable, or its other end was closed.
  virtual void onEvent(bool isClosed) = 0;
  virtual void setAsleep(bool asleep) = 0;
  virtual int fd() const = 0;
  // What sendFd() sent with this cookie; closed when it has not come.
  virtual Fd takeFd(const std::string& /*cookie*/) { return Fd(); }
  // Those that nobody will take, by the beginning of their cookies.
  virtual void dropFds(const std::string& /*prefix*/) {}
};

struct Link {
  std::unique_ptr<LinkSender> sender;
  std::unique_ptr<LinkReceiver> receiver;
  bool isShm = false;
  // Over TCP: what both ends call the connection that it is the first link of. Not 0.
  uint64_t id = 0;
};

// For tests: may put something of its own between a mesh and each new link.
class LinkTap {
 public:
  virtual std::unique_ptr<LinkSender> tap(std::unique_ptr<LinkSender> link) = 0;
  virtual std::unique_ptr<LinkReceiver> tap(std::unique_ptr<LinkReceiver> link) = 0;

 protected:
  ~LinkTap() = default;
};

}  // namespace mycoll
