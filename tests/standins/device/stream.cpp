#include "stream.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <utility>

#include "memory.h"

namespace standin {
namespace {

// Guards isCaptureStrict, captures, and each capture and its graph until it has ended.
std::mutex captureMutex;
bool isCaptureStrict = false;
// The captures that have not ended; their streams keep them alive.
std::vector<Graph*>& captures = *new std::vector<Graph*>;

// As cudaStreamCaptureMode.
constexpr int kGlobal = 0;
constexpr int kRelaxed = 2;
thread_local int captureMode = 0;

struct Registry {
  std::mutex mutex;
  std::vector<Stream*> streams;
};

// Never destroyed: the threads of streams may still run while the process exits.
Registry& registry() {
  static Registry& all = *new Registry;
  return all;
}

std::atomic<int64_t>& delay() {
  static std::atomic<int64_t> microseconds = [] {
    const char* text = std::getenv("STANDIN_DELAY_US");
    return text != nullptr ? std::atoll(text) : 0LL;
  }();
  return microseconds;
}

void dawdle() {
  const int64_t most = delay().load(std::memory_order_relaxed);
  if (most <= 0) return;
  thread_local std::minstd_rand random(std::random_device{}());
  const int64_t time = std::uniform_int_distribution<int64_t>(0, most)(random);
  std::this_thread::sleep_for(std::chrono::microseconds(time));
}

void mergeInto(std::map<Stream*, size_t>& target, const std::map<Stream*, size_t>& source) {
  for (const auto& [stream, count] : source) {
    size_t& known = target[stream];
    known = std::max(known, count);
  }
}

constexpr const char* kCapturing =
    "the stream is being captured: nothing runs that one could wait for";

}  // namespace

[[noreturn]] void die(const std::string& sentence) {
  std::fprintf(stderr, "stand-in device: %s\n", sentence.c_str());
  std::fflush(stderr);
  std::abort();
}

Refusal refuse(std::string sentence) {
  thread_local std::string last;
  last = "stand-in device: " + std::move(sentence);
  return last.c_str();
}

void setDelay(int64_t microseconds) { delay() = microseconds; }

// --- the idle device

namespace {

struct Idleness {
  bool is = false;
  int64_t nanoseconds[2] = {0, 0};  // of a call of the runtime, of NCCL
};

const Idleness& idleness() {
  static const Idleness asked = [] {
    Idleness made;
    const char* text = std::getenv("STANDIN_IDLE");
    if (text == nullptr) return made;
    made.is = true;
    char* rest = nullptr;
    made.nanoseconds[0] = std::strtoll(text, &rest, 10);
    if (*rest == ',') made.nanoseconds[1] = std::strtoll(rest + 1, nullptr, 10);
    return made;
  }();
  return asked;
}

}  // namespace

bool isIdle() { return idleness().is; }

void spend(bool isNccl) {
  const int64_t nanoseconds = idleness().nanoseconds[isNccl];
  if (nanoseconds == 0) return;
  const auto end = Clock::now() + std::chrono::nanoseconds(nanoseconds);
  while (Clock::now() < end) {
  }
}

// --- moments

void Moment::pass() {
  std::lock_guard<std::mutex> lock(mutex_);
  isPassed_ = true;
  time_ = Clock::now();
  changed_.notify_all();
}

bool Moment::isPassed() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return isPassed_;
}

void Moment::await() const {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return isPassed_; });
}

Clock::time_point Moment::time() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return time_;
}

// --- graphs

Graph::~Graph() {
  for (void* address : memory_) Memory::get().retire(address);
}

void Graph::keep(void* address) {
  std::lock_guard<std::mutex> lock(mutex_);
  memory_.push_back(address);
}

void setStrictCapture(bool isStrict) {
  std::lock_guard<std::mutex> lock(captureMutex);
  isCaptureStrict = isStrict;
}

int exchangeCaptureMode(int mode) { return std::exchange(captureMode, mode); }

namespace {

struct Breakage {
  std::mutex mutex;
  std::string sentence;
};

Breakage& breakage() {
  static Breakage& one = *new Breakage;
  return one;
}

}  // namespace

void breakDevice(std::string sentence) {
  std::lock_guard<std::mutex> lock(breakage().mutex);
  breakage().sentence = std::move(sentence);
}

Refusal refuseWhenBroken() {
  std::lock_guard<std::mutex> lock(breakage().mutex);
  return breakage().sentence.empty() ? nullptr : refuse(breakage().sentence);
}

Refusal refuseDuringCapture(const char* what) {
  std::lock_guard<std::mutex> lock(captureMutex);
  if (!isCaptureStrict || captureMode == kRelaxed) return nullptr;
  bool isRefused = false;
  for (Graph* graph : captures) {
    const bool isOwn = graph->thread == std::this_thread::get_id();
    const bool isFree =
        isOwn ? graph->mode == kRelaxed : captureMode != kGlobal || graph->mode != kGlobal;
    if (isFree) continue;
    graph->spoiledBy = what;
    isRefused = true;
  }
  return isRefused ? refuse(std::string(what) + " during a capture, which invalidates it")
                   : nullptr;
}

Refusal refuseCaptured(const Moment& moment) {
  std::lock_guard<std::mutex> lock(captureMutex);
  const std::shared_ptr<Graph> graph = moment.graph.lock();
  if (graph && !graph->hasEnded) graph->spoiledBy = "an event recorded in it was asked for";
  return refuse("the event was recorded under capture: it never passes");
}

// --- streams

Stream::Stream(int device, int priority) : device(device), priority(priority) {
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    registry().streams.push_back(this);
  }
  std::thread([this] { run(); }).detach();
}

