#include "comm.h"

#include <algorithm>

#include "device.h"

namespace standin::nccl {
namespace {

struct Handles {
  std::mutex mutex;
  std::map<Handle, std::shared_ptr<Comm>> comms;
  uintptr_t next = 0x5ccl << 32;
};

Handles& handles() {
  static Handles& all = *new Handles;
  return all;
}

struct Complaint {
  std::mutex mutex;
  std::string text;
};

Complaint& complaint() {
  static Complaint& last = *new Complaint;
  return last;
}

}  // namespace

Result complain(Result result, std::string sentence) {
  std::lock_guard<std::mutex> lock(complaint().mutex);
  complaint().text = "stand-in: " + std::move(sentence);
  return result;
}

const char* lastComplaint() {
  thread_local std::string copy;
  std::lock_guard<std::mutex> lock(complaint().mutex);
  copy = complaint().text;
  return copy.c_str();
}

Handle publish(std::shared_ptr<Comm> comm) {
  std::lock_guard<std::mutex> lock(handles().mutex);
  const auto handle = reinterpret_cast<Handle>(handles().next);
  handles().next += 64;
  handles().comms.emplace(handle, std::move(comm));
  count("comms");
  return handle;
}

void withdraw(const Comm* comm) {
  std::shared_ptr<Comm> last;  // destroyed without the lock
  std::lock_guard<std::mutex> lock(handles().mutex);
  for (auto it = handles().comms.begin(); it != handles().comms.end(); ++it) {
    if (it->second.get() != comm) continue;
    last = std::move(it->second);
    handles().comms.erase(it);
    count("comms", -1);
    return;
  }
}

std::shared_ptr<Comm> find(Handle handle, const char* function) {
  std::lock_guard<std::mutex> lock(handles().mutex);
  const auto found = handles().comms.find(handle);
  if (found == handles().comms.end()) {
    die(std::string(function) + " of a communicator that was destroyed, aborted or never made");
  }
  return found->second;
}

namespace {

struct Inside {
  std::thread::id thread;
  int depth = 0;
  const char* function = "";
};
std::mutex insideMutex;
std::map<int, Inside>& inside() {
  static std::map<int, Inside>& all = *new std::map<int, Inside>;
  return all;
}

}  // namespace

DeviceEntry::DeviceEntry(int device, const char* function) : device_(device) {
  std::lock_guard<std::mutex> lock(insideMutex);
  Inside& here = inside()[device];
  const std::thread::id me = std::this_thread::get_id();
  if (here.depth > 0 && here.thread != me && script().oneThread) {
    die(std::string(function) + " beside " + here.function +
        " of another thread, on the same device");
  }
  if (++here.depth == 1) here = {me, 1, function};
}

DeviceEntry::~DeviceEntry() {
  std::lock_guard<std::mutex> lock(insideMutex);
  --inside()[device_].depth;
}

Entry::Entry(Comm& comm, const char* function, bool isGrouped)
    : comm_(comm), onDevice_(comm.device, function) {
  const std::thread::id me = std::this_thread::get_id();
  const std::thread::id owner = comm.groupOwner_;
  if (comm.isEntered_.exchange(true) || (owner != std::thread::id() && owner != me)) {
    die(std::string(function) + " of rank " + std::to_string(comm.rank) +
        " while another thread uses the same communicator");
  }
  if (isGrouped) comm.groupOwner_ = me;
}

size_t sizeOf(DataType type) {
  switch (type) {
    case DataType::kInt8:
    case DataType::kUInt8:
    case DataType::kFloat8E4M3:
    case DataType::kFloat8E5M2: return 1;
    case DataType::kFloat16:
    case DataType::kBFloat16: return 2;
    case DataType::kInt32:
    case DataType::kUInt32:
    case DataType::kFloat32: return 4;
    default: return 8;
  }
}

Comm::Comm(int rank, int ranks, int device, const Config& config)
    : rank(rank), ranks(ranks), device(device), config(config), isBlocking(config.blocking != 0) {}

// --- states

Result Comm::asyncError() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (state_ == Result::kSuccess && isFinalizing_ && passed_ < issued_) return Result::kInProgress;
  return state_;
}

void Comm::setError(Result error) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (state_ == Result::kSuccess || state_ == Result::kInProgress) state_ = error;
}

Result Comm::readiness() {
  const Result state = asyncError();
  if (state == Result::kInProgress) {
    return complain(
        Result::kInvalidArgument,
        "Attempt to use communicator before the previous operation returned ncclSuccess");
  }
  if (state != Result::kSuccess) return complain(state, "the communicator has failed before");
  if (isRevoked_) return complain(Result::kInvalidUsage, "the communicator was revoked");
  return Result::kSuccess;
}

