// The address of a process, as it publishes it in the rendezvous store. A plain value.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>
#include <sys/un.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"

namespace mycoll {

struct TcpAddress {
  std::string address;
  int port = 0;
};

struct PeerAddress {
  // Identifies the process's mesh: 16 random bytes in hexadecimal, the size that the handshake has
  // room for. Known only to processes that can read the rendezvous store (and to the network
  // between hosts).
  static constexpr size_t kUidLength = 32;
  std::string uid;
  std::string hostIdentity;  // equal: shared memory is worth trying
  std::string pidSpace;      // equal and not empty: each can see the other's process
  std::string hostName;
  pid_t pid = 0;
  uint64_t startTicks = 0;
  std::vector<TcpAddress> tcp;

  // Whether that process can look at this one, as its pid means the same to both. A process that
  // only has the same host name may be in another pid namespace, or on a clone of the host.
  bool isVisibleTo(const PeerAddress& other) const {
    return !pidSpace.empty() && pidSpace == other.pidSpace;
  }
  // Whether both run under one kernel, as containers of one machine do, whatever their host names.
  bool sharesKernelWith(const PeerAddress& other) const;

  // "node1:4711", for error messages.
  std::string describe() const { return hostName + ":" + std::to_string(pid); }
  // The texts of processes on one host begin alike.
  std::string encode() const;
  // The text is not trusted: an invalid uid is refused.
  static Status decode(std::string_view text, PeerAddress* result);
};

// The addresses of a group's ranks. Copies share them, as there may be thousands.
class PeerList {
 public:
  PeerList() : PeerList(std::vector<PeerAddress>()) {}
  PeerList(std::vector<PeerAddress> peers)
      : peers_(std::make_shared<const std::vector<PeerAddress>>(std::move(peers))) {}
  PeerList(std::initializer_list<PeerAddress> peers) : PeerList(std::vector<PeerAddress>(peers)) {}

  const PeerAddress& operator[](size_t rank) const { return (*peers_)[rank]; }
  size_t size() const { return peers_->size(); }
  bool empty() const { return peers_->empty(); }
  auto begin() const { return peers_->begin(); }
  auto end() const { return peers_->end(); }

 private:
  std::shared_ptr<const std::vector<PeerAddress>> peers_;
};

// A group as one of its ranks knows it. A rank without a uid is absent: nothing can be sent to it.
//
// An invitation is a group of two that reaches a rank which is in no group yet: rank 0 is any
// process that knows the secret, and has no uid in the address that rank 1 has. Most often rank 1
// opens it before it publishes what the secret is made of.
struct GroupAddress {
  bool isInvitation = false;
  bool opensLater = false;  // an invitation that rank 1 may open after rank 0
  bool isOnce = false;      // an invitation that is not opened again: as groups are not
  uint64_t context = 0;     // the same on all ranks, different from all other groups
  std::string name;
  std::string secret;  // 32 bytes that only members know
  int rank = 0;
  PeerList peers;  // by rank
};

// The name of its sockets on its host, where all users can list names. It does not reveal the uid.
std::string publicName(const std::string& uid);
// The address of that name in the abstract namespace, which leaves nothing in a file system.
// Returns its length.
socklen_t unixAddressOf(const char* prefix, const std::string& uid, sockaddr_un* address);

}  // namespace mycoll
