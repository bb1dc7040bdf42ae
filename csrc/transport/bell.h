// Bells wake a sleeping process of the same host: one datagram socket in the abstract namespace per
// process, on which anybody may send an empty message. Who rings says nothing and is believed
// nothing: the woken process looks at its memory and finds out.
#pragma once

#include <sys/un.h>

#include <string>

#include "base/fd.h"
#include "base/status.h"

namespace mycoll {

// Where to ring. Copyable; `socket` is borrowed from the process's BellSocket, which the mesh
// keeps for as long as any link or group can ring.
class Bell {
 public:
  Bell() = default;
  Bell(int socket, const std::string& uid);
  // Any thread. Never blocks; a full queue means that the peer is about to wake anyway.
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
  Bell bellOf(const std::string& uid) const { return Bell(socket_.get(), uid); }
  // Takes all that has arrived.
  // False: some may be left.
  bool drain();

 private:
  Fd socket_;
};

}  // namespace mycoll
