// ProcessWatch: the peers' processes, as far as this host's kernel shows them. Tells of each that
// has ended, once.
//
// Thread contract: the mesh's I/O lock.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/fd.h"
#include "transport/io_lock.h"
#include "transport/peer.h"
#include "transport/sleeper.h"

namespace mycoll {

class ProcessWatch {
 public:
  explicit ProcessWatch(Sleeper& sleeper) : sleeper_(sleeper) {}

  // sharesMemory: what it had sent is there at once. self: this process.
  void add(const PeerAddress& peer, bool sharesMemory, const PeerAddress& self) REQUIRES(ioRole);
  void remove(const std::string& uid) REQUIRES(ioRole) { processes_.erase(uid); }

  // Whether it can be seen at all: not on another host, nor in another pid namespace.
  bool isVisible(const std::string& uid) const REQUIRES(ioRole) {
    return processes_.count(uid) > 0;
  }
  // It is no more, or the kernel is taking it apart.
  bool isEnding(const std::string& uid) const REQUIRES(ioRole);
  // hasEnded() has said so.
  bool isLost(const std::string& uid) const REQUIRES(ioRole);

  // The process whose descriptor this is, if it has really ended; else empty.
  std::string endedBy(int fd) const REQUIRES(ioRole);
  // Of a process that has ended. True once, when it is time to count it as lost: at once where
  // memory is shared, else a little after its end.
  bool hasEnded(const std::string& uid) REQUIRES(ioRole);

  struct Seen {
    std::string uid;
    pid_t pid;
    uint64_t startTicks;
  };
  // Those that are not lost: to be looked at without the lock, as there may be many.
  std::vector<Seen> living() const REQUIRES(ioRole);

 private:
  struct Process {
    pid_t pid = 0;
    uint64_t startTicks = 0;
    bool sharesMemory = false;
    Fd fd;  // becomes readable at the end; closed where the kernel has none
    int64_t endingSince = 0;
    bool isLost = false;
  };

  Sleeper& sleeper_;
  std::map<std::string, Process> processes_ GUARDED_BY(ioRole);  // by uid
};

// The time of the steady clock.
int64_t nowMilliseconds();

}  // namespace mycoll