std::vector<Stream*> streamsOf(int device) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  std::vector<Stream*> found;
  for (Stream* stream : registry().streams) {
    if (stream->device == device) found.push_back(stream);
  }
  return found;
}

Stream* defaultStream(int device) {
  static std::mutex& mutex = *new std::mutex;
  static auto& all = *new std::map<int, Stream*>;
  std::lock_guard<std::mutex> lock(mutex);
  Stream*& stream = all[device];
  if (stream == nullptr) stream = new Stream(device, 0);
  return stream;
}

void Stream::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return !queue_.empty(); });
    Task task = std::move(queue_.front());
    queue_.pop_front();
    isBusy_ = true;
    lock.unlock();
    dawdle();
    (*task)();
    task.reset();  // without the lock: destructors of the task may enqueue
    lock.lock();
    isBusy_ = false;
    changed_.notify_all();
  }
}

void Stream::push(Task task) {
  std::lock_guard<std::mutex> lock(mutex_);
  queue_.push_back(std::move(task));
  changed_.notify_all();
}

void Stream::enqueue(std::function<void()> work) {
  if (isIdle()) return;
  Task task = std::make_shared<const std::function<void()>>(std::move(work));
  {
    std::lock_guard<std::mutex> lock(captureMutex);
    if (capture_) {
      capture_->tasks.push_back(std::move(task));
      ++capture_->recorded[this];
      return;
    }
  }
  push(std::move(task));
}

void Stream::enqueueNow(std::function<void()> work) {
  if (isIdle()) return work();
  push(std::make_shared<const std::function<void()>>(std::move(work)));
}

std::shared_ptr<Moment> Stream::mark() {
  auto moment = std::make_shared<Moment>();
  enqueueNow([moment] { moment->pass(); });
  return moment;
}

Refusal Stream::synchronize() {
  if (Refusal refusal = refuseDuringCapture("a stream was waited for")) return refusal;
  if (capture()) return refuse(kCapturing);
  mark()->await();
  return nullptr;
}

Refusal Stream::query(bool* isDone) {
  if (Refusal refusal = refuseWhenBroken()) return refusal;
  if (Refusal refusal = refuseDuringCapture("a stream was queried")) return refusal;
  if (capture()) return refuse(kCapturing);
  std::lock_guard<std::mutex> lock(mutex_);
  *isDone = queue_.empty() && !isBusy_;
  return nullptr;
}

// --- events

Refusal Stream::record(Event* event) {
  auto moment = std::make_shared<Moment>();
  {
    std::lock_guard<std::mutex> lock(captureMutex);
    if (capture_) {
      moment->isCaptured = true;
      moment->graph = capture_;
      moment->before = capture_->reached[this];
      moment->before[this] = capture_->recorded[this];
    }
  }
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    event->last = moment;
  }
  if (!moment->isCaptured) enqueueNow([moment] { moment->pass(); });
  return nullptr;
}

Refusal Stream::block(Event* event) {
  std::shared_ptr<Moment> moment;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    moment = event->last;
  }
  if (!moment) return nullptr;
  {
    std::lock_guard<std::mutex> lock(captureMutex);
    if (moment->isCaptured) {
      const std::shared_ptr<Graph> graph = moment->graph.lock();
      if (!graph || graph->hasEnded) {
        return refuse("the event was recorded under a capture that has ended");
      }
      if (capture_ && capture_ != graph) return refuse("the event belongs to another capture");
      capture_ = graph;
      graph->recorded.try_emplace(this, 0);
      mergeInto(graph->reached[this], moment->before);
      return nullptr;
    }
    if (capture_) {
      return refuse("a stream that is being captured cannot wait for work outside the capture");
    }
  }
  enqueueNow([moment] { moment->await(); });
  return nullptr;
}

// --- capture

std::shared_ptr<Graph> Stream::capture() const {
  std::lock_guard<std::mutex> lock(captureMutex);
  return capture_;
}

Refusal Stream::beginCapture(int mode) {
  static std::atomic<uint64_t> last{0};
  std::lock_guard<std::mutex> lock(captureMutex);
  if (capture_) return refuse("the stream is being captured already");
  capture_ = std::make_shared<Graph>();
  capture_->origin = this;
  capture_->thread = std::this_thread::get_id();
  capture_->mode = mode;
  capture_->id = ++last;
  captures.push_back(capture_.get());
  capture_->recorded[this] = 0;
  capture_->reached[this];
  return nullptr;
}

Refusal Stream::endCapture(std::shared_ptr<Graph>* graph) {
  std::vector<Stream*> members;
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    members = registry().streams;
  }
  std::lock_guard<std::mutex> lock(captureMutex);
  if (!capture_ || capture_->origin != this) return refuse("no capture began on this stream");
  const std::shared_ptr<Graph> ended = capture_;
  for (Stream* stream : members) {
    if (stream->capture_ == ended) stream->capture_.reset();
  }
  ended->hasEnded = true;
  std::erase(captures, ended.get());
  if (!ended->spoiledBy.empty()) {
    return refuse("the capture was spoiled: " + ended->spoiledBy + " meanwhile");
  }
  std::map<Stream*, size_t> joined = ended->reached[this];
  joined[this] = ended->recorded[this];
  for (const auto& [stream, count] : ended->recorded) {
    if (joined[stream] < count) {
      return refuse("a stream that joined the capture has work that was not joined back");
    }
  }
  *graph = ended;
  return nullptr;
}

void Stream::launch(const std::shared_ptr<Graph>& graph) {
  // One task for each recorded one, so that each is delayed. Each keeps the graph and its memory.
  for (const Task& task : graph->tasks) {
    enqueue([graph, &task] { (*task)(); });
  }
}

}  // namespace standin
