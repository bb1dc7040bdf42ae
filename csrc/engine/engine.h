// Engine: what all groups of a process share: the endpoint, and the one thread that works on
// operations nobody waits for.
//
// Thread contract: all [any thread].
// Lifetime: groups hold it by shared_ptr; the last one stops the thread and closes the endpoint.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"
#include "transport/endpoint.h"

namespace mycoll {

class Group;

class Engine {
 public:
  // The process's, made when there is none. storeHost: as in EndpointOptions.
  static Status process(const std::string& storeHost, std::shared_ptr<Engine>* result);
  // One of its own: tests give each rank-thread one.
  static Status create(const EndpointOptions& options, std::shared_ptr<Engine>* result);
  ~Engine();

  const std::shared_ptr<Endpoint>& endpoint() const { return state_->endpoint; }

  void add(const std::shared_ptr<Group>& group);
  // There is work that nobody waits for.
  void poke() { state_->poke(); }
  // Brackets a user's thread that waits, and therefore works.
  void addWaiter(int delta) { state_->waiters.fetch_add(delta, std::memory_order_seq_cst); }

 private:
  // Outlives the engine where the thread itself drops the last group.
  struct State {
    std::shared_ptr<Endpoint> endpoint;
    std::mutex mutex;
    std::condition_variable poked;
    std::vector<std::weak_ptr<Group>> groups;  // guarded by mutex
    bool isStopped = false;                    // guarded by mutex
    std::atomic<int> waiters{0};
    // What the thread is at: who brings it work must wake it from all but the first.
    enum Activity { kWorking, kSleeping };
    std::atomic<int> activity{kWorking};
    uint64_t pokes = 0;  // guarded by mutex

    void poke();
    void run();
    void rest(uint64_t generation, uint64_t seenPokes);
    bool workOnce(bool* isNeeded);
    bool stopped();
  };

  Engine() = default;

  std::shared_ptr<State> state_ = std::make_shared<State>();
  std::thread thread_;
};

}  // namespace mycoll
