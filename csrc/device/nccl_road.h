// NcclRoad: a group's requests as calls of NCCL's, on the caller's stream (synchronous ones) or on
// a side stream.
//
// Communicators: one for each device that the group is used with, for collectives and batches; one
// for each pair of ranks that send to each other outside of a batch, so that a send meets its
// receive whatever collectives either side has enqueued before it.
//
// Thread contract: as DeviceGroup.
// Lifetimes: a part of its DeviceGroup.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "device/device_group.h"
#include "nccl/collectives.h"
#include "nccl/comm.h"

namespace mycoll {

// Where the nvidia-nccl wheel beside torch has its library; empty: there is none. Once, before the
// first group.
void setNcclWheelFile(std::string path);
// Finds NCCL, or throws why there is none.
void requireNccl(const nccl::Library** library);
// Throws where there is none, or it has no memory to give.
void requireNcclMemory();
// For tests: NCCL is this file, also beside a copy that torch has loaded.
void useNccl(const std::string& path);

// All that they hold are messages.
bool isPointToPoint(const std::vector<Request*>& requests);
// Those among them.
std::vector<ExternalMessage> messagesOf(const std::vector<Request*>& requests);

class NcclRoad {
 public:
  explicit NcclRoad(const DevicePlace& place) : place_(place) {}

  // What this rank can bring to the choice of a road.
  struct Report {
    int32_t version = 0;     // of NCCL; 0: none, and `reason` says why
    uint8_t choice = 0;      // CudaPath
    uint8_t capability = 0;  // of the GPU: 90 for sm_90; 0: not known
    uint32_t kernel = 0;     // hash of what tells machines of one name apart
    char gpu[48] = {};       // which GPU of which host, if that can be known
    char reason[200] = {};
  };
  static Report report(c10::Device device);
  // Not ok: why these ranks cannot use NCCL together (kUnsupported: the host road can serve), or
  // should not (they were told different things).
  static Status judge(const std::vector<Report>& reports, const std::vector<int>& ranks);

  // What all ranks' GPUs can do, of those that have reported.
  void setCapability(const std::vector<Report>& reports);

  // All ranks: makes the communicator that the first collective would make.
  void connect(c10::Device device) { (void)lineFor(device); }

  // On all ranks of the group: gives the child, a group of some of them, a part of this group's
  // communicator; null on ranks that are in no child. Ranks with one color are one child's.
  // isWilling: false where this rank has no child although it should. False: no part was given, on
  // any rank, and the child connects like any other group.
  bool split(NcclRoad* child, int color, bool isWilling);

  // Throws where connecting has failed, which ends the group, if nothing has yet.
  void connected(const Status& status);
  // The communicator of two ranks. For one thread at a time for each peer; waits for that rank.
  void connectPair(c10::Device device, int peer) { (void)pairFor(device, peer); }
  bool hasPair(c10::Device device, int peer) const {
    return find(pairs_, std::make_pair(device.index(), peer)) != nullptr;
  }

  // All of the same device. requests: one, or those of a batch, which become one launch.
  // A batch goes by the group's communicator, even one of a single message.
  DeviceOperationPtr carry(DeviceGroup& group, const std::vector<Request*>& requests, bool isTimed,
                           bool isBatch);

  // Memory of the device that NCCL may then use without copies. isSymmetric: on all ranks, in the
  // same order and sizes.
  Status registerMemory(c10::Device device, void* address, size_t bytes, bool isSymmetric);
  Status deregisterMemory(void* address);

  // Ok while NCCL has no error to report. [watchdog]
  Status check();
  // Stops all there is, on threads of its own.
  void beginAbort(const Status& why);
  // The same, and waits for it, also for what began before, by the deadline.
  void abort(Deadline deadline, const Status& why);
  // Waits for what runs and frees it, by the deadline.
  Status close(Deadline deadline);
  // For a barrier: the streams that this group's collectives are enqueued on. Not those of messages
  // between two ranks: the other end of one may come after the barrier.
  void addStreams(std::vector<c10::Stream>* streams) const;

 private:
  struct Line {  // a communicator, and the stream of its asynchronous operations
    std::shared_ptr<nccl::Comm> communicator;
    c10::Stream stream;
  };
  using LinePtr = std::shared_ptr<Line>;
  struct Registered {
    std::shared_ptr<nccl::Comm> communicator;
    void* handle;          // of memory
    nccl::Window* window;  // of symmetric memory; may be null: NCCL cannot have it here
    bool isSymmetric;
    size_t bytes;
  };

  LinePtr lineFor(c10::Device device);
  LinePtr pairFor(c10::Device device, int peer);
  void connectBothWays(Line& line, int peer);  // peer: as the communicator counts
  nccl::CommOptions optionsOn(c10::Device device) const;
  // What ends NCCL's waits: the group's end, or a signal.
  Status interruption() const;
  LinePtr join(c10::Device device, int rank, int ranks, const std::string& name,
               const nccl::UniqueId& id);
  LinePtr keepUnlessEnded(LinePtr line);
  // Null when there is none yet.
  template <typename Lines, typename Key>
  LinePtr find(const Lines& lines, const Key& key) const {
    std::lock_guard<std::mutex> lock(mutex_);
    auto known = lines.find(key);
    return known == lines.end() ? nullptr : known->second;
  }
  // All lines, none once the group has ended. isEnd: this is its end.
  std::vector<LinePtr> open(bool isEnd);
  std::vector<LinePtr> all() const;  // with mutex_
  nccl::Form formOf(const Request& request) const;
  // peer: of a message, as the communicator counts.
  void enqueue(nccl::Issue& issue, const Request& request, int peer, void* stream);

  const DevicePlace& place_;
  std::atomic<int> capability_{0};  // of the oldest GPU; 0: not known

  std::mutex connectMutex_;  // one connects all ranks at a time; before mutex_
  mutable std::mutex mutex_;
  std::map<c10::DeviceIndex, LinePtr> lines_;                  // guarded by mutex_
  std::map<std::pair<c10::DeviceIndex, int>, LinePtr> pairs_;  // guarded by mutex_; by peer
  std::map<void*, Registered> registered_;                     // guarded by mutex_
  bool isEnded_ = false;                                       // guarded by mutex_
};

}  // namespace mycoll
