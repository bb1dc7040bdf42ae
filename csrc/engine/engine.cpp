#include "engine/engine.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <system_error>
#include <utility>

#include "base/os.h"
#include "base/wait.h"
#include "engine/communicator.h"
#include "observe/trace_file.h"

namespace mycoll {
namespace {

using Clock = std::chrono::steady_clock;

// While the user's threads work themselves, the engine's thread looks again after this time.
constexpr auto kWaitForWork = std::chrono::milliseconds(5);
// How often the thread does what no other thread may be there for: doChores().
constexpr auto kChores = std::chrono::milliseconds(250);
// An idle thread checks unfinished handshakes and the peers' processes this often.
constexpr auto kHousekeeping = std::chrono::milliseconds(1000);

// The engines of this process. The first one serves nearly all groups.
struct ProcessEngines {
  Mutex mutex;
  std::vector<std::weak_ptr<Engine>> engines GUARDED_BY(mutex);
};

}  // namespace

Status Engine::process(GroupOptions* group, std::shared_ptr<Engine>* result) {
  const auto rank = std::make_shared<const Seat>(Seat{group->name, group->rank, group->ranks});
  ProcessEngines& shared = perProcess<ProcessEngines>();
  std::vector<std::shared_ptr<Engine>> living;  // released without the lock
  MutexLock lock(shared.mutex);
  std::erase_if(shared.engines, [&](const auto& entry) {
    living.push_back(entry.lock());
    return living.back() == nullptr;
  });
  const auto isFree = [&](const auto& engine) { return engine && !engine->isTakenFor(*rank); };
  const auto found = std::find_if(living.begin(), living.end(), isFree);
  if (found != living.end()) {
    *result = *found;
  } else {
    MeshOptions options;
    MYCOLL_RETURN_IF_ERROR(MeshOptions::fromEnv(&options));
    options.storeHost = group->storeHost;
    MYCOLL_RETURN_IF_ERROR(create(options, result));
    shared.engines.push_back(*result);
  }
  std::erase_if((*result)->seats_, [](const auto& entry) { return entry.expired(); });
  (*result)->seats_.push_back(rank);
  group->seat = rank;
  return Status();
}

bool Engine::isTakenFor(const Seat& rank) const {
  return std::any_of(seats_.begin(), seats_.end(), [&](const auto& entry) {
    const std::shared_ptr<const Seat> seat = entry.lock();
    return seat && seat->group == rank.group && seat->ranks == rank.ranks &&
           seat->rank != rank.rank;
  });
}

// The thread itself may drop the last group. So it holds the engine, too, until it ends; what
// others hold stops it.
Status Engine::create(const MeshOptions& options, std::shared_ptr<Engine>* result) {
  auto engine = std::shared_ptr<Engine>(new Engine);
  MYCOLL_RETURN_IF_ERROR(Mesh::create(options, &engine->mesh_));
  try {
    const SignalsBlocked blocked;
    engine->thread_ = std::thread([engine] { engine->run(); });
  } catch (const std::system_error& error) {
    return Status(Code::kInternal, std::string("cannot start a thread: ") + error.what());
  }
  pthread_setname_np(engine->thread_.native_handle(), "mycoll");
  result->reset(engine.get(),
                [engine](Engine*) mutable { std::exchange(engine, nullptr)->stop(); });
  return Status();
}

void Engine::stop() {
  isStopped_ = true;
  wakeup_.notify();
  mesh_->sleeper().wakeAll();
  if (std::this_thread::get_id() == thread_.get_id()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

void Engine::add(const std::shared_ptr<Communicator>& group) {
  MutexLock lock(mutex_);
  std::erase_if(groups_, [](const auto& entry) { return entry.expired(); });
  groups_.push_back(group);
}

std::map<int64_t, Engine::Loss> Engine::losses() {
  std::map<int64_t, Loss> found;
  for (const auto& group : groups()) {
    const Status cause = group->error();
    if (!group->options().isOfJob || group->membership().isLeaving() || cause.ok()) continue;
    const std::vector<int64_t> numbers = jobRanks(group->options());
    for (int rank = 0; rank < group->ranks(); ++rank) {
      const PeerAddress& peer = group->address().peers[rank];
      if (rank == group->rank() || !mesh()->hasLost(peer)) continue;
      found.emplace(numbers[rank], Loss{peer.uid, cause});
    }
  }
  return found;
}

void Engine::wake() {
  // Pairs with work(): either that thread sees the work, or this one sees that it sleeps.
  if (activity_.fetch_add(0, std::memory_order_seq_cst) == kWorking) return;
  wakeup_.notify();
  mesh_->sleeper().wakeAll();
}

void Engine::wakeIfAsleep() {
  if (activity_.fetch_add(0, std::memory_order_seq_cst) == kSleeping) wake();
}

std::vector<std::shared_ptr<Communicator>> Engine::groups() {
  std::vector<std::shared_ptr<Communicator>> found;
  MutexLock lock(mutex_);
  for (auto& entry : groups_) {
    if (auto group = entry.lock()) found.push_back(std::move(group));
  }
  return found;
}

void Engine::handleMessages() {
  if (messages_.load(std::memory_order_relaxed) == 0) return;
  messages_.exchange(0, std::memory_order_acquire);
  for (auto& group : groups()) group->diagnosis().handleMessages();
}

// True if anything moved. *isNeeded: there is work that no other thread will do. *advanced: a queue
// advanced, or bytes moved within this host.
bool Engine::workOnce(bool* isNeeded, bool* advanced) {
  const std::vector<std::shared_ptr<Communicator>> living = groups();
  *advanced = false;
  bool moved = mesh_->progress(advanced);
  handleMessages();
  *isNeeded = mesh_->hasPending() && !someoneWaits();
  for (auto& group : living) {
    if (!group->queue().isUnattended()) continue;
    *isNeeded = true;
    *advanced |= group->queue().run(0);
  }
  return moved || *advanced;
}

// Retries when memory runs out. The mesh, which cannot resume an interrupted step, then fails its
// groups itself.
void Engine::run() {
  for (;;) {
    try {
      return work();
    } catch (const std::bad_alloc&) {
      activity_.exchange(kWorking, std::memory_order_seq_cst);
      sched_yield();
    }
  }
}

void Engine::work() {
  auto lastMove = Clock::now();
  uint64_t lastWaits = 0;
  for (;;) {
    const uint64_t generation = mesh_->sleeper().generation();
    if (isStopped_) return;
    bool isNeeded = false, advanced = false;
    doChores();
    if (workOnce(&isNeeded, &advanced)) {
      if (advanced) lastMove = Clock::now();
      continue;
    }
    if (!isNeeded) {
      const uint64_t waitsNow = waitCounts_.load(std::memory_order_relaxed);
      const bool areOthersAtIt = someoneWaits() || waitsNow != std::exchange(lastWaits, waitsNow);
      activity_.exchange(areOthersAtIt ? kWaiting : kSleeping, std::memory_order_seq_cst);
      // Look once more: from here on a caller that brings work wakes this thread.
      if (!workOnce(&isNeeded, &advanced) && !isNeeded) {
        if (areOthersAtIt) {
          // The user's threads wait for their operations themselves. Their sockets' events would
          // wake this thread for nothing, so it waits for no events until the process is quiet.
          wakeup_.wait(kWaitForWork);
          mesh_->progress(nullptr, /*polls=*/true);
        } else {
          mesh_->sleeper().idle(generation, Deadline::after(kHousekeeping));
          mesh_->checkProcesses();
        }
      }
      activity_.exchange(kWorking, std::memory_order_seq_cst);
      lastMove = Clock::now();
      continue;
    }
    // The work waits for peers. Yield, then sleep: the cores belong to the user's computation.
    if (Clock::now() - lastMove < std::chrono::microseconds(200)) {
      sched_yield();
      continue;
    }
    // First: a group that gets work after the next lines have looked at it wakes this thread.
    activity_.exchange(kSleeping, std::memory_order_seq_cst);
    std::vector<std::shared_ptr<Communicator>> asleep = groups();
    std::erase_if(asleep, [](const auto& group) { return !group->queue().isUnattended(); });
    Sleeper::Nap nap(mesh_->sleeper(), generation);
    std::vector<Arena*> arenas;
    for (const auto& group : asleep) {
      if (Arena* const arena = group->arena()) arenas.push_back(arena);
    }
    const Asleep ringing(*mesh_, arenas);
    if (!workOnce(&isNeeded, &advanced)) {
      // Without a group that waits, only handshakes, queued messages and new groups are waited for.
      nap.sleep(Deadline::after(asleep.empty() ? kChores : kWaitTick));
      mesh_->checkProcesses();
    }
    activity_.exchange(kWorking, std::memory_order_seq_cst);
    if (advanced) lastMove = Clock::now();
  }
}

// Periodic background work; most of the time it is not due. It is done also while the thread has
// always something to move.
void Engine::doChores() {
  const auto now = Clock::now();
  if (now < nextCheck_) return;
  nextCheck_ = now + kWaitTick;
  const std::vector<std::shared_ptr<Communicator>> living = groups();
  for (auto& group : living) {
    if (!group->queue().isUnattended()) continue;
    mesh_->checkProcesses();
    group->diagnosis().checkHealth();
  }
  if (now < nextChores_) return;
  nextChores_ = now + kChores;
  flushLog();
  bool isUnseen = false;
  for (auto& group : living) {
    // Another rank of the host may have failed a group that no thread of this process waits in.
    isUnseen |= !group->queue().hasWaiters() && group->membership().checkArena();
    group->diagnosis().checkMessages();
    if (group->hasFailed()) group->releaseWindows();
  }
  TraceFile::writeInBackground(isUnseen);
}

}  // namespace mycoll
