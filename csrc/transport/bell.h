// Bells wake a sleeping process of the same host. Each process has one datagram socket in the
// abstract namespace, and any process of the host may send an empty message to it. The message
// carries no information: the process that it wakes re-checks its own memory.
#pragma once

#include <sys/un.h>

#include <string>

#include "base/fd.h"
#include "base/status.h"

namespace mycoll {

// The address of a process's bell. Copyable; `socket` is borrowed from this process's BellSocket,
// which the mesh keeps for as long as any link or group can ring.
class Bell {
 public:
  Bell() = default;
  Bell(int socket, const std::string& uid);
  // Any thread. Never blocks: if the peer's queue is full, the peer is about to wake anyway.
  void ring() const;

 private:
  int socket_ = -1;
  sockaddr_un address_{};
  unsigned length_ = 0;
};

class BellSocket {
 public:
  // Listens under this process's uid.
  Status open(const std::string& uid);
  int fd() const { return socket_.get(); }
  // Receives all messages that have arrived. Returns false if some may be left.
  bool drain();

 private:
  Fd socket_;
};

}  // namespace mycoll