// Runs the job in the caller for a blocking communicator. Otherwise a thread runs it, and the
// communicator is in progress until it is done.
Result Comm::background(std::function<Result()> job) {
  if (isBlocking) {
    const Result result = job();
    if (result != Result::kSuccess) setError(result);
    return result;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    state_ = Result::kInProgress;
    ++jobs_;
  }
  std::thread([self = shared_from_this(), job = std::move(job)] {
    const int milliseconds = script().concerns(self->rank) ? script().progressMilliseconds : 0;
    for (int i = 0; i < milliseconds && !self->isAborted_; ++i) nap();
    const Result result = job();
    std::lock_guard<std::mutex> lock(self->mutex_);
    if (self->state_ == Result::kInProgress) self->state_ = result;
    --self->jobs_;
    self->changed_.notify_all();
  }).detach();
  return Result::kInProgress;
}

void Comm::mayWaitForDevice() const {
  if (script().initSyncs) (void)Device::get().synchronize(device);
}

bool Comm::isEntered() const { return isEntered_ || groupOwner_.load() != std::thread::id(); }

// --- making

Result Comm::connect(const UniqueId& id) {
  id_ = id;
  auto job = [self = shared_from_this()] {
    auto aborted = [&] { return self->isStopped(); };
    hangWhile("init", self->rank, aborted);
    self->mayWaitForDevice();
    const Script now = script();
    if (now.fails("init", self->rank)) {
      return complain(Result::kInternalError, "the script makes it fail");
    }
    self->segment_ = Segment::attach(self->id_, self->rank, self->ranks);
    if (!self->segment_) {
      return complain(Result::kSystemError, "no such id, or another number of ranks");
    }
    const Result met = self->meet();
    if (met == Result::kSuccess && now.duplicateGpu && self->ranks > 1) {
      return complain(Result::kInvalidUsage,
                      "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000");
    }
    return met;
  };
  return background(job);
}

Result Comm::meet() {
  if (segment_->isTaken()) {
    return complain(Result::kInvalidUsage, "rank " + std::to_string(rank) + " is taken");
  }
  const Result met = await([this] { return segment_->isComplete(); });
  Segment::drop(id_);  // all ranks have mapped it
  return met;
}

Result Comm::split(int color, int key, Handle* child, const Config& config) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (passed_ < issued_) {
      die("ncclCommSplit of rank " + std::to_string(rank) +
          " with operations outstanding on the communicator");
    }
  }
  mayWaitForDevice();
  return background([self = shared_from_this(), color, key, child, config] {
    return self->makeChild(color, key, child, config);
  });
}

// The ranks agree in a round of bulletins. Each publishes its color and key; the leader of each
// color publishes the child's id; at the end each publishes that it has finished the round.
Result Comm::makeChild(int color, int key, Handle* child, const Config& config) {
  *child = nullptr;
  hangWhile("init", rank, [this] { return isStopped(); });
  const uint64_t round = ++rounds_;
  auto at = [this](int peer) -> Segment::Bulletin& { return segment_->bulletin(peer); };
  auto all = [&](auto isThere) {
    return await([&] {
      for (int peer = 0; peer < ranks; ++peer) {
        if (!isThere(at(peer))) return false;
      }
      return true;
    });
  };
  Result result = all([&](const auto& bulletin) { return bulletin.finished >= round - 1; });
  if (result != Result::kSuccess) return result;
  at(rank).color = color;
  at(rank).key = key;
  at(rank).asked = round;
  result = all([&](const auto& bulletin) { return bulletin.asked >= round; });
  if (result != Result::kSuccess) return result;

  std::vector<int> mine;  // the ranks of this color, in their new order
  for (int peer = 0; peer < ranks; ++peer) {
    if (at(peer).color == color) mine.push_back(peer);
  }
  std::stable_sort(mine.begin(), mine.end(), [&](int a, int b) { return at(a).key < at(b).key; });
  UniqueId id{};
  if (color >= 0) {
    const int leader = mine.front();
    if (leader == rank) {
      if (!Segment::create(&at(rank).child)) return Result::kSystemError;
      at(rank).answered = round;
    }
    result = await([&] { return at(leader).answered >= round; });
    if (result != Result::kSuccess) return result;
    id = at(leader).child;
  }
  at(rank).finished = round;
  if (color < 0) return Result::kSuccess;

  const int place = static_cast<int>(std::find(mine.begin(), mine.end(), rank) - mine.begin());
  auto made = std::make_shared<Comm>(place, static_cast<int>(mine.size()), device, config);
  made->id_ = id;
  made->segment_ = Segment::attach(id, place, made->ranks);
  if (!made->segment_) return complain(Result::kSystemError, "the child's leader is gone");
  result = await([&] { return made->segment_->isComplete(); });
  if (result != Result::kSuccess) return result;
  Segment::drop(id);
  *child = publish(made);
  return Result::kSuccess;
}

// --- operations

struct Comm::Launch {
  Launch() = default;
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;
  ~Launch() {
    if (!isCaptured) return;
    std::lock_guard<std::mutex> lock(comm->mutex_);
    --comm->graphs_;
    comm->changed_.notify_all();
  }

  std::shared_ptr<Comm> comm;
  std::vector<Operation> operations;
  bool isCaptured = false;
  bool isBroken = false;  // error_after
  uint64_t turn = 0;
};

