// A communicator of the stand-in: its ranks, its state as NCCL would report it, and the launches
// that move its data, one after another in the order in which they were issued.
//
// Thread contract: [any thread]; Entry checks that two threads do not enqueue at the same time.
// Lifetimes: found by its handle until destroyed or aborted; launches hold a reference until they
// have run.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "nccl/abi.h"
#include "script.h"
#include "segment.h"

#define NCCL_API extern "C" __attribute__((visibility("default")))

namespace standin::nccl {

using mycoll::nccl::Config;
using mycoll::nccl::DataType;
using mycoll::nccl::RedOp;
using mycoll::nccl::Result;
using mycoll::nccl::UniqueId;
using Handle = mycoll::nccl::RawComm*;

enum class Kind : uint32_t {
  kAllReduce,
  kBroadcast,
  kReduce,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kGather,
  kScatter,
  kSend,
  kReceive,
};

struct Operation {
  Kind kind{};
  const char* name = "";
  const void* send = nullptr;
  void* receive = nullptr;
  size_t count = 0;
  DataType type{};
  RedOp op{};
  int root = -1;  // or the peer of kSend and kReceive
};

size_t sizeOf(DataType type);

class Comm : public std::enable_shared_from_this<Comm> {
 public:
  // device: the current device of the thread that makes the communicator; it never changes.
  Comm(int rank, int ranks, int device, const Config& config);

  const int rank, ranks, device;
  const Config config;
  const bool isBlocking;

  // --- the functions of NCCL that take a handle
  Result connect(const UniqueId& id);
  Result split(int color, int key, Handle* child, const Config& config);
  Result issue(std::vector<Operation> operations, void* stream);
  Result finalize();
  Result destroy();
  Result abort();
  Result revoke();
  Result asyncError();
  // If this is not kSuccess, a call with this communicator returns it.
  Result readiness();

  Result registerBuffer(void** handle);
  Result deregisterBuffer(void* handle);

  // Waits for the device unless the script says otherwise, as cudaMalloc and cudaFree in NCCL may.
  void mayWaitForDevice() const;
  bool isEntered() const;

  // --- for launches
  const Segment& segment() const { return *segment_; }
  bool isAborted() const { return isAborted_; }
  bool isStopped() const { return isAborted_ || isRevoked_; }
  void setError(Result error);
  uint64_t nextCollective() { return collectives_++; }

 private:
  friend class Entry;
  struct Launch;

  Result background(std::function<Result()> job);
  Result meet();
  Result dial(const std::vector<Operation>& operations);
  Result dialAll(const Operation& operation);
  void waitForOthersToLeave();
  void dieUnderThread(const char* function);
  Result makeChild(int color, int key, Handle* child, const Config& config);
  void run(const Launch& launch);
  template <typename Predicate>
  Result await(Predicate isTrue);

  std::unique_ptr<Segment> segment_;
  UniqueId id_{};
  std::atomic<bool> isAborted_{false}, isRevoked_{false};

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  Result state_ = Result::kSuccess;
  int jobs_ = 0;  // that run in the background
  bool isFinalizing_ = false;
  bool isRunning_ = false;
  uint64_t issued_ = 0, passed_ = 0;  // launches, without those of graphs
  int64_t operations_ = 0;
  std::map<void*, int> buffers_;
  int graphs_ = 0;  // launches that graphs hold

  uint64_t collectives_ = 0;  // of the running launch
  uint64_t rounds_ = 0;       // children made; one thread at a time makes one

  std::atomic<bool> isEntered_{false};
  std::atomic<std::thread::id> groupOwner_{};
};

// --- handles: never reused, so that the use of an old handle is always detected

Handle publish(std::shared_ptr<Comm> comm);
void withdraw(const Comm* comm);
// Aborts the process if the handle is not, or no longer, that of a communicator.
std::shared_ptr<Comm> find(Handle handle, const char* function);

// The scope in which a thread is inside NCCL for a device: see one_thread in standin_nccl.h.
class DeviceEntry {
 public:
  DeviceEntry(int device, const char* function);
  ~DeviceEntry();
  DeviceEntry(const DeviceEntry&) = delete;
  DeviceEntry& operator=(const DeviceEntry&) = delete;

 private:
  const int device_;
};

// The scope in which a thread uses a communicator. Aborts the process if two threads do.
class Entry {
 public:
  Entry(Comm& comm, const char* function, bool isGrouped);
  ~Entry() { comm_.isEntered_ = false; }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;
  // Called when the thread's group has ended.
  static void leaveGroup(Comm& comm) { comm.groupOwner_ = std::thread::id(); }

 private:
  Comm& comm_;
  const DeviceEntry onDevice_;
};

// The text of ncclGetLastError. As in NCCL, it belongs to the process and is never cleared.
Result complain(Result result, std::string sentence);
const char* lastComplaint();
inline Result invalid(std::string sentence) {
  return complain(Result::kInvalidArgument, std::move(sentence));
}

// Waits until the predicate is true, the communicator is stopped, or a peer is dead.
template <typename Predicate>
Result Comm::await(Predicate isTrue) {
  for (int poll = 0; !isTrue(); ++poll) {
    if (isStopped()) return complain(Result::kInternalError, "aborted or revoked");
    if (poll % 16 == 0 && segment_ && script().peerDeathIsError) {
      for (int peer = 0; peer < ranks; ++peer) {
        if (segment_->isPeerDead(peer)) {
          return complain(Result::kRemoteError, "rank " + std::to_string(peer) + " is gone");
        }
      }
    }
    nap();
  }
  return Result::kSuccess;
}

// Whether this thread is between ncclGroupStart and ncclGroupEnd (operations.cpp).
bool isGrouping();

// Returns false if an abort stopped it, or if it can never end (mover.cpp).
bool move(Comm& comm, const std::vector<Operation>& operations);

}  // namespace standin::nccl
