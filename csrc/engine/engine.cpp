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
// The interval of doChores().
constexpr auto kChores = std::chrono::milliseconds(250);
// An idle thread checks unfinished handshakes and the peers' processes this often.
constexpr auto kHousekeeping = std::chrono::milliseconds(1000);

// The engines of this process. The first one serves nearly all groups.
struct ProcessEngines {
  Mutex mutex;
  std::vector<std::weak_ptr<Engine>> engines GUARDED_BY(mutex);
};

}  // namespace

Status Engine::process(const std::string& storeHost, Seat rank, std::shared_ptr<Engine>* result,
                       std::shared_ptr<const Seat>* seat) {
  ProcessEngines& shared = perProcess<ProcessEngines>();
  std::vector<std::shared_ptr<Engine>> living;  // released without the lock
  MutexLock lock(shared.mutex);
  std::erase_if(shared.engines, [&](const auto& entry) {
    living.push_back(entry.lock());
    return living.back() == nullptr;
  });
  const auto isFree = [&](const auto& engine) { return engine && !engine->isTakenFor(rank); };
  const auto found = std::find_if(living.begin(), living.end(), isFree);
  if (found != living.end()) {
    *result = *found;
  } else {
    MeshOptions options;
    MYCOLL_RETURN_IF_ERROR(MeshOptions::fromEnv(&options));
    options.storeHost = storeHost;
    MYCOLL_RETURN_IF_ERROR(create(options, result));
    shared.engines.push_back(*result);
  }
  *seat = std::make_shared<const Seat>(std::move(rank));
  std::erase_if((*result)->seats_, [](const auto& entry) { return entry.expired(); });
  (*result)->seats_.push_back(*seat);
  return Status();
}

bool Engine::isTakenFor(const Seat& rank) const {
  return std::any_of(seats_.begin(), seats_.end(), [&](const auto& entry) {
    const std::shared_ptr<const Seat> seat = entry.lock();
    return seat && seat->group == rank.group && seat->ranks == rank.ranks &&
           seat->rank != rank.rank;
  });
}

Status Engine::create(const MeshOptions& options, std::shared_ptr<Engine>* result) {
  auto engine = std::shared_ptr<Engine>(new Engine);
  MYCOLL_RETURN_IF_ERROR(Mesh::create(options, &engine->progress_->mesh));
  try {
    const SignalsBlocked blocked;
    engine->thread_ = std::thread([progress = engine->progress_] { progress->run(); });
  } catch (const std::system_error& error) {
    return Status(Code::kInternal, std::string("cannot start a thread: ") + error.what());
  }
  pthread_setname_np(engine->thread_.native_handle(), "mycoll");
  *result = std::move(engine);
  return Status();
}

Engine::~Engine() {
  if (!thread_.joinable()) return;  // create() has failed
  {
    MutexLock lock(progress_->mutex);
    progress_->isStopped = true;
    ++progress_->wakeUps;
    progress_->woken.notify_all();
  }
  progress_->mesh->sleeper().wakeAll();
  if (std::this_thread::get_id() == thread_.get_id()) {
    thread_.detach();  // it dropped the last group itself, and ends now
  } else {
    thread_.join();
  }
}

void Engine::add(const std::shared_ptr<Communicator>& group) {
  MutexLock lock(progress_->mutex);
  std::erase_if(progress_->groups, [](const auto& entry) { return entry.expired(); });
  progress_->groups.push_back(group);
}

