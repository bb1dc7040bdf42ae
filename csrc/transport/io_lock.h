// The lock of a mesh. It guards the connections, and the mailboxes, memberships and agreements of
// all groups. A process has one mesh, so one capability is enough for clang to check that the
// lock is held (base/mutex.h), in the functions of all these objects.
//
// It is never held while a thread blocks or calls user code: log messages are written after it is
// released. Lock order: a group's run lock, its queue lock, this one, then the sleeper's and leaf
// locks.
#pragma once

#include <mutex>

#include "base/log.h"
#include "base/mutex.h"

namespace mycoll {

class CAPABILITY("I/O lock") IoRole {};
inline IoRole ioRole;

// The mutex type of a mesh, which IoLock takes.
using IoMutex = std::mutex;

class SCOPED_CAPABILITY IoLock {
 public:
  explicit IoLock(IoMutex& mutex) ACQUIRE(ioRole) : lock_(mutex) {}
  // Adopts a mutex that try_lock() has taken.
  IoLock(IoMutex& mutex, std::adopt_lock_t adopt) ACQUIRE(ioRole) : lock_(mutex, adopt) {}
  ~IoLock() RELEASE() {}
  IoLock(const IoLock&) = delete;
  IoLock& operator=(const IoLock&) = delete;

 private:
  const LogDelay delay_;  // ends after the lock is released
  std::lock_guard<IoMutex> lock_;
};

}  // namespace mycoll
