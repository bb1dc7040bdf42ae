// How a process is reached, as it tells the others through the rendezvous store. A plain value.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace mycoll {

struct TcpAddress {
  std::string address;
  int port = 0;
};

struct PeerAddress {
  std::string uid;           // of the process's endpoint, random
  std::string hostIdentity;  // equal: shared memory is worth trying
  std::string hostName;
  pid_t pid = 0;
  uint64_t startTicks = 0;
  std::vector<TcpAddress> tcp;

  // "node1:4711", for messages.
  std::string describe() const { return hostName + ":" + std::to_string(pid); }
  std::string encode() const;
  static Status decode(const std::string& text, PeerAddress* result);
};

}  // namespace mycoll
