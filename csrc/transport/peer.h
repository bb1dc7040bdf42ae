// How a process is reached, as it tells the others through the rendezvous store. A plain value.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace mycoll {

struct TcpAddress {
  std::string address;
  int port = 0;
};

struct PeerAddress {
  // Names the process's mesh: 16 random bytes in hexadecimal, which is what the handshake has room
  // for. Only processes that can read the rendezvous store know it (and the network between hosts).
  static constexpr size_t kUidLength = 32;
  std::string uid;
  std::string hostIdentity;  // equal: shared memory is worth trying
  std::string pidSpace;      // equal and not empty: each can look at the other's process
  std::string hostName;
  pid_t pid = 0;
  uint64_t startTicks = 0;
  std::vector<TcpAddress> tcp;

  // Under one kernel, as containers of one machine are, whatever they are called.
  bool sharesKernelWith(const PeerAddress& other) const;

  // "node1:4711", for messages.
  std::string describe() const { return hostName + ":" + std::to_string(pid); }
  std::string encode() const;
  // Anybody may have written the text: what is not a valid uid is refused.
  static Status decode(std::string_view text, PeerAddress* result);
};

// A group as one of its ranks knows it.
struct GroupAddress {
  uint64_t context = 0;  // the same number on all ranks, and no other group's
  std::string name;
  std::string secret;  // 32 bytes that only members know
  int rank = 0;
  std::vector<PeerAddress> peers;  // by rank
};

// What its sockets are called on its host, where all users can list their names. It does not give
// the uid away.
std::string publicName(const std::string& uid);

}  // namespace mycoll
