// ProcessWatch: the peers' processes, as far as this host's kernel shows them. Reports once that a
// process has ended.
//
// Thread contract: the mesh's I/O lock.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
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

  // sharesMemory: everything that it sent is visible immediately. self: this process.
  void add(const PeerAddress& peer, bool sharesMemory, const PeerAddress& self) REQUIRES(ioRole);
  void remove(const std::string& uid) REQUIRES(ioRole) { processes_.erase(uid); }

  // Its pidfd, which is readable after its end: until then, the pid is its own. Null if it has
  // none: it is not visible here, it is lost, or the kernel is too old.
  std::shared_ptr<const Fd> descriptorOf(const std::string& uid) const REQUIRES(ioRole);
  // Whether it has one and has not ended.
  bool isRunning(const std::string& uid) const REQUIRES(ioRole);
  // Whether it has ended, or the kernel is tearing it down.
  bool isEnding(const std::string& uid) const REQUIRES(ioRole);
  // Whether hasEnded() has returned true for it.
  bool isLost(const std::string& uid) const REQUIRES(ioRole);

  // The process whose descriptor this is, if it has really ended; else empty.
  std::string endedBy(int fd) const REQUIRES(ioRole);
  // Called for a process that has ended. Returns true once, when it should be declared lost:
  // immediately if memory is shared, else a little later.
  bool hasEnded(const std::string& uid) REQUIRES(ioRole);

  struct Seen {
    std::string uid;
    pid_t pid;
    uint64_t startTicks;
  };
  // The next processes, in turn, that are not lost: at most so many. Looking at one costs four
  // system calls, so each process of a host with many looks at a part of the others at a time. They
  // begin at different ones. To be checked without the lock.
  std::vector<Seen> next(size_t atMost) REQUIRES(ioRole);

 private:
  struct Process {
    pid_t pid = 0;
    uint64_t startTicks = 0;
    bool sharesMemory = false;
    std::shared_ptr<const Fd> fd;
    int64_t endingSince = 0;
    bool isLost = false;
  };

  Sleeper& sleeper_;
  std::map<std::string, Process> processes_ GUARDED_BY(ioRole);  // by uid
  std::string latest_ GUARDED_BY(ioRole);                        // returned by next()
};

// The time of the steady clock.
int64_t nowMilliseconds();

}  // namespace mycoll
