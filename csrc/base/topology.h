// The identity and the place of this process. All [any thread].
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace mycoll {

// Equal in two processes when they run under one kernel and share a network namespace, so that
// they can reach each other by abstract unix socket (which the network namespace scopes).
// A host name is not enough: containers of one host, and clones of one image, may share theirs.
std::string hostIdentity();

// Equal in two processes when they run under one kernel, and so see the same devices.
std::string kernelIdentity();

// Equal in two processes of one kernel and one pid namespace, where a pid means the same process to
// both. Empty where that is not known.
std::string pidSpace();

std::string hostName();

pid_t processId();

// When a process started, in clock ticks since boot; 0 when there is no such process. Identifies a
// process together with the pid, which alone may be reused.
uint64_t processStartTicks(pid_t pid);

// The observable state of a process of this host.
//   kEnding  it was killed or has left, and the kernel is still taking it apart: its sockets stay
//            open and its pidfd silent, for 40 ms for every GB of its memory
//   kGone    there is no such process (any more); also where it lives in another pid namespace
enum class ProcessLife { kAlive, kBusy, kStopped, kEnding, kGone };

// Looks at the process that had this pid and started at startTicks. Takes about 10 us.
ProcessLife lookAtProcess(pid_t pid, uint64_t startTicks);

inline bool isLiving(ProcessLife life) { return life < ProcessLife::kEnding; }

}  // namespace mycoll