std::shared_ptr<Communicator> Engine::groupWith(std::vector<int64_t> ranks) {
  std::sort(ranks.begin(), ranks.end());
  for (const auto& group : groups()) {
    if (!group->options().isOfJob || group->membership().isLeaving()) continue;
    std::vector<int64_t> members = jobRanks(group->options());
    std::sort(members.begin(), members.end());
    if (std::includes(members.begin(), members.end(), ranks.begin(), ranks.end())) return group;
  }
  return nullptr;
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

void Engine::Progress::wake() {
  // Pairs with work(): either that thread sees the work, or this one sees that it sleeps.
  if (activity.fetch_add(0, std::memory_order_seq_cst) == kWorking) return;
  {
    MutexLock lock(mutex);
    ++wakeUps;
    woken.notify_all();
  }
  mesh->sleeper().wakeAll();
}

void Engine::Progress::wakeIfAsleep() {
  if (activity.fetch_add(0, std::memory_order_seq_cst) == kSleeping) wake();
}

bool Engine::Progress::stopped() {
  MutexLock lock(mutex);
  return isStopped;
}

std::vector<std::shared_ptr<Communicator>> Engine::Progress::alive() {
  std::vector<std::shared_ptr<Communicator>> found;
  MutexLock lock(mutex);
  for (auto& entry : groups) {
    if (auto group = entry.lock()) found.push_back(std::move(group));
  }
  return found;
}

void Engine::Progress::handleMessages() {
  if (messages.load(std::memory_order_relaxed) == 0) return;
  messages.exchange(0, std::memory_order_acquire);
  for (auto& group : alive()) group->diagnosis().handleMessages();
}

// True if anything moved. *isNeeded: there is work that no other thread will do. *advanced: a queue
// advanced, or bytes moved within this host.
bool Engine::Progress::workOnce(bool* isNeeded, bool* advanced) {
  const std::vector<std::shared_ptr<Communicator>> living = alive();
  *advanced = false;
  bool moved = mesh->progress(advanced);
  handleMessages();
  *isNeeded = mesh->hasPending() && !someoneWaits();
  for (auto& group : living) {
    if (!group->queue().isUnattended()) continue;
    *isNeeded = true;
    *advanced |= group->queue().run(0);
  }
  return moved || *advanced;
}

// Retries when memory runs out. The mesh, which cannot resume an interrupted step, then fails its
// groups itself.
void Engine::Progress::run() {
  for (;;) {
    try {
      return work();
    } catch (const std::bad_alloc&) {
      activity.exchange(kWorking, std::memory_order_seq_cst);
      sched_yield();
    }
  }
}

void Engine::Progress::work() {
  auto lastMove = Clock::now();
  uint64_t lastWaits = 0;
  while (!stopped()) {
    const uint64_t generation = mesh->sleeper().generation();
    bool isNeeded = false, advanced = false;
    doChores();
    if (workOnce(&isNeeded, &advanced)) {
      if (advanced) lastMove = Clock::now();
      continue;
    }
    if (!isNeeded) {
      uint64_t seen;
      {
        MutexLock lock(mutex);
        seen = wakeUps;
      }
      const uint64_t waitsNow = waits.load(std::memory_order_relaxed);
      const bool areOthersAtIt = someoneWaits() || waitsNow != std::exchange(lastWaits, waitsNow);
      activity.exchange(areOthersAtIt ? kWaiting : kSleeping, std::memory_order_seq_cst);
      // Look once more: from here on a caller that brings work wakes this thread.
      if (!workOnce(&isNeeded, &advanced) && !isNeeded) {
        if (areOthersAtIt) {
          waitForWork(seen);
          mesh->progress(nullptr, /*polls=*/true);
        } else {
          mesh->sleeper().idle(generation, Deadline::after(kHousekeeping));
          mesh->checkProcesses();
        }
      }
      activity.exchange(kWorking, std::memory_order_seq_cst);
      lastMove = Clock::now();
      continue;
    }
    // The work waits for peers. Yield, then sleep: the cores belong to the user's computation.
    if (Clock::now() - lastMove < std::chrono::microseconds(200)) {
      sched_yield();
      continue;
    }
    std::vector<std::shared_ptr<Communicator>> asleep = alive();
    std::erase_if(asleep, [](const auto& group) { return !group->queue().isUnattended(); });
    Sleeper::Nap nap(mesh->sleeper(), generation);
    std::vector<Arena*> arenas;
    for (const auto& group : asleep) {
      if (Arena* const arena = group->arena()) arenas.push_back(arena);
    }
    const Asleep ringing(*mesh, arenas);
    activity.exchange(kSleeping, std::memory_order_seq_cst);
    if (!workOnce(&isNeeded, &advanced)) {
      // Without a group that waits, only handshakes, queued messages and new groups are waited for.
      nap.sleep(Deadline::after(asleep.empty() ? kChores : kWaitTick));
      mesh->checkProcesses();
      for (auto& group : asleep) group->diagnosis().checkHealth();
    }
    activity.exchange(kWorking, std::memory_order_seq_cst);
    if (advanced) lastMove = Clock::now();
  }
}

// Periodic background work; most of the time it is not due.
void Engine::Progress::doChores() {
  const auto now = Clock::now();
  if (now < nextChores) return;
  nextChores = now + kChores;
  flushLog();
  bool isUnseen = false;
  for (auto& group : alive()) {
    // Another rank of the host may have failed a group that no thread of this process waits in.
    isUnseen |= !group->queue().hasWaiters() && group->membership().checkArena();
    group->diagnosis().checkFutures();
    if (group->hasFailed()) group->releaseWindows();
  }
  TraceFile::writeInBackground(isUnseen);
}

// There is nothing to do, and the user's threads wait for their operations themselves. Their
// sockets' events would wake this thread for nothing, so it does not wait for events until the
// process is quiet.
void Engine::Progress::waitForWork(uint64_t seenWakeUps) {
  MutexLock lock(mutex);
  woken.wait_for(lock.native(), kWaitForWork,
                 [&]() REQUIRES(mutex) { return isStopped || wakeUps != seenWakeUps; });
}

}  // namespace mycoll
