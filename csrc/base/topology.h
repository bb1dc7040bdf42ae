// Who and where this process is. All [any thread].
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace mycoll {

// Equal in two processes when they run under one kernel and share a network namespace, so that
// they can reach each other by abstract unix socket (which the network namespace scopes).
// A host name would not do: containers of one host, and clones of one image, may share theirs.
std::string hostIdentity();

std::string hostName();

pid_t processId();

// When a process started, in clock ticks since boot; 0 when there is no such process. With the pid
// it names a process for good, where a pid alone may be reused.
uint64_t processStartTicks(pid_t pid);

// As ps shows it: 'R', 'S', 'T' for stopped, 'Z' for a zombie...; 0 when there is no such process.
char processState(pid_t pid);

}  // namespace mycoll
