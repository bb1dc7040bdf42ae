// DeviceGroup: a group's half for tensors on devices. Requests arrive checked and translated, as
// for the engine, with spans of device memory; they leave on one of two roads:
//
//   NCCL   (nccl_road.h)  where every rank has it
//   host   (host_road.h)  through pinned memory and the CPU engine, where one has not
//
// Which one is agreed on by all ranks at the first collective; two ranks that only send to each
// other agree between themselves.
//
// Order, agreement, deadlines and deaths are the engine's: NCCL's operations are external ones of a
// group of their own, `control`; the host road has another, so that neither shares an order with
// the group's CPU tensors. What kills one of the three kills all.
//
// Thread contract: [any thread], without the GIL. Between beginBatch() and endBatch() the calls are
// of one thread, as in MycollBackend.
// Lifetimes: held by the backend, by works and, while it is busy, by the watchdog.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backend/device_support.h"
#include "device/operation.h"
#include "engine/communicator.h"

namespace mycoll {

class HostRoad;
class NcclRoad;

enum class DeviceRoad : uint8_t { kUnknown, kNccl, kHost };

// Of what two ranks tell each other while they connect: the message that waits for it has a
// deadline of its own, and its text names what the user called.
constexpr std::chrono::milliseconds kNoDeadline = std::chrono::milliseconds::max();

// For NCCL to stop when a group ends; what takes longer goes on without us.
constexpr std::chrono::milliseconds kNcclAbortTime(1000);

// In errors, where the program went on from an operation that was lost.
constexpr char kNotToBeUsed[] = ". What the device has computed since is not to be used";

// Of the control group's name.
constexpr char kControlSuffix[] = " on devices";

// Once in a process for each reason; none where the user has asked for that road.
void warnOfHostRoad(const Status& why);

// What the parts of a DeviceGroup share.
struct DevicePlace {
  std::string name;
  int rank = 0;
  int ranks = 1;
  std::shared_ptr<Communicator> cpu;      // the group itself
  std::shared_ptr<Communicator> control;  // external operations, and notes between the roads
  std::shared_ptr<Communicator> host;     // the host road's
  c10::intrusive_ptr<MycollOptions> options;
  bool waitsOnHost = false;  // MYCOLL_CUDA_BLOCKING_WAIT

  std::chrono::milliseconds timeoutOf(const Request& request) const {
    return request.timeout > std::chrono::milliseconds(0) ? request.timeout : options->timeout;
  }
};

// What has to be over before a barrier.
class DeviceFence final : public Condition {
 public:
  std::vector<EventPtr> events;
  std::vector<DeviceOperationPtr> operations;  // not all on their streams yet

  bool ready() override;
};

// An operation that the watchdog follows to its end.
struct Followed {
  DeviceOperationPtr operation;
  // A collective of NCCL's: its place in the control group. Null: a message, or host road.
  std::shared_ptr<External> external;
  OpPtr op;
  // A message, or a batch of them.
  bool isMessage = false;
  std::vector<ExternalMessage> messages;  // on NCCL, which no group watches over
  std::vector<OpRecord> records;          // of them
  uint32_t calledAt = 0;                  // place in the program; 0: not known
  std::chrono::milliseconds timeout{0};
  Deadline deadline;
  bool ownsDeadline = false;
};

class DeviceGroup final : public DeviceSupport, public std::enable_shared_from_this<DeviceGroup> {
 public:
  // With nothing exchanged, on all ranks that have an accelerator.
  static std::shared_ptr<DeviceSupport> create(std::string name,
                                               std::shared_ptr<Communicator> communicator,
                                               c10::intrusive_ptr<MycollOptions> options);
  explicit DeviceGroup(DevicePlace place);
  ~DeviceGroup() override;

  int rank() const { return place_.rank; }

  WorkPtr launch(Request& request, at::TensorList outputs, Extras extras) override;
  void addToBatch(Request request, at::TensorList outputs) override;
  bool hasBatch() const override { return !batch_.empty(); }
  WorkPtr endBatch(Extras extras) override;
  void dropBatch() override;
  std::shared_ptr<Condition> fence() override;
  Status waitFor(Condition& fence) const override;
  // Of these four the host road needs nothing, and ignores them.
  void connect(c10::Device device) override;
  void split(DeviceSupport* child, int color, bool isWilling) override;
  void registerMemory(c10::Device device, void* address, size_t bytes, bool isSymmetric) override;
  void deregisterMemory(void* address) override;
  uint64_t sequence() const override {
    return place_.control->sequence() + place_.host->sequence();
  }
  std::string path() const override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  Status error() const override;
  void abort(const std::string& reason) override;
  Status drain(Deadline deadline) const override;
  void close(Deadline deadline) override;

  // Runs fn once on the watchdog (it must not block) when the operation is over.
  void onOver(const DeviceOperationPtr& operation, std::function<void(const Status&)> fn);
  // Drops the memory of operations that are over, of any group; for the user's threads, now and
  // then.
  static void clearReleased();

  void fail(const Status& cause);

  // --- for the roads

