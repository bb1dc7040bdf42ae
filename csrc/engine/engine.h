// Engine: what all groups of a process share: the mesh, and the one thread that works on operations
// that no other thread waits for.
//
// Thread contract: all [any thread].
// Lifetime: groups hold it by shared_ptr; the last one stops the thread and closes the mesh.
#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "collectives/shm/arena.h"
#include "engine/waits.h"
#include "transport/mesh.h"

namespace mycoll {

class Communicator;
struct GroupOptions;

class Engine {
 public:
  // Returns the process's engine, or makes one, for a rank of a group. A process may hold several
  // ranks of one group, as threads (in tests) or as actors: each of them appears to the others as a
  // process of its own, with an engine of its own. Sets the seat of the options.
  static Status process(GroupOptions* options, std::shared_ptr<Engine>* result);
  // Makes a separate engine: tests give each rank-thread one.
  static Status create(const MeshOptions& options, std::shared_ptr<Engine>* result);

  const std::shared_ptr<Mesh>& mesh() const { return mesh_; }

  void add(const std::shared_ptr<Communicator>& group);
  // Wakes the thread: there is work that no other thread waits for.
  void wake();
  // As wake(), for a message, whose caller most often waits for it next. A thread that has just
  // seen others wait is not woken, and looks by itself a little later.
  void wakeIfAsleep();
  // Bracket the wait of a user's thread, which works while it waits.
  void beginWait() { waitCounts_.fetch_add(kOneWait + 1, std::memory_order_seq_cst); }
  void endWait() { waitCounts_.fetch_sub(1, std::memory_order_seq_cst); }

  // The waits of this process, and the thread that it is called from.
  WaitBoard& waits() { return waits_; }
  Caller& caller() { return caller_; }
  std::vector<std::shared_ptr<Communicator>> groups();
  // A rank of the job that is lost, in a group that has failed and is not being left: the rank's
  // process, and the group's error.
  struct Loss {
    std::string uid;
    Status cause;
  };
  // By the rank in the job.
  std::map<int64_t, Loss> losses();
  // A group has received a message for Diagnosis::handleMessages(). [I/O lock]
  void messageCame() { messages_.fetch_add(1, std::memory_order_release); }
  // Lets the groups handle these messages. For a thread that has waited a while.
  void handleMessages();

 private:
  // A rank of a group, for as long as the seat is referenced.
  struct Seat {
    std::string group;
    int rank;
    int ranks;
  };

  Engine() = default;
  void stop();
  // Whether another rank of the same group has a seat here.
  bool isTakenFor(const Seat& rank) const;
  bool someoneWaits() const { return waitCounts_.load(std::memory_order_relaxed) % kOneWait > 0; }

  // ---- the thread
  void run();
  void work();
  bool workOnce(bool* isNeeded, bool* advanced);
  void doChores();

  // The seats of its ranks. Guarded by the lock of all engines of the process.
  std::vector<std::weak_ptr<const Seat>> seats_;
  std::shared_ptr<Mesh> mesh_;
  std::thread thread_;
  Mutex mutex_;
  std::vector<std::weak_ptr<Communicator>> groups_ GUARDED_BY(mutex_);
  Wakeup wakeup_;
  std::atomic<bool> isStopped_{false};
  // Below kOneWait: threads that wait now. Above: the number of waits begun so far.
  static constexpr uint64_t kOneWait = uint64_t{1} << 32;
  std::atomic<uint64_t> waitCounts_{0};
  // The thread's activity. A caller that brings it work must wake it unless it is working.
  // kWaiting: it waits for wake() only; kSleeping: for socket events, too.
  enum Activity { kWorking, kWaiting, kSleeping };
  std::atomic<int> activity_{kWorking};
  // Used by the thread only.
  std::chrono::steady_clock::time_point nextCheck_, nextChores_;
  WaitBoard waits_;
  Caller caller_;
  std::atomic<int> messages_{0};
};

// For a scope, other ranks ring this process when they have something for it in these arenas, or in
// the mesh.
class Asleep {
 public:
  Asleep(Mesh& mesh, std::span<Arena* const> arenas) : mesh_(mesh), arenas_(arenas) { set(true); }
  ~Asleep() { set(false); }
  Asleep(const Asleep&) = delete;
  Asleep& operator=(const Asleep&) = delete;

 private:
  void set(bool isAsleep) {
    mesh_.setAsleep(isAsleep);
    for (Arena* const arena : arenas_) arena->setAsleep(isAsleep);
  }

  Mesh& mesh_;
  const std::span<Arena* const> arenas_;
};

// While it lives, the engine's thread, once it is awake, waits for messages that no group of this
// process waits for. The mesh outlives it.
class Listening {
 public:
  explicit Listening(Mesh& mesh) : mesh_(mesh) { mesh_.addPending(1); }
  ~Listening() { mesh_.addPending(-1); }
  Listening(const Listening&) = delete;
  Listening& operator=(const Listening&) = delete;

 private:
  Mesh& mesh_;
};

}  // namespace mycoll
