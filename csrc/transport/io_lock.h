// The lock of a mesh: it guards the connections, and the mailboxes, memberships and agreements
// of all groups. A process has one mesh, so one name for it is enough for clang to check who
// holds it (base/mutex.h), whichever object's function asks.
//
// Never held while anything blocks or calls a user's code: what is logged meanwhile is written when
// it has been released. Lock order: a group's run lock, its
// queue lock, this one, then the sleeper's and leaves.
#pragma once

#include <mutex>

#include "base/log.h"
#include "base/mutex.h"

namespace mycoll {

class CAPABILITY("I/O lock") IoRole {};
inline IoRole ioRole;

// What a mesh hands out for an IoLock to take.
using IoMutex = std::mutex;

class SCOPED_CAPABILITY IoLock {
 public:
  explicit IoLock(IoMutex& mutex) ACQUIRE(ioRole) : lock_(mutex) {}
  // Takes over a mutex that try_lock() has taken.
  IoLock(IoMutex& mutex, std::adopt_lock_t adopt) ACQUIRE(ioRole) : lock_(mutex, adopt) {}
  ~IoLock() RELEASE() {}
  IoLock(const IoLock&) = delete;
  IoLock& operator=(const IoLock&) = delete;

 private:
  const LogDelay delay_;  // ends after the lock is released
  std::lock_guard<IoMutex> lock_;
};

}  // namespace mycoll