  // The watchdog takes it from here.
  void follow(Followed followed);
  // The same for a message, or a batch of them, that no group of the engine watches over.
  struct MessagesCalled {
    std::vector<ExternalMessage> messages;
    std::chrono::milliseconds timeout;
    uint32_t calledAt = 0;   // place in the program; 0: not known
    bool isRecorded = true;  // in the black box
  };
  void followMessages(const DeviceOperationPtr& operation, MessagesCalled called);
  // While it lives, a thread waits for other ranks in a way that no operation stands for: the group
  // is watched, so that a failure, or the message's deadline, ends that, too.
  class Waiting {
   public:
    Waiting(DeviceGroup& group, const char* what, const c10::Stream& caller);
    Waiting(DeviceGroup& group, Request& request);  // a message
    ~Waiting();
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    const DeviceOperationPtr operation_;
  };
  // A graph that is captured on this stream holds an operation of this group. Nobody says when it
  // is replayed, so failures are listened for from here on.
  void followCaptured(const c10::Stream& stream);
  // What all ranks have agreed on, or not yet.
  DeviceRoad knownRoad() const { return road_.load(std::memory_order_acquire); }

  // --- for the watchdog
  struct Watched {
    bool isBusy = false;     // there is more to come
    bool hasMoved = false;   // something ended
    bool wantsSoon = false;  // the CPU waits for a device
  };
  Watched watch();
  // There is more to come, or to hear of. [watchdog]
  bool needsWatch() const;

 private:
  struct Batched {
    Request request;
    std::vector<at::Tensor> outputs;
  };
  struct Awaited {
    DeviceOperationPtr operation;
    std::function<void(const Status&)> fn;
  };

  bool isBusy() const;
  bool isDead() const;
  void throwIfDead() const;
  bool hasUndrained() const;
  bool mayReplay() const;
  // caller: what is called, for the error when ranks do not come.
  void chooseRoad(c10::Device device, const std::string& caller);
  // isBatch: also where it is a batch of one: the others' may have more, and all take one road.
  WorkPtr carry(const std::vector<Request*>& requests, at::TensorList outputs, Extras extras,
                bool isBatch);
  // The same; the requests' device is current.
  WorkPtr carryHere(const std::vector<Request*>& requests, at::TensorList outputs, Extras extras,
                    bool isBatch);
  // With mutex_ held: on all that are followed.
  template <typename Fn>
  void forEachFollowed(Fn fn) const {
    for (const Followed& entry : inOrder_) fn(entry);
    for (const Followed& entry : followed_) fn(entry);
  }
  std::string describe(const Followed& followed) const;
  // A message between two ranks: whether it goes by NCCL is theirs to agree on.
  DeviceOperationPtr carryMessage(Request& request, bool isTimed);
  bool connectWith(Request& request);
  bool agreeWith(c10::Device device, int peer);
  std::optional<bool> pairOnNccl(c10::Device device, int peer) const;  // empty: not connected yet
  void takeEnded(std::vector<Followed>* ended);
  // Takes those entries of a list that are over, which is guarded by mutex_. [watchdog]
  template <typename Entry>
  std::vector<Entry> takeOver(std::vector<Entry>* entries);
  void failLate();
  void hearOfFailures();
  // Fails what is followed.
  void endWith(const Status& cause);
  void tellProgram(const Status& cause, const std::string& what);
  void endFollowed(const std::vector<Followed>& ended);
  void releaseLingering();
  void tellAwaited();

  const DevicePlace place_;

  std::mutex chooseMutex_;
  std::atomic<DeviceRoad> road_{DeviceRoad::kUnknown};
  const std::unique_ptr<NcclRoad> nccl_;
  const std::unique_ptr<HostRoad> host_;

  std::timed_mutex pairMutex_;  // one connects with another rank at a time; before mutex_
  std::map<int, bool> pairs_;   // guarded by mutex_: by peer, whether they are on NCCL

  std::vector<Batched> batch_;  // of the thread that is coalescing

  mutable std::mutex mutex_;
  // Guarded by mutex_, oldest first: NCCL's collectives, which end one after another, of which
  // there are thousands where a program runs ahead of its device; and all others.
  std::deque<Followed> inOrder_;
  std::vector<Followed> followed_;
  std::vector<Awaited> awaited_;         // guarded by mutex_
  std::vector<c10::Device> devices_;     // guarded by mutex_: that were used
  std::vector<c10::Stream> capturedOn_;  // guarded by mutex_: streams of graphs, and their devices'
  std::atomic<bool> isCaptured_{false};
  std::atomic<bool> isClosed_{false};
  std::atomic<bool> isLeft_{false};          // what is heard from here on is this rank's own end
  std::atomic<bool> isAbortedHere_{false};   // by the program, which knows
  std::atomic<bool> isSpread_{false};        // NCCL has been told to stop
  std::atomic<bool> hasLost_{false};         // something that the program went on from
  mutable std::atomic<bool> isTold_{false};  // a call has thrown the failure in the main thread
  // The watchdog's own.
  // Over; their memory is not handed on yet, as after a failure the device may still use it.
  std::vector<DeviceOperationPtr> lingering_;
  std::chrono::steady_clock::time_point ncclErrorSince_;
  std::chrono::steady_clock::time_point askedAt_;
};

}  // namespace mycoll
