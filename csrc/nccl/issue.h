// The right to enqueue on a communicator: holds its issue mutex, and balances ncclGroupStart with
// ncclGroupEnd. Several operations of one Issue become one launch.
//
// Threads: used only by the thread that made it, which must not make another one of the same
// communicator meanwhile. Short-lived.
#pragma once

#include <mutex>

#include "nccl/comm.h"

namespace mycoll::nccl {

class Issue {
 public:
  explicit Issue(Comm& comm);
  ~Issue() { (void)end(); }  // an error of an end() that was not called is then only in cause()
  Issue(const Issue&) = delete;
  Issue& operator=(const Issue&) = delete;

  // Why nothing can be enqueued; after a failed call, its error.
  const Status& status() const { return status_; }

  // From here on until end(), operations form one group. May be called repeatedly.
  Status group();

  // After each call into NCCL. kInProgress is waited for here, or at end() in a group. A failure
  // makes the communicator kFailed: other ranks may have started what this one did not.
  Status take(Result result, const char* function);

  // Everything enqueued is on its stream when this returns ok. No other thread enqueues before the
  // Issue is destroyed.
  Status end();

  Comm& comm() { return comm_; }
  RawComm* handle() const { return handle_; }
  const Functions& functions() const { return comm_.library_.functions(); }

 private:
  Comm& comm_;
  std::unique_lock<std::mutex> lock_;
  RawComm* handle_ = nullptr;
  Status status_;
  bool isGrouped_ = false;
};

}  // namespace mycoll::nccl