Result Comm::issue(std::vector<Operation> operations, void* stream) {
  if (Device::get().streamDevice(stream) != device) {
    die("a stream of device " + std::to_string(Device::get().streamDevice(stream)) +
        " with a communicator of device " + std::to_string(device));
  }
  auto launch = std::make_shared<Launch>();
  launch->comm = shared_from_this();
  launch->isCaptured = Device::get().isCapturing(stream) != 0;
  const Script now = script();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    operations_ += static_cast<int64_t>(operations.size());
    launch->isBroken = now.errorAfter >= 0 && now.concerns(rank) && operations_ > now.errorAfter;
    if (launch->isCaptured) {
      ++graphs_;
    } else {
      launch->turn = issued_++;
    }
  }
  launch->operations = std::move(operations);
  return background([launch, stream] {
    const Result dialled = launch->comm->dial(launch->operations);
    if (dialled != Result::kSuccess) return dialled;
    Device::get().enqueueOwned(
        stream,
        [](void* argument) {
          const auto& self = *static_cast<std::shared_ptr<Launch>*>(argument);
          self->comm->run(*self);
        },
        new std::shared_ptr<Launch>(launch),
        [](void* argument) { delete static_cast<std::shared_ptr<Launch>*>(argument); });
    return Result::kSuccess;
  });
}

// On the stream's thread.
void Comm::run(const Launch& launch) {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] {
      return isStopped() || (!isRunning_ && (launch.isCaptured || launch.turn == passed_));
    });
    if (isStopped()) {
      if (!launch.isCaptured) ++passed_;
      count("aborted");
      return;
    }
    isRunning_ = true;
  }
  count("launches");
  bool isDone = false;
  if (launch.isBroken) {
    setError(script().error);
  } else {
    hangWhile("op", rank, [this] { return isStopped(); });
    isDone = !isStopped() && move(*this, launch.operations);
  }
  std::unique_lock<std::mutex> lock(mutex_);
  if (!isDone) {
    changed_.wait(lock, [this] { return isStopped(); });
    count("aborted");
  }
  isRunning_ = false;
  if (!launch.isCaptured) ++passed_;
  changed_.notify_all();
}

// --- ending

Result Comm::finalize() {
  hangWhile("finalize", rank, [this] { return isAborted(); });
  std::unique_lock<std::mutex> lock(mutex_);
  isFinalizing_ = true;
  if (segment_) segment_->bulletin(rank).isLeaving = 1;
  if (!isBlocking) return passed_ < issued_ ? Result::kInProgress : Result::kSuccess;
  changed_.wait(lock, [this] { return isAborted() || (passed_ == issued_ && graphs_ == 0); });
  lock.unlock();
  waitForOthersToLeave();
  return Result::kSuccess;
}

// In NCCL the ranks of a host end a communicator together; here all ranks are on one host.
void Comm::waitForOthersToLeave() {
  if (!segment_) return;
  for (int peer = 0; peer < ranks; ++peer) {
    const Segment::Bulletin& other = segment_->bulletin(peer);
    while (!isAborted() && !other.isLeaving && !other.isGone && !segment_->isPeerDead(peer)) nap();
  }
}

void Comm::dieUnderThread(const char* function) {
  if (!isEntered()) return;
  die(std::string(function) + " of rank " + std::to_string(rank) +
      " frees the communicator under a thread that is inside NCCL with it");
}

Result Comm::destroy() {
  hangWhile("destroy", rank, [this] { return isAborted(); });
  dieUnderThread("ncclCommDestroy");
  if (segment_) segment_->bulletin(rank).isLeaving = 1;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(
        lock, [this] { return isAborted() || (passed_ == issued_ && jobs_ == 0 && graphs_ == 0); });
  }
  waitForOthersToLeave();
  mayWaitForDevice();
  if (segment_) segment_->bulletin(rank).isGone = 1;
  withdraw(this);
  return Result::kSuccess;
}

Result Comm::abort() {
  dieUnderThread("ncclCommAbort");
  {
    std::lock_guard<std::mutex> lock(mutex_);
    isAborted_ = true;
    changed_.notify_all();
  }
  hangWhile("abort", rank, [] { return false; });
  {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return jobs_ == 0 && !isRunning_; });
  }
  if (segment_) segment_->bulletin(rank).isGone = 1;
  withdraw(this);
  return Result::kSuccess;
}

Result Comm::revoke() {
  std::unique_lock<std::mutex> lock(mutex_);
  isRevoked_ = true;
  changed_.notify_all();
  changed_.wait(lock, [this] { return !isRunning_; });
  state_ = Result::kSuccess;
  return Result::kSuccess;
}

// --- registrations

Result Comm::registerBuffer(void** handle) {
  std::lock_guard<std::mutex> lock(mutex_);
  static std::atomic<uintptr_t> next{0x5cd0000};
  *handle = reinterpret_cast<void*>(next += 16);
  buffers_.emplace(*handle, 1);
  return Result::kSuccess;
}

Result Comm::deregisterBuffer(void* handle) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (buffers_.erase(handle) == 1) return Result::kSuccess;
  return complain(Result::kInvalidArgument, "no such registration");
}

}  // namespace standin::nccl
